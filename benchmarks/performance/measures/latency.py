"""The time from publishing until an idle worker has done a task: body, records and locks."""

import random
import time
from collections import defaultdict

from benchmarks.performance import roster
from benchmarks.performance.bench import Bench, Running, keys, turns
from benchmarks.performance.figures import figure, quantile, ratio
from benchmarks.performance.findings import Finding
from benchmarks.performance.journal import ANSWERED
from benchmarks.performance.roster import Contender

FULL = (12, 20)
QUICK = (4, 10)
"""Rounds, and tasks in each turn."""


def measure(bench: Bench, quick: bool) -> Finding:
    """One task at a time, and one contender at a time."""
    rounds, tasks = QUICK if quick else FULL
    made: dict[Contender, list[list[float]]] = defaultdict(list)
    with bench.running(roster.ALL, notes=ANSWERED) as running:
        for one in turns(running, rounds):
            made[one.stage.contender].append(_turn(one, tasks))
    medians = {
        contender: [figure(turn).median for turn in mine] for contender, mine in made.items()
    }
    head = ["idle system, no-op body", "publish to done, ms", "times plain's", "99 % below, ms"]
    rows = [head]
    for contender, mine in medians.items():
        slow = quantile((each for turn in made[contender] for each in turn), 0.99)
        times = ratio(mine, medians[roster.PLAIN]).shown()
        rows.append([contender.heading, figure(mine).shown(1), times, f"{slow:.1f}"])
    facts = {f"latency {contender.name}": figure(mine) for contender, mine in medians.items()}
    for ours, mine in medians.items():
        added = (each - plain for each, plain in zip(mine, medians[roster.PLAIN], strict=True))
        facts[f"latency added {ours.name}"] = figure(added)
        facts |= {
            f"latency {ours.name} / {other.name}": ratio(mine, theirs)
            for other, theirs in medians.items()
        }
    text = f"{rounds} rounds of {tasks} tasks; medians and quartiles of the rounds' medians."
    return Finding("latency", [rows], text, facts)


def _turn(one: Running, tasks: int) -> list[float]:
    """Milliseconds of each task."""
    one.worker.resume()
    names = keys(tasks + 1)  # the first one is a warm-up
    began = {}
    for number, name in enumerate(names, len(one.journal) + 1):
        began[name] = one.caller.publish([name])["began"]
        if one.stage.contender.on_celery:
            one.worker.ended(number)
        else:
            one.caller.send("settle")
        time.sleep(random.uniform(0.005, 0.020))
    one.caller.send("settle")
    answered = {entry.key: entry.time for entry in one.journal.entries()}
    answered |= one.caller.send("answered", keys=names)
    one.worker.pause()
    return [1000 * (answered[name] - began[name]) for name in names[1:]]
