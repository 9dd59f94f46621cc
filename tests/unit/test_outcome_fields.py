"""Single fields of outcomes, rows, marks and deadlines, at their bounds."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from celery_leases import deadlines
from celery_leases.attempt.held_lease import DEADLINE, HELD_TOO_LONG, NOT_EXTENDED, HeldLease
from celery_leases.decide import attempt_history, repairs
from celery_leases.decide.after_run import (
    CRASH_LOOP,
    after_group_closed,
    after_outcome,
    after_run,
    call_has_ended,
    child_exited,
    closed_for_celery,
    stopped_by_crash_loop,
    unrun,
)
from celery_leases.decide.answers import Holder
from celery_leases.decide.before_run import holder_of_row
from celery_leases.decide.claim import claimed, covers, has_message_of, replaces
from celery_leases.decide.copies import UNCOPIED, callbacks_mark, waiter_mark, waiting_call
from celery_leases.decide.endings import ControlFlow, ExitCause, Lost, Raised, Returned, Snoozed
from celery_leases.decide.verdicts import Follow, Raise, Reschedule, Return, TaskEvent
from celery_leases.decide.waiting import countdown_until_free
from celery_leases.errors import Cooldown, LeaseLost, RecordUnreadable, ResultMissing, Snooze
from celery_leases.failures.actions import Reason, cooldown
from celery_leases.failures.default_rules import ANYTHING_ELSE
from celery_leases.options import DATABASE
from celery_leases.record import Attempt, Ended, PastAttempt, Record, State
from celery_leases.results import NOT_JSON
from tests.unit.decision_inputs import (
    FAILURE,
    KEY,
    NOW,
    OURS,
    RUNNING,
    SECOND,
    THEIRS,
    a_call,
    a_record,
    closed,
    cooled,
    decide,
    held_by,
    raised,
    reschedule,
    waiting,
)
from tests.unit.memory_stores import ManualClock

LIMIT = ExitCause.TIME_LIMIT
STOP = SystemExit()


def test_a_longer_group_makes_the_cooldown_and_its_retention_longer() -> None:
    outcome = cooled(raised(cooldown("60s", jitter=0.0)))
    assert outcome.retention is not None
    longer = after_group_closed(outcome, 90.0)
    assert longer.retry_after == 90.0
    assert longer.retention == outcome.retention + 30.0
    forever = after_group_closed(replace(outcome, retry_after=None, retention=1.0), 90.0)
    assert forever.retention == 91.0


def test_a_success_leaves_the_crashes_of_another_call() -> None:
    crashed = replace(RUNNING, crashes=2, crashed_call=THEIRS)
    outcome = after_run(a_call(runs="each"), crashed, Returned(1, "1"))
    assert (outcome.crashes, outcome.crashed_call) == (2, THEIRS)


def test_a_call_that_lost_its_lease_sends_no_task_event() -> None:
    ending = Lost("stolen")
    outcome = after_run(a_call(), RUNNING, ending)
    again = reschedule(after_outcome(a_call(), ending, outcome, 0.5, 0.0))
    assert (again.task_event, again.started, again.delay) == (None, True, 1.5)


@pytest.mark.parametrize(
    ("ended", "reason", "expected"),
    [
        (Ended.TERMINATED, LIMIT.value, True),
        (Ended.TERMINATED, ExitCause.REVOKED.value, True),
        (Ended.TERMINATED, "another", False),
        (Ended.INTERRUPTED, LIMIT.value, False),
        (Ended.CRASHED, None, True),
        (Ended.FAILED, None, True),
        (Ended.SNOOZED, None, False),
    ],
)
def test_what_ends_a_call_although_its_key_waits(
    ended: Ended, reason: str | None, expected: bool
) -> None:
    row = a_record(State.PENDING, ended=ended, reason=reason)
    assert call_has_ended(row) is expected
    assert not call_has_ended(replace(row, resumes=True))
    assert not call_has_ended(replace(row, state=State.DONE))


def ended_by_a_limit(row: Any, token: str | None = None, *, final: bool = True) -> Any:
    given = row.owner if token is None else token
    return closed_for_celery(a_call(), row, given, LIMIT, final=final, failure=None)


def test_a_limit_counts_the_attempt_that_was_closed_as_interrupted() -> None:
    row = replace(RUNNING, state=State.PENDING, ended=Ended.INTERRUPTED, attempt=3)
    outcome = ended_by_a_limit(row)
    assert (outcome.attempt, outcome.ended, outcome.resumes) == (4, Ended.TERMINATED, False)
    assert ended_by_a_limit(row, "another token") is None
    assert ended_by_a_limit(row, final=False).resumes


@pytest.mark.parametrize("begun", [True, False])
def test_a_limit_ends_a_call_that_waits_and_leaves_its_wait(begun: bool) -> None:
    row = waiting(State.PENDING, 5.0, OURS, ended=Ended.FAILED if begun else None, resumes=begun)
    outcome = ended_by_a_limit(row)
    assert (outcome.retry_after, outcome.unrun) == (5.0, True)
    assert (outcome.state, outcome.ended, outcome.reason) == (
        State.PENDING, Ended.TERMINATED, "hard time limit",
    )  # fmt: skip
    cooling = replace(row, state=State.COOLING, resumes=True, failure=FAILURE)
    assert ended_by_a_limit(cooling).state is State.COOLING
    assert ended_by_a_limit(cooling).failure == FAILURE
    other = replace(FAILURE, message="other")
    failed = closed_for_celery(a_call(), cooling, row.owner, LIMIT, final=True, failure=other)
    assert failed is not None
    assert (failed.ended, failed.failure) == (Ended.FAILED, other)
    assert ended_by_a_limit(replace(row, retry_at=None)).retry_after is None
    assert ended_by_a_limit(replace(row, call_id=THEIRS)) is None


@pytest.mark.parametrize("reschedulable", [True, False])
def test_an_attempt_that_does_not_run_resumes_if_it_can(reschedulable: bool) -> None:
    assert unrun(a_call(reschedulable=reschedulable), RUNNING, 1.0).resumes is reschedulable


def test_an_ignored_call_leaves_no_failures() -> None:
    failed = replace(RUNNING, failures=3, quick_retries=2, cooldowns=4)
    ending = ControlFlow(ValueError(), False, 0.0, Ended.IGNORED, None, None)
    outcome = after_run(a_call(), failed, ending)
    assert (outcome.failures, outcome.quick_retries, outcome.cooldowns) == (0, 0, 0)


@pytest.mark.parametrize("ended", [Ended.ABANDONED, Ended.CRASHED])
def test_only_an_abandoned_attempt_is_corrected_later(ended: Ended) -> None:
    past = PastAttempt(NOW, None, ended, "host-a/17", None, None, "token-0")
    row = replace(RUNNING, previous=Attempt(ended, None, "host-a/17"), history=(past,), crashes=1)
    known = attempt_history.with_end(row, "token-0", Ended.LOST)
    assert known is not None
    assert known.previous is not None
    assert known.previous.ended is (Ended.LOST if ended is Ended.ABANDONED else ended)


@pytest.mark.parametrize("ended", [Ended.ABANDONED, Ended.TERMINATED])
def test_a_key_whose_last_suspected_crash_was_none_may_run_again(ended: Ended) -> None:
    past = PastAttempt(NOW, None, Ended.ABANDONED, "host-a/17", None, None, "token-0")
    failed = {"reason": CRASH_LOOP, "failure": FAILURE, "finished_calls": (OURS, THEIRS)}
    row = a_record(State.FAILED, OURS, crashes=3, ended=ended, history=(past,), **failed)
    known = attempt_history.with_end(row, "token-0", Ended.LOST)
    assert known is not None
    assert (known.state, known.reason, known.failure) == (State.PENDING, None, None)
    assert known.ended is (Ended.LOST if ended is Ended.ABANDONED else ended)
    assert (known.crashes, known.finished_calls) == (2, (THEIRS,))
    confirmed = attempt_history.with_end(row, "token-0", Ended.CRASHED)
    assert confirmed is not None
    assert (confirmed.state, confirmed.crashes) == (State.FAILED, 3)


def test_a_key_that_failed_for_another_reason_has_one_crash_less_and_stays_failed() -> None:
    past = PastAttempt(NOW, None, Ended.ABANDONED, "host-a/17", None, None, "token-0")
    row = a_record(State.FAILED, crashes=1, history=(past,), reason="error", crashed_at=NOW)
    known = attempt_history.with_end(row, "token-0", Ended.LOST)
    assert known is not None
    assert (known.state, known.crashes, known.crashed_at) == (State.FAILED, 0, None)
    confirmed = attempt_history.with_end(row, "token-0", Ended.TERMINATED)
    assert confirmed is not None
    assert (confirmed.crashes, confirmed.crashed_at) == (1, NOW)


def test_a_failure_between_two_crashes_ends_the_row_of_crashes() -> None:
    ends = (Ended.CRASHED, Ended.FAILED, Ended.ABANDONED, Ended.LOST, Ended.TERMINATED)
    history = tuple(PastAttempt(NOW, NOW, ended, "host-a/17") for ended in ends)
    row = a_record(State.RUNNING, crashes=9, history=history)
    found = attempt_history.crashes_in_a_row(row)
    assert [each.ended for each in found] == [Ended.TERMINATED, Ended.ABANDONED]


@pytest.mark.parametrize(
    ("damaged", "told"),
    [
        ({}, "not a list"),
        *(([[*times, "lost", "h"]], "times") for times in (("1", 1), ("1", None), (1, "1"))),
        *(([[1, 1, "lost", *texts]], "texts") for texts in ([1], ["h", 1], ["h", "", 1], ["h", "", "", 1])),
    ],
)  # fmt: skip
def test_a_history_of_other_values_is_an_error(damaged: Any, told: str) -> None:
    with pytest.raises(TypeError, match=told):
        attempt_history.load(damaged)


def test_the_last_crash_says_whether_it_is_known() -> None:
    suspected = PastAttempt(NOW, None, Ended.ABANDONED, "host-a/17")
    row = replace(RUNNING, crashes=2, history=(suspected, suspected))
    died = child_exited(a_call(), row, ExitCause.KILLED).failure
    stopped = stopped_by_crash_loop(a_call(), replace(row, crashes=3)).failure
    assert died is not None
    assert stopped is not None
    assert "its process died, or its lease ended and nothing was heard of it, 3" in died.message
    assert "its lease ended 3 times in a row" in stopped.message


@pytest.mark.parametrize(
    ("value", "stored", "returned"), [((1, 2), "[1,2]", [1, 2]), (STOP, None, STOP)]
)
def test_the_first_caller_gets_the_value_as_it_was_stored(value, stored, returned) -> None:
    ending = Returned(value, stored)
    outcome = after_run(a_call(), RUNNING, ending)
    assert after_outcome(a_call(), ending, outcome, 0.5, 0.0) == Return(returned)


def told(ending: Raised | Snoozed, **changes: Any) -> Any:
    """What Celery gets after this failure of a call."""
    call = a_call(**({"resume": "always"} | changes))
    outcome = closed(call, ending, RUNNING)
    return after_outcome(call, ending, outcome, 0.0, 0.0)


def test_a_reschedule_says_whether_the_failure_is_an_unknown_one() -> None:
    unknown = told(raised(cooldown("60s"), rule=ANYTHING_ELSE.name))
    unreadable = RecordUnreadable("no", False, "k", "result")
    damaged = told(replace(raised(cooldown("60s")), error=unreadable))
    assert (unknown.unknown, unknown.unavailable) == (True, False)
    assert (damaged.unknown, damaged.unavailable) == (False, True)
    assert told(Snoozed(Snooze(60), 0.0)).delay == 0.0


@pytest.mark.parametrize(("group", "scope"), [(None, "key"), ("g", "group")])
def test_a_wait_that_the_body_asked_for_says_who_waits(group: str | None, scope: str) -> None:
    asked = raised(cooldown("60s", scope="group"), 60.0, Reason.ASKED)
    answer = told(replace(asked, error=Cooldown(60)), resume="never", group=group)
    assert (answer.error.scope, answer.error.reason) == (scope, "asked")
    assert answer.task_event == TaskEvent("cooldown", 60.0, "asked")


@pytest.mark.parametrize(("length", "shown"), [(160, 160), (161, 160)])
def test_an_error_in_a_history_is_short(length: int, shown: int) -> None:
    failure = replace(FAILURE, type="E", message="m" * (length - 3))
    past = attempt_history.taken_over(replace(RUNNING, failure=failure), Ended.LOST)
    assert past.error is not None
    assert (len(past.error), past.error.endswith("…")) == (shown, length > shown)


def test_a_call_that_follows_another_task_says_that_the_result_is_missing() -> None:
    row = a_record(State.DONE, ended=Ended.REPLACED, reason=Ended.REPLACED.value, finished_at=NOW)
    verdict = decide(a_call(), row)
    assert isinstance(verdict, Follow)
    assert isinstance(verdict.again.refusal, ResultMissing)
    assert verdict.again.refusal is verdict.missing
    undated = decide(a_call(), replace(row, finished_at=None))
    assert isinstance(undated, Follow)
    assert undated.age == 0.0


def test_a_claim_takes_the_retention_of_its_call() -> None:
    row = waiting(State.PENDING, 0.0, retention=77.0)
    assert claimed(row, a_call(retention=500.0), "redis://one", NOW).retention == 500.0
    assert claimed(row, a_call(retries=3), "redis://one", NOW).retries == 3


@pytest.mark.parametrize(
    "row", [None, a_record(State.PENDING, fingerprint=None, digests=None, task="other")]
)
def test_a_claimed_row_has_all_values_of_its_call(row: Record | None) -> None:
    fields: dict[str, Any] = {"token": "token-2", "host": "host-b/1", "retries": 2}
    options = {"ttl": 30.0, "retention": 50.0}
    for order, arrived, unordered in ((7, 5, False), (0, 5, True), (0, 1, True), (0, 0, False)):
        call = a_call(order=order, arrived=arrived, **fields, **options)
        after = claimed(row, call, DATABASE, NOW)
        assert (after.task, after.owner, after.call_id, after.holder) == (
            call.task, "token-2", OURS, "host-b/1",
        )  # fmt: skip
        assert (after.lease_store, after.lease_ttl, after.lease_until) == (
            DATABASE, 30.0, NOW + 30 * SECOND,
        )  # fmt: skip
        assert (after.fingerprint, after.digests) == (KEY.fingerprint, KEY.digests)
        assert (after.order, after.arrived, after.unordered) == (order, arrived, unordered)
        assert (after.retries, after.retention, after.now, after.started_at) == (2, 50.0, NOW, NOW)


@pytest.mark.parametrize(
    ("state", "call_id", "came", "arrived"),
    [
        (State.DONE, THEIRS, 0, 3),
        (State.PENDING, OURS, 0, 3),
        (State.PENDING, THEIRS, 0, 0),
        (State.DONE, THEIRS, 9, 9),
    ],
)
def test_a_call_that_came_at_no_known_time_leaves_the_arrival_of_what_stands(
    state: State, call_id: str, came: int, arrived: int
) -> None:
    row = a_record(state, call_id, arrived=3, unordered=True)
    after = claimed(row, a_call(runs="latest", arrived=came), "redis://one", NOW)
    assert (after.arrived, after.unordered) == (arrived, arrived > 0)


def test_a_message_that_is_claimed_is_no_longer_queued() -> None:
    message = json.dumps({"options": {"task_id": OURS}})
    row = a_record(State.PENDING, message=message, published_at=NOW - 1)
    assert claimed(row, a_call(), "redis://one", NOW).published_at is None
    assert claimed(row, a_call(call_id=THEIRS), "redis://one", NOW).published_at == NOW - 1


@pytest.mark.parametrize(
    ("call", "row", "covered"),
    [
        ({"order": 5}, {"order": 5}, True),
        ({"order": 1}, {"order": 5}, True),
        ({"order": 6, "arrived": 1}, {"order": 5, "arrived": 9}, False),
        ({"arrived": 3}, {"order": 5, "arrived": 3}, True),
        ({"arrived": 4}, {"order": 5, "arrived": 3}, False),
        ({"order": 6, "arrived": 9}, {"unordered": True, "arrived": 9}, True),
        ({"order": 6, "arrived": 9}, {"unordered": True, "arrived": 8}, False),
    ],
)
def test_a_run_covers_the_calls_that_are_not_newer(call, row, covered) -> None:
    given = a_call(**({"runs": "latest"} | call))
    theirs = a_record(State.DONE, **row)
    assert covers(theirs, given) is covered
    assert replaces(theirs, given) is covered
    assert not replaces(replace(theirs, call_id=OURS), given)
    assert not replaces(replace(theirs, finished_calls=(OURS,)), given)
    assert not replaces(theirs, a_call(**call))


def test_a_call_that_waits_for_a_holder_comes_back_later_and_later() -> None:
    for reschedules, remaining, delay in ((0, 9.0, 1.0), (5, 9.0, 9.0), (5, 0.2, 1.0)):
        call = a_call(reschedules=reschedules)
        again = reschedule(decide(call, holder=held_by(THEIRS, remaining), rand=0.0))
        assert again.delay == pytest.approx(delay + 0.1)
        assert (again.event_type, again.held) == ("held", True)
    retried = a_call(retries=1)
    assert reschedule(decide(retried, holder=held_by(OURS), rand=0.0)).delay == pytest.approx(1.1)
    copied = replace(retried, reschedules=1)
    assert reschedule(decide(copied, holder=held_by(OURS), rand=0.0)).delay == pytest.approx(9.1)


@pytest.mark.parametrize("own", [True, False])
def test_a_missing_result_says_whether_the_call_is_its_own(own: bool) -> None:
    call_id = OURS if own else THEIRS
    row = a_record(State.DONE, call_id, ended=Ended.RETURNED, reason=NOT_JSON, finished_at=NOW)
    verdict = decide(a_call(), row)
    assert isinstance(verdict, Raise)
    assert verdict.own is own
    each = a_record(State.DONE, THEIRS, finished_calls=(OURS,), finished_results={OURS: None})
    before = decide(a_call(runs="each"), each)
    assert isinstance(before, Raise)
    assert before.own


def test_a_row_has_the_message_of_a_call_once_it_is_published() -> None:
    message = json.dumps({"options": {"task_id": OURS}})
    published = a_record(State.PENDING, message=message, published_at=NOW)
    assert has_message_of(published, OURS)
    assert not has_message_of(published, THEIRS)
    for other in ({"published_at": None}, {"message": None}, {"message": "{}"}):
        assert not has_message_of(replace(published, **other), OURS)


def test_only_a_running_row_whose_lease_lasts_names_a_holder() -> None:
    held = a_record(State.RUNNING, lease_until=NOW + SECOND)
    assert holder_of_row(held) == Holder("token-1", THEIRS, "host-a/17", 15.0, 1.0)
    assert holder_of_row(replace(held, lease_until=NOW)) is None
    assert holder_of_row(replace(held, state=State.DONE)) is None


def test_a_copy_of_a_call_that_runs_sends_no_task_event() -> None:
    again = reschedule(decide(a_call(), holder=held_by(OURS)))
    assert (again.event_type, again.started) == ("", True)


@pytest.mark.parametrize(("seconds", "sending"), [(4.5, True), (5.0, False)])
def test_callbacks_may_be_sent_for_five_seconds(seconds: float, sending: bool) -> None:
    row = a_record(
        State.DONE, OURS, ended=Ended.RETURNED, result="1", finished_at=NOW - int(seconds * SECOND)
    )
    verdict = decide(a_call(canvas=True), row, rand=0.5)
    assert isinstance(verdict, Reschedule if sending else Return)
    if isinstance(verdict, Reschedule):
        assert verdict.delay == pytest.approx(0.5 + 0.3)
        assert (verdict.started, verdict.event_type) == (True, "")


def test_a_crash_loop_needs_an_operator() -> None:
    outcome = stopped_by_crash_loop(a_call(), replace(RUNNING, crashes=3))
    assert outcome.failure is not None
    assert outcome.failure.operator


def test_a_mark_names_the_call_that_waits_only_while_it_has_a_copy() -> None:
    copy = str(UNCOPIED.after("0" * 32))
    assert copy == "1 " + "0" * 32
    assert waiting_call(waiter_mark(OURS, 0), copy) == OURS
    assert waiting_call(waiter_mark(OURS, 2, NOW), copy) == OURS
    assert waiting_call(waiter_mark(OURS, 0), "ended") is None
    assert waiting_call(callbacks_mark(OURS), copy) is None


QUEUED = repairs.NewCall("t", KEY, OURS, "{}", ttl=5.0, retention=9.0)
OF_QUEUED: dict[str, Any] = {
    "task": "t", "state": State.PENDING, "call_id": OURS, "fingerprint": KEY.fingerprint,
    "digests": KEY.digests, "message": "{}", "lease_ttl": 5.0, "retention": 9.0,
}  # fmt: skip
FAILED = a_record(
    State.FAILED, generation=4, failures=3, crashes=2, digests=None, fingerprint=None, retention=77.0,
    ended=Ended.FAILED, failure=FAILURE, finished_at=NOW - SECOND,
)  # fmt: skip


@pytest.mark.parametrize(("row", "now", "generation"), [(None, 0, 0), (FAILED, NOW, 5)])
def test_a_published_call_begins_a_row(row: Record | None, now: int, generation: int) -> None:
    times: Any = dict.fromkeys(("fence", "created_at", "started_at", "now"), now)
    expected = Record(
        stored_key=KEY.stored, key=KEY.key, generation=generation, **OF_QUEUED, **times
    )
    assert repairs.enqueued(row, QUEUED) == expected


@pytest.mark.parametrize("begins", [True, False])
def test_a_published_call_has_the_row_of_a_call_that_has_ended(begins: bool) -> None:
    empty: Any = {"owner": "", "ended": None, "failure": None, "finished_at": None}
    past = PastAttempt(
        NOW - 9 * SECOND, NOW - SECOND, Ended.FAILED, "host-a/17", "ValueError: boom"
    )
    previous = Attempt(Ended.FAILED, FAILURE, "host-a/17")
    expected = replace(
        FAILED, **OF_QUEUED, **empty, fence=NOW, started_at=NOW, previous=previous, history=(past,)
    )
    if begins:
        expected = replace(expected, generation=5, attempt=0, failures=0)
    assert repairs.reassigned(FAILED, QUEUED, new_generation=begins) == expected
    unheard = replace(FAILED, ended=None)
    assert repairs.reassigned(unheard, QUEUED, new_generation=begins).previous is None


def test_resolved_work_has_the_result_of_the_operator() -> None:
    row = a_record(State.UNCERTAIN, failure=FAILURE, reason="uncertain")
    resolved = repairs.resolved(row, "[1]")
    assert (resolved.state, resolved.result, resolved.failure) == (State.DONE, "[1]", None)
    assert (resolved.reason, resolved.finished_at) == (None, NOW)
    assert resolved.ended is Ended.RESOLVED


@pytest.mark.parametrize(("forgive", "failures"), [(False, 3), (True, 0)])
def test_a_row_that_an_operator_has_taken_is_kept_or_emptied(forgive: bool, failures: int) -> None:
    kept = repairs.reset(FAILED, keep=True, forgive=forgive)
    assert (kept.state, kept.ended, kept.generation) == (State.PENDING, Ended.RELEASED, 4)
    assert (kept.failures, kept.failure) == (failures, FAILURE)
    emptied = repairs.reset(FAILED, keep=False, forgive=forgive)
    assert (emptied.generation, emptied.failures, emptied.forgotten) == (5, 0, True)


@pytest.mark.parametrize(
    ("own", "given", "lasts"), [(77.0, None, 77), (None, None, 7 * 86_400), (77.0, 5.0, 5)]
)
def test_a_row_that_an_operator_has_taken_counts_for_its_retention(own, given, lasts) -> None:
    row = repairs.reset(replace(FAILED, retention=own), keep=True, retention=given)
    assert row.expires_at == NOW + lasts * SECOND


def test_the_fence_grows_although_the_clock_was_set_back() -> None:
    row = a_record(State.PENDING, fence=NOW + 7)
    changed = [
        repairs.reset(row, keep=True),
        repairs.resolved(row, None),
        repairs.enqueued(row, QUEUED),
        repairs.reassigned(row, QUEUED, new_generation=False),
    ]
    assert [each.fence for each in changed] == [NOW + 8] * 4


@pytest.mark.parametrize("progress", [None, '{"b": 2}'])
def test_an_outcome_leaves_the_progress_that_it_does_not_save(progress: str | None) -> None:
    row = replace(RUNNING, progress='{"a": 1}')
    outcome = replace(after_run(a_call(), row, Lost("taken")), progress=progress)
    settled = repairs.settled(row, outcome, NOW)
    assert (settled.progress, settled.retry_at) == (progress or row.progress, None)


def test_no_call_waits_longer_than_ten_seconds_for_a_connection() -> None:
    assert deadlines.connection_timeout(60.0) == 10.0
    assert deadlines.connection_timeout(15.0) == 5.0
    assert deadlines.connection_timeout(60.0, 100.0) == 10.0
    assert deadlines.connection_timeout(60.0, 1.0) == 2.0
    assert deadlines.connection_timeout(60.0, 8.0) == 4.0


def test_the_countdown_of_a_call_that_begins_when_free_doubles_and_spreads_by_a_quarter() -> None:
    assert countdown_until_free(a_call(), 0.0) == 45.0
    assert countdown_until_free(a_call(), 1.0) == 60.0
    assert countdown_until_free(a_call(reschedules=2), 1.0) == 240.0


def test_a_body_that_was_told_is_not_interrupted_at_once() -> None:
    clock = ManualClock()
    held = HeldLease(a_call(), clock.now(), clock)
    assert not held.interrupted_recently()
    clock.sleep(60.0)
    with pytest.raises(LeaseLost):
        held.check()
    assert held.interrupted_recently()
    clock.sleep(0.5)
    assert not held.interrupted_recently()


@pytest.mark.parametrize(("renew", "before"), [(True, DEADLINE), (False, NOT_EXTENDED)])
def test_a_lease_is_held_too_long_from_its_longest_hold_on(renew: bool, before: str) -> None:
    clock = ManualClock()
    now = clock.now()
    held = HeldLease(a_call(), now, clock, renew=renew, max_hold=100.0)
    assert held.overdue(now + 1.0) is None
    assert held.overdue(now + 99.0) == before
    assert held.overdue(now + 100.0) == HELD_TOO_LONG


def test_the_wait_of_a_row_is_that_of_its_retry_time() -> None:
    assert waiting(State.COOLING, 3.0).waits == 3.0
    assert a_record(State.COOLING, retry_at=NOW - SECOND).waits == 0.0
