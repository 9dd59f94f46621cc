"""Which calls run, and how many at a time."""

import os
import signal
import time
from typing import Any

from benchmarks.peers.observations import KEYLESS, Observed, case, right, wrong
from benchmarks.peers.stage import BRIEF, PATIENCE, Stage, until

NEWEST = 10
"""Changes of one thing while a first run is in progress."""
LIMIT = 3
CALLS = 8
BEATS = 4
COPIES = 10
WINDOW = 8.0
"""Seconds in which the runs of calls that publish themselves are counted; each does so for a second
later.
"""


@case("R1", f"{NEWEST} changes of one thing arrive while a run applies an older one")
def a_burst_of_changes(stage: Stage) -> Observed:
    """The newest change must be applied, three runs are enough, and each caller gets an answer."""
    stage.another()
    results = []
    for version in range(NEWEST + 1):
        results.append(stage.call(stage.tasks.changes, "a", stage.gate, version)[0])
        stage.seen(1)
    stage.seen(2, patience=BRIEF)
    stage.open()
    applied = [event["version"] for event in stage.settled()]
    runs = "one run" if len(applied) == 1 else f"{len(applied)} runs"
    if NEWEST not in applied:
        return wrong(f"{runs}, the newest change is lost")
    if len(applied) > 3:
        return wrong(f"{runs} for {NEWEST + 1} calls")
    answered = all(stage.value(result) is not None for result in results)
    return (
        right(f"{runs}, the last with the newest change") if answered else wrong("a caller waits")
    )


@case("R2", f"{CALLS} calls of a tenant who may run {LIMIT} at a time, and a process is killed")
def a_limit(stage: Stage) -> Observed:
    """Celery's own ``rate_limit`` and concurrency are those of one worker, and of all tenants."""
    stage.another(CALLS)
    results = [stage.call(stage.tasks.limits, f"a{n}", stage.gate)[0] for n in range(CALLS)]
    until(lambda: len(_running(stage)) >= LIMIT, PATIENCE)
    until(lambda: len(_running(stage)) > LIMIT, BRIEF)
    most = len(_running(stage))
    os.kill(min(_running(stage)), signal.SIGKILL)
    until(lambda: len(_running(stage)) > LIMIT, 2 * BRIEF)
    most = max(most, len(_running(stage)))
    stage.open()
    done = all(stage.value(result) is not None for result in results)
    if most > LIMIT:
        return wrong(f"more than {LIMIT} at a time")
    return right(f"never more than {LIMIT}, all done") if done else wrong("not all are done")


@case("R3", f"beat calls a task with the same arguments {BEATS} times")
def a_periodic_task(stage: Stage) -> Observed:
    """Each call must run, or somebody must say before that it will not."""
    stage.another(beat=True)
    unthinking, periodic = (task.name for task in (stage.tasks.unthinking, stage.tasks.periodic))
    until(lambda: len(stage.begun(periodic)) >= BEATS, 3 * BRIEF)
    runs, warned = len(stage.begun(unthinking)), f"beat calls {unthinking}" in stage.logs()
    if runs >= BEATS - 1:
        return right("each runs")
    if warned and len(stage.begun(periodic)) >= BEATS:
        return right('a worker warns that one runs; with `lease_runs="each"` each runs')
    return wrong(f"{runs} of {BEATS} run")


@case("R4", '`delay(1)` and `delay("1")` while the first runs', unfit=KEYLESS)
def a_number_and_its_text(stage: Stage) -> Observed:
    """A view has the text of a URL, and another place has the number."""
    stage.another()
    stage.begin(1)
    other, _ = stage.call(stage.tasks.work, "1", stage.gate)
    both = stage.seen(1, "1", BRIEF)
    stage.open()
    if both:
        return wrong("both run")
    if other is not None and stage.value(other) is None:
        return wrong(f"one runs, and the other caller gets {other.state}")
    return right("one runs")


@case("R5", f"a task that publishes itself, and {COPIES} extra copies of it")
def copies_of_a_task_that_publishes_itself(stage: Stage) -> Observed:
    """One must go on, and the copies must end."""
    stage.another()
    repeats = stage.tasks.repeats
    stage.call(repeats, "a")
    for _ in range(COPIES):
        stage.app.send_task(repeats.name, args=["a"])
    time.sleep(WINDOW)
    before = len(stage.begun())
    time.sleep(WINDOW)
    runs = len(stage.begun()) - before
    if not runs:
        return wrong("none goes on")
    return right("one goes on") if runs <= WINDOW else wrong("the copies go on for ever")


def _running(stage: Stage) -> set[Any]:
    """The living processes in which a body has begun; none ends before the gate is open."""
    begun = (event["pid"] for event in stage.tasks.events() if event["what"] == "begin")
    return {pid for pid in begun if not _is_dead(pid)}


def _is_dead(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False
