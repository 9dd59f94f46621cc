"""How an attempt is closed, what it leaves of the counts, and how long to wait when a store
fails.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from celery_leases.decide import after_run as settlement
from celery_leases.decide.after_failure import after_failure
from celery_leases.decide.after_run import (
    CRASH_LOOP,
    ExitCause,
    after_run,
    child_exited,
    crash_pause,
    settle_pause,
    settle_until,
    stopped_by_crash_loop,
    store_pause,
    unrun,
)
from celery_leases.decide.before_run import after_claim
from celery_leases.decide.endings import (
    ControlFlow,
    Ending,
    Interrupted,
    Lost,
    Raised,
    Returned,
    Snoozed,
    Terminated,
)
from celery_leases.decide.verdicts import Raise
from celery_leases.errors import PermanentFailure, Snooze, Uncertain
from celery_leases.failures.actions import Ruling, cooldown, permanent, retry
from celery_leases.options import LeaseOptions
from celery_leases.record import Attempt, Ended, Outcome, Record, State
from celery_leases.results import NOT_JSON
from tests.unit.decision_inputs import (
    FAILURE,
    GROUP,
    NOW,
    OURS,
    RUNNING,
    a_call,
    a_record,
    classified,
    decide,
    raised,
    refusal,
)

WEEK = 7 * 86_400.0
DAY = 86_400.0


def closed(ending: Ending, record: Record = RUNNING, **changes: Any) -> Outcome:
    """The outcome of an attempt of ours that ended so."""
    call = a_call(**changes)
    verdict = after_failure(call, record, ending, 0.0) if isinstance(ending, Raised) else None
    return after_run(call, record, ending, verdict)


ENDINGS: dict[str, Ending] = {
    "returned": Returned(1, "1"),
    "raised, cooldown": raised(cooldown("60s")),
    "raised, retry": raised(retry("1s")),
    "raised, permanent": raised(permanent()),
    "snoozed": Snoozed(Snooze(60), 60.0, "not yet"),
    "lost": Lost("taken"),
    "interrupted": Interrupted(SystemExit()),
    "terminated": Terminated(SystemExit(), "hard time limit"),
    "retried": ControlFlow(Exception(), runs_again=True),
    "ignored": ControlFlow(Exception(), runs_again=False, ended=Ended.IGNORED),
}


class TestAfterTheRun:
    def test_a_value_is_done_and_clears_the_counts(self) -> None:
        outcome = closed(
            Returned({"a": 1}, '{"a": 1}'), replace(RUNNING, quick_retries=3, cooldowns=2)
        )
        assert (outcome.state, outcome.ended, outcome.result) == (
            State.DONE,
            Ended.RETURNED,
            '{"a": 1}',
        )
        assert (outcome.attempt, outcome.failures, outcome.crashes, outcome.retry_after) == (
            4, 0, 0, None,
        )  # fmt: skip
        assert (outcome.quick_retries, outcome.cooldowns) == (0, 0)

    def test_a_call_whose_value_cannot_be_stored_is_done(self) -> None:
        outcome = closed(Returned(object(), None, NOT_JSON))
        assert (outcome.state, outcome.result, outcome.reason) == (State.DONE, None, NOT_JSON)

    @pytest.mark.parametrize(
        ("ending", "ended"),
        [(Lost("taken"), Ended.LOST), (Interrupted(SystemExit()), Ended.INTERRUPTED)],
    )
    def test_an_abandoned_attempt_is_given_back_and_counts_as_nothing(self, ending, ended) -> None:
        outcome = closed(ending, replace(RUNNING, quick_retries=3, cooldowns=2))
        assert (outcome.state, outcome.ended) == (State.PENDING, ended)
        assert (outcome.attempt, outcome.failures, outcome.crashes, outcome.retry_after) == (
            3, 2, 1, None,
        )  # fmt: skip
        assert (outcome.quick_retries, outcome.cooldowns, outcome.failed) == (3, 2, False)

    def test_a_snooze_spends_no_attempt_and_no_count(self) -> None:
        outcome = closed(ENDINGS["snoozed"], replace(RUNNING, quick_retries=3, cooldowns=2))
        assert (outcome.state, outcome.ended, outcome.reason) == (
            State.PENDING,
            Ended.SNOOZED,
            "not yet",
        )
        assert (outcome.attempt, outcome.failures, outcome.crashes, outcome.retry_after) == (
            3, 2, 1, 60.0,
        )  # fmt: skip
        assert (outcome.quick_retries, outcome.cooldowns, outcome.failed, outcome.failure) == (
            3, 2, False, None,
        )  # fmt: skip

    @pytest.mark.parametrize(("before", "pause"), [(0, None), (1, 5.0), (2, 30.0)])
    def test_a_hard_limit_is_a_crash_with_its_pause(self, before: int, pause: float | None) -> None:
        outcome = closed(ENDINGS["terminated"], replace(RUNNING, crashes=before), max_crashes=9)
        assert (outcome.state, outcome.ended) == (State.PENDING, Ended.TERMINATED)
        assert (outcome.crashes, outcome.retry_after) == (before + 1, pause)

    def test_the_last_crash_allowed_fails_for_good(self) -> None:
        outcome = closed(ENDINGS["terminated"], replace(RUNNING, crashes=2))
        assert (outcome.state, outcome.crashes, outcome.reason) == (
            State.FAILED,
            3,
            settlement.CRASH_LOOP,
        )
        assert outcome.failure is not None
        assert outcome.failure.rule == settlement.CRASH_LOOP

    @pytest.mark.parametrize("delay", [None, 0.0, 30.0])
    @pytest.mark.parametrize("ended", [Ended.RETRIED, Ended.REJECTED])
    def test_a_retry_of_the_user_waits_for_its_countdown(self, delay, ended) -> None:
        outcome = closed(
            ControlFlow(Exception(), runs_again=True, delay=delay, ended=ended),
            replace(RUNNING, quick_retries=3, cooldowns=2),
        )
        assert (outcome.state, outcome.ended, outcome.retry_after) == (State.PENDING, ended, delay)
        assert (outcome.attempt, outcome.failures, outcome.crashes) == (4, 2, 0)
        assert (outcome.quick_retries, outcome.cooldowns, outcome.failed) == (3, 2, False)

    @pytest.mark.parametrize("ended", [Ended.IGNORED, Ended.REPLACED])
    def test_the_users_ignore_and_replace_are_done_without_a_result(self, ended: Ended) -> None:
        outcome = closed(ControlFlow(Exception(), runs_again=False, ended=ended))
        assert (outcome.state, outcome.result, outcome.reason) == (State.DONE, None, ended.value)

    @pytest.mark.parametrize("ended", [Ended.REJECTED, Ended.FAILED, Ended.RETRIED])
    def test_a_call_that_has_not_done_its_work_leaves_the_key_to_the_next_one(self, ended) -> None:
        outcome = closed(ControlFlow(Exception(), runs_again=False, ended=ended, failure=FAILURE))
        assert (outcome.state, outcome.ended, outcome.failure) == (State.PENDING, ended, FAILURE)
        assert (outcome.resumes, outcome.retry_after, outcome.failures) == (False, None, 2)

    @pytest.mark.parametrize("ending", ENDINGS.values(), ids=ENDINGS)
    def test_no_ending_leaves_the_row_running(self, ending: Ending) -> None:
        """A row found running would be counted as a crash."""
        assert closed(ending).state is not State.RUNNING

    def test_without_rerun_no_calls_are_remembered(self) -> None:
        assert closed(Returned(1, "1")).finished is None


class TestADeadChild:
    """Closed by the main process, which outlives it."""

    def test_a_killed_one_is_a_crash_and_its_call_resumes(self) -> None:
        outcome = child_exited(
            a_call(), replace(RUNNING, crashes=0, quick_retries=3), ExitCause.KILLED
        )
        assert (outcome.state, outcome.ended, outcome.reason) == (
            State.PENDING,
            Ended.CRASHED,
            "its process died",
        )
        assert (outcome.attempt, outcome.crashes, outcome.retry_after) == (4, 1, None)
        assert (outcome.failures, outcome.quick_retries, outcome.resumes) == (2, 3, True)

    def test_one_killed_by_the_hard_limit_is_a_crash_whose_call_is_over(self) -> None:
        outcome = child_exited(a_call(), replace(RUNNING, crashes=1), ExitCause.TIME_LIMIT)
        assert (outcome.state, outcome.ended, outcome.resumes) == (
            State.PENDING,
            Ended.TERMINATED,
            False,
        )
        assert (outcome.attempt, outcome.crashes, outcome.retry_after) == (4, 2, 5.0)

    def test_a_revoked_one_is_given_back_and_counts_as_nothing(self) -> None:
        outcome = child_exited(a_call(), RUNNING, ExitCause.REVOKED)
        assert (outcome.state, outcome.ended, outcome.resumes) == (
            State.PENDING,
            Ended.TERMINATED,
            False,
        )
        assert (outcome.attempt, outcome.crashes, outcome.retry_after) == (3, 1, None)

    def test_one_killed_by_a_cold_shutdown_is_given_back_and_resumes(self) -> None:
        outcome = child_exited(a_call(), RUNNING, ExitCause.STOPPED)
        assert (outcome.state, outcome.ended, outcome.resumes) == (
            State.PENDING,
            Ended.INTERRUPTED,
            True,
        )
        assert (outcome.attempt, outcome.crashes, outcome.retry_after) == (3, 1, None)

    def test_the_last_of_a_crash_loop_fails_for_good(self) -> None:
        outcome = child_exited(a_call(), replace(RUNNING, crashes=2), ExitCause.KILLED)
        assert (outcome.state, outcome.crashes, outcome.reason) == (State.FAILED, 3, CRASH_LOOP)

    def test_under_rerun_another_calls_crashes_are_not_added(self) -> None:
        record = replace(RUNNING, crashes=2, crashed_call="another")
        outcome = child_exited(a_call(runs="each"), record, ExitCause.KILLED)
        assert (outcome.crashes, outcome.crashed_call) == (1, OURS)

    @pytest.mark.parametrize("ending", ["returned", "terminated"])
    def test_under_rerun_the_crashes_are_those_of_the_call_that_died(self, ending: str) -> None:
        record = replace(RUNNING, crashes=2, crashed_call="another")
        outcome = closed(ENDINGS[ending], record, runs="each")
        assert (outcome.crashes, outcome.crashed_call) == (
            (2, "another") if ending == "returned" else (1, OURS)
        )


class TestAfterAFailure:
    def test_a_cooldown_waits_and_stores_the_failure(self) -> None:
        outcome = closed(raised(cooldown("60s", jitter=0.0)), RUNNING)
        assert (outcome.state, outcome.ended, outcome.retry_after) == (
            State.COOLING,
            Ended.FAILED,
            60.0,
        )
        assert (outcome.attempt, outcome.failures, outcome.cooldowns, outcome.crashes) == (
            4, 3, 1, 0,
        )  # fmt: skip
        assert outcome.failed
        assert outcome.failure is not None
        assert (outcome.failure.type, outcome.failure.message, outcome.failure.rule) == (
            "ValueError",
            "boom",
            "row",
        )
        assert outcome.reason == outcome.failure.reason == "error"

    def test_a_quick_retry_waits_as_pending_and_is_no_failure(self) -> None:
        outcome = closed(raised(retry("1s", jitter=0.0)), replace(RUNNING, cooldowns=2))
        assert (outcome.state, outcome.ended, outcome.retry_after) == (
            State.PENDING,
            Ended.FAILED,
            1.0,
        )
        assert (outcome.attempt, outcome.failures, outcome.quick_retries, outcome.cooldowns) == (
            4, 2, 1, 2,
        )  # fmt: skip
        assert outcome.failed

    def test_a_permanent_failure_waits_for_nothing(self) -> None:
        outcome = closed(raised(permanent()))
        assert (outcome.state, outcome.ended, outcome.retry_after) == (
            State.FAILED,
            Ended.FAILED,
            None,
        )
        assert (outcome.failures, outcome.crashes, outcome.resumes) == (3, 0, False)

    def test_an_effect_in_doubt_waits_for_an_operator(self) -> None:
        doubt = Raised(
            Uncertain("in doubt", "k", "charge", "i"), FAILURE, classified(cooldown("60s"))
        )
        outcome = closed(doubt)
        assert (outcome.state, outcome.retry_after, outcome.retention) == (
            State.UNCERTAIN,
            None,
            None,
        )
        assert (outcome.failures, outcome.resumes, outcome.finished) == (2, False, None)

    def test_a_failure_of_the_group_counts_neither_as_failure_nor_as_retry(self) -> None:
        record = replace(RUNNING, quick_retries=1, cooldowns=2)
        outcome = closed(raised(cooldown("60s", scope="group")), record, group=GROUP)
        assert (outcome.state, outcome.failures, outcome.quick_retries, outcome.cooldowns) == (
            State.COOLING, 2, 0, 2,
        )  # fmt: skip

    @pytest.mark.parametrize(
        "ruling", [cooldown("60s"), retry("1s"), permanent()], ids=lambda ruling: ruling.kind
    )
    def test_a_failure_in_our_hands_ends_the_row_of_crashes(self, ruling: Ruling) -> None:
        assert closed(raised(ruling), replace(RUNNING, crashes=2)).crashes == 0

    @pytest.mark.parametrize(
        "ruling", [cooldown("60s"), retry("1s")], ids=lambda ruling: ruling.kind
    )
    @pytest.mark.parametrize("reschedulable", [True, False])
    def test_the_row_has_whether_the_call_resumes(self, ruling, reschedulable) -> None:
        assert (
            closed(raised(ruling), reschedulable=reschedulable, resume="always").resumes
            is reschedulable
        )

    def test_a_call_with_resume_never_does_not_resume(self) -> None:
        assert not closed(raised(cooldown("60s")), resume="never").resumes

    def test_a_call_that_shall_stop_after_a_cooldown_is_retried_quickly_all_the_same(self) -> None:
        assert closed(raised(retry("1s")), resume="never").resumes

    def test_under_rerun_a_call_that_failed_for_good_is_remembered_as_over(self) -> None:
        assert closed(raised(permanent()), runs="each").finished == {OURS: settlement.NO_RESULT}
        assert closed(raised(cooldown("60s")), runs="each").finished is None


class TestResumes:
    """Operators can see whether a message will be delivered."""

    @pytest.mark.parametrize("name", ["snoozed", "lost", "interrupted", "retried"])
    @pytest.mark.parametrize("reschedulable", [True, False])
    def test_a_rescheduled_call_resumes(self, name: str, reschedulable: bool) -> None:
        assert closed(ENDINGS[name], reschedulable=reschedulable).resumes is reschedulable

    @pytest.mark.parametrize("name", ["returned", "raised, permanent", "terminated", "ignored"])
    def test_what_is_over_does_not(self, name: str) -> None:
        assert not closed(ENDINGS[name]).resumes


class TestRetention:
    def test_an_ended_record_stays_for_the_retention(self) -> None:
        for name in ("returned", "ignored", "raised, permanent"):
            assert closed(ENDINGS[name], retention=60.0).retention == 60.0

    @pytest.mark.parametrize(
        "name", ["raised, cooldown", "raised, retry", "snoozed", "lost", "interrupted", "retried"]
    )
    @pytest.mark.parametrize("retention", [60.0, WEEK])
    def test_a_waiting_record_stays_until_it_may_run_and_as_long_as_its_counts_matter(
        self, name: str, retention: float
    ) -> None:
        """Else a key with a short retention forgot its failures during each cooldown, and never
        failed for good.
        """
        outcome = closed(ENDINGS[name], retention=retention)
        assert outcome.retention == (outcome.retry_after or 0.0) + max(retention, DAY)

    def test_the_record_of_an_attempt_given_back_unrun_stays_as_long(self) -> None:
        assert unrun(a_call(retention=60.0), RUNNING, 30.0).retention == 30.0 + DAY


class TestUnrunAttempts:
    def test_giving_up_fails_for_good_and_gives_the_attempt_back(self) -> None:
        outcome = stopped_by_crash_loop(a_call(), replace(RUNNING, crashes=3))
        assert (outcome.state, outcome.ended, outcome.reason) == (
            State.FAILED,
            Ended.CRASHED,
            settlement.CRASH_LOOP,
        )
        assert (outcome.attempt, outcome.crashes) == (3, 3)

    def test_the_caller_and_the_record_agree_on_why(self) -> None:
        record = replace(RUNNING, crashes=3, crashed_at=NOW, started_at=NOW)
        verdict = after_claim(a_call(), record)
        outcome = stopped_by_crash_loop(a_call(), record)
        assert isinstance(verdict, Raise)
        assert isinstance(verdict.error, PermanentFailure)
        failed = a_record(State.FAILED, OURS, failure=outcome.failure)
        told = refusal(decide(a_call(), failed))
        assert isinstance(told, PermanentFailure)
        assert told.rule == verdict.error.rule

    def test_a_pause_after_a_crash_waits_and_retains_how_the_previous_attempt_ended(self) -> None:
        before = Attempt(Ended.CRASHED, FAILURE, "host-b/9")
        outcome = unrun(a_call(), replace(RUNNING, crashes=2, previous=before), 5.0)
        assert (outcome.state, outcome.ended, outcome.failure) == (
            State.PENDING,
            Ended.CRASHED,
            FAILURE,
        )
        assert (outcome.attempt, outcome.crashes, outcome.retry_after) == (3, 2, 5.0)

    def test_a_pause_after_a_crash_retains_the_counts_and_resumes(self) -> None:
        """Also if the caller of the previous attempt got its error, because this caller has got
        nothing.
        """
        record = replace(
            RUNNING,
            quick_retries=3,
            cooldowns=2,
            previous=Attempt(Ended.FAILED, FAILURE, "host-b/9"),
        )
        outcome = unrun(a_call(), record, 0.0)
        assert (outcome.failures, outcome.quick_retries, outcome.cooldowns, outcome.failed) == (
            2, 3, 2, False,
        )  # fmt: skip
        assert outcome.resumes

    def test_standing_back_without_a_pause_leaves_the_key_free(self) -> None:
        assert unrun(a_call(), RUNNING, 0.0).retry_after is None

    @pytest.mark.parametrize(
        ("crashes", "pause"), [(0, 0.0), (1, 0.0), (2, 5.0), (3, 30.0), (99, 30.0)]
    )
    def test_crashes_pause_from_the_second_on(self, crashes: int, pause: float) -> None:
        assert crash_pause(crashes) == pause


class TestStoresAway:
    @pytest.mark.parametrize(
        ("tries", "most"), [(0, 5), (1, 10), (2, 20), (3, 40), (4, 60), (5, 60), (10_000, 60)]
    )
    def test_a_delivery_is_rescheduled_after_5_s_doubling_to_60(self, tries, most) -> None:
        assert store_pause(tries, 1.0) == pytest.approx(most)
        assert store_pause(tries, 0.0) == pytest.approx(0.8 * most)

    def test_an_outcome_is_tried_again_soon_and_then_every_two_seconds(self) -> None:
        pauses = [settle_pause(tries) for tries in range(8)]
        assert pauses == sorted(pauses)
        assert (pauses[0], pauses[-1], settle_pause(10_000)) == (0.05, 2.0, 2.0)

    def test_an_outcome_is_tried_for_the_settle_timeout(self) -> None:
        assert settle_until(a_call(options=LeaseOptions(settle_timeout=60.0)), now=100.0) == 160.0

    def test_a_hard_limit_cuts_it_short(self) -> None:
        call = a_call(time_limit=30.0, received_at=90.0, options=LeaseOptions(settle_timeout=60.0))
        assert settle_until(call, now=100.0) == 119.0
        call = replace(call, options=LeaseOptions(settle_timeout=5.0))
        assert settle_until(call, now=100.0) == 105.0
