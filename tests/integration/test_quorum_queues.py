"""Quorum queues of RabbitMQ on topic and direct exchanges: waiting calls return to their queue and
block no other call.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from kombu import Exchange, Queue

from celery_leases.decide.latest import MICROSECONDS, PATIENCE
from celery_leases.errors import RescheduleFailed
from celery_leases.keys import stored_key
from celery_leases.worker.headers import HEADER, ORDER, Header
from celery_leases.worker.processes import process_of
from tests.integration.conftest import MakeStage
from tests.integration.deployments import RABBIT_DATABASE_POSTGRES, Stage, got, until

SLOTS = 2


@pytest.fixture(scope="module", params=["topic", "direct"])
def module_stage(request: pytest.FixtureRequest, stage_factory: MakeStage) -> Iterator[Stage]:
    """A worker with two slots and a prefetch count of two on a quorum queue."""
    env = {"QUORUM": request.param, "PREFETCH": "1"}
    made = stage_factory(RABBIT_DATABASE_POSTGRES, env=env, worker={"concurrency": SLOTS})
    yield made
    made.close_when_drained(request.session)


def kind_of(stage: Stage, queue: str) -> Any:
    """A quorum queue as the worker declares it."""
    exchange = Exchange(queue, stage.env["QUORUM"])
    return Queue(queue, exchange, queue, queue_arguments={"x-queue-type": "quorum"})


def test_a_call_returns_after_several_waits(stage: Stage, name: str) -> None:
    calls = [stage.tasks.snoozes.delay(f"{name}-{number}", 0.2, 1.0, 3.0) for number in range(3)]
    assert [got(call)["name"] for call in calls] == [f"{name}-{number}" for number in range(3)]
    assert all(len(stage.events("begin", name=f"{name}-{number}")) == 4 for number in range(3))
    assert not stage.log("could not be rescheduled")


def test_calls_that_wait_leave_the_worker_free(stage: Stage, name: str) -> None:
    waiting = [
        stage.tasks.snoozes.delay(f"{name}-{number}", 6.0) for number in range(2 * 2 * SLOTS)
    ]
    for number in range(len(waiting)):
        stage.wait_for("begin", name=f"{name}-{number}")
    assert stage.tasks.work.delay(name).get(timeout=4.0)["name"] == name
    assert all(not call.ready() for call in waiting[-SLOTS:])
    for call in waiting:
        got(call)


def test_a_wait_ends_in_the_queue_it_began_in(stage: Stage, name: str) -> None:
    high = stage.side_queue()
    worker = stage.new_worker(
        queue=high, concurrency=1, env=stage.env | {"SIDE_QUEUE": high}
    ).start()
    try:
        queue = kind_of(stage, high)
        calls = [
            stage.tasks.snoozes.apply_async((f"{name}-{n}", 1.2, 1.2), queue=queue, priority=3)
            for n in range(3)
        ]
        assert {got(call)["host"].partition("@")[0] for call in calls} == {worker.name}
        begun = [
            event for number in range(3) for event in stage.events("begin", name=f"{name}-{number}")
        ]
        assert [(event["host"].partition("@")[0], event["priority"]) for event in begun] == [
            (worker.name, 3)
        ] * 9
    finally:
        worker.teardown()
        with stage.app.connection_for_write() as connection:
            connection.default_channel.queue_delete(high)
    until(lambda: not stage.left_over(), "the default queue to be empty")


def test_a_call_runs_itself_if_no_newer_one_comes(stage: Stage, name: str) -> None:
    """The publisher of the newer one died after it got its order, a minute ago."""
    task, leases, call_id = stage.tasks.newest, process_of(stage.app).leases, str(uuid4())
    key = stored_key(task.name, f"newest:{name}")
    minute_ago = leases.burst(key).now - 60 * MICROSECONDS
    leases.note_order(key, minute_ago)
    waits = Header(task.name, call_id, waited_for_newer=PATIENCE - 1.0, reschedules=1)
    headers = {ORDER: [call_id, minute_ago - 1], HEADER: waits.written()}
    call = stage.app.send_task(task.name, (name, 1), task_id=call_id, headers=headers)
    assert call.get(timeout=PATIENCE) == 1
    assert any("newer call" in line for line in stage.log(call_id)), "it has waited"


@pytest.fixture(scope="module")
def refusing(stage_factory: MakeStage, tmp_path_factory: pytest.TempPathFactory) -> Stage:
    """Its broker takes no rescheduled message; its queue allows two deliveries after the first."""
    refused = tmp_path_factory.mktemp("refused") / "refused"
    env = {"DELIVERY_LIMIT": "2", "REFUSED": str(refused)}
    worker = {"concurrency": 2, "pool": "threads"}
    return stage_factory(
        RABBIT_DATABASE_POSTGRES, home="tests.apps.messages", env=env, worker=worker
    )


def test_a_call_fails_before_its_queue_would_discard_it(refusing: Stage, name: str) -> None:
    Path(refusing.env["REFUSED"]).touch()
    call = refusing.tasks.reschedules_once.delay(name)
    with pytest.raises(RescheduleFailed, match="the broker takes nothing"):
        got(call)
    assert len(refusing.wait_for_log(call.id, "returned to the broker")) == 2
    status = refusing.tasks.reschedules_once.lease_status(name)
    assert (status.state, status.resumes) == ("pending", False)


def test_a_call_whose_reschedule_succeeds_at_last_runs(refusing: Stage, name: str) -> None:
    Path(refusing.env["REFUSED"]).touch()
    call = refusing.tasks.reschedules_once.delay(name)
    refusing.wait_for_log(call.id, "could not be rescheduled")
    Path(refusing.env["REFUSED"]).unlink()
    assert got(call) == "NoneType"


@pytest.mark.parametrize("ends", [False, True], ids=["that goes on", "that ends meanwhile"])
def test_the_copy_of_a_running_call_spends_no_more_deliveries_than_there_are(
    refusing: Stage, name: str, ends: bool
) -> None:
    """It is held, and ends once no more may be given back."""
    gate = refusing.gate()
    call = refusing.tasks.stays.delay(name, str(gate))
    refusing.wait_for("begin", name=name)
    Path(refusing.env["REFUSED"]).touch()
    refusing.send("stays", name, str(gate), task_id=call.id)
    refusing.wait_for("refused", number=3, id=call.id)  # the last delivery has met the running one
    if ends:
        gate.touch()
        refusing.wait_for_log(call.id, "its outcome is already known")
    else:
        refusing.wait_for_log(call.id, "the call cannot be rescheduled")
        gate.touch()
    assert len(refusing.wait_for_log(call.id, "returned to the broker")) == 2
    Path(refusing.env["REFUSED"]).unlink()
    until(
        lambda: refusing.app.AsyncResult(call.id).state == "SUCCESS", "the call that ran to be over"
    )
    assert len(refusing.events("begin", name=name)) == 1
