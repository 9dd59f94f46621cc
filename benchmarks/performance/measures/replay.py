"""The cost of a duplicate of finished work, compared with a plain task that runs again."""

from collections import defaultdict

from benchmarks.performance import roster
from benchmarks.performance.bench import Bench, keys, turns
from benchmarks.performance.draining import Turn, drained
from benchmarks.performance.figures import Figure, figure, ratio
from benchmarks.performance.findings import Finding
from benchmarks.performance.journal import ANSWERED
from benchmarks.performance.roster import Contender

CONTENDERS = (roster.PLAIN, roster.TIGHT, *roster.OURS)
FULL = (10, 300)
QUICK = (2, 100)
"""Rounds, and tasks in each turn."""


def measure(bench: Bench, quick: bool) -> Finding:
    """Each turn first runs its keys, and then measures their duplicates."""
    rounds, tasks = QUICK if quick else FULL
    made: dict[Contender, list[Turn]] = defaultdict(list)
    with bench.running(CONTENDERS, notes=ANSWERED) as running:
        for one in turns(running, rounds):
            names = keys(tasks)
            for _ in range(2):
                published = one.caller.publish(names)
                turn = drained(one, tasks, published["cpu"])
            made[one.stage.contender].append(turn)
    plain = made[roster.PLAIN]
    rows = [
        [
            "each key called again",
            "answers/s",
            "of plain's",
            "worker CPU, µs",
            "times plain's",
            "PostgreSQL, µs",
        ]
    ]
    facts: dict[str, Figure] = {}
    for contender, mine in made.items():
        rate = ratio([turn.rate for turn in mine], [turn.rate for turn in plain])
        cpu = ratio([turn.worker for turn in mine], [turn.worker for turn in plain])
        facts |= {
            f"replay rate {contender.name} / plain": rate,
            f"replay cpu {contender.name} / plain": cpu,
        }
        rows.append(
            [
                f"{contender.heading}: {'runs again' if contender is roster.PLAIN else 'replay'}",
                figure(turn.rate for turn in mine).shown(0),
                rate.shown(),
                figure(turn.worker for turn in mine).shown(0),
                cpu.shown(),
                figure(turn.postgres for turn in mine).shown(0),
            ]
        )
    text = f"{rounds} rounds of {tasks} keys."
    return Finding("replay", [rows], text, facts)
