"""Presses during a cooldown, quick retries, and failures for good: what reaches the paid side, and
what callers get.
"""

import os
import signal
import time
from typing import Any

import pytest

from celery_leases import CoolingDown, PermanentFailure
from celery_leases.testing.waits import wait_until
from tests.integration.cooldowns import (
    BROKEN,
    COOLING,
    OK,
    TAKEN,
    assert_sound,
    cooled,
    lasted,
    limited,
    paid,
    refusal,
    status,
    wait_until_over,
)
from tests.integration.deployments import BOTH_WAYS, Stage, got, stages
from tests.integration.rate_limited_server import Answered
from tests.support.records import assert_has

module_stage = stages(*BOTH_WAYS, home=COOLING)


def test_twenty_calls_in_a_minute_are_one_paid_call(stage: Stage, name: str) -> None:
    presses = [stage.tasks.stops.delay(name, [limited(60)]) for _ in range(20)]
    errors = [got(press, propagate=False) for press in presses]
    now = time.time()
    (original,) = [error for error in errors if isinstance(error, Answered)]
    assert (original.status, original.headers) == (429, {"retry-after": "60"})
    told = [error for error in errors if isinstance(error, CoolingDown)]
    assert len(told) == 19
    for error in told:
        assert_has(error, key=f"stops:{name}", reason="rate_limited", rule="rate-limited")
        assert 50 < error.retry_after <= 66
        assert 50 < error.retry_at - now <= 66
    assert max(error.retry_at for error in told) - min(error.retry_at for error in told) < 0.5
    (run,) = paid(stage, name)
    assert run["id"] == presses[errors.index(original)].id
    assert_sound(stage, "stops", name)


def test_the_call_that_failed_resumes_after_the_delay(stage: Stage, name: str) -> None:
    first = stage.tasks.resumes.delay(name, [limited(4), OK])
    row = cooled(stage, "resumes", name)
    wait_until(
        lambda: not stage.is_held("resumes", f"resumes:{name}"),
        1.0,
        "the lease to become a cooldown",
    )
    refusals = [refusal(stage.tasks.resumes.delay(name, [limited(4), OK])) for _ in range(19)]
    assert all(0 < told.retry_after <= 4.4 and told.reason == "rate_limited" for told in refusals)
    assert len(paid(stage, name)) == 1
    assert got(first) == {"name": name, "paid": 2}
    runs = paid(stage, name)
    assert [run["id"] for run in runs] == [first.id] * 2
    assert 4.0 <= lasted(row) <= 4.4
    assert runs[1]["wall"] >= row["retry_at"] / 1e6
    assert got(stage.tasks.resumes.delay(name, [limited(4), OK])) == {"name": name, "paid": 2}
    assert_sound(stage, "resumes", name)


def test_the_status_of_a_waiting_call_shows_its_revocation(stage: Stage, name: str) -> None:
    first = stage.tasks.resumes.delay(name, [limited(5), OK])
    before = cooled(stage, "resumes", name)
    host = f"{stage.worker.name}@{os.uname().nodename}"
    assert stage.app.control.revoke(first.id, destination=[host], reply=True, timeout=10)
    stage.wait_for_log(first.id, "it was revoked while it waited")
    seen = status(stage, "resumes", name)
    assert_has(seen, state="cooling", reason="terminated", detail="revoked", resumes=False)
    assert seen.message().startswith("Cancelled: ")
    row = stage.row("resumes", f"resumes:{name}")
    assert row["retry_at"] == before["retry_at"]
    wait_until_over(stage, "resumes", name)
    assert status(stage, "resumes", name).message() == "Cancelled: start it again if it is needed"
    assert got(stage.tasks.resumes.delay(name, [limited(5), OK])) == {"name": name, "paid": 2}


def test_a_fresh_message_of_a_stopped_call_waits_and_runs(stage: Stage, name: str) -> None:
    """It is rescheduled in hops, and is no copy."""
    script = [limited(1.5), OK]
    call = stage.tasks.stops.delay(name, script)
    with pytest.raises(Answered):
        got(call)
    stage.send("stops", name, script, task_id=call.id)
    assert stage.wait_for("paid", 2, name=name)[1]["id"] == call.id
    stage.wait_until_drained()
    assert_sound(stage, "stops", name)


def test_a_copy_of_a_call_with_its_error_does_not_run(stage: Stage, name: str) -> None:
    script, during, after = [limited(1.5), OK], stage.side_queue(), stage.side_queue()
    call = stage.tasks.stops.delay(name, script)
    with pytest.raises(Answered):
        got(call)
    for side in (during, after):
        stage.send("stops", name, script, task_id=call.id, queue=side)
    stage.redeliver(during)
    stage.wait_for_log(call.id, "dropped: its outcome is already known")
    wait_until_over(stage, "stops", name)
    stage.redeliver(after)
    stage.wait_for_log(call.id, "dropped: its outcome is already known", 2)
    assert len(paid(stage, name)) == 1
    assert got(stage.tasks.stops.delay(name, script)) == {"name": name, "paid": 2}
    assert_sound(stage, "stops", name)


