"""Each thing that happens is a signal with a frozen event and, where it is an outcome, one log
line.
"""

from typing import Any
from uuid import uuid4

import pytest

from celery_leases.errors import KeyReused
from tests.integration.conftest import MakeStage
from tests.integration.deployments import (
    BOTH_WAYS,
    REDIS_REDIS_POSTGRES,
    Stage,
    got,
    stages,
    until,
)
from tests.support.records import assert_has
from tests.support.servers import RedisServer

MODULE = "tests.apps.signal_receivers"

# Every test here runs with a receiver that raises and one that raises SystemExit behind the one
# that writes down.


module_stage = stages(*BOTH_WAYS, module=MODULE)
"""A worker with receivers for every signal."""


def signals_of(stage: Stage, call: str) -> list[str]:
    """The names of the signals about one call, in their order."""
    return [
        event["signal"] for event in stage.events("signal") if event["event"]["call_id"] == call
    ]


def one(stage: Stage, signal: str, call: str) -> dict[str, Any]:
    """The one event of that signal about a call."""

    def found() -> list[dict[str, Any]]:
        return [
            event
            for event in stage.events("signal", signal=signal)
            if event["event"]["call_id"] == call
        ]

    until(lambda: len(found()) >= 1, f"{signal} of {call}")
    assert len(found()) == 1
    return found()[0]


def lines_of(stage: Stage, call: str) -> list[str]:
    """The log lines about one call at INFO and above, by their event."""
    return [event["event"] for event in stage.events("line", id=call) if event["level"] != "DEBUG"]


def test_a_run_sends_lease_acquired_and_attempt_settled(stage: Stage, name: str) -> None:
    call = stage.tasks.work.delay(name)
    fence = got(call)["fence"]
    acquired, settled = (
        one(stage, "lease_acquired", call.id),
        one(stage, "attempt_settled", call.id),
    )
    about = {"task": stage.tasks.work.name, "key": f"work:{name}", "call_id": call.id}
    assert acquired["event"] == {**about, "fence": fence, "attempt": 1}
    assert settled["event"] | {"runtime": 0, "held": 0} == {
        **about,
        "fence": fence,
        "held": 0,
        "repeated": False,
        "state": "done",
        "ended": "returned",
        "attempt": 1,
        "runtime": 0,
        "failure": None,
        "reason": None,
        "retry_after": None,
    }
    assert {acquired["sender"], settled["sender"]} == {stage.tasks.work.name}
    assert acquired["frozen"]
    assert settled["frozen"]
    assert signals_of(stage, call.id) == ["lease_acquired", "attempt_settled"]
    assert lines_of(stage, call.id) == ["attempt_settled"]


def test_a_receiver_for_one_task_gets_its_events_only(stage: Stage, name: str) -> None:
    for task in (stage.tasks.rerun, stage.tasks.work):
        got(task.delay(name))
    stage.wait_for("settled", name=f"work:{name}")
    assert {event["task"] for event in stage.events("settled")} == {stage.tasks.work.name}


def test_the_event_of_a_failure_has_its_class_and_message(stage: Stage, name: str) -> None:
    call = stage.tasks.fails.delay(name)
    with pytest.raises(ValueError, match="no luck"):
        got(call)
    event = one(stage, "attempt_settled", call.id)["event"]
    assert (event["state"], event["ended"], event["reason"]) == ("cooling", "failed", "error")
    assert 0.5 <= event["retry_after"] <= 1
    failure = event["failure"]
    assert_has(failure, type="ValueError", message=f"no luck with {name}", group=None)
    assert any(failure["rule"] in line for line in stage.log(call.id))
    assert lines_of(stage, call.id) == ["attempt_settled"]


def test_a_duplicate_sends_its_three_events(stage: Stage, name: str) -> None:
    gate, first = stage.hold("work", name)
    other = stage.tasks.work.delay(name, gate=str(gate))
    stage.wait_for_log(other.id, "rescheduled in")
    gate.touch()
    assert got(other) == got(first)
    told = signals_of(stage, other.id)
    rounds = told.count("call_rescheduled")
    assert rounds >= 1
    assert told == ["lease_held", "call_rescheduled"] * rounds + ["result_replayed"]
    assert lines_of(stage, other.id) == ["call_rescheduled"] * rounds + ["result_replayed"]
    held = stage.events("signal", signal="lease_held")[-1]["event"]
    assert (held["holder_call_id"], held["same_call"]) == (first.id, False)
    assert 0 < held["remaining"] <= 3
    assert one(stage, "result_replayed", other.id)["event"]["first_call_id"] == first.id


