"""The worker processes that a drill starts, pauses and kills; it sends signals to no others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from celery_leases.ops.drill.worker import VARIABLE, WorkerConfig
from celery_leases.worker.processes import METRICS_DIRECTORY

MODULE = "celery_leases.ops.drill.worker"


class DrillWorker:
    """One worker with its pool, in its own process group."""

    def __init__(self, config: WorkerConfig) -> None:
        self.config = config
        self.number = config.number
        self._log = Path(config.directory) / f"worker-{config.number}.log"
        others = {name: each for name, each in os.environ.items() if name != METRICS_DIRECTORY}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", MODULE],
                env={**others, VARIABLE: config.as_text(), "TMPDIR": config.directory},
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def alive(self) -> bool:
        """Whether its main process exists, paused or not."""
        return self._process.poll() is None

    def last_log_line(self) -> str:
        """The last line of its log."""
        lines = self._log.read_text(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "its log is empty")

    def kill_child(self, pid: int) -> None:
        """Kill the process *pid*, which must belong to its pool."""
        if not self.alive or os.getpgid(pid) != self._process.pid:
            raise ProcessLookupError(f"{pid} is not a process of this worker")
        os.kill(pid, signal.SIGKILL)

    def pause(self) -> None:
        """Stop all its processes, until :meth:`resume`."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Continue all its processes."""
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kill all its processes and wait for the main one, which may already be dead."""
        self._signal(signal.SIGKILL)
        self._process.wait()
        if self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.close()

    def _signal(self, sig: signal.Signals) -> None:
        if self._process.returncode is None:  # not reaped, so its pid is not reused
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, sig)