def test_the_second_failure_waits_twice_as_long(stage: Stage, name: str) -> None:
    script = [BROKEN, BROKEN, OK]
    waits = []
    for number in (1, 2):
        with pytest.raises(KeyError):
            got(stage.tasks.stops.delay(name, script))
        row = cooled(stage, "stops", name, number)
        told = refusal(stage.tasks.stops.delay(name, script))
        assert told.reason == "error"
        assert told.retry_after <= lasted(row)
        waits.append(lasted(row))
        assert (row["failures"], row["cooldowns"]) == (number, number)
        wait_until_over(stage, "stops", name)
    assert waits == pytest.approx([3.0, 6.0], abs=0.01)
    assert got(stage.tasks.stops.delay(name, script)) == {"name": name, "paid": 3}
    row = stage.row("stops", f"stops:{name}")
    assert (row["state"], row["failures"], row["cooldowns"]) == ("done", 0, 0)
    assert_sound(stage, "stops", name)


def test_later_callers_get_a_permanent_failure_at_once(stage: Stage, name: str) -> None:
    script = [["raise", "ValueError", f"no document {name}"], OK]
    with pytest.raises(ValueError, match=f"no document {name}"):
        got(stage.tasks.firm.delay(name, script))
    for _ in range(3):
        with pytest.raises(PermanentFailure, match=f"no document {name}") as told:
            got(stage.tasks.firm.delay(name, script))
        assert (told.value.error, told.value.rule) == ("ValueError", "no such document")
    assert len(paid(stage, name)) == 1
    shown = status(stage, "firm", name)
    assert (shown.state, shown.message()) == ("failed", "Failed for good")

    assert not stage.client.retry(f"firm:{name}", task=f"{COOLING}.firm").resumes
    assert got(stage.tasks.firm.delay(name, script)) == {"name": name, "paid": 2}


def test_the_last_failure_that_is_allowed_ends_the_key(stage: Stage, name: str) -> None:
    first = stage.tasks.breaks.delay(name, [BROKEN])
    with pytest.raises(KeyError):
        got(first)
    assert [run["id"] for run in paid(stage, name)] == [first.id] * 2
    row = stage.row("breaks", f"breaks:{name}")
    assert (row["state"], row["failures"], row["reason"]) == ("failed", 2, "too_many_failures")
    with pytest.raises(PermanentFailure) as told:
        got(stage.tasks.breaks.delay(name, [BROKEN]))
    assert told.value.error == "KeyError"
    assert len(paid(stage, name)) == 2
    assert_sound(stage, "breaks", name)


def test_quick_retries_count_and_end_in_a_cooldown(stage: Stage, name: str) -> None:
    gate = stage.gate()
    first = stage.tasks.quick.delay(name, [TAKEN, TAKEN, ["when", str(gate), *TAKEN], OK])
    stage.wait_for("paid", 3, name=name)
    row = stage.row("quick", f"quick:{name}")
    assert (row["quick_retries"], row["failures"], row["cooldowns"], row["crashes"]) == (2, 0, 0, 0)
    gate.touch()
    row = cooled(stage, "quick", name)
    assert (row["quick_retries"], row["failures"], row["reason"]) == (0, 1, "retries_used_up")
    assert lasted(row) == pytest.approx(3.0, abs=0.01)
    assert got(first) == {"name": name, "paid": 4}
    runs = paid(stage, name)
    assert [(run["id"], run["retries"]) for run in runs] == [(first.id, 0)] * 4
    assert runs[1]["t"] - runs[0]["t"] >= 0.4
    assert runs[2]["t"] - runs[1]["t"] >= 0.4
    assert_sound(stage, "quick", name)


def test_twenty_snoozes_spend_no_attempt(stage: Stage, name: str) -> None:
    result = stage.tasks.quick.delay(name, [*[["snooze", 0.05]] * 20, OK])
    assert got(result) == {"name": name, "paid": 21}
    assert [run["attempt"] for run in paid(stage, name)] == [1] * 21
    row = stage.row("quick", f"quick:{name}")
    assert (row["attempt"], row["failures"], row["quick_retries"], row["crashes"]) == (1, 0, 0, 0)
    assert_sound(stage, "quick", name)


def test_retries_snoozes_and_a_shutdown_are_no_crash_loop(stage: Stage, name: str) -> None:
    gate = stage.gate()
    steps: list[list[Any]] = [
        ["later", 0.2],
        ["snooze", 0.2],
        TAKEN,
        ["when", str(gate), "snooze", 0.2],
        BROKEN,
        ["later", 0.1],
        OK,
    ]
    results = [stage.tasks.quick.delay(f"{name}-{n}", steps[n:]) for n in range(6)]
    stage.wait_for("paid", name=f"{name}-3")
    stage.worker.kill(signal.SIGTERM)
    stage.worker.wait_for_log("Warm shutdown")
    gate.touch()
    assert stage.worker.wait(30) == 0
    stage.worker.start()
    for n, result in enumerate(results):
        assert got(result) == {"name": f"{name}-{n}", "paid": 7 - n}
        row = stage.row("quick", f"quick:{name}-{n}")
        snoozes = sum("snooze" in step for step in steps[n:])
        assert (row["state"], row["crashes"], row["attempt"]) == ("done", 0, 7 - n - snoozes)
        assert_sound(stage, "quick", f"{name}-{n}")
