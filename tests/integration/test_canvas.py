"""Groups, chains, chords and links with duplicates and redelivered members: each ends with the
first result.
"""

from uuid import uuid4

import pytest
from celery import chain, chord
from celery.exceptions import ChordError

from tests.integration.deployments import Stage, got

# The callbacks of one call may be sent twice when its process dies between Celery's dispatch and
# our mark: tests/crash has that window. Here no process dies, so each is sent exactly once.


def test_a_chain_delivered_three_times_goes_on_once(stage: Stage, name: str) -> None:
    side, gate = stage.side_queue(), stage.gate()
    first = stage.tasks.work.s(name, gate=str(gate), answer=name).set(queue=side)
    outcome = chain(first, stage.tasks.leased_link.s(), stage.tasks.plain.s())()
    (call,) = stage.forward(side, copies=3)
    stage.wait_for("begin", name=name)
    stage.wait_for_log(call, "a copy of this call is running")
    gate.touch()
    assert got(outcome) == name
    stage.wait_for_log(call, "dropped: its result and callbacks are already sent")
    stage.wait_until_drained()
    assert len(stage.events("begin", name=name)) == 1
    assert len(stage.events("leased_link", id=outcome.parent.id)) == 1
    assert len(stage.events("plain", id=outcome.id)) == 1


def test_copies_that_come_while_callbacks_are_sent_send_none(stage: Stage, name: str) -> None:
    side, number = stage.side_queue(), 8
    results = []
    for n in range(number):
        step = stage.tasks.leased_link.s().set(queue=side)
        results.append(chain(stage.tasks.plain.s(f"{name}-{n}"), step, stage.tasks.plain.s())())
    for n, result in enumerate(results):
        assert got(result.parent.parent) == f"{name}-{n}"
    stage.forward(side, copies=2)
    for n, result in enumerate(results):
        assert got(result) == f"{name}-{n}"
        stage.wait_for_log(result.parent.id, "dropped")
    stage.wait_until_drained()
    for result in results:
        assert len(stage.events("leased_link", id=result.parent.id)) == 1
        assert len(stage.events("plain", id=result.id)) == 1


@pytest.mark.parametrize("callback", ["leased_link", "plain"])
def test_links_of_a_call_that_is_delivered_again_when_it_is_done_are_not_sent_again(
    stage: Stage, name: str, callback: str
) -> None:
    now, later = stage.side_queue(), stage.side_queue()
    call, linked = str(uuid4()), str(uuid4())
    link = getattr(stage.tasks, callback).si(name).set(task_id=linked)
    task = stage.tasks.work.s(name).set(task_id=call)
    result = task.apply_async(queue=now, link=link)
    task.apply_async(queue=later, link=link)
    stage.forward(now)
    assert got(result)["name"] == name
    stage.wait_for(callback, id=linked)
    stage.wait_for_log(call, "succeeded")
    stage.forward(later, copies=2)
    stage.wait_for_log(call, "dropped: its result and callbacks are already sent", 2)
    stage.wait_until_drained()
    assert len(stage.events(callback, id=linked)) == 1


def test_another_call_gets_the_result_and_its_own_callbacks(stage: Stage, name: str) -> None:
    assert got(stage.tasks.work.delay(name))
    duplicate = stage.tasks.work.apply_async((name,), link=stage.tasks.gather.s())
    value = got(duplicate)
    (linked,) = stage.wait_for("gather", values=value)
    assert linked["values"]["name"] == name
    assert len(stage.events("begin", name=name)) == 1


def test_a_chord_member_delivered_three_times_counts_once(stage: Stage, name: str) -> None:
    side, gate = stage.side_queue(), stage.gate()
    header = [stage.tasks.work.s(f"{name}-{n}", gate=str(gate)).set(queue=side) for n in range(2)]
    outcome = chord(header, stage.tasks.gather.s())
    result = outcome()
    ids = stage.forward(side, copies=3)
    for call in ids:
        stage.wait_for_log(call, "a copy of this call is running")
    gate.touch()
    values = got(result)
    assert [value["name"] for value in values] == [f"{name}-0", f"{name}-1"]
    stage.wait_until_drained()
    assert len(stage.events("gather", id=result.id)) == 1
    assert len(stage.events("begin", name=f"{name}-0")) == 1


def test_a_frozen_chord_applied_again_runs_nothing(stage: Stage, name: str) -> None:
    frozen = chord(
        [stage.tasks.keyless.s(f"{name}-0"), stage.tasks.keyless.s(f"{name}-1")],
        stage.tasks.gather.s(),
    )
    frozen.freeze()
    result = frozen.apply_async()
    values = got(result)
    members = [child.id for child in result.parent.children]
    stage.wait_until_drained()  # the callbacks of each call are noted
    again = frozen.apply_async()
    assert (again.id, [child.id for child in again.parent.children]) == (result.id, members)
    for call in members:
        stage.wait_for_log(call, "dropped: its result and callbacks are already sent")
    stage.wait_until_drained()
    assert got(stage.app.AsyncResult(again.id)) == values
    assert [got(stage.app.AsyncResult(call)) for call in members] == values
    assert [len(stage.events("begin", name=f"{name}-{n}")) for n in range(2)] == [1, 1]
    assert len(stage.events("gather", id=result.id)) == 1


def test_a_leased_body_of_a_chord_runs_once(stage: Stage, name: str) -> None:
    header = [stage.tasks.keyless.s(name), stage.tasks.keyless.s(name)]
    result = chord(header, stage.tasks.leased_link.si(name))()
    assert got(result) == name
    assert len(stage.events("leased_link", id=result.id)) == 1
    assert len(stage.events("begin", name=name)) == 2


@pytest.mark.parametrize("task", ["ignores", "work"])
def test_what_would_be_dropped_still_completes_a_chord(stage: Stage, name: str, task: str) -> None:
    """A member without a result would leave it hanging."""
    gate = stage.gate()
    leased = getattr(stage.tasks, task)
    running = leased.delay(name, gate=str(gate))
    stage.wait_for("begin", name=name)
    result = chord(
        [leased.s(name, gate=str(gate)), leased.s(name, gate=str(gate))], stage.tasks.gather.s()
    )()
    stage.wait_for_log(f"{task}:{name}", "another call holds the key")
    gate.touch()
    value = got(running)
    assert got(result) == [value, value]
    assert len(stage.events("begin", name=name)) == 1


def test_the_leased_errback_of_failed_calls_runs_once(stage: Stage, name: str) -> None:
    fails, work = stage.tasks.fails, stage.tasks.work
    errback = stage.tasks.refunds.s(name=name)
    calls = [
        fails.apply_async((f"{name}-0",), link_error=errback),
        chain(fails.si(f"{name}-1"), stage.tasks.plain.s()).apply_async(link_error=errback),
        chord([work.s(name), fails.s(f"{name}-2")], stage.tasks.plain.s().on_error(errback))(),
    ]
    for call in calls:
        with pytest.raises((ValueError, ChordError)):
            got(call)
    stage.wait_until_drained()
    (ran,) = stage.wait_for("refund", name=name)
    assert ran["key"] == f"refunds:{name}"
    assert "no luck" in ran["error"]
