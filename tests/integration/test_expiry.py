"""``expires``: what expired before it began is revoked, and no copy revokes a call that has
begun.
"""

from datetime import UTC, datetime, timedelta
from uuid import uuid4

import pytest
from celery.exceptions import TaskRevokedError

from tests.integration.deployments import BOTH_WAYS, Stage, got, stages

module_stage = stages(*BOTH_WAYS, worker={"log_level": "DEBUG"})
"""Its worker logs each hop of a wait."""


def test_a_copy_with_expires_revokes_no_call_that_began(stage: Stage, name: str) -> None:
    gate, call = stage.gate(), str(uuid4())
    running = stage.send("keyless", name, 0.0, str(gate), task_id=call)
    stage.wait_for("begin", name=name)
    stage.send("keyless", name, 0.0, str(gate), task_id=call, expires=1)
    # The second time comes three seconds after the first.
    stage.wait_for_log(call, "rescheduled in", 2)
    hops = ["INFO" in line for line in stage.log(call) if "rescheduled in" in line]
    assert hops[:2] == [True, False], "a wait that goes on is no news"
    assert not [line for line in stage.log(call) if line.endswith("ignored")]
    gate.touch()
    assert got(running)["name"] == name
    stage.wait_for_log(call, "answered with the saved result")
    stage.wait_until_drained()
    assert running.state == "SUCCESS"


def test_m7_a_message_that_expired_in_the_queue_is_revoked(stage: Stage, name: str) -> None:
    expired = stage.tasks.work.apply_async(
        (name,), expires=datetime.now(UTC) - timedelta(seconds=5)
    )
    with pytest.raises(TaskRevokedError):
        got(expired)
    assert stage.events(name=name) == []
    assert stage.find_row("work", f"work:{name}") is None
    assert not stage.is_held("work", f"work:{name}")
    assert got(stage.tasks.work.delay(name))["name"] == name


def test_a_redelivered_message_that_expired_is_revoked(stage: Stage, name: str) -> None:
    expired = stage.redeliver_expired("work", name)
    with pytest.raises(TaskRevokedError):
        got(expired)
    stage.wait_for_log(expired.id, "it expired before it began")
    assert stage.find_row("work", f"work:{name}") is None
    assert not stage.is_held("work", f"work:{name}")
    assert stage.events(name=name) == []


def test_an_expired_copy_does_not_revoke_the_call_that_runs(stage: Stage, name: str) -> None:
    gate, call = stage.gate(), str(uuid4())
    running = stage.send("work", name, 0.0, str(gate), task_id=call)
    stage.wait_for("begin", name=name)
    stage.redeliver_expired("work", name, 0.0, str(gate), task_id=call)
    stage.wait_for_log(call, "a copy of this call is running")
    gate.touch()
    assert got(running)["name"] == name
    stage.wait_for_log(call, "answered with the saved result")
    assert running.state == "SUCCESS"


def test_a_copy_is_not_revoked_because_another_message_has_expired(stage: Stage, name: str) -> None:
    gate, call = stage.gate(), str(uuid4())
    stage.send("keyless", name, 0.0, str(gate), task_id=call)
    stage.wait_for("begin", name=name)
    stage.send("keyless", name, 0.0, str(gate), task_id=call)
    stage.wait_for_log(call, "a copy of this call is running")
    past = datetime.now(UTC) - timedelta(seconds=5)
    stage.send("keyless", name, 0.0, str(gate), task_id=call, expires=past)
    stage.wait_for_log(call, "Discarding revoked task")
    gate.touch()
    stage.wait_for_log(call, "answered with the saved result")
    stage.wait_until_drained()
    assert len([line for line in stage.log(call) if "Discarding revoked task" in line]) == 1
