"""How the benchmark measures a worker that processes waiting messages."""

import os
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from benchmarks.performance import machine
from benchmarks.performance.draining import drained
from benchmarks.performance.journal import ENDED, Journal, Writer

TASKS = 40


class Worker:
    """Ends tasks in bursts: *bursts* are the numbers of tasks that have ended at each look."""

    def __init__(self, path: Path, bursts: list[int]) -> None:
        self.journal = Journal(path)
        self.mains = [os.getpid()]
        self.paused = False
        self.writer = Writer(str(path), ENDED)
        self._bursts = bursts

    def pids(self) -> list[int]:
        return self.mains

    def ended(self, number: int) -> None:
        for _ in range(self._bursts.pop(0)):
            self.writer.note(ENDED, "a key")
        assert len(self.journal) >= number

    def resume(self) -> None:
        self.paused = False

    def pause(self) -> None:
        self.paused = True


@pytest.mark.parametrize(
    "bursts", [[4, 36], [40, 0], [39, 1]], ids=["as usual", "all at once", "all but one at once"]
)
def test_tasks_are_measured_however_fast_they_end(tmp_path, monkeypatch, bursts) -> None:
    """Also on a machine where nothing else runs until they have ended; a turn before leaves its
    records. Each task takes a second of CPU here.
    """
    worker = Worker(tmp_path / "journal", bursts)
    for number in range(3):
        worker.writer.note(ENDED, f"before {number}")

    def cpu(pids: Iterable[int]) -> machine.CpuByPid:
        return {pid: float(len(worker.journal)) for pid in pids}

    monkeypatch.setattr(machine, "cpu", cpu)
    bench = SimpleNamespace(postgres_pids=worker.pids, redis_cpu=lambda: cpu([0]))
    caller = SimpleNamespace(send=lambda _: None)
    one = SimpleNamespace(
        stage=SimpleNamespace(bench=bench), worker=worker, journal=worker.journal, caller=caller
    )
    turn = drained(cast("Any", one), TASKS, publishing=1.0)
    assert turn.rate > 0
    assert turn.worker == turn.main == pytest.approx(1e6, rel=0.05)
    assert turn.redis == turn.postgres == pytest.approx(1e6, rel=0.05)
    assert turn.publisher == 1e6 / TASKS
    assert worker.paused
