"""How many connections one worker has to each server, by pool."""

from benchmarks.performance import roster
from benchmarks.performance.bench import Bench, Running, Stage, keys
from benchmarks.performance.figures import figure
from benchmarks.performance.findings import Finding
from benchmarks.performance.journal import ENDED

POOLS = (("prefork", 2), ("threads", 20), ("gevent", 100))
ENOUGH = 0.98
"""The share of the tasks that must run: with gevent, Celery sometimes loses a message when its
first connection breaks.
"""
FULL = (POOLS, 1500)
QUICK = (POOLS[-1:], 300)
"""Pools with their concurrency, and tasks."""


def measure(bench: Bench, quick: bool) -> Finding:
    """The maximal number of connections while the tasks ran, with all slots of the pool in use."""
    pools, tasks = QUICK if quick else FULL
    rows = [
        [
            "pool",
            *(
                f"{contender.title}: {where}"
                for contender in roster.OURS
                for where in ("PostgreSQL", "Redis")
            ),
        ]
    ]
    facts = {}
    for pool, concurrency in pools:
        row = [f"`-P {pool} -c {concurrency}`"]
        for contender in roster.OURS:
            postgres, redis = _most(bench.stage(contender), pool, concurrency, tasks)
            facts[f"connections {pool} {contender.name}"] = figure([postgres])
            row += [str(postgres), str(redis)]
        rows.append(row)
    text = f"While one worker ran {tasks} tasks with a body of 5 ms, once."
    return Finding("connections", [rows], text, facts)


def _most(stage: Stage, pool: str, concurrency: int, tasks: int) -> tuple[int, int]:
    stage.forget_messages()
    with stage.caller() as caller:
        caller.publish(keys(tasks), seconds=0.005)
        before = _clients(stage)
        with stage.worker(pool=pool, concurrency=concurrency, notes=ENDED) as worker:
            one = Running(stage, caller, worker)
            seen: list[tuple[int, int]] = []

            def done() -> bool:
                seen.append((len(_backends(stage)), _clients(stage) - before))
                return len(one.journal) >= ENOUGH * tasks

            worker.until(done, "the end of all tasks")
    return max(postgres for postgres, _ in seen), max(redis for _, redis in seen)


def _backends(stage: Stage) -> list[tuple[object, ...]]:
    others = "backend_type = 'client backend' AND pid <> pg_backend_pid()"
    return stage.sql(
        f"SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND {others}"  # noqa: S608
    )


def _clients(stage: Stage) -> int:
    with stage.bench.client() as client:
        return int(client.info("clients")["connected_clients"])
