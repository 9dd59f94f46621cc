"""What Celery and those who watch it see of a failure: its error as without leases, or a retry like
Celery's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from celery import chain, chord

from celery_leases import CoolingDown, PermanentFailure
from tests.integration.cooldowns import (
    BROKEN,
    COOLING,
    OK,
    TAKEN,
    assert_sound,
    cooled,
    limited,
    paid,
    refusal,
    status,
    wait_until_over,
)
from tests.integration.deployments import BOTH_WAYS, Stage, got, stages, until
from tests.integration.event_watcher import Watcher
from tests.integration.rate_limited_server import Answered

SEEN = "tests.apps.cooling_with_sentry"


module_stage = stages(
    *BOTH_WAYS, module=SEEN, home=COOLING, worker={"options": ("-E",)}, drained=False
)
"""A worker that sends task events, and writes down Celery's signals."""


@pytest.fixture
def watcher(stage: Stage) -> Iterator[Watcher]:
    made = Watcher(stage)
    yield made
    made.close()


def signalled(stage: Stage, call: Any, number: int = 1) -> list[tuple[str, str]]:
    """The signals of Celery's about one call, with their error, once there are so many."""
    return [
        (event["name"], event["error"]) for event in stage.wait_for("signal", number, id=call.id)
    ]


def reported(stage: Stage, call: Any) -> list[list[str]]:
    """The errors that Sentry received for one call."""
    return [event["types"] for event in stage.events("sentry", id=call.id)]


def shown(stage: Stage, call: Any, state: str) -> dict[str, Any]:
    """What the result backend has of a call once it is in *state*."""
    until(
        lambda: call.backend.get_task_meta(call.id)["status"] == state, f"{call.id} to be {state}"
    )
    found: dict[str, Any] = call.backend.get_task_meta(call.id)
    return found


def test_a_bug_fails_now_and_its_key_cools_down(stage: Stage, name: str, watcher: Watcher) -> None:
    """As in Celery: signal, errback, log line."""
    call = stage.tasks.usual.apply_async((name, [BROKEN, OK]), link_error=stage.tasks.failed.s())
    with pytest.raises(KeyError):
        got(call)
    assert "KeyError: 'customer'" in shown(stage, call, "FAILURE")["traceback"]
    assert signalled(stage, call) == [("task_failure", "KeyError('customer')")]
    assert reported(stage, call) == [["KeyError"]]
    assert [event["id"] for event in stage.wait_for("errback", id=call.id)] == [call.id]
    assert watcher.wait_for("task-cooldown", call.id)["reason"] == "error"
    watcher.wait_for("task-failed", call.id)
    assert any(
        "ERROR" in line for line in stage.wait_for_log(call.id, "raised unexpected: KeyError")
    )
    row = cooled(stage, "usual", name)
    assert (row["resumes"], row["failures"]) == (0, 1)
    refusal(stage.tasks.usual.delay(name, [BROKEN, OK]))
    wait_until_over(stage, "usual", name)
    assert got(stage.tasks.usual.delay(name, [BROKEN, OK])) == {"name": name, "paid": 2}
    assert_sound(stage, "usual", name)


def test_an_unknown_outcome_fails_and_later_callers_know(stage: Stage, name: str) -> None:
    doubt = "the call may have been executed"
    call = stage.tasks.usual.delay(name, [["read timeout"], OK])
    with pytest.raises(TimeoutError):
        got(call)
    assert cooled(stage, "usual", name)["resumes"] == 0
    (line,) = stage.wait_for_log(call.id, doubt)
    assert "WARNING" in line
    assert "may have been executed" in status(stage, "usual", name).message()
    assert doubt in str(refusal(stage.tasks.usual.delay(name, [["read timeout"], OK])))
    assert len(paid(stage, name)) == 1


def test_a_chain_and_a_chord_end_with_a_bug_as_in_celery(stage: Stage, name: str) -> None:
    steps = chain(stage.tasks.usual.si(name, [BROKEN]), stage.tasks.plain.s()).apply_async(
        link_error=stage.tasks.failed.s()
    )
    with pytest.raises(KeyError):
        got(steps)
    assert stage.wait_for("errback", id=steps.parent.id)
    members = [stage.tasks.usual.si(f"{name}-{n}", [step]) for n, step in enumerate((BROKEN, OK))]
    whole = chord(members, stage.tasks.gather.s())()
    with pytest.raises(Exception, match="customer"):
        got(whole)
    assert not stage.events("gather", id=whole.id)
    assert not stage.events("plain", id=steps.id)


def test_wrong_arguments_fail_for_good(stage: Stage, name: str) -> None:
    wrong = stage.send("unkeyed", name, "too", "many")
    with pytest.raises(TypeError):
        got(wrong)
    row = stage.row("unkeyed", wrong.id)
    assert (row["state"], row["reason"]) == ("failed", "refused")
    own = stage.send("unkeyed", name)
    with pytest.raises(TypeError):
        got(own)
    assert (stage.find_row("unkeyed", own.id) or {})["state"] == "cooling"


