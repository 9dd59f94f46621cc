"""A summary of the figures: a table for the page, and one sentence for the README."""

import textwrap
from typing import Final

from benchmarks.performance import roster
from benchmarks.performance.findings import Table
from benchmarks.performance.goals import Facts

BODIES: Final = ("no-op", "5 ms", "100 ms")
HEAD: Final = [
    *("", "more CPU per task, ms", *(f"throughput, {body} body" for body in BODIES)),
    *("later done on an idle system, ms", "more memory per process, MiB"),
]
WIDTH: Final = 150
SENTENCE: Final = (
    "With the prefork pool, a task costs a worker {cpu} ms more CPU than on plain Celery ({cpu_database} ms with "
    "database leases). What is left of the throughput: {noop} % ({noop_database} %) where bodies do nothing, "
    "{short} % ({short_database} %) where they take 5 ms, {long} % ({long_database} %) "
    "where they take 100 ms ([performance](docs/explanation/performance.md))."
)


def table(facts: Facts) -> Table | None:
    """Both modes and plain Celery; None unless everything in it was measured."""
    rows = [HEAD]
    for ours in roster.OURS:
        wanted = {
            f"no-op added cpu {ours.name}": (0.001, 1),
            **{f"{body} rate {ours.name} / plain": (100, 0) for body in BODIES},
            f"latency added {ours.name}": (1, 1),
            f"memory above plain {ours.name} 4": (1, 0),
        }
        if not wanted.keys() <= facts.keys():
            return None
        cells = [
            f"{facts[name].median * factor:.{digits}f}" for name, (factor, digits) in wanted.items()
        ]
        cells[1:4] = [f"{share} %" for share in cells[1:4]]
        rows.append([ours.title.strip("*"), *cells])
    return rows


def sentence(shown: Table) -> str:
    """The sentence for the README, from the table on the page."""
    (
        _,
        (_, cpu, noop, short, long, *_),
        (_, cpu_database, noop_database, short_database, long_database, *_),
    ) = shown
    said = SENTENCE.format(
        cpu=cpu,
        cpu_database=cpu_database,
        noop=noop.removesuffix(" %"),
        noop_database=noop_database.removesuffix(" %"),
        short=short.removesuffix(" %"),
        short_database=short_database.removesuffix(" %"),
        long=long.removesuffix(" %"),
        long_database=long_database.removesuffix(" %"),
    )
    return textwrap.fill(said, WIDTH, break_long_words=False, break_on_hyphens=False)
