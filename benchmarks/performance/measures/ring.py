"""The cost of a task in a pool child: processes in turns of a few tasks, without a broker."""

from collections import defaultdict
from contextlib import ExitStack
from dataclasses import dataclass

from benchmarks.performance import roster
from benchmarks.performance.bench import Bench, Caller, keys
from benchmarks.performance.figures import Figure, figure, ratio
from benchmarks.performance.findings import Finding
from benchmarks.performance.roster import Contender

FULL = (60, 16)
QUICK = (8, 16)
"""Rounds, and tasks in each turn."""
WARM_UP = 64


@dataclass(frozen=True)
class Runner:
    """One process of the ring: first runs of a contender, or replays of one key."""

    contender: Contender
    caller: Caller
    replayed: str = ""

    @property
    def name(self) -> str:
        """Its name in the facts."""
        return f"{self.contender.name} replay" if self.replayed else self.contender.name

    @property
    def title(self) -> str:
        """The title of its row."""
        return f"{self.contender.heading}: a replay" if self.replayed else self.contender.heading

    def keys(self, number: int) -> list[str]:
        """The keys of a turn."""
        return [self.replayed] * number if self.replayed else keys(number)


def measure(bench: Bench, quick: bool) -> Finding:
    """All contenders that use Celery, and the replays of those that have them."""
    rounds, tasks = QUICK if quick else FULL
    cpu: dict[str, list[float]] = defaultdict(list)
    wall: dict[str, list[float]] = defaultdict(list)
    with ExitStack() as stack:
        ring = [_runner(bench, contender, stack) for contender in roster.ON_CELERY]
        ring += [
            _runner(bench, contender, stack, replay=True)
            for contender in (roster.TIGHT, *roster.OURS)
        ]
        for number in range(rounds):
            first = number % len(ring)
            for runner in [*ring[first:], *ring[:first]]:
                runner.caller.trace(runner.keys(4))
                traced = runner.caller.trace(runner.keys(tasks))
                cpu[runner.name].append(1e6 * traced["cpu"])
                wall[runner.name].append(1e6 * traced["wall"])
        calls = {
            runner.name: float(runner.caller.send("calls", keys=runner.keys(tasks)))
            for runner in ring
        }
    head = ["one process, no-op body", "CPU, µs", "times that by hand", "time, µs"]
    rows = [[*head, "Python calls"]]
    facts: dict[str, Figure] = {}
    for runner in ring:
        by_hand = roster.ROWS if runner.contender is roster.LEASES_DATABASE else roster.TIGHT
        rows.append(
            [
                runner.title,
                figure(cpu[runner.name]).shown(0),
                ratio(cpu[runner.name], cpu[by_hand.name]).shown(),
                figure(wall[runner.name]).shown(0),
                f"{calls[runner.name]:,.0f}",
            ]
        )
        facts[f"calls {runner.name}"] = figure([calls[runner.name]])
        facts[f"ring {runner.name} / {by_hand.name}"] = ratio(cpu[runner.name], cpu[by_hand.name])
    text = f"{rounds} rounds of {tasks} tasks."
    return Finding("ring", [rows], text, facts)


def _runner(
    bench: Bench, contender: Contender, stack: ExitStack, *, replay: bool = False
) -> Runner:
    """A process that has run some tasks."""
    stage = bench.stage(contender)
    caller = stack.enter_context(stage.caller())
    runner = Runner(contender, caller, keys(1, "replay-")[0] if replay else "")
    stage.settle(lambda: caller.trace(runner.keys(1)))
    caller.trace(runner.keys(WARM_UP))
    return runner
