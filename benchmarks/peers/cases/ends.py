"""How a run can end: by a retry, a kill, a revoke, a limit, or after its lock has expired."""

import os
import signal
import time
from typing import Any

from benchmarks.peers.observations import KEYLESS, Observed, case, right, wrong
from benchmarks.peers.stage import PATIENCE, Stage, until

GRACE = 2.0
"""Seconds between the end of a call and the next one, so that a clean-up can finish first."""


def next_call(stage: Stage, task: Any, *args: object) -> Observed:
    """Whether another call with these arguments may run."""
    time.sleep(GRACE)
    stage.open()
    if stage.serves_next(task, *args):
        return right("the next call runs")
    return wrong("stays locked")


@case("M1", "the body fails twice, and asks for a retry each time")
def a_retry_is_due(stage: Stage) -> Observed:
    """Three runs of one call."""
    stage.another()
    result = stage.tasks.retries.delay("a", 2)
    value = stage.value(result, 15)
    if value is None:
        return wrong(f"{len(stage.begun())} of 3 runs, then {result.state} for ever")
    return right(f"{len(stage.begun())} of 3 runs")


@case("M4", "the pool child is killed, the message delivered again")
def a_killed_child(stage: Stage) -> Observed:
    """Celery publishes the message again by itself; a worker must run it."""
    stage.another()
    result = stage.begin()
    os.kill(stage.begun()[0]["pid"], signal.SIGKILL)
    again = stage.seen(2)
    stage.open()
    value = stage.value(result) if again else None
    return right("runs again") if value is not None else wrong(f"not run again, {result.state}")


@case("M6", "`revoke(terminate=True)` while it runs", unfit=KEYLESS)
def a_revoked_run(stage: Stage) -> Observed:
    """The run is over, and the key should be free."""
    stage.another()
    result = stage.begin()
    result.revoke(terminate=True)
    until(lambda: result.state == "REVOKED", PATIENCE)
    return next_call(stage, stage.tasks.work, "a", stage.gate)


@case("M7", "the message expires in the queue", unfit=KEYLESS)
def a_message_that_expired(stage: Stage) -> Observed:
    """Nothing has run, and the key should be free."""
    result, _ = stage.call(stage.tasks.work, "a", stage.gate, expires=1)
    time.sleep(1.5)
    stage.another()
    until(lambda: result.state == "REVOKED", PATIENCE)
    return next_call(stage, stage.tasks.work, "a", stage.gate)


@case("M8", "the hard `time_limit`", unfit=KEYLESS)
def a_hard_time_limit(stage: Stage) -> Observed:
    """The call has failed, and the key should be free."""
    stage.another()
    result = stage.tasks.limited.delay("a")
    until(lambda: result.state == "FAILURE", PATIENCE)
    return next_call(stage, stage.tasks.limited, "a")


@case("M9", "the lock ran out, a second run took over, the first ends", unfit=KEYLESS, locks=6)
def an_end_that_comes_too_late(stage: Stage) -> Observed:
    """The first run is frozen for longer than its lock lasts; it ends while the second one runs."""
    stage.another()
    stage.begin()
    frozen = stage.begun()[0]["pid"]
    os.kill(frozen, signal.SIGSTOP)
    time.sleep(7)
    taken = time.monotonic()
    stage.call(stage.tasks.work, "a", stage.gate)
    if not stage.seen(2, patience=5):
        return wrong("stays locked")
    stage.open(1)
    os.kill(frozen, signal.SIGCONT)
    until(stage.ended, 1)
    time.sleep(0.5)
    stage.call(stage.tasks.work, "a", stage.gate)
    third = stage.seen(3, patience=taken + 5.5 - time.monotonic())
    stage.open()
    if third:
        return wrong("a third runs beside the second")
    return right("the second keeps the key")


@case("C4", "a task that kills its own process, with `reject_on_worker_lost`")
def a_crash_loop(stage: Stage) -> Observed:
    """Its caller must get an error, because it will never succeed."""
    stage.another()
    result = stage.tasks.dies.delay("a")
    last, runs = time.monotonic(), 0
    while not result.ready() and runs < 7 and time.monotonic() - last < PATIENCE:
        if len(stage.begun()) != runs:
            last, runs = time.monotonic(), len(stage.begun())
        time.sleep(0.1)
    runs = len(stage.begun())
    if result.state == "FAILURE":
        return right(f"FAILURE after {runs} {'run' if runs == 1 else 'runs'}")
    return (
        wrong("again and again, no end")
        if runs >= 7
        else wrong(f"{runs} of its runs, then {result.state} for ever")
    )
