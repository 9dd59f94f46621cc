"""``lease_runs``, ``lease_on_busy`` and ``lease_on_done`` from real workers."""

import pytest

from celery_leases.errors import AlreadyDone, LeaseHeld
from celery_leases.testing.waits import wait_until
from tests.integration.deployments import PATIENCE, Deployment


def test_ignore_drops_other_calls_of_a_held_or_done_key(stage: Deployment, name: str) -> None:
    gate = stage.gate()
    first = stage.tasks.ignores.delay(name, gate=str(gate))
    stage.wait_for("begin", name=name)
    early = stage.tasks.ignores.delay(name, gate=str(gate))
    stage.wait_for_log(early.id, "dropped: another call holds the key")
    gate.touch()
    assert first.get(timeout=PATIENCE)["name"] == name
    late = stage.tasks.ignores.delay(name, gate=str(gate))
    stage.wait_for_log(late.id, "dropped: another call has done it")
    stage.wait_until_drained()
    assert {early.state, late.state} == {"PENDING"}
    assert len(stage.events("begin", name=name)) == 1


def test_with_raise_other_calls_get_the_error(stage: Deployment, name: str) -> None:
    gate = stage.gate()
    first = stage.tasks.refuses.delay(name, gate=str(gate))
    stage.wait_for("begin", name=name)
    with pytest.raises(LeaseHeld, match="is held by call"):
        stage.tasks.refuses.delay(name, gate=str(gate)).get(timeout=PATIENCE)
    gate.touch()
    assert first.get(timeout=PATIENCE)["name"] == name
    before = stage.row("refuses", f"refuses:{name}")
    with pytest.raises(AlreadyDone) as done:
        stage.tasks.refuses.delay(name, gate=str(gate)).get(timeout=PATIENCE)
    assert done.value.call_id == first.id
    assert stage.row("refuses", f"refuses:{name}") == before


def test_the_options_speak_about_other_calls_only(stage: Deployment, name: str) -> None:
    """A copy of the call itself may be the last copy."""
    gate, calls = stage.gate(), {}
    for task in ("ignores", "refuses"):
        calls[task] = stage.send(task, f"{name}-{task}", 0.0, str(gate))
        stage.wait_for("begin", name=f"{name}-{task}")
        stage.send(task, f"{name}-{task}", 0.0, str(gate), task_id=calls[task].id)
        stage.wait_for_log(calls[task].id, "a copy of this call is running")
    gate.touch()
    for task, call in calls.items():
        value = call.get(timeout=PATIENCE)
        stage.wait_for_log(call.id, "answered with the saved result")
        assert call.get(timeout=PATIENCE) == value
        assert len(stage.events("begin", name=f"{name}-{task}")) == 1


def test_rerun_runs_the_next_call_and_replays_copies(stage: Deployment, name: str) -> None:
    first = stage.tasks.rerun.delay(name)
    one = first.get(timeout=PATIENCE)
    second = stage.tasks.rerun.delay(name)
    two = second.get(timeout=PATIENCE)
    assert two["fence"] > one["fence"]
    for call in (first, second):
        stage.send("rerun", name, task_id=call.id)
        stage.wait_for_log(call.id, "answered with the saved result")
    stage.wait_until_drained()
    assert (first.get(timeout=PATIENCE), second.get(timeout=PATIENCE)) == (one, two)
    assert [event["attempt"] for event in stage.events("begin", name=name)] == [1, 1]


def test_a_body_that_raises_leaves_its_key_cooling(stage: Deployment, name: str) -> None:
    failed = stage.tasks.fails.delay(name)
    with pytest.raises(ValueError, match=f"no luck with {name}"):
        failed.get(timeout=PATIENCE)
    status = stage.tasks.fails.lease_status(name)
    assert (status.state, status.failures, status.reason, status.resumes) == (
        "cooling",
        1,
        "error",
        False,
    )
    assert status.error is not None
    assert status.error.type == "ValueError"
    assert not stage.is_held("fails", f"fails:{name}")
    wait_until(
        lambda: stage.tasks.fails.lease_status(name).retry_after is None,
        PATIENCE,
        "the cooldown to end",
    )
    with pytest.raises(ValueError, match="no luck"):
        stage.tasks.fails.delay(name).get(timeout=PATIENCE)
    assert [event["previous"] for event in stage.events("begin", name=name)] == [None, "failed"]
