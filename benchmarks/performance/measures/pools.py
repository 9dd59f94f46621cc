"""Tasks per second and their cost on each kind of pool, for bodies that wait."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.performance import roster
from benchmarks.performance.bench import Bench, keys, turns
from benchmarks.performance.draining import Turn, drained
from benchmarks.performance.figures import Figure, figure, ratio
from benchmarks.performance.findings import Finding
from benchmarks.performance.roster import Contender

CONTENDERS = (roster.PLAIN, roster.LEASES_DATABASE, roster.LEASES)


@dataclass(frozen=True)
class Pool:
    """A pool with its *concurrency*, the contenders that run on it, and the lengths of their bodies
    in seconds.
    """

    kind: str
    concurrency: int
    contenders: Sequence[Contender] = CONTENDERS
    bodies: Sequence[float] = (0.005, 0.02, 0.1)

    @property
    def title(self) -> str:
        """As in a worker's command line."""
        return f"-P {self.kind} -c {self.concurrency}"

    def tasks(self, seconds: float) -> int:
        """The tasks of a turn: as many as take about a second, but enough to fill the pool."""
        return max(3 * self.concurrency, min(600, int(self.concurrency / seconds)))


# DBOS runs 64 jobs at once.
WITH_DBOS = Pool("gevent", 64, (*CONTENDERS, roster.DBOS), (0.1,))
FULL = ((Pool("prefork", 2), Pool("threads", 40), Pool("gevent", 100), WITH_DBOS), 5)
QUICK = ((Pool("threads", 40, bodies=(0.1,)), Pool("gevent", 100, bodies=(0.1,)), WITH_DBOS), 2)
"""Pools, and rounds of each."""

Turns = Mapping[Contender, Sequence[Turn]]


def measure(bench: Bench, quick: bool) -> Finding:
    """One pool after the other; its workers take turns."""
    pools, rounds = QUICK if quick else FULL
    rows = [
        [
            *("pool", "body, ms", "", "tasks/s", "of plain's"),
            *("worker CPU, µs", "times plain's", "Redis, µs", "PostgreSQL, µs"),
        ]
    ]
    facts: dict[str, Figure] = {}
    others: list[float] = []
    for pool in pools:
        for seconds, made in _measured(bench, pool, rounds).items():
            others += [turn.others for mine in made.values() for turn in mine]
            for contender in made:
                known = _facts(contender, made)
                rows.append(
                    [
                        *(f"`{pool.title}`", f"{1000 * seconds:.0f}", contender.heading),
                        *(known[name].shown(digits) for name, digits in SHOWN.items()),
                    ]
                )
                place = f"{pool.title} {1000 * seconds:.0f} ms"
                facts |= {
                    f"{place} {name} {contender.name}": found for name, found in known.items()
                }
    text = (
        f"{rounds} rounds. Other processes of the machine used "
        f"{100 * figure(others).median:.0f} % of it meanwhile."
    )
    return Finding("pools", [rows], text, facts)


SHOWN = {"rate": 0, "rate / plain": 2, "cpu": 0, "cpu / plain": 2, "redis": 0, "postgres": 0}
"""The figures of a row, and their decimals."""


def _measured(bench: Bench, pool: Pool, rounds: int) -> Mapping[float, Turns]:
    made: dict[float, dict[Contender, list[Turn]]] = {}
    options = {"pool": pool.kind, "concurrency": pool.concurrency}
    with bench.running(pool.contenders, **options) as running:
        for seconds in pool.bodies:
            made[seconds] = defaultdict(list)
            for one in turns(running, rounds):
                tasks = pool.tasks(seconds)
                published = one.caller.publish(keys(tasks), seconds=seconds)
                turn = drained(one, tasks, published["cpu"])
                made[seconds][one.stage.contender].append(turn)
    return {
        seconds: {contender: found[contender] for contender in pool.contenders}
        for seconds, found in made.items()
    }


def _facts(contender: Contender, made: Turns) -> dict[str, Figure]:
    mine = made[contender]
    rates, costs = [turn.rate for turn in mine], [turn.worker for turn in mine]
    return {
        "rate": figure(rates),
        "cpu": figure(costs),
        "redis": figure(turn.redis for turn in mine),
        "postgres": figure(turn.postgres for turn in mine),
        **{
            f"rate / {other.name}": ratio(rates, [turn.rate for turn in theirs])
            for other, theirs in made.items()
        },
        "cpu / plain": ratio(costs, [turn.worker for turn in made[roster.PLAIN]]),
    }
