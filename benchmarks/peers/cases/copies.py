"""One message is delivered twice: after a visibility timeout, a lost connection or a failover."""

import time

from celery import chord

from benchmarks.peers.observations import Observed, case, right, wrong
from benchmarks.peers.stage import BRIEF, PATIENCE, Stage, until


@case("M2", "the same message is delivered again while its first copy runs")
def a_second_copy(stage: Stage) -> Observed:
    """Two copies of one call, the second while the first runs."""
    stage.another()
    result, _ = stage.call(stage.tasks.work, "a", stage.gate, queue="side")
    stage.forward("side", copies=2)
    stage.seen(2, patience=BRIEF)
    bodies, during = len(stage.begun()), stage.app.AsyncResult(result.id).state
    stage.open()
    if bodies > 1:
        return wrong("both run")
    if during not in ("PENDING", "STARTED"):
        return wrong(f"one runs, and meanwhile its caller gets {during}")
    return (
        right("one runs")
        if stage.value(result) is not None
        else wrong(f"one runs, then {result.state}")
    )


@case("C2", "the message of a chord member arrives twice while its first copy runs")
def a_second_copy_of_a_member(stage: Stage) -> Observed:
    """As before, and other tasks wait for the member; a copy that is refused by ``Reject`` may be
    stored as a failure.
    """
    stage.another()
    member = stage.tasks.skips.s("a", stage.gate).set(queue="side")
    result = chord([member, stage.tasks.plain.s(1)], stage.tasks.gather.s())()
    stage.forward("side", copies=2)
    stage.seen(1)
    call = stage.app.AsyncResult(stage.begun()[0]["id"])
    until(lambda: call.state == "FAILURE" or len(stage.begun()) > 1, BRIEF)
    during, bodies = call.state, len(stage.begun())
    stage.open()
    gathered = stage.gathered(10)
    if bodies > 1:
        return wrong("both run")
    if during not in ("PENDING", "STARTED"):
        return wrong(
            f"{during} is stored while it runs" + ("" if gathered else ", the chord fails")
        )
    return (
        right("one runs, the chord completes")
        if gathered and stage.value(result)
        else wrong("the chord hangs")
    )


@case("C3", "8 s of work, Redis delivers again after a `visibility_timeout` of 2 s", visibility=2)
def longer_than_the_visibility_timeout(stage: Stage) -> Observed:
    """No process has died; the body takes longer than the visibility timeout."""
    stage.another()
    result, _ = stage.call(stage.tasks.work, "a", None, 8.0)
    stage.seen(1)
    until(lambda: stage.ended() or len(stage.begun()) > 1, PATIENCE)
    bodies = len(stage.begun())
    value = stage.value(result)
    if bodies > 1:
        return wrong("more than one at once")
    return (
        right("one runs")
        if value is not None
        else wrong(f"one runs, and its caller gets {result.state}")
    )


@case(
    "C6",
    "a second worker meets a copy of the running call, then the first worker is killed",
    visibility=2,
)
def the_last_copy(stage: Stage) -> Observed:
    """The holder dies later: if the copy was dropped, the call is never run again."""
    first = stage.another(1)
    result, _ = stage.call(stage.tasks.work, "a", stage.gate)
    stage.seen(1)
    second = stage.another(1)
    until(lambda: f"[{result.id}] received" in second.logs(), PATIENCE)
    time.sleep(BRIEF)
    both = len(stage.begun()) > 1
    first.kill()
    stage.open()
    value = stage.value(result, 60)
    if both:
        return wrong("both run")
    return (
        right("runs again")
        if value is not None and len(stage.begun()) == 2
        else wrong("the task is gone")
    )
