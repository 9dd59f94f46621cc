"""A real Celery worker as a child process, which a test can kill, pause and restart."""

import os
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, Self
from uuid import uuid4

from celery_leases.testing.waits import wait_until
from tests.support.process import GuardedProcess, NotReady

Pool = Literal["prefork", "threads", "gevent", "eventlet", "solo"]

QUEUE_VARIABLE = "CELERY_LEASES_TEST_QUEUE"
"""Contains the name of the worker's queue for its app, so that messages which the worker publishes
(retries, links) go to the same queue.
"""

QUIET = ("--without-gossip", "--without-mingle", "--without-heartbeat")
"""Options without the messages that workers send each other."""


class LocalWorker:
    """``python -m celery -A <app> worker`` in its own session; a context manager. Times are
    seconds.

    The worker ends with all its children at ``teardown()``, and when this Python process ends in
    any way. ``env`` is added to the environment of this process; ``cwd`` (by default the current
    directory) is on the worker's import path. ``directory`` contains the log, to which each start
    is appended, and the worker's temporary files.
    """

    def __init__(
        self,
        app: str,
        *,
        directory: Path,
        pool: Pool = "prefork",
        concurrency: int = 1,
        name: str | None = None,
        queue: str = "celery",
        env: Mapping[str, str] | None = None,
        options: Sequence[str] = (),
        log_level: str = "INFO",
        cwd: Path | None = None,
    ) -> None:
        self.app = app
        self.pool = pool
        self.concurrency = concurrency
        self.name = name or f"worker-{uuid4().hex[:8]}"
        self.queue = queue
        self.log_level = log_level
        self.log_file = directory / f"{self.name}.log"
        self._cwd = cwd or Path.cwd()
        self._options = tuple(options)
        self._env = dict(env or {})
        self._process: GuardedProcess | None = None

    def _argv(self) -> list[str]:
        return [
            *(sys.executable, "-m", "celery", "-A", self.app, "worker", "-P", self.pool),
            *(
                "-c",
                str(self.concurrency),
                "-n",
                f"{self.name}@%h",
                "-Q",
                self.queue,
                "-l",
                self.log_level,
            ),
            *(*QUIET, *self._options),
        ]

    def start(self, timeout: float = 30.0) -> Self:
        """Start the worker and wait until it consumes.

        Raises NotReady, with the end of the log, if it ended or was not ready in time.
        """
        self.launch()
        return self.wait_ready(timeout)

    def launch(self) -> Self:
        """Start without waiting, so that several workers can start at the same time. Call
        ``wait_ready`` afterwards.
        """
        if self.alive:
            return self
        self.teardown()
        path = os.pathsep.join(filter(None, (str(self._cwd), os.environ.get("PYTHONPATH", ""))))
        # C_FORCE_ROOT: as root, which containers and CI often use, a worker that accepts pickle
        # refuses to start. TMPDIR: a prefork worker that is killed does not remove its temporary
        # directory.
        forced = {
            "PYTHONPATH": path,
            "PYTHONUNBUFFERED": "1",
            "C_FORCE_ROOT": "1",
            "TMPDIR": str(self.log_file.parent),
            QUEUE_VARIABLE: self.queue,
        }
        self._process = GuardedProcess(
            self._argv(),
            log=self.log_file,
            env={**os.environ, **forced, **self._env},
            cwd=self._cwd,
        )
        return self

    def wait_ready(self, timeout: float = 30.0) -> Self:
        """Wait for the log line of a worker that consumes. Raises NotReady, with the end of the
        log.
        """
        try:
            self.process.wait_for_log(r"\bready\.\s*$", timeout)
        except NotReady:
            self.teardown()
            raise
        return self

    @property
    def process(self) -> GuardedProcess:
        """The process of the last start. Raises RuntimeError before the first start."""
        if self._process is None:
            raise RuntimeError(f"worker {self.name} was not started: call start()")
        return self._process

    @property
    def pid(self) -> int:
        """Process id of the worker's main process."""
        return self.process.pid

    @property
    def alive(self) -> bool:
        """Whether the main process exists, paused or not."""
        return self._process is not None and self._process.alive

    def children(self) -> list[int]:
        """Process ids of the pool's children (prefork only), oldest first."""
        return self.process.children()

    def wait_for_children(self, number: int | None = None, timeout: float = 10.0) -> list[int]:
        """The pool's children once there are ``number`` of them (default: the concurrency)."""
        wanted = self.concurrency if number is None else number
        wait_until(
            lambda: len(self.children()) == wanted, timeout, f"{wanted} children of {self.name}"
        )
        return self.children()

    def kill(self, sig: int = signal.SIGKILL) -> None:
        """Send a signal to the main process only, as an operator or the OOM killer does. Does not
        wait.
        """
        self.process.send(sig)

    def kill_child(self, sig: int = signal.SIGKILL, *, pid: int | None = None) -> int:
        """Send a signal to one pool child, by default the oldest, and return its process id.

        Raises LookupError if there is no child.
        """
        if pid is None:
            children = self.children()
            if not children:
                raise LookupError(f"worker {self.name} ({self.pool}) has no pool child")
            pid = children[0]
        os.kill(pid, sig)
        return pid

    def pause(self, *, pid: int | None = None) -> None:
        """SIGSTOP the worker with its children, or one process, and wait until it has stopped."""
        self.process.pause(pid)

    def resume(self, *, pid: int | None = None) -> None:
        """SIGCONT the worker with its children, or one process."""
        self.process.resume(pid)

    def wait(self, timeout: float = 30.0) -> int:
        """The exit code of the main process, negative for a signal. Raises TimeoutError if it still
        runs.
        """
        return self.process.wait(timeout)

    def stop(self, sig: int = signal.SIGTERM, timeout: float = 30.0) -> int:
        """Ask the main process to end (SIGTERM warm, SIGQUIT cold), wait, and return its exit code.

        Raises TimeoutError if it still runs after ``timeout``. The worker and its children are
        ended in any case.
        """
        try:
            self.process.send(sig)
            return self.process.wait(timeout)
        finally:
            self.process.end()

    def restart(self, sig: int = signal.SIGTERM, timeout: float = 30.0) -> Self:
        """Stop with the given signal and start again under the same name."""
        if self.alive:
            self.stop(sig, timeout)
        return self.start(timeout)

    def teardown(self) -> None:
        """Kill all processes of the worker that are left; may be called twice."""
        if self._process is not None:
            self._process.end()

    def logs(self) -> str:
        """Everything logged since the last start."""
        return self._process.logs() if self._process else ""

    def full_log(self) -> str:
        """Everything logged over all starts."""
        return self.log_file.read_text(errors="replace") if self.log_file.exists() else ""

    def wait_for_log(self, pattern: str, timeout: float = 30.0) -> re.Match[str]:
        """The first match of a regular expression in the log since the last start. Raises NotReady,
        with the end of the log.
        """
        return self.process.wait_for_log(pattern, timeout)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.teardown()

    def __repr__(self) -> str:
        state = (
            f"pid {self._process.pid}" if self._process and self._process.alive else "not running"
        )
        return f"<LocalWorker {self.name} {self.pool}x{self.concurrency} of {self.app}, {state}>"
