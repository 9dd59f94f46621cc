"""``lease_runs="latest"`` with real workers: of the calls that wait, only the newest runs."""

from uuid import uuid4

import pytest
from celery import chain, group

from celery_leases import PermanentFailure
from celery_leases.keys import stored_key
from celery_leases.worker.headers import ORDER
from celery_leases.worker.processes import process_of
from tests.integration.deployments import Stage, got, until


def numbers(stage: Stage, name: str) -> list[int]:
    """The numbers of the bodies that have begun, in their order."""
    return [event["number"] for event in stage.events("begin", name=name)]


def test_r1_of_ten_changes_during_a_run_only_the_last_one_runs(stage: Stage, name: str) -> None:
    gate = stage.gate()
    calls = [stage.tasks.newest.delay(name, 0, gate=str(gate))]
    stage.wait_for("begin", name=name)
    calls += [stage.tasks.newest.delay(name, number) for number in range(1, 11)]
    gate.touch()
    assert [got(call) for call in calls] == [0, *[10] * 10]
    assert numbers(stage, name) == [0, 10]
    task = stage.tasks.newest.name
    of_calls = [stage.client.status(f"newest:{name}", task=task, call=c.id) for c in calls]
    assert [status.message() for status in of_calls] == [
        "Done",
        *["Replaced by a newer call"] * 9,
        "Done",
    ]
    assert stage.log(calls[5].id)[-2].endswith(
        f"replaced by a newer call, answered with the saved result of call {calls[10].id}"
    )
    unknown = stage.client.status(f"newest:{name}", task=task, call="another")
    assert (unknown.state, unknown.result) == ("pending", None)
    stage.wait_until_drained()


def test_calls_without_a_publisher_of_ours(stage: Stage, name: str) -> None:
    """A worker gives them their order."""
    gate = stage.gate()
    send = stage.app.send_task
    calls = [send(stage.tasks.newest.name, (name, 0, str(gate)))]
    stage.wait_for("begin", name=name)
    calls += [send(stage.tasks.newest.name, (name, number)) for number in range(1, 11)]
    for call in calls[1:]:
        stage.wait_for_log(call.id, "received")
    gate.touch()
    found = [got(call) for call in calls]
    assert len(numbers(stage, name)) <= 3
    assert numbers(stage, name)[-1] == 10
    assert found[-1] == 10
    stage.wait_until_drained()


def test_calls_with_and_without_a_publisher_of_ours(stage: Stage, name: str) -> None:
    """Their first arrivals decide, also if an order was given long before its message came."""
    gate, task = stage.gate(), stage.tasks.newest
    first = task.delay(name, 0, gate=str(gate))
    stage.wait_for("begin", name=name)
    late, key = str(uuid4()), stored_key(task.name, f"newest:{name}")
    order = process_of(stage.app).leases.new_order(key)
    sent = stage.app.send_task(task.name, (name, 1))
    stage.wait_for_log(sent.id, "received")
    headers = {ORDER: [late, order]}
    newest = stage.app.send_task(task.name, (name, 2), task_id=late, headers=headers)
    stage.wait_for_log(late, "received")
    gate.touch()
    assert [got(first), got(newest)] == [0, 2]
    assert got(sent) in (1, 2)
    assert numbers(stage, name)[-1] == 2
    assert got(stage.app.send_task(task.name, (name, 3))) == 3
    stage.wait_until_drained()


def test_a_burst_of_many_keys(stage: Stage, name: str) -> None:
    """Each key sees its last change."""
    keys = [f"{name}-{key}" for key in range(20)]
    calls = {key: [stage.tasks.newest.delay(key, number) for number in range(6)] for key in keys}
    for key, of_key in calls.items():
        assert got(of_key[-1]) == 5
        for call in of_key:
            assert got(call) in numbers(stage, key)
        assert numbers(stage, key)[-1] == 5
    stage.wait_until_drained()


