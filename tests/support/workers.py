"""A real Celery worker as a child process, to be killed, paused and restarted by a test."""

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
"""Names the worker's queue to its app, so that what the worker itself publishes (retries, links)
comes back.
"""

QUIET = ("--without-gossip", "--without-mingle", "--without-heartbeat")
"""Options that spare a test the workers' small talk."""


class LocalWorker:
    """``python -m celery -A <app> worker`` in its own session; a context manager. Times are
    seconds.

    The whole tree ends with ``teardown()``, and when this Python process ends in any way. ``env``
    goes over the environment of this process; ``cwd`` (default: the current directory) is put on
    the worker's import path. The log lives in ``directory`` and holds every start of this worker;
    the worker's temporary files go there too.
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
        """Start and wait until the worker consumes.

        Raises NotReady, with the end of the log, when it ended or was not ready in time.
        """
        self.launch()
        return self.wait_ready(timeout)

    def launch(self) -> Self:
        """Start without waiting: several workers can come up side by side, each then meets
        ``wait_ready``.
        """
        if self.alive:
            return self
        self.teardown()
        path = os.pathsep.join(filter(None, (str(self._cwd), os.environ.get("PYTHONPATH", ""))))
        # C_FORCE_ROOT: a container or CI often runs as root, and a pickle-accepting app would
        # refuse to start. TMPDIR: a prefork worker that is killed leaves its temporary directory
        # behind.
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
        """Wait for the log line of a worker that consumes; raises NotReady, with the end of the
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
        """The process of the last start. Raises RuntimeError before the first."""
        if self._process is None:
            raise RuntimeError(f"worker {self.name} was not started: call start()")
        return self._process

    @property
    def pid(self) -> int:
        """Process id of the worker's main process."""
        return self.process.pid

    @property
    def alive(self) -> bool:
        """Whether the main process exists (a paused one does)."""
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
        """Send a signal to the main process only, as an operator or the OOM killer would; does not
        wait.
        """
        self.process.send(sig)

    def kill_child(self, sig: int = signal.SIGKILL, *, pid: int | None = None) -> int:
        """Send a signal to one pool child, by default the oldest, and return its process id.

        Raises LookupError when there is no child.
        """
        if pid is None:
            children = self.children()
            if not children:
                raise LookupError(f"worker {self.name} ({self.pool}) has no pool child")
            pid = children[0]
        os.kill(pid, sig)
        return pid

    def pause(self, *, pid: int | None = None) -> None:
        """SIGSTOP the whole tree, or one process of it, and return when it stands still."""
        self.process.pause(pid)

    def resume(self, *, pid: int | None = None) -> None:
        """SIGCONT the whole tree, or one process of it."""
        self.process.resume(pid)

    def wait(self, timeout: float = 30.0) -> int:
        """Exit code of the main process, negative for a signal; TimeoutError when it still runs."""
        return self.process.wait(timeout)

    def stop(self, sig: int = signal.SIGTERM, timeout: float = 30.0) -> int:
        """Ask the main process to end (SIGTERM warm, SIGQUIT cold), wait, and return its exit code.

        Raises TimeoutError when it still runs after ``timeout``; the tree is ended in any case.
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
        """End whatever is left of the tree; safe to call twice."""
        if self._process is not None:
            self._process.end()

    def logs(self) -> str:
        """Everything logged since the last start."""
        return self._process.logs() if self._process else ""

    def full_log(self) -> str:
        """Everything logged over all starts."""
        return self.log_file.read_text(errors="replace") if self.log_file.exists() else ""

    def wait_for_log(self, pattern: str, timeout: float = 30.0) -> re.Match[str]:
        """First match of a regular expression since the last start; raises NotReady, with the end
        of the log.
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
