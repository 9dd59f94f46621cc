"""A child process that ends, with all its descendants, when the process that started it ends."""

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from celery_leases.testing.waits import pause, wait_until
from tests.support import guard
from tests.support.preloaded import ForkedGuard, preloaded


class NotReady(RuntimeError):
    """A process was not ready in time, or ended before. The message ends with its log."""


class GuardedProcess:
    """A command with its output in a log file, run by a guard that ends it with all descendants.

    They end at ``end()``, and when this Python process ends for any reason, also by SIGKILL. Then
    the directories ``homes`` are removed too. Times are seconds.
    """

    def __init__(
        self,
        argv: Sequence[str | Path],
        *,
        log: Path,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        user: tuple[int, int] | None = None,
        homes: Sequence[Path] = (),
        errors: Path | None = None,
        forked: bool | None = None,
        modules: tuple[str, ...] = (),
    ) -> None:
        """Start the command at once. ``user`` is the (uid, gid) that runs it, which requires
        root. ``errors`` is a file for what the command writes to stderr.

        The command is executed, or forked from a process that has imported it with ``modules``;
        ``forked`` tells which, and by default workers are forked where that makes no difference.
        """
        self.log = log
        self.argv = [str(part) for part in argv]
        task = {
            "argv": self.argv,
            "log": str(log),
            "errors": str(errors) if errors else None,
            "cwd": str(cwd) if cwd else None,
            "user": user[0] if user else None,
            "group": user[1] if user else None,
            "homes": [str(home) for home in homes],
            "owner": os.getpid(),
        }
        self._log_start = log.stat().st_size if log.exists() else 0
        wanted = dict(os.environ if env is None else env)
        self._guard: subprocess.Popen[bytes] | ForkedGuard
        if forked is None:
            forked = user is None and preloaded.can_run(self.argv, wanted)
        if forked:
            self._guard = preloaded.start(task, wanted, modules)
        else:
            self._guard = subprocess.Popen(
                [sys.executable, "-I", "-S", guard.__file__, json.dumps(task)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=wanted,
                start_new_session=True,
            )
        self._unread = b""
        self._returncode: int | None = None
        word, number = self._hear(30) or ("ended", -1)
        if word != "pid":
            self.end()
            raise NotReady(f"could not start {self.argv[0]}\n{self.logs()}")
        self.pid: int = number
        """Process id of the command itself (not of its guard)."""

    def _hear(self, timeout: float) -> tuple[str, int] | None:
        """The next line of the guard, or ``None`` after ``timeout``; ("ended", …) once the guard
        has ended.
        """
        pipe = self._guard.stdout
        assert pipe is not None
        deadline = time.monotonic() + timeout
        while b"\n" not in self._unread:
            if pipe.closed:
                return ("ended", 0)
            if not select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
                return None
            chunk = os.read(pipe.fileno(), 4096)
            if not chunk:
                return ("ended", 0)
            self._unread += chunk
        line, _, self._unread = self._unread.partition(b"\n")
        word, number = line.decode().split()
        return word, int(number)

    def wait(self, timeout: float) -> int:
        """The exit code of the command, negative for a signal. Raises TimeoutError if it still runs
        after ``timeout``.
        """
        if self._returncode is None:
            heard = self._hear(timeout)
            if heard is None:
                raise TimeoutError(f"process {self.pid} still runs after {timeout:g} s")
            self._returncode = heard[1] if heard[0] == "exit" else -signal.SIGKILL
        return self._returncode

    @property
    def alive(self) -> bool:
        """Whether the command itself exists, paused or not."""
        with contextlib.suppress(TimeoutError):
            self.wait(0)
        return self._returncode is None

    def children(self) -> list[int]:
        """The process ids of the command's descendants, parents first."""
        return guard.descendants(self.pid) if self.alive else []

    def send(self, number: int, *, tree: bool = False) -> None:
        """Send a signal to the command, with ``tree`` also to its descendants. Nothing happens
        if the command has ended.
        """
        if not self.alive:
            return
        if tree:
            guard.signal_tree(self.pid, number)
        else:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def pause(self, pid: int | None = None) -> None:
        """SIGSTOP the command with its descendants, or one process, and wait until it has
        stopped.
        """
        if pid is not None:
            os.kill(pid, signal.SIGSTOP)
            pids = [pid]
        else:
            self.send(signal.SIGSTOP, tree=True)
            pids = [self.pid, *self.children()]
        wait_until(lambda: guard.stopped(pids), 10, f"the stop of {pids}")

    def resume(self, pid: int | None = None) -> None:
        """SIGCONT the command with its descendants, or one process."""
        if pid is not None:
            os.kill(pid, signal.SIGCONT)
        else:
            self.send(signal.SIGCONT, tree=True)

    def end(self) -> None:
        """SIGKILL the command and its descendants, and wait for their end; may be called twice."""
        if self._guard.stdin is None or self._guard.stdin.closed:
            return
        with contextlib.suppress(BrokenPipeError):
            self._guard.stdin.write(b"end\n")
            self._guard.stdin.flush()
        while (heard := self._hear(30)) is not None and heard[0] != "ended":
            if heard[0] == "exit":
                self._returncode = heard[1]
        if self._returncode is None:
            self._returncode = -signal.SIGKILL
        self._guard.stdin.close()
        if self._guard.stdout is not None:
            self._guard.stdout.close()
        self._guard.wait()

    def logs(self) -> str:
        """What the command has written since it was started."""
        if not self.log.exists():
            return ""
        with self.log.open("rb") as log:
            log.seek(self._log_start)
            return log.read().decode(errors="replace")

    def wait_for_log(self, pattern: str, timeout: float) -> re.Match[str]:
        """The first match of a regular expression in the log.

        Raises NotReady, with the end of the log, if the command ended or ``timeout`` passed without
        a match.
        """
        began = time.monotonic()
        while True:
            alive, waited = self.alive, time.monotonic() - began
            if match := re.search(pattern, self.logs(), re.MULTILINE):
                return match
            if not alive or waited > timeout:
                why = (
                    f"no log line {pattern!r} after {timeout:g} s"
                    if alive
                    else f"ended with {self.wait(0)}"
                )
                tail = "\n".join(self.logs().splitlines()[-25:])
                raise NotReady(f"process {self.pid}: {why}; its log ends:\n{tail}")
            time.sleep(pause(waited))
