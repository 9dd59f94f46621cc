"""The history of a record: what each attempt writes, and what its status shows."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from celery import Celery

from celery_leases import LeaseClient, LeasedTask
from celery_leases.decide import after_run as settlement
from celery_leases.decide import attempt_history
from celery_leases.decide.after_failure import after_failure
from celery_leases.decide.claim import claimed
from celery_leases.decide.endings import Raised, Returned
from celery_leases.decide.repairs import reset, resolved, settled
from celery_leases.failures.actions import Action, Reason, RuleMatch
from celery_leases.record import (
    Ended,
    PastAttempt,
    Record,
    State,
)
from celery_leases.status import status_of
from celery_leases.stores.sql.rows import details_of, read_details, settle_parameters
from celery_leases.testing.contracts.calls import make_call
from tests.unit.decision_inputs import FAILURE, NOW, OURS, SECOND, TODAY, a_call, a_record

BID = make_call("t:billing.send|k", "token", task="billing.send", key="k", call_id=OURS)


def claim(row: Record | None, at: int, host: str = "vm/1") -> Record:
    """*row* after a claim at second *at*."""
    now = NOW + at * SECOND
    row = replace(row, now=now) if row is not None else None
    return claimed(row, replace(BID, host=host), "redis://one", now)


def fail(row: Record, at: int, traceback: str | None = None) -> Record:
    """*row* after its attempt failed at second *at*."""
    matched = RuleMatch("status:500", Action("retry"), Reason.UNREACHABLE)
    ending = Raised(ValueError("boom"), FAILURE, matched, traceback)
    call = a_call(call_id=OURS)
    outcome = after_failure(call, row, ending, 0.0)
    return settled(row, outcome, NOW + at * SECOND)


def succeed(row: Record, at: int) -> Record:
    """*row* after its attempt returned at second *at*."""
    outcome = settlement.after_run(a_call(call_id=OURS), row, Returned(1, "1"))
    return settled(row, outcome, NOW + at * SECOND)


def told(row: Record) -> list[tuple[str, float | None, str]]:
    """How each attempt ended, how long it took, and where it ran, from the status."""
    found = status_of("k", row.task, row, None, wall_time=TODAY).attempts
    return [(each.ended, each.runtime, each.host) for each in found]


def test_a_first_success_writes_no_history() -> None:
    row = claim(None, 0)
    outcome = settlement.after_run(a_call(call_id=OURS), row, Returned(1, "1"))
    assert "new_details" not in settle_parameters(row, outcome)
    done = succeed(row, 3)
    assert done.history == ()
    assert details_of(replace(done, retention=7 * 86_400.0, fingerprint=None, digests=None)) is None
    assert told(done) == [("returned", 3.0, "vm/1")]
    assert status_of("k", done.task, done, None, wall_time=TODAY).runtime == 3.0


def test_the_history_has_each_attempt_once_in_order_with_time_host_and_error() -> None:
    row = fail(claim(None, 0), 2, "  File x")
    assert told(row) == [("failed", 2.0, "vm/1")]
    row = claim(row, 10, "vm/2")
    assert told(row)[0] == ("failed", 2.0, "vm/1")
    row = succeed(row, 14)
    assert told(row) == [("failed", 2.0, "vm/1"), ("returned", 4.0, "vm/2")]
    first = status_of("k", row.task, row, None, wall_time=TODAY).attempts[0]
    assert (first.error, first.rule) == ("ValueError: boom", "status:500")
    assert row.traceback == "  File x", "the last traceback stays after a success"


def test_an_attempt_of_which_nothing_was_heard_has_no_end_and_counts_as_abandoned() -> None:
    row = claim(claim(None, 0, "vm/7"), 60)
    assert told(succeed(row, 61)) == [("abandoned", None, "vm/7"), ("returned", 1.0, "vm/1")]


def test_the_last_ten_attempts_are_stored() -> None:
    row: Record | None = None
    for number in range(14):
        row = fail(claim(row, number * 10, f"vm/{number}"), number * 10 + 1)
    assert row is not None
    assert [host for _, _, host in told(row)] == [f"vm/{number}" for number in range(4, 14)]
    document = details_of(row)
    assert document is not None
    assert len(document) < 1500


def test_a_claim_that_is_given_back_unrun_is_no_attempt() -> None:
    failed = fail(claim(None, 0), 2)
    row = claim(failed, 10, "vm/2")
    outcome = settlement.unrun(a_call(call_id=OURS), row, 5.0)
    assert "new_details" in settle_parameters(row, outcome)
    back = settled(row, outcome, NOW + 11 * SECOND)
    assert told(back) == [("failed", 2.0, "vm/1")]
    assert status_of("k", back.task, back, None, wall_time=TODAY).runtime is None
    assert told(succeed(claim(back, 20, "vm/3"), 21)) == [
        ("failed", 2.0, "vm/1"),
        ("returned", 1.0, "vm/3"),
    ]


def test_what_an_operator_does_is_no_attempt() -> None:
    running = replace(claim(None, 0), now=NOW + 5 * SECOND)
    assert told(reset(running, keep=True)) == [("released", 5.0, "vm/1")]
    failed = replace(fail(running, 2), now=NOW + 5 * SECOND)
    assert told(reset(failed, keep=True, forgive=True)) == [("failed", 2.0, "vm/1")]
    assert told(resolved(failed, "1")) == [("failed", 2.0, "vm/1")]
    forgotten = reset(failed, keep=False)
    assert (forgotten.history, forgotten.traceback, forgotten.unrun) == ((), None, False)


def test_an_expired_record_hands_no_history_on() -> None:
    failed = replace(fail(claim(None, 0), 2, "  File x"), expires_at=NOW + 3 * SECOND)
    again = claim(failed, 10)
    assert (again.history, again.traceback) == ((), None)


def test_a_history_is_the_same_after_it_was_written_and_read() -> None:
    attempts = (
        PastAttempt(NOW, NOW + 5, Ended.RETURNED, "vm/1"),
        PastAttempt(NOW, None, Ended.CRASHED, "vm/1"),
        PastAttempt(NOW, NOW, Ended.FAILED, "", "E: ü", "rule"),
        PastAttempt(NOW, None, Ended.LOST, "h", None, "rule"),
        PastAttempt(NOW, None, Ended.ABANDONED, "h", owner="token"),
    )
    assert attempt_history.load(json.loads(json.dumps(attempt_history.dump(attempts)))) == attempts


@pytest.mark.parametrize("damage", ["past", "trace", "unrun"])
def test_a_history_that_cannot_be_read_is_left_out(damage: str) -> None:
    row = replace(
        fail(claim(None, 0), 2, "  File x"),
        unrun=True,
        history=(attempt_history.latest_ended(fail(claim(None, 0), 2)),),  # type: ignore[arg-type]
    )
    document = json.loads(details_of(row) or "")
    document[damage] = [["x"]]
    found, spared = read_details(json.dumps(document), NOW)
    assert spared == damage
    assert found["lease_ttl"] == 15.0


def test_the_status_of_an_eager_task_has_its_attempts(tmp_path: object) -> None:
    app = Celery("history", broker="memory://", set_as_current=False)
    app.conf.update(
        leases_url="database",
        leases_database_url=f"sqlite:///{tmp_path}/r.db",
        leases_eager_stores=True,
    )
    answers = ["no", "no", "yes"]

    @app.task(base=LeasedTask, name="eager.asks", lease_key="k", shared=False)
    def asks() -> str:
        if answers.pop(0) == "no":
            raise KeyError("api_key=sk-12345678 refused")  # a secret in the source, too
        return "yes"

    with LeaseClient.from_app(app, eager=True) as client:
        for _ in range(2):
            assert app.tasks["eager.asks"].apply().failed()
            client.retry("k", task="eager.asks")
        assert app.tasks["eager.asks"].apply().get() == "yes"
        status = client.status("k", task="eager.asks")
    assert [each.ended for each in status.attempts] == ["failed", "failed", "returned"]
    assert status.attempts[0].error is not None
    assert "sk-1" not in status.attempts[0].error
    assert status.traceback is not None
    assert "in asks" in status.traceback
    assert "celery_leases/" not in status.traceback
    assert "sk-1" not in status.traceback
    assert status.runtime is not None
    assert status.runtime >= 0


def test_the_row_of_a_running_attempt_is_the_last_of_its_timeline() -> None:
    row = a_record(
        State.RUNNING, OURS, history=(PastAttempt(NOW - 20, NOW - 10, Ended.FAILED, "vm/1"),)
    )
    found = status_of("k", "t", row, None, wall_time=TODAY)
    assert [(each.ended, each.runtime) for each in found.attempts] == [
        ("failed", 1e-5),
        ("abandoned", None),
    ]