def test_what_follows_a_replaced_call_gets_the_result_of_the_newest(
    stage: Stage, name: str
) -> None:
    gate, tasks = stage.gate(), stage.tasks
    first = tasks.newest.delay(name, 0, gate=str(gate))
    stage.wait_for("begin", name=name)
    chains = [chain(tasks.newest.si(name, number), tasks.plain.s())() for number in (1, 2)]
    both = group(tasks.newest.si(name, 3), tasks.newest.si(name, 4))()
    gate.touch()
    assert [got(first), *map(got, chains), got(both)] == [0, 4, 4, [4, 4]]
    assert numbers(stage, name) == [0, 4]
    stage.wait_until_drained()


def test_the_failure_of_the_newest_answers_the_calls_that_it_replaced(
    stage: Stage, name: str
) -> None:
    """A newer call runs, although the key has failed for good."""
    gate = stage.gate()
    first = stage.tasks.newest.delay(name, 0, gate=str(gate))
    stage.wait_for("begin", name=name)
    calls = [stage.tasks.newest.delay(name, 1), stage.tasks.newest.delay(name, 2, how="fail")]
    gate.touch()
    assert got(first) == 0
    for call in calls:
        with pytest.raises(PermanentFailure, match="number 2 is wrong"):
            got(call)
    assert got(stage.tasks.newest.delay(name, 3)) == 3
    assert numbers(stage, name) == [0, 2, 3]


def test_a_newer_call_replaces_a_retry(stage: Stage, name: str) -> None:
    first = stage.tasks.newest.delay(name, 0, how="retry")
    stage.wait_for_log(first.id, "retry")
    second = stage.tasks.newest.delay(name, 1)
    assert [got(first), got(second)] == [1, 1]
    assert numbers(stage, name) == [0, 1]


def test_a_debounced_run_begins_once_the_burst_is_over(stage: Stage, name: str) -> None:
    calls = []
    for number in range(5):
        calls.append(stage.tasks.quiet.delay(name, number))
        until(lambda: stage.log(calls[-1].id), "the call to arrive")
    assert [got(call) for call in calls] == [4] * 5
    assert numbers(stage, name) == [4]


def test_no_call_waits_for_a_newer_one_with_a_long_countdown(stage: Stage, name: str) -> None:
    """The newer one has the newest arguments all the same, once it is due."""
    gate, task = stage.gate(), stage.tasks.newest
    calls = [task.delay(name, 0, gate=str(gate))]
    stage.wait_for("begin", name=name)
    calls += [task.delay(name, 1), task.apply_async((name, 2), countdown=11)]
    gate.touch()
    assert [got(call) for call in calls] == [0, 1, 2]
    assert not any("newer call" in line for line in stage.log(calls[1].id))
    overtaken, newest = task.apply_async((name, 3), countdown=2), task.delay(name, 4)
    assert [got(overtaken), got(newest)] == [4, 4]
    assert numbers(stage, name) == [0, 1, 2, 4]
    stage.wait_until_drained()


def test_a_burst_ends_when_its_newest_call_is_revoked(stage: Stage, name: str) -> None:
    """Otherwise the next burst would begin too early: the time of its first call would be old."""
    task, leases = stage.tasks.quiet, process_of(stage.app).leases
    key = stored_key(task.name, f"quiet:{name}")
    calls = [task.delay(name, number) for number in range(3)]
    assert leases.burst(key).first > 0
    stage.app.control.revoke([call.id for call in calls])
    for call in calls:
        stage.wait_for_log(call.id, "Discarding revoked task")
    until(lambda: leases.burst(key).first == 0, "the end of the burst")
    assert numbers(stage, name) == []


def test_a_burst_during_a_run_ends_when_its_calls_are_revoked(stage: Stage, name: str) -> None:
    task, leases = stage.tasks.newest, process_of(stage.app).leases
    key, gate = stored_key(task.name, f"newest:{name}"), stage.gate()
    running = task.delay(name, 0, gate=str(gate))
    stage.wait_for("begin", name=name)
    calls = [task.delay(name, number) for number in range(1, 3)]
    assert leases.burst(key).first > 0
    stage.app.control.revoke([call.id for call in calls])
    gate.touch()
    for call in calls:
        stage.wait_for_log(call.id, "Discarding revoked task")
    assert got(running) == 0
    until(lambda: leases.burst(key).first == 0, "the end of the burst")
    assert numbers(stage, name) == [0]
