"""The memory of a worker's processes after they have run some tasks."""

from benchmarks.performance import machine, roster
from benchmarks.performance.bench import Bench
from benchmarks.performance.figures import figure
from benchmarks.performance.findings import Finding
from benchmarks.performance.roster import Contender

CHILDREN = (4, 16)
"""Pool children of a worker."""
TASKS = 400
FULL = (roster.ON_CELERY, 3)
QUICK = ((roster.PLAIN, roster.LEASES_DATABASE, roster.LEASES), 1)
"""Contenders, and workers of each."""


def measure(bench: Bench, quick: bool) -> Finding:
    """One worker at a time, because pages that two of them share would count half in each."""
    contenders, workers = QUICK if quick else FULL
    rows = [
        ["", "children", "main process, MiB", "each child, MiB", "per process above plain's, MiB"]
    ]
    facts = {}
    for children in CHILDREN:
        used = {
            contender: [_used(bench, contender, children) for _ in range(workers)]
            for contender in contenders
        }
        for contender in contenders:
            above = figure(
                (sum(ours) - sum(plain)) / (1 + children)
                for ours, plain in zip(used[contender], used[roster.PLAIN], strict=True)
            )
            facts[f"memory above plain {contender.name} {children}"] = above
            main = figure(one[0] for one in used[contender])
            child = figure(sum(one[1:]) / children for one in used[contender])
            shown = [each.shown(1) for each in (main, child, above)]
            rows.append([contender.heading, str(children), *shown])
    text = f"Workers of each contender: {workers}, each after {TASKS} tasks."
    return Finding("memory", [rows], text, facts)


def _used(bench: Bench, contender: Contender, children: int) -> list[float]:
    """MiB of the main process, and of each child."""
    with bench.running([contender], concurrency=children) as (one,):
        one.run(TASKS)
        return [machine.pss(pid) for pid in one.worker.pids()]
