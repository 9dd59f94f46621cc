"""Messages of rescheduled calls, and messages that a worker cannot serialize again."""

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import redis

from celery_leases.errors import RescheduleFailed
from tests.integration.deployments import BOTH_WAYS, Stage, got, stages

MESSAGES = "tests.apps.messages"
OPTIONS = [
    "producer",
    "router",
    "queue",
    "exchange",
    "connection",
    "link",
    "chain",
    "countdown",
    "expires",
    "task_id",
]
OPTIONS += [
    "headers",
    "retries",
    "task_type",
    "add_to_parent",
    "mandatory",
    "stamps",
    "self",
    "name",
    "celery_leases",
]
"""What Celery has arguments for when it publishes."""


module_stage = stages(*BOTH_WAYS, home=MESSAGES, worker={"concurrency": 1}, drained=False)
"""A worker with one slot."""


def test_a_rescheduled_message_is_like_the_one_that_was_sent(stage: Stage, name: str) -> None:
    """Only its ETA is new."""
    signature = stage.tasks.reschedules_once.s(name, payload={1, 2}).set(
        serializer="pickle",
        compression="zlib",
        argsrepr="<redacted>",
        kwargsrepr="<nothing>",
        shadow="shadow",
        priority=3,
        expires=datetime.now(UTC) + timedelta(hours=1),
        time_limit=120,
        soft_time_limit=100,
        headers={"tenant": "north"},
        link=stage.tasks.reschedules_once.signature(
            (f"{name}-link",), {"delay": 0.1}, immutable=True
        ),
        group_id="a-group",
        reply_to="somebody",
    )
    signature.stamp(visit="monday")
    call = signature.apply_async()
    assert got(call) == "set"
    sent, came = (event for event in stage.events("received", id=call.id))
    # A call that has begun does not expire, and our header changes.
    ours = dict.fromkeys(("eta", "expires", "celery_leases"))
    assert came["headers"] | ours == sent["headers"] | ours
    assert came["headers"]["compression"] == "application/x-gzip"
    assert (came["content"], came["properties"]) == (sent["content"], sent["properties"])
    assert came["content"][0] == "application/x-python-serialize"
    stage.wait_for("begin", name=f"{name}-link")


def test_stamps_may_have_the_names_of_options(stage: Stage, name: str) -> None:
    headers = {"stamped_headers": OPTIONS, "stamps": {stamp: ["monday"] for stamp in OPTIONS}}
    call = stage.send("reschedules_once", name, headers=headers)
    assert got(call) == "NoneType"
    sent, came = (event["headers"] for event in stage.events("received", id=call.id))
    assert (
        {header: came[header] for header in headers}
        == {header: sent[header] for header in headers}
        == headers
    )


def test_a_call_that_cannot_be_written_again_fails(stage: Stage, name: str) -> None:
    call = stage.tasks.reschedules_once.apply_async((name,), {"delay": 600}, serializer="read-only")
    with pytest.raises(RescheduleFailed, match="a worker does not write this"):
        got(call)
    status = stage.tasks.reschedules_once.lease_status(name)
    assert (status.state, status.resumes) == ("pending", False)
    assert status.error is not None
    assert "a worker does not write this" in status.error.message
    assert len(stage.events("begin", name=name)) == 1
    assert not stage.log("returned to the broker")


def test_a_call_whose_headers_make_no_message_fails_at_once(stage: Stage, name: str) -> None:
    call = stage.send("reschedules_once", name, headers={"as_execution_options": 5})
    with pytest.raises(RescheduleFailed, match="'int' object is not callable"):
        got(call)
    assert not stage.log("returned to the broker")


@pytest.mark.only(broker="redis")
def test_a_copy_without_exchange_returns_to_its_queue(stage: Stage, name: str) -> None:
    """As a client in another language may publish it."""
    side, other = stage.side_queue(), stage.side_queue()
    stage.consume(other)
    call = stage.tasks.reschedules_once.apply_async((name,), {"delay": 0.1}, queue=side)
    with redis.Redis.from_url(stage.broker_url) as client:
        raw: Any = client.rpop(side)
        message = json.loads(raw)
        message["properties"]["delivery_info"] = {"exchange": None, "routing_key": None}
        client.lpush(other, json.dumps(message))
    assert got(call) is not None
    assert len(stage.events("received", id=call.id)) == 2


@pytest.mark.only(broker="redis")
def test_a_task_id_of_ones_own_may_have_any_length_and_form(stage: Stage, name: str) -> None:
    for number in (7, 8):
        task_id = f"{name}~{number}" if number == 7 else f"{name}~8{'x' * 300}~8"
        named = (f"{name}-{number}",), {"delay": 0.1}
        call = stage.tasks.reschedules_once.apply_async(*named, task_id=task_id)
        got(call)
        assert len(stage.events("received", id=task_id)) == 2