def test_a_superfluous_copy_sends_call_dropped(stage: Stage, name: str) -> None:
    gate, call = stage.gate(), str(uuid4())
    first = stage.send("work", name, 0.0, str(gate), task_id=call)
    stage.wait_for("begin", name=name)
    stage.send("work", name, 0.0, str(gate), task_id=call)
    stage.wait_for_log(call, "rescheduled in")
    stage.send("work", name, 0.0, str(gate), task_id=call)
    assert one(stage, "call_dropped", call)["event"]["reason"] == "copy_waits"
    gate.touch()
    got(first)
    stage.wait_for_log(call, "answered with the saved result")
    told = lines_of(stage, call)
    assert sorted(told) == [
        "attempt_settled",
        "call_dropped",
        "call_rescheduled",
        "result_replayed",
    ]


def test_the_event_of_a_refusal_has_its_error(stage: Stage, name: str) -> None:
    assert got(stage.tasks.work.delay(name, answer=1)) == 1
    call = stage.tasks.work.delay(name, answer=2)
    with pytest.raises(KeyReused):
        got(call)
    assert "they differ in answer" in one(stage, "call_refused", call.id)["event"]["error"]
    assert signals_of(stage, call.id) == lines_of(stage, call.id) == ["call_refused"]


def test_renewals_and_a_loss_send_events(stage: Stage, name: str) -> None:
    call = stage.tasks.checks.delay(name, gate="once")
    stage.wait_for("begin", name=name)
    until(lambda: "lease_renewed" in signals_of(stage, call.id), "a renewal")
    stage.client.release(f"checks:{name}", task=stage.tasks.checks.name)
    assert got(call)["name"] == name
    lost = one(stage, "lease_lost", call.id)["event"]
    assert lost["reason"]
    refused = one(stage, "outcome_refused", call.id)["event"]
    assert refused["state"] == "pending"
    told = signals_of(stage, call.id)
    for earlier, later in (
        ("lease_renewed", "outcome_refused"),
        ("outcome_refused", "call_rescheduled"),
    ):
        assert told.index(earlier) < told.index(later)
    assert told[-1] == "attempt_settled"


def test_the_worker_of_a_dead_process_sends_crash_seen(stage: Stage, name: str) -> None:
    call = stage.tasks.dies.delay(name, 1)
    assert got(call)["name"] == name
    crash = one(stage, "crash_seen", call.id)
    assert crash["event"]["crashes"] == 1
    assert "/" in crash["event"]["host"]
    assert crash["frozen"]


def test_a_failed_renewal_sends_an_event(stage_factory: MakeStage, name: str) -> None:
    with RedisServer() as server:
        stage = stage_factory(
            REDIS_REDIS_POSTGRES, module=MODULE, env={"LEASES_URL": server.url, "TTL": "6"}
        )
        gate, call = stage.hold("work", name)
        server.pause()
        until(lambda: "renewal_failed" in signals_of(stage, call.id), "a failed renewal")
        server.resume()
        until(lambda: signals_of(stage, call.id)[-1] == "lease_renewed", "a renewal")
        gate.touch()
        assert got(call)["name"] == name
        failed = stage.events("signal", signal="renewal_failed")[0]["event"]
        assert 0 < failed["remaining"] < 6
        assert failed["error"]
        assert "lease_lost" not in signals_of(stage, call.id)
        assert len(stage.events("begin", name=name)) == 1
        stage.close()


def test_broken_receivers_and_log_handlers_harm_nothing(stage: Stage, name: str) -> None:
    children = set(stage.worker.wait_for_children())
    results = [stage.tasks.keyless.delay(f"{name}-{n}") for n in range(20)]
    assert [got(result)["name"] for result in results] == [f"{name}-{n}" for n in range(20)]
    done, again = (
        stage.tasks.work.delay(f"broken-log-{name}"),
        stage.tasks.work.delay(f"broken-log-{name}"),
    )
    assert got(done) == got(again)
    with pytest.raises(ValueError, match="no luck"):
        got(stage.tasks.fails.delay(f"broken-log-{name}"))
    assert set(stage.worker.children()) == children
    assert stage.log("a receiver of lease_acquired raised")
    assert stage.log("TypeError: a broken log handler")
