"""The steps of a drill: each one kills or pauses a worker and checks what happens then."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from celery_leases.ops.drill.report import StepName, StepReport
from celery_leases.ops.drill.run import KILLED, Drill
from celery_leases.ops.drill.worker import Note

Find = Callable[[list[Note]], Note | None]
LOSS_TIMEOUT: Final = 15.0
"""Seconds after the pause within which the paused task must notice that its lease is lost."""


def run(drill: Drill, steps: Sequence[StepName]) -> Iterator[StepReport]:
    """Run *steps* in the order of :data:`~celery_leases.ops.drill.report.STEPS`; report each."""
    for name, step in _STEPS.items():
        if name in steps:
            yield step(drill)


def _child(drill: Drill) -> StepReport:
    key = drill.key("child")
    call = drill.publish(key)
    first = _wait_for_run(drill, key, call)
    killed = drill.note_action("killed the pool process of worker", key, first.worker)
    drill.worker(first.worker).kill_child(first.pid)
    own = drill.takeover("child", "its own call", killed, _run_of(key, call, after=killed))
    drill.finish(key)
    return drill.report("child", [own])


def _double(drill: Drill) -> StepReport:
    key = drill.key("double")
    call = drill.publish(key)
    first = _wait_for_run(drill, key, call)
    drill.publish(key, worker=drill.other(first.worker), call=call)
    drill.require(
        "the second delivery", _first_of(key, ("call_rescheduled", "call_dropped", "began"), first)
    )
    drill.finish(key)
    ended = drill.require("the end of the task", _first_of(key, ("attempt_settled",), first))
    drill.publish(key, worker=first.worker, call=call)
    answers = ("result_replayed", "call_dropped", "began")
    drill.require("the third delivery", _first_of(key, answers, ended))
    runs = sum(note.what == "began" and note.key == key for note in drill.notes.all())
    wrong = [] if runs == 1 else [f"the task of one call ran {runs} times"]
    return drill.report("double", [], wrong)


def _pause(drill: Drill) -> StepReport:
    key = drill.key("pause")
    first, _ = _two_calls(drill, key)
    paused = drill.note_action("paused worker", key, first.worker)
    drill.worker(first.worker).pause()
    try:
        taken = drill.takeover(
            "pause",
            "another call",
            paused,
            lambda notes: next(
                (n for n in _events(notes, key, "began", paused) if n.worker != first.worker), None
            ),
        )
    finally:
        drill.worker(first.worker).resume()
        drill.note_action("resumed worker", key, first.worker)
    wrong = []
    if taken.took is not None:
        lost = drill.wait_for(
            lambda notes: next(
                (
                    n
                    for what in ("lost", "lease_lost", "outcome_refused")
                    for n in _events(notes, key, what, paused)
                    if n.worker == first.worker
                ),
                None,
            ),
            LOSS_TIMEOUT,
        )
        if lost is None:
            wrong.append("the paused call did not lose its lease, although another call had it")
    drill.finish(key)
    return drill.report("pause", [taken], wrong)


def _worker(drill: Drill) -> StepReport:
    key = drill.key("worker")
    first, other = _two_calls(drill, key)
    killed = drill.note_action(KILLED, key, first.worker)
    drill.worker(first.worker).kill()
    drill.finish(key)
    another = drill.takeover("worker", "another call", killed, _run_of(key, other, after=killed))
    own = drill.takeover("worker", "its own call", killed, _run_of(key, first.call, after=killed))
    return drill.report("worker", [another, own])


_STEPS: Final[dict[StepName, Callable[[Drill], StepReport]]] = {
    "child": _child,
    "double": _double,
    "pause": _pause,
    "worker": _worker,
}


def _two_calls(drill: Drill, key: str) -> tuple[Note, str]:
    """A call that runs, and the id of another call of its key that waits at the other worker."""
    first = _wait_for_run(drill, key, drill.publish(key))
    other = drill.publish(key, worker=drill.other(first.worker))
    drill.require("another call to wait for the key", _first_of(key, ("call_rescheduled",), first))
    return first, other


def _wait_for_run(drill: Drill, key: str, call: str) -> Note:
    return drill.require("the first run of a task", _run_of(key, call))


def _run_of(key: str, call: str, after: Note | None = None) -> Find:
    return lambda notes: next(
        (note for note in _events(notes, key, "began", after) if note.call == call), None
    )


def _first_of(key: str, whats: Sequence[str], after: Note) -> Find:
    return lambda notes: next(
        (note for what in whats for note in _events(notes, key, what, after)), None
    )


def _events(notes: list[Note], key: str, what: str, after: Note | None) -> Iterator[Note]:
    since = after.at if after is not None else 0.0
    return (note for note in notes if note.key == key and note.what == what and note.at > since)
