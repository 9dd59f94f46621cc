"""How a worker processes waiting messages: tasks per second, and CPU per task."""

from dataclasses import dataclass

from benchmarks.performance import machine
from benchmarks.performance.bench import WORKERS, Running

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


def drained(one: Running, tasks: int, publishing: float) -> Turn:
    """Let the paused worker run *tasks* messages; *publishing* is the CPU of their caller, in
    seconds.

    The journal gets one record for each task.
    """
    bench, worker, journal = one.stage.bench, one.worker, one.journal
    start = len(journal)
    pids, mains, servers = worker.pids(), worker.mains, bench.postgres_pids()
    worker.resume()
    worker.ended(start + int(tasks * UNMEASURED))
    first = len(journal)
    busy, cpu, redis, postgres = (
        machine.busy(),
        machine.cpu(pids),
        bench.redis_cpu(),
        machine.cpu(servers),
    )
    worker.ended(start + tasks)
    after = machine.cpu(pids)
    redis_used = machine.used(redis, bench.redis_cpu())
    postgres_used = machine.used(postgres, machine.cpu(servers))
    worker_used = machine.used(cpu, after)
    main_used = machine.used(cpu, {pid: after[pid] for pid in mains})
    others = machine.busy() - busy - worker_used - redis_used - postgres_used
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
