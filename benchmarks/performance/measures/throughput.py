"""Tasks per second of a worker with waiting messages, and their cost, for three body lengths."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.performance import roster
from benchmarks.performance.bench import Bench, Running, keys, turns
from benchmarks.performance.draining import Turn, drained
from benchmarks.performance.figures import Figure, figure, ratio
from benchmarks.performance.findings import Finding, Table
from benchmarks.performance.roster import Contender


@dataclass(frozen=True)
class Load:
    """The length of the bodies in seconds, and how many *tasks* each turn has."""

    title: str
    seconds: float
    tasks: int
    rounds: int


FULL = (Load("no-op", 0.0, 500, 20), Load("5 ms", 0.005, 250, 10), Load("100 ms", 0.1, 40, 5))
QUICK = (Load("no-op", 0.0, 200, 3), Load("5 ms", 0.005, 100, 2), Load("100 ms", 0.1, 20, 1))


Turns = Mapping[Contender, Sequence[Turn]]


def measure(bench: Bench, quick: bool) -> Finding:
    """All contenders: all workers are started, and one of them runs at a time."""
    loads = QUICK if quick else FULL
    with bench.running(roster.ALL) as running:
        measured = [(load, _measured(running, load)) for load in loads]
    noop = measured[0][1]
    facts: dict[str, Figure] = {}
    for load, made in measured:
        facts |= _facts(load.title, made)
    return Finding("throughput", [_costs(noop), _rates(measured)], _text(measured), facts)


def _measured(running: Sequence[Running], load: Load) -> Turns:
    made: dict[Contender, list[Turn]] = defaultdict(list)
    for one in turns(running, load.rounds):
        published = one.caller.publish(keys(load.tasks), seconds=load.seconds)
        made[one.stage.contender].append(drained(one, load.tasks, published["cpu"]))
    return made


def _facts(body: str, made: Turns) -> dict[str, Figure]:
    facts = {}
    for ours, mine in made.items():
        facts[f"{body} rate {ours.name}"] = figure(turn.rate for turn in mine)
        facts[f"{body} cpu {ours.name}"] = figure(turn.worker for turn in mine)
        for name in ("main", "children", "redis", "postgres"):
            facts[f"{body} {name} {ours.name}"] = figure(getattr(turn, name) for turn in mine)
        for other, theirs in made.items():
            pair = f"{ours.name} / {other.name}"
            facts[f"{body} rate {pair}"] = ratio(
                [turn.rate for turn in mine], [turn.rate for turn in theirs]
            )
            facts[f"{body} cpu {pair}"] = ratio(
                [turn.worker for turn in mine], [turn.worker for turn in theirs]
            )
    added = {
        ours: figure(
            turn.worker - other.worker
            for turn, other in zip(made[ours], made[roster.PLAIN], strict=True)
        )
        for ours in roster.OURS
    }
    return facts | {f"{body} added cpu {ours.name}": more for ours, more in added.items()}


def _costs(made: Turns) -> Table:
    head = [
        "no-op body",
        "tasks/s",
        "of plain's",
        "worker CPU, µs",
        "times plain's",
        "in the children, µs",
    ]
    rows = [[*head, "Redis, µs", "PostgreSQL, µs", "publishing, µs"]]
    plain = made[roster.PLAIN]
    for contender, mine in made.items():
        rows.append(
            [
                contender.heading,
                figure(turn.rate for turn in mine).shown(0),
                ratio([turn.rate for turn in mine], [turn.rate for turn in plain]).shown(),
                figure(turn.worker for turn in mine).shown(0),
                ratio([turn.worker for turn in mine], [turn.worker for turn in plain]).shown(),
                *(
                    figure(getattr(turn, name) for turn in mine).shown(0)
                    for name in ("children", "redis", "postgres")
                ),
                figure(turn.publisher for turn in mine).shown(0),
            ]
        )
    return rows


def _rates(measured: Sequence[tuple[Load, Turns]]) -> Table:
    rows = [
        ["throughput as a share of plain Celery's", *(f"{load.title} body" for load, _ in measured)]
    ]
    for contender in roster.ALL:
        shares = []
        for _, made in measured:
            mine, plain = made[contender], made[roster.PLAIN]
            shares.append(
                ratio([turn.rate for turn in mine], [turn.rate for turn in plain]).shown()
            )
        rows.append([contender.heading, *shares])
    return rows


def _text(measured: Sequence[tuple[Load, Turns]]) -> str:
    sizes = ", ".join(
        f"{load.rounds} of {load.tasks} tasks with a {load.title} body" for load, _ in measured
    )
    others = figure(turn.others for _, made in measured for mine in made.values() for turn in mine)
    return f"Rounds: {sizes}. Other processes of the machine used {100 * others.median:.0f} % of it meanwhile."
