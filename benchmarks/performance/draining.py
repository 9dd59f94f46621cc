"""How a worker processes waiting messages: tasks per second, and CPU per task."""

from dataclasses import dataclass

from benchmarks.performance import machine
from benchmarks.performance.bench import WORKERS, Running
from benchmarks.performance.machine import CpuByPid

UNMEASURED = 0.1
"""The share of the tasks that warm the worker up."""


@dataclass(frozen=True)
class Turn:
    """Tasks per second; the other fields are CPU per task, in microseconds: of the worker, its main
    process, the servers, and the publisher. *others* is the share of the machine that other
    processes used meanwhile.
    """

    rate: float
    worker: float
    main: float
    redis: float
    postgres: float
    publisher: float
    others: float

    @property
    def children(self) -> float:
        """The CPU of the pool's children."""
        return self.worker - self.main


@dataclass(frozen=True)
class _Reading:
    """The CPU used until a moment: by the whole machine, the worker, and the servers."""

    busy: float
    worker: CpuByPid
    redis: CpuByPid
    postgres: CpuByPid


def drained(one: Running, tasks: int, publishing: float) -> Turn:
    """Let the paused worker run *tasks* messages; *publishing* is the CPU of their caller, in
    seconds.

    The journal gets one record for each task.
    """
    bench, worker, journal = one.stage.bench, one.worker, one.journal
    start = len(journal)
    pids, mains, servers = worker.pids(), worker.mains, bench.postgres_pids()

    def read() -> _Reading:
        return _Reading(machine.busy(), machine.cpu(pids), bench.redis_cpu(), machine.cpu(servers))

    first, before = start + 1, read()
    worker.resume()
    worker.ended(start + int(tasks * UNMEASURED))
    # Most of the tasks, or all, have ended by now on a machine that let only the worker run. Then
    # the first tasks are measured too.
    if len(journal) - start <= tasks // 2:
        first, before = len(journal), read()
    worker.ended(start + tasks)
    after = machine.cpu(pids)
    redis_used = machine.used(before.redis, bench.redis_cpu())
    postgres_used = machine.used(before.postgres, machine.cpu(servers))
    worker_used = machine.used(before.worker, after)
    main_used = machine.used(before.worker, {pid: after[pid] for pid in mains})
    others = machine.busy() - before.busy - worker_used - redis_used - postgres_used
    one.caller.send("settle")
    worker.pause()
    times = [entry.time for entry in journal.entries(first - 1)]
    seconds, measured = times[-1] - times[0], len(times) - 1
    each = 1e6 / measured
    return Turn(
        rate=measured / seconds,
        worker=worker_used * each,
        main=main_used * each,
        redis=redis_used * each,
        postgres=postgres_used * each,
        publisher=publishing * 1e6 / tasks,
        others=max(0.0, others) / (seconds * WORKERS),
    )
