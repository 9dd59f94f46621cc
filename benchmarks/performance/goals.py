"""Goals for the figures: a bound that a release must meet, and an aim."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from benchmarks.performance.figures import Figure
from benchmarks.performance.findings import Table

Facts = Mapping[str, Figure]


@dataclass(frozen=True)
class Goal:
    """The median of *fact* is compared with the goal; without a *bound* there is only an aim.

    *more*: more of it is better. *sized*: the title has a size, which a quick run does not reach.
    """

    title: str
    fact: str
    bound: float | None
    aim: float
    more: bool = False
    digits: int = 2
    sized: bool = False

    def keeps(self, measured: Figure, limit: float) -> bool:
        """Whether the rounded figure is as good as *limit*."""
        shown = round(measured.median, self.digits)
        return shown >= limit if self.more else shown <= limit

    def kept(self, facts: Facts) -> bool:
        """Whether the bound is met, or was not measured."""
        return (
            self.bound is None or self.fact not in facts or self.keeps(facts[self.fact], self.bound)
        )


BOTH: Final = (("Redis + PostgreSQL", "leases"), ("database leases", "leases_database"))


def _of_both(
    title: str, fact: str, bound: float | None, aim: float, digits: int = 2, *, sized: bool = False
) -> Iterator[Goal]:
    for mode, name in BOTH:
        yield Goal(f"{mode}: {title}", fact.format(name), bound, aim, digits=digits, sized=sized)


def _of_pool(pool: str, *limits: tuple[float, float]) -> Iterator[Goal]:
    """CPU beside plain Celery's; *limits* are bound and aim of both modes."""
    for (mode, name), (bound, aim) in zip(BOTH, limits, strict=True):
        title = f"{mode}: worker CPU of `-P {pool}`, 100 ms / plain"
        yield Goal(title, f"-P {pool} 100 ms cpu / plain {name}", bound, aim)


GOALS: Final = (
    Goal("Redis + PostgreSQL: worker CPU / by hand", "no-op cpu leases / tight", 1.25, 1.08),
    Goal(
        "Redis + PostgreSQL: throughput / by hand",
        "no-op rate leases / tight",
        0.90,
        0.97,
        more=True,
    ),
    Goal(
        "database leases: worker CPU / celery-singleton",
        "no-op cpu leases_database / singleton",
        1.4,
        1.00,
    ),
    Goal(
        "database leases: throughput / by hand",
        "no-op rate leases_database / rows",
        0.85,
        0.95,
        more=True,
    ),
    Goal("Redis + PostgreSQL: throughput / DBOS", "no-op rate leases / dbos", 1.6, 2.0, more=True),
    Goal(
        "database leases: throughput / DBOS",
        "no-op rate leases_database / dbos",
        1.9,
        2.0,
        more=True,
    ),
    *_of_pool("gevent -c 100", (1.25, 1.15), (1.2, 1.1)),
    *_of_pool("threads -c 40", (1.4, 1.2), (1.35, 1.15)),
    *_of_both(
        "PostgreSQL's CPU on `-P gevent -c 100`, 100 ms, µs",
        "-P gevent -c 100 100 ms postgres {}",
        250,
        120,
        digits=0,
    ),
    *(
        Goal(
            f"{mode}: throughput of `-P gevent -c 64`, 100 ms / DBOS with 64 jobs at once",
            f"-P gevent -c 64 100 ms rate / dbos {name}",
            2,
            3,
            more=True,
        )
        for mode, name in BOTH
    ),
    Goal("Redis + PostgreSQL: Python calls per task", "calls leases", 1100, 900, digits=0),
    Goal("database leases: Python calls per task", "calls leases_database", 650, 500, digits=0),
    *_of_both("publish to done / by hand with Redis", "latency {} / tight", 1.15, 1.05),
    Goal("Redis + PostgreSQL: WAL of a first run / by hand", "wal run leases / tight", 1.3, 1.1),
    Goal(
        "database leases: WAL of a first run / by hand", "wal run leases_database / rows", 1.3, 1.1
    ),
    *_of_both("WAL of a replay, bytes", "wal replay {}", 0, 0, digits=0),
    *_of_both("transaction ids of a replay", "xids replay {}", 0, 0, digits=1),
    *_of_both("rows locked by a replay", "locks replay {}", 0, 0, digits=1),
    *_of_both("worker CPU of a replay / of a plain run", "replay cpu {} / plain", None, 1.0),
    *_of_both("1,000 leases, share of a core in %", "renewals share {}", 0.8, 0.4, sized=True),
    *_of_both(
        "the latest of their renewals, ms", "renewals late {}", 100, 100, digits=0, sized=True
    ),
    *_of_both(
        "50 calls of a mutex with bodies of 0.2 s, s",
        "mutex total {}",
        12,
        10.5,
        digits=1,
        sized=True,
    ),
    *_of_both("mutex free while others wait, s", "mutex free {}", 0.3, 0.1),
    *_of_both(
        "50 calls, one body of 12 s: last answer after its end, s",
        "storm last {}",
        0.5,
        0.3,
        sized=True,
    ),
    *_of_both(
        "50 calls, one body of 12 s: rescheduled",
        "storm rescheduled {}",
        60,
        50,
        digits=0,
        sized=True,
    ),
    *_of_both("5,000 calls of a held key: another task waits, s", "crowd {}", 3, 1, sized=True),
    *_of_both(
        "PostgreSQL connections of `-P gevent -c 100`", "connections gevent {}", 10, 10, digits=0
    ),
    *_of_both(
        "memory per process above plain Celery, 4 children, MiB",
        "memory above plain {} 4",
        4,
        0,
        digits=1,
    ),
    *_of_both(
        "memory per process above plain Celery, 16 children, MiB",
        "memory above plain {} 16",
        2,
        0,
        digits=1,
    ),
    Goal(
        "database leases: a first run with 1,000,000 records / with none",
        "growth time first run",
        1.2,
        1.1,
        sized=True,
    ),
    Goal("import of `LeasedTask` with Celery / Celery", "import task", 1.4, 1.2),
)


def judged(quick: bool) -> list[Goal]:
    """The goals that a run can check."""
    return [goal for goal in GOALS if not (quick and goal.sized)]


def table(facts: Facts, quick: bool) -> Table:
    """Every goal that was measured."""
    rows = [["", "measured", "bound", "aim"]]
    for goal in judged(quick):
        if (measured := facts.get(goal.fact)) is not None:
            bound = "" if goal.bound is None else f"{goal.bound:,g}"
            mark = "" if goal.kept(facts) else " ✗"
            rows.append(
                [goal.title, f"{measured.shown(goal.digits)}{mark}", bound, f"{goal.aim:,g}"]
            )
    return rows


def missed(facts: Facts, quick: bool) -> list[str]:
    """The titles of the goals whose bound is missed."""
    return [goal.title for goal in judged(quick) if not goal.kept(facts)]
