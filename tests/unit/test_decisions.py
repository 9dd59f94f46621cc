"""The decision table row by row, and its traps."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_leases.decide.verdicts import Drop, Follow, Raise, Reschedule, Return, Run
from celery_leases.errors import AlreadyDone, KeyReused, LeaseHeld, PermanentFailure, ResultMissing
from celery_leases.events import Dropped
from celery_leases.groups.group import ClosedGroup
from celery_leases.options import OnBusy, OnDone
from celery_leases.record import Ended, Failure, State
from celery_leases.results import NOT_JSON, TOO_LARGE
from tests.unit.decision_inputs import (
    FAILURE,
    KEY,
    NOW,
    ON_BUSY,
    OURS,
    SECOND,
    THEIRS,
    WHEN_DONE,
    a_call,
    a_closed_group,
    a_record,
    decide,
    held_by,
    refusal,
    reschedule,
    waiting,
)

WAITING = [State.PENDING, State.COOLING]


class TestFinishedByThisCall:
    @pytest.mark.parametrize("on_busy", ON_BUSY)
    @pytest.mark.parametrize("when_done", WHEN_DONE)
    def test_it_gets_its_own_result_with_any_options(self, on_busy, when_done) -> None:
        done = a_record(State.DONE, OURS, result='{"charge": 1}')
        assert decide(a_call(on_busy=on_busy, **when_done), done) == Return({"charge": 1}, OURS)

    @pytest.mark.parametrize("when_done", WHEN_DONE)
    def test_it_is_dropped_once_its_callbacks_are_out(self, when_done: dict[str, Any]) -> None:
        done = a_record(State.DONE, OURS, result="1")
        assert isinstance(decide(a_call(**when_done, canvas=True), done, callbacks_sent=True), Drop)

    def test_with_its_callbacks_unsent_it_is_replayed_so_that_a_chord_goes_on(self) -> None:
        done = a_record(State.DONE, OURS, result="1")
        assert decide(a_call(canvas=True), done) == Return(1, OURS)

    def test_it_is_answered_even_while_another_holds_the_key(self) -> None:
        done = a_record(State.DONE, OURS, result="1")
        assert decide(a_call(), done, held_by(THEIRS)) == Return(1, OURS)

    @pytest.mark.parametrize("ended", [Ended.IGNORED, Ended.REPLACED])
    def test_what_the_task_itself_ended_without_a_result_is_dropped(self, ended: Ended) -> None:
        done = a_record(State.DONE, OURS, reason=ended.value)
        assert isinstance(decide(a_call(canvas=True), done), Drop)

    @pytest.mark.parametrize("reason", [TOO_LARGE, NOT_JSON])
    def test_a_result_that_was_not_stored_is_reported_as_missing(self, reason: str) -> None:
        error = refusal(decide(a_call(), a_record(State.DONE, OURS, reason=reason)))
        assert isinstance(error, ResultMissing)
        assert (error.key, error.reason) == (KEY.key, reason)

    def test_a_result_of_none_is_a_result(self) -> None:
        assert decide(a_call(), a_record(State.DONE, OURS)) == Return(None, OURS)

    def test_a_record_past_its_retention_counts_as_absent(self) -> None:
        assert decide(a_call(), a_record(State.DONE, OURS, result="1", expires_at=NOW)) == Run()
        kept = a_record(State.DONE, OURS, result="1", expires_at=NOW + 1)
        assert decide(a_call(), kept) == Return(1, OURS)


class TestDoneByAnotherCall:
    def test_replay_gives_the_saved_result_and_names_the_first_call(self) -> None:
        assert decide(a_call(), a_record(State.DONE, result="7")) == Return(7, THEIRS)

    def test_it_is_replayed_even_while_a_third_call_holds_the_key(self) -> None:
        assert decide(a_call(), a_record(State.DONE, result="7"), held_by("call-third")) == Return(
            7, THEIRS
        )

    def test_ignore_drops(self) -> None:
        dropped = decide(a_call(on_done="ignore"), a_record(State.DONE, result="7"))
        assert isinstance(dropped, Drop)
        assert dropped.why == "another call has done it"

    def test_ignore_with_a_canvas_replays_because_a_dropped_member_would_hang_the_chord(self):
        assert decide(
            a_call(on_done="ignore", canvas=True), a_record(State.DONE, result="7")
        ) == Return(7, THEIRS)

    def test_fail_names_the_call_that_did_it(self) -> None:
        error = refusal(decide(a_call(on_done="raise"), a_record(State.DONE, result="7")))
        assert isinstance(error, AlreadyDone)
        assert (error.key, error.call_id) == (KEY.key, THEIRS)

    @pytest.mark.parametrize("reason", [TOO_LARGE, NOT_JSON])
    def test_a_result_that_was_not_stored_is_reported_as_missing(self, reason: str) -> None:
        error = refusal(decide(a_call(), a_record(State.DONE, reason=reason)))
        assert isinstance(error, ResultMissing)
        assert reason in str(error)

    def test_the_result_of_a_call_that_replaced_itself_is_asked_of_celery(self) -> None:
        gone_on = a_record(State.DONE, reason="replaced", finished_at=NOW - 40 * SECOND)
        delays = []
        for reschedules in (0, 3, 30):
            verdict = decide(a_call(reschedules=reschedules), gone_on, rand=0.0)
            assert isinstance(verdict, Follow)
            assert (verdict.call_id, verdict.age) == (THEIRS, 40.0)
            assert isinstance(verdict.missing, ResultMissing)
            delays.append(verdict.again.delay)
        assert delays == pytest.approx([1.1, 8.1, 60.1])
        assert isinstance(decide(a_call(on_done="ignore"), gone_on), Drop)
        assert isinstance(decide(a_call(), a_record(State.DONE, OURS, reason="replaced")), Drop)

    @pytest.mark.parametrize("on_done", ["replay", "ignore"])
    def test_a_copy_of_a_call_that_was_replayed_is_dropped_once_its_callbacks_are_out(
        self, on_done: OnDone
    ) -> None:
        verdict = decide(
            a_call(on_done=on_done, canvas=True),
            a_record(State.DONE, result="7"),
            callbacks_sent=True,
        )
        assert verdict == Drop(Dropped.CALLBACKS_SENT)
        assert verdict.reason.saved_a_run


class TestABegunCall:
    """It has published, charged or retried already: nothing another call does may end it without an
    answer.
    """

    @pytest.mark.parametrize("on_busy", ON_BUSY)
    def test_it_is_rescheduled_when_another_call_holds_the_key(self, on_busy: OnBusy) -> None:
        assert isinstance(
            decide(a_call(on_busy=on_busy, started=True), holder=held_by(THEIRS)), Reschedule
        )

    @pytest.mark.parametrize("on_done", ["replay", "ignore", "raise"])
    def test_it_gets_the_result_of_the_call_that_finished_it(self, on_done: OnDone) -> None:
        assert decide(
            a_call(on_done=on_done, started=True), a_record(State.DONE, result="7")
        ) == Return(7, THEIRS)

    def test_its_copies_may_no_longer_expire(self) -> None:
        waiting = a_record(State.PENDING, OURS, retry_at=NOW + 9 * SECOND)
        for verdict in (decide(a_call(), holder=held_by(OURS)), decide(a_call(), waiting)):
            assert isinstance(verdict, Reschedule)
            assert verdict.started

    def test_a_copy_of_an_attempt_that_was_retried_since_is_dropped(self) -> None:
        """The message of the retry counts; the copy would start the retries again."""
        retried = a_record(State.PENDING, OURS, retries=1, ended=Ended.RETRIED)
        assert isinstance(decide(a_call(retries=0, canvas=True), retried), Drop)
        assert decide(a_call(retries=1), retried) == Run()

    @pytest.mark.parametrize("wait", [-60, 60])
    @pytest.mark.parametrize("state", WAITING)
    @pytest.mark.parametrize("closed_group", [None, a_closed_group(60)], ids=["open", "shut"])
    def test_a_copy_of_a_call_whose_caller_got_the_error_gets_it_again_and_does_not_run(
        self, state: State, wait: int, closed_group: ClosedGroup | None
    ) -> None:
        told = waiting(state, wait, OURS, ended=Ended.FAILED, failure=FAILURE)
        verdict = decide(a_call(repeat=True), told, closed_group=closed_group)
        assert isinstance(verdict, Raise)
        assert verdict.own
        assert str(verdict.error) == "ValueError: boom"

    @pytest.mark.parametrize("state", WAITING)
    def test_a_copy_of_a_call_that_resumes_waits_and_runs(self, state: State) -> None:
        failed: dict[str, Any] = {"ended": Ended.FAILED, "failure": FAILURE, "resumes": True}
        assert isinstance(
            decide(a_call(repeat=True), waiting(state, 60, OURS, **failed)), Reschedule
        )
        assert decide(a_call(repeat=True), waiting(state, 0, OURS, **failed)) == Run()

    @pytest.mark.parametrize("state", WAITING)
    def test_a_new_message_with_the_id_of_a_call_whose_caller_got_the_error_runs(self, state):
        assert (
            decide(
                a_call(repeat=False), waiting(state, 0, OURS, ended=Ended.FAILED, failure=FAILURE)
            )
            == Run()
        )

    @pytest.mark.parametrize("state", WAITING)
    def test_a_new_message_that_was_rescheduled_waits_for_the_failure_that_it_has_seen(self, state):
        told: dict[str, Any] = {"ended": Ended.FAILED, "failure": FAILURE, "fence": 17}
        verdict = reschedule(decide(a_call(), waiting(state, 60, OURS, **told)))
        assert verdict.failure_fence == 17
        for met in (17, 0):
            copy = a_call(repeat=True, failure_fence=met)
            assert isinstance(decide(copy, waiting(state, 60, OURS, **told)), Reschedule)
            assert decide(copy, waiting(state, 0, OURS, **told)) == Run()
        for met in (16, 18, None):
            assert isinstance(
                decide(a_call(repeat=True, failure_fence=met), waiting(state, 0, OURS, **told)),
                Raise,
            )

    @pytest.mark.parametrize("state", WAITING)
    def test_another_call_may_have_other_arguments_once_the_caller_got_the_error(self, state):
        told: dict[str, Any] = {
            "fingerprint": "v1:other",
            "ended": Ended.FAILED,
            "failure": FAILURE,
        }
        assert decide(a_call(), waiting(state, 0, **told)) == Run()
        assert not isinstance(decide(a_call(), waiting(state, 60, **told)), Run)

    @pytest.mark.parametrize("state", WAITING)
    @pytest.mark.parametrize("wait", [0, 60])
    def test_other_arguments_are_refused_while_the_call_will_resume(self, state, wait) -> None:
        coming: dict[str, Any] = {"fingerprint": "v1:other", "ended": Ended.FAILED, "resumes": True}
        assert isinstance(refusal(decide(a_call(), waiting(state, wait, **coming))), KeyReused)


class TestOtherContent:
    @pytest.mark.parametrize(
        "state", [state for state in State if state not in (State.FAILED, State.UNCERTAIN)]
    )
    def test_another_call_with_other_arguments_is_refused_with_the_names_that_differ(self, state):
        record = a_record(state, fingerprint="v1:other", digests={"month": "m2", "amount": "a"})
        error = refusal(decide(a_call(), record))
        assert isinstance(error, KeyReused)
        assert (error.key, error.differing) == (KEY.key, ["amount", "month"])
        assert re.search(r"amount \(.*month \(another text in the key\)", str(error))

    @pytest.mark.parametrize(
        ("ours", "theirs"), [(None, "v1:same"), ("v1:same", None), (None, None)]
    )
    def test_where_one_side_has_no_fingerprint_nothing_is_compared(self, ours, theirs) -> None:
        call = a_call(key=replace(KEY, fingerprint=ours))
        assert decide(call, a_record(State.DONE, result="7", fingerprint=theirs)) == Return(
            7, THEIRS
        )

    def test_a_record_past_its_retention_is_not_compared(self) -> None:
        assert (
            decide(a_call(), a_record(State.DONE, fingerprint="v1:other", expires_at=NOW)) == Run()
        )


class TestFailedForGood:
    @pytest.mark.parametrize(
        ("repeat", "call_id", "own"),
        [(True, OURS, True), (False, OURS, False), (True, THEIRS, False)],
    )
    def test_only_a_copy_of_the_failed_call_is_dropped_if_celery_has_its_failure(
        self, repeat: bool, call_id: str, own: bool
    ) -> None:
        """Otherwise the first error would be overwritten, and error callbacks be sent twice."""
        verdict = decide(a_call(repeat=repeat), a_record(State.FAILED, call_id, failure=FAILURE))
        assert isinstance(verdict, Raise)
        assert verdict.own is own

    @pytest.mark.parametrize("call_id", [OURS, THEIRS])
    def test_every_call_gets_the_failure(self, call_id: str) -> None:
        failure = Failure("shop.errors.Declined", "card declined", "card")
        error = refusal(decide(a_call(), a_record(State.FAILED, call_id, failure=failure)))
        assert isinstance(error, PermanentFailure)
        said = "shop.errors.Declined: card declined"
        assert (str(error), error.rule, error.error) == (said, "card", "shop.errors.Declined")

    @pytest.mark.parametrize(
        ("failure", "said"),
        [
            (Failure("celery_leases.errors.PermanentFailure", "unknown invoice"), "unknown invoice"),
            (Failure("KeyError", ""), "KeyError"),
            (Failure("TimeoutError", "no", ambiguous=True), "TimeoutError: no (the call may have been executed)"),
        ],
    )  # fmt: skip
    def test_the_error_has_its_class_and_says_whether_it_may_have_been_executed(
        self, failure: Failure, said: str
    ) -> None:
        assert (
            str(refusal(decide(a_call(), a_record(State.FAILED, THEIRS, failure=failure)))) == said
        )

    def test_a_failure_without_details_still_has_a_message(self) -> None:
        assert KEY.key in str(refusal(decide(a_call(), a_record(State.FAILED))))

    def test_it_is_forgotten_after_its_retention(self) -> None:
        assert decide(a_call(), a_record(State.FAILED, expires_at=NOW)) == Run()


class TestHeldByThisCall:
    @pytest.mark.parametrize("on_busy", ON_BUSY)
    @pytest.mark.parametrize("when_done", WHEN_DONE)
    @pytest.mark.parametrize("canvas", [False, True])
    def test_a_copy_is_rescheduled_until_the_lease_ends_with_any_options(
        self, on_busy: OnBusy, when_done: dict[str, Any], canvas: bool
    ) -> None:
        verdict = decide(
            a_call(on_busy=on_busy, **when_done, canvas=canvas),
            holder=held_by(OURS, 9.0),
            rand=0.5,
        )
        assert isinstance(verdict, Reschedule)
        assert verdict.delay == pytest.approx(9.3)

    def test_a_lease_in_the_row_counts_like_one_in_a_store(self) -> None:
        running = a_record(State.RUNNING, OURS, lease_until=NOW + 9 * SECOND)
        assert decide(a_call(), running) == decide(a_call(), holder=held_by(OURS, 9.0))

    @given(st.floats(0, 1, exclude_max=True))
    def test_the_copy_comes_when_the_lease_is_over_and_not_all_copies_at_once(self, rand) -> None:
        verdict = reschedule(decide(a_call(), holder=held_by(OURS, 9.0), rand=rand))
        assert 9.1 <= verdict.delay <= 9.5

    def test_the_number_of_its_reschedules_does_not_matter(self) -> None:
        assert decide(a_call(reschedules=9), holder=held_by(OURS)) == decide(
            a_call(), holder=held_by(OURS)
        )


class TestHeldByAnotherCall:
    @pytest.mark.parametrize(
        ("reschedules", "delay"),
        [(0, 1.0), (1, 2.0), (2, 4.0), (3, 8.0), (4, 9.0), (5, 9.0), (10_000, 9.0)],
    )
    def test_a_reschedule_waits_a_second_doubling_up_to_the_remaining_ttl(self, reschedules, delay):
        verdict = decide(a_call(reschedules=reschedules), holder=held_by(THEIRS, 9.0), rand=0.0)
        assert isinstance(verdict, Reschedule)
        assert verdict.delay == pytest.approx(delay + 0.1)

    def test_a_reschedule_waits_at_least_a_second_even_when_the_lease_is_nearly_over(self) -> None:
        verdict = reschedule(decide(a_call(), holder=held_by(THEIRS, 0.01)))
        assert verdict.delay >= 1.0

    def test_ignore_drops(self) -> None:
        assert isinstance(decide(a_call(on_busy="ignore"), holder=held_by(THEIRS)), Drop)

    def test_ignore_with_a_canvas_reschedules_because_the_rest_would_hang(self) -> None:
        assert isinstance(
            decide(a_call(on_busy="ignore", canvas=True), holder=held_by(THEIRS)), Reschedule
        )

    def test_raise_names_the_holder_and_the_remaining_time(self) -> None:
        error = refusal(decide(a_call(on_busy="raise"), holder=held_by(THEIRS, 9.0)))
        assert isinstance(error, LeaseHeld)
        assert (error.key, error.remaining, error.holder) == (KEY.key, 9.0, "host-a/17")

    @pytest.mark.parametrize("remaining", [-1, 0])
    def test_an_expired_lease_in_the_row_has_no_holder(self, remaining: int) -> None:
        assert decide(a_call(), a_record(State.RUNNING, lease_until=NOW + remaining)) == Run()

    def test_a_running_row_whose_lease_lives_elsewhere_is_for_the_lease_store_to_judge(self):
        assert decide(a_call(), a_record(State.RUNNING, lease_until=None)) == Run()