def test_a_permanent_failure_shows_the_class_of_its_error(stage: Stage, name: str) -> None:
    with pytest.raises(ValueError, match="no document"):
        got(stage.tasks.firm.delay(name, [["raise", "ValueError", "no document"]]))
    with pytest.raises(PermanentFailure) as raised:
        got(stage.tasks.firm.delay(name, [OK]))
    assert str(raised.value) == "ValueError: no document"


def test_a_rescheduled_failure_is_a_retry(stage: Stage, name: str, watcher: Watcher) -> None:
    gate = stage.gate()
    call = stage.tasks.usual.delay(name, [limited(2), ["when", str(gate), "ok"]])
    meta = shown(stage, call, "RETRY")
    assert isinstance(meta["result"], Answered)
    assert "Answered" in meta["traceback"]
    assert watcher.wait_for("task-cooldown", call.id)["reason"] == "rate_limited"
    assert "429" in watcher.wait_for("task-retried", call.id)["exception"]
    ((what, reason),) = signalled(stage, call)
    assert what == "task_retry"
    assert reason.startswith("Retry in 2")
    stage.wait_for_log(call.id, "retry: Retry in 2")
    stage.wait_for("paid", 2, name=name)
    gate.touch()
    assert got(call) == {"name": name, "paid": 2}
    assert [(run["id"], run["retries"]) for run in paid(stage, name)] == [(call.id, 0)] * 2
    assert [what for what, _ in signalled(stage, call, 2)] == ["task_retry", "task_success"]
    watcher.wait_for("task-succeeded", call.id)
    assert len([line for line in stage.log(call.id) if line.endswith("received")]) == 2, (
        "one message for each attempt"
    )
    assert watcher.state.tasks[call.id].state == "SUCCESS"
    stage.wait_until_drained()


@pytest.mark.parametrize(
    "step", [TAKEN, ["later", 0.4, "not yet"]], ids=["quick retry", "asked for"]
)
def test_so_is_a_quick_retry(stage: Stage, name: str, step: list[Any]) -> None:
    call = stage.tasks.quick.delay(name, [step, step, OK])
    assert got(call) == {"name": name, "paid": 3}
    assert [what for what, _ in signalled(stage, call, 3)] == [
        "task_retry",
        "task_retry",
        "task_success",
    ]


def test_a_further_reschedule_of_a_wait_is_no_retry(stage: Stage, name: str) -> None:
    call = stage.tasks.tracked.delay(name, [["cooldown", 3, "not yet"], OK])
    shown(stage, call, "RETRY")
    stage.tasks.tracked.apply_async((name, [OK]), task_id=call.id)
    stage.wait_for_log(call.id, "dropped: another copy of this call waits already")
    shown(stage, call, "RETRY")
    early = stage.side_queue()
    stage.send("tracked", name, [OK], task_id=call.id, queue=early)
    stage.redeliver(early)
    stage.wait_for_log(call.id, "dropped: another copy of this call waits already", 2)
    shown(stage, call, "RETRY")
    assert got(call) == {"name": name, "paid": 2}
    assert [what for what, _ in signalled(stage, call, 2)] == ["task_retry", "task_success"]


def test_an_unknown_error_that_is_retried_is_logged_at_error(stage: Stage, name: str) -> None:
    """A bug must not be invisible."""
    call = stage.tasks.resumes.delay(name, [BROKEN, OK])
    assert got(call) == {"name": name, "paid": 2}
    (line,) = stage.wait_for_log(call.id, "raised, and will run again")
    assert "ERROR" in line
    assert [what for what, _ in signalled(stage, call, 2)] == ["task_retry", "task_success"]
    assert reported(stage, call) == [["KeyError"]]
    known = stage.tasks.usual.delay(f"{name}-known", [limited(1), OK])
    assert got(known)
    (line,) = stage.wait_for_log(known.id, "raised, and will run again")
    assert "WARNING" in line
    signalled(stage, known, 2)
    assert reported(stage, known) == []


def test_a_new_call_waits_at_a_closed_gate_and_shows_it(stage: Stage, name: str) -> None:
    group = f"group-{name}"
    script = [limited(3), OK]
    first = stage.tasks.shared.delay(name, script, group)
    stage.wait_for_state("shared", f"shared:{name}", "cooling")
    fresh = stage.tasks.shared.delay(f"{name}-fresh", [OK], group)
    stage.wait_for_log(fresh.id, "rescheduled in")
    page = stage.client.status(f"shared:{name}-fresh", task=f"{COOLING}.shared", group=group)
    assert page.message().startswith("Retry available in")
    with pytest.raises(CoolingDown):
        got(stage.tasks.shared.delay(name, script, group))
    assert got(fresh) == {"name": f"{name}-fresh", "paid": 1}
    assert got(first) == {"name": name, "paid": 2}
    assert [what for what, _ in signalled(stage, fresh)] == ["task_success"]
