"""The worker processes that a drill starts, pauses and kills. It signals no others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from celery_leases.drill.worker import VARIABLE, Orders

MODULE = "celery_leases.drill.worker"


class DrillWorker:
    """One worker with its pool, in a process group of its own."""

    def __init__(self, orders: Orders) -> None:
        self.orders = orders
        self.number = orders.number
        self._log = Path(orders.directory) / f"worker-{orders.number}.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", MODULE],
                env={**os.environ, VARIABLE: orders.as_text(), "TMPDIR": orders.directory},
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def alive(self) -> bool:
        """Whether its main process exists; a paused one does."""
        return self._process.poll() is None

    def last_words(self) -> str:
        """The last line of its log."""
        lines = self._log.read_text(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")

    def kill_child(self, pid: int) -> None:
        """Kill the process *pid* of its pool."""
        if not self.alive or os.getpgid(pid) != self._process.pid:
            raise ProcessLookupError(f"{pid} is no process of this worker")
        os.kill(pid, signal.SIGKILL)

    def pause(self) -> None:
        """Stop all its processes, until :meth:`resume`."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let all its processes go on."""
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kill all its processes, and wait until the main one is gone. It may be dead already."""
        self._signal(signal.SIGKILL)
        self._process.wait()
        if self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.close()

    def _signal(self, sig: signal.Signals) -> None:
        if self._process.returncode is None:  # not waited for, so its number is not another's yet
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, sig)
