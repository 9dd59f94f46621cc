"""The memory of a worker's processes after they have run some tasks."""

from collections import defaultdict

from benchmarks.performance import machine, roster
from benchmarks.performance.bench import WORKERS, Bench
from benchmarks.performance.figures import figure
from benchmarks.performance.findings import Finding
from benchmarks.performance.roster import Contender

FULL = (roster.ON_CELERY, 3, 1000)
QUICK = ((roster.PLAIN, roster.LEASES_DATABASE, roster.LEASES), 1, 100)
"""Contenders, workers of each, and tasks of each worker."""


def measure(bench: Bench, quick: bool) -> Finding:
    """One worker at a time, because pages that two of them share would count half in each."""
    contenders, workers, tasks = QUICK if quick else FULL
    mains: dict[Contender, list[float]] = defaultdict(list)
    children: dict[Contender, list[float]] = defaultdict(list)
    for _ in range(workers):
        for contender in contenders:
            with bench.running([contender]) as (one,):
                one.run(tasks)
                main, *others = [machine.pss(pid) for pid in one.worker.pids()]
            mains[contender].append(main)
            children[contender].append(sum(others) / len(others))
    rows = [["", "main process, MiB", "each child, MiB", "per process above plain's, MiB"]]
    facts = {}
    for contender in contenders:
        above = figure(
            (main + WORKERS * child - plain_main - WORKERS * plain_child) / (1 + WORKERS)
            for main, child, plain_main, plain_child in zip(
                *(mains[contender], children[contender]),
                *(mains[roster.PLAIN], children[roster.PLAIN]),
                strict=True,
            )
        )
        facts[f"memory above plain {contender.name}"] = above
        shown = [
            figure(mains[contender]).shown(1),
            figure(children[contender]).shown(1),
            above.shown(1),
        ]
        rows.append([contender.heading, *shown])
    text = f"Workers of each contender: {workers}, each after {tasks} tasks."
    return Finding("memory", [rows], text, facts)
