"""Duplicates inside chains and chords, where other tasks wait for their result."""

from celery import chain, chord

from benchmarks.peers.observations import EVERYBODY, NO_MEMORY, Observed, case, right, wrong
from benchmarks.peers.stage import BRIEF, Stage, until


@case("M10", "the next step of a chain is held by another call")
def a_held_step(stage: Stage) -> Observed:
    """A step that is done, a step that another call runs, and a step that waits for its result."""
    stage.another()
    stage.begin()
    tasks = stage.tasks
    result = chain(tasks.plain.s(0), tasks.work.si("a", stage.gate), tasks.gather.s())()
    done = result.parent.parent
    until(lambda: done.ready() and done.state == "FAILURE", BRIEF)
    both = len(stage.begun()) > 1
    stage.open()
    gathered = stage.gathered(15)
    if done.state != "SUCCESS":
        return wrong(f"the finished step turns {done.state}")
    if not gathered:
        return wrong("the chain ends there, silently")
    return wrong("both run") if both else right("it waits, and goes on with the result")


@case("M11", "a duplicate inside a chord header")
def a_duplicate_member(stage: Stage) -> Observed:
    """Two members of one key, and a body that waits for both."""
    stage.another()
    tasks = stage.tasks
    try:
        chord([tasks.work.s("a", stage.gate) for _ in range(2)], tasks.gather.s())()
    except Exception as error:  # noqa: BLE001 - whatever the package raises is what we want to know
        stage.open()
        return wrong(f"the caller gets {type(error).__name__}, half of the chord runs")
    both = stage.seen(2, patience=BRIEF)
    stage.open()
    if not stage.gathered(15):
        return wrong("the chord hangs")
    return wrong("both run") if both else right("completes with the result of the one that runs")


@case(
    "C1",
    "a chord member was done before, and is skipped",
    unfit=dict.fromkeys(EVERYBODY, NO_MEMORY),
)
def a_member_that_is_done(stage: Stage) -> Observed:
    """A task that ends without a result, by ``Ignore``, is never counted by its chord."""
    stage.another()
    stage.open()
    tasks = stage.tasks
    stage.value(tasks.skips.delay("a", stage.gate))
    chord([tasks.skips.s("a", stage.gate), tasks.plain.s(1)], tasks.gather.s())()
    gathered = stage.gathered(10)
    if len(stage.begun()) > 1:
        return wrong("runs again")
    return right("completes with the saved result") if gathered else wrong("the chord hangs")
