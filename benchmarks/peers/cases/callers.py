"""Cases about the caller: how it calls, with which argument, and during which outage."""

import pickle
from typing import Any

from benchmarks.peers.observations import KEYLESS, SILENT, Observed, case, right, wrong
from benchmarks.peers.stage import BRIEF, PATIENCE, Stage, until


@case("M3", "a duplicate is called by name, as `send_task` and other programs do")
def a_call_by_name(stage: Stage) -> Observed:
    """The first call is made by ``delay()``; while it runs, ``delay()`` is called again."""
    stage.another()
    first = stage.begin()
    named = stage.app.send_task(stage.tasks.work.name, args=["a", stage.gate])
    until(lambda: named.ready() or len(stage.begun()) > 1, BRIEF)
    if len(stage.begun()) > 1:
        stage.open()
        return wrong("both run")
    told = named.state
    stage.call(stage.tasks.work, "a", stage.gate)
    third = stage.seen(2, patience=BRIEF)
    stage.open()
    if third:
        return wrong(f"{told} with `None`, and frees the key: a third call runs too")
    if told == "SUCCESS":
        return wrong("SUCCESS with `None`")
    value = stage.value(first)
    return (
        right("one runs") if value is not None else wrong(f"the first call ends as {first.state}")
    )


@case("M5", "publishing fails: the broker is down", unfit=KEYLESS)
def a_broker_that_is_down(stage: Stage) -> Observed:
    """The caller gets an error, and calls again after the outage."""
    stage.another()
    nowhere = stage.app.connection_for_write(
        "redis://127.0.0.1:1/0", transport_options={"max_retries": 1, "socket_connect_timeout": 1}
    )
    _, error = stage.call(stage.tasks.work, "a", connection=nowhere, retry=False)
    if not error:
        raise RuntimeError("a call was published without a broker")
    free = stage.serves_next(stage.tasks.work, "a", patience=10)
    return right("the next call runs") if free else wrong("stays locked")


@case("M12", "the argument is `(1, 2)`, which JSON turns into a list", unfit=KEYLESS)
def an_argument_that_changes(stage: Stage) -> Observed:
    """A tuple and a list while it runs, and again after both have ended."""
    stage.another()
    first, _ = stage.call(stage.tasks.work, (1, 2), stage.gate)
    stage.seen(1, [1, 2])
    stage.call(stage.tasks.work, [1, 2], stage.gate)
    both = stage.seen(2, [1, 2], BRIEF)
    stage.open()
    stage.value(first)
    until(lambda: stage.ended([1, 2]) == 1 + both, PATIENCE)
    again = stage.serves_next(stage.tasks.work, (1, 2), stage.gate, patience=10)
    seen = ["two keys"] * both + ["stays locked"] * (not again)
    return wrong(", ".join(seen)) if seen else right("one key")


@case("M13", "the store of locks is away when the task is called", unfit=KEYLESS)
def a_lock_store_that_is_away(stage: Stage) -> Observed:
    """Either the caller gets an error, or the call runs after the outage."""
    stage.another()
    stage.locks_away()
    _, error = stage.call(stage.tasks.work, "a")
    until(lambda: "ConnectionError" in stage.logs() or stage.begun(), BRIEF)
    stage.locks_back()
    runs = stage.seen(1, patience=PATIENCE if not error else BRIEF)
    if error and error != "None":
        return right("the caller gets an error")
    return (
        right("runs when it is back")
        if runs
        else wrong("silently dropped: `delay()` returns `None`")
    )


@case(
    "M14",
    "a task asks for a duplicate, and the error crosses processes",
    unfit={**KEYLESS, "once_task": SILENT},
)
def an_error_on_its_way(stage: Stage) -> Observed:
    """The error is raised in a body or in the worker; the caller must get the same class, and no
    worker may die of it.
    """
    stage.another()
    first = stage.begin(task="refuses")
    asking: Any = stage.tasks.asks.delay("a", stage.gate)
    until(asking.ready, PATIENCE)
    if asking.state == "SUCCESS":
        asking = stage.app.AsyncResult(asking.result)
        until(asking.ready, PATIENCE)
    told = asking.result
    logs = stage.logs()
    stage.open()
    stage.value(first)
    if "WorkerLostError" in logs or "UnpickleableExceptionWrapper" in logs:
        return wrong("does not pickle")
    if not isinstance(told, stage.tasks.package.DUPLICATE):
        return wrong(f"arrives as {type(told).__name__}")
    try:
        pickle.loads(pickle.dumps(told))  # noqa: S301 - what we just pickled
    except TypeError:
        return wrong("does not pickle")
    return right("arrives as what it was")
