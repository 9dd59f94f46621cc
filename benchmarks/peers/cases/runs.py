"""Which calls run, and how many at a time."""

import os
import signal
from typing import Any

from benchmarks.peers.observations import KEYLESS, Observed, case, right, wrong
from benchmarks.peers.stage import BRIEF, PATIENCE, Stage, until

LIMIT = 3
CALLS = 8
BEATS = 4


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
