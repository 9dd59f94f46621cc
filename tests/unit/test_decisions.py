"""The decision table row by row, its traps, and what must hold for every combination of facts."""

# ruff: noqa: D101, D102, D103 - names state the behaviour; a docstring follows where the name is not enough

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_leases.core import decisions, outcomes
from celery_leases.core.decisions import (
    RETRY_GRACE,
    SHORTEST_DELAY,
    before_run,
    store_came_up_empty,
)
from celery_leases.core.endings import Interrupted, Lost, Passed, Raised, Returned, Terminated
from celery_leases.core.errors import AlreadyDone, KeyReused, LeaseHeld, PermanentFailure, ResultMissing
from celery_leases.core.keys import CallKey
from celery_leases.core.options import LeaseOptions, OnDone, OnHeld
from celery_leases.core.outcomes import (
    REMEMBERED_CALLS,
    REMEMBERED_RESULT_MAX,
    after_run,
    crash_pause,
    gave_up,
    settle_pause,
    settle_until,
    stood_back,
    store_pause,
)
from celery_leases.core.ports import Holder
from celery_leases.core.records import Attempt, Ended, Failure, Outcome, Record, State
from celery_leases.core.results import NOT_JSON, TOO_LARGE
from celery_leases.core.verdicts import (
    Call,
    Drop,
    Facts,
    GiveUp,
    PutBack,
    Refuse,
    Replay,
    Run,
    StandBack,
    Verdict,
    Wait,
)

NOW = 1_000_000_000_000
SECOND = 1_000_000
OURS, THEIRS = "call-ours", "call-theirs"
KEY = CallKey("invoice:1842", "t:billing.send|invoice:1842", "v1:same", {"month": "m1"})
ON_HELD: tuple[OnHeld, ...] = ("put_back", "wait", "ignore", "fail")
ON_DONE: tuple[OnDone, ...] = ("replay", "ignore", "fail", "rerun")


def a_call(*, on_held: OnHeld = "put_back", on_done: OnDone = "replay", **changes: Any) -> Call:
    options = replace(changes.pop("options", LeaseOptions(key="invoice:{id}")), on_held=on_held, on_done=on_done)
    key = replace(KEY, fingerprint=None, digests=None) if on_done == "rerun" else KEY
    return Call(**({"task": "billing.send", "call_id": OURS, "key": key, "options": options} | changes))


def a_record(state: State, call_id: str = THEIRS, **changes: Any) -> Record:
    defaults: dict[str, Any] = {
        "stored_key": KEY.stored,
        "task": "billing.send",
        "key": KEY.key,
        "state": state,
        "fence": NOW - 9 * SECOND,
        "owner": "token-1",
        "call_id": call_id,
        "holder": "host-a/17",
        "attempt": 1,
        "generation": 0,
        "failures": 0,
        "crashes": 0,
        "retries": 0,
        "lease_store": "redis://one",
        "lease_ttl": 15.0,
        "created_at": NOW - 9 * SECOND,
        "started_at": NOW - 9 * SECOND,
        "now": NOW,
        "fingerprint": KEY.fingerprint,
        "digests": KEY.digests,
    }
    return Record(**(defaults | changes))


def held_by(call_id: str, remaining: float = 9.0) -> Holder:
    return Holder("token-1", call_id, "host-a/17", 15.0, remaining)


def decide(call: Call, record: Record | None = None, holder: Holder | None = None, **facts: Any) -> Verdict:
    return before_run(call, Facts(record=record, holder=holder, **facts))


def refusal(verdict: Verdict) -> Exception:
    assert isinstance(verdict, Refuse)
    return verdict.error


class TestFinishedByThisCall:
    @pytest.mark.parametrize("on_held", ON_HELD)
    @pytest.mark.parametrize("on_done", ON_DONE)
    def test_it_gets_its_own_result_whatever_the_options_say(self, on_held: OnHeld, on_done: OnDone) -> None:
        done = a_record(State.DONE, OURS, result='{"charge": 1}')
        assert decide(a_call(on_held=on_held, on_done=on_done), done) == Replay('{"charge": 1}', OURS)

    @pytest.mark.parametrize("on_done", ON_DONE)
    def test_it_is_dropped_once_its_callbacks_are_out(self, on_done: OnDone) -> None:
        done = a_record(State.DONE, OURS, result="1")
        assert isinstance(decide(a_call(on_done=on_done, canvas=True), done, callbacks_out=True), Drop)

    def test_with_its_callbacks_unsent_it_is_replayed_so_that_a_chord_goes_on(self) -> None:
        done = a_record(State.DONE, OURS, result="1")
        assert decide(a_call(canvas=True), done) == Replay("1", OURS)

    def test_it_is_answered_even_while_another_holds_the_key(self) -> None:
        done = a_record(State.DONE, OURS, result="1")
        assert decide(a_call(), done, held_by(THEIRS)) == Replay("1", OURS)

    @pytest.mark.parametrize("ended", [Ended.IGNORED, Ended.REJECTED])
    def test_what_the_task_itself_ended_without_a_result_is_dropped(self, ended: Ended) -> None:
        done = a_record(State.DONE, OURS, reason=ended.value)
        assert isinstance(decide(a_call(canvas=True), done), Drop)

    @pytest.mark.parametrize("reason", [TOO_LARGE, NOT_JSON])
    def test_a_result_that_was_not_kept_is_said_to_be_missing(self, reason: str) -> None:
        error = refusal(decide(a_call(), a_record(State.DONE, OURS, reason=reason)))
        assert isinstance(error, ResultMissing)
        assert (error.key, error.reason) == (KEY.key, reason)

    def test_a_result_of_none_is_a_result(self) -> None:
        assert decide(a_call(), a_record(State.DONE, OURS)) == Replay(None, OURS)

    def test_a_record_past_its_retention_counts_as_absent(self) -> None:
        assert decide(a_call(), a_record(State.DONE, OURS, result="1", expires_at=NOW)) == Run()
        kept = a_record(State.DONE, OURS, result="1", expires_at=NOW + 1)
        assert decide(a_call(), kept) == Replay("1", OURS)


class TestRerun:
    def listed(self, state: State, **changes: Any) -> Record:
        return a_record(
            state, fingerprint=None, finished_calls=(OURS, THEIRS), finished_results={OURS: "1", THEIRS: "2"}, **changes
        )

    @pytest.mark.parametrize("state", State)
    def test_a_call_on_the_list_never_runs_again_whatever_became_of_the_key(self, state: State) -> None:
        assert decide(a_call(on_done="rerun"), self.listed(state, lease_until=NOW + SECOND)) == Replay("1", OURS)

    def test_a_call_on_the_list_is_dropped_once_its_callbacks_are_out(self) -> None:
        verdict = decide(a_call(on_done="rerun", canvas=True), self.listed(State.RUNNING), callbacks_out=True)
        assert isinstance(verdict, Drop)

    def test_a_call_on_the_list_whose_result_was_overwritten_is_told_so_and_not_run(self) -> None:
        record = replace(self.listed(State.DONE), finished_results={OURS: None, THEIRS: "2"})
        assert isinstance(refusal(decide(a_call(on_done="rerun"), record)), ResultMissing)

    def test_another_call_runs_anew(self) -> None:
        record = a_record(State.DONE, result="2", fingerprint=None, finished_calls=(THEIRS,))
        assert decide(a_call(on_done="rerun"), record) == Run()

    def test_another_call_runs_after_a_permanent_failure(self) -> None:
        assert decide(a_call(on_done="rerun"), a_record(State.FAILED)) == Run()

    def test_the_call_that_failed_for_good_is_told_so(self) -> None:
        assert isinstance(refusal(decide(a_call(on_done="rerun"), a_record(State.FAILED, OURS))), PermanentFailure)

    def test_arguments_are_not_compared(self) -> None:
        assert decide(a_call(on_done="rerun"), a_record(State.DONE, fingerprint="v1:other")) == Run()

    @pytest.mark.parametrize("canvas", [False, True])
    def test_a_live_lease_holds_another_call_back(self, canvas: bool) -> None:
        running = a_record(State.RUNNING, fingerprint=None, lease_until=NOW + 9 * SECOND)
        assert isinstance(decide(a_call(on_done="rerun", canvas=canvas), running), PutBack)

    def test_a_lease_taken_by_a_third_call_holds_back_although_the_last_run_is_done(self) -> None:
        done = a_record(State.DONE, fingerprint=None, finished_calls=(THEIRS,))
        assert isinstance(decide(a_call(on_done="rerun"), done, held_by("call-third")), PutBack)

    def test_a_cooldown_holds_another_call_back(self) -> None:
        cooling = a_record(State.COOLING, fingerprint=None, retry_at=NOW + 60 * SECOND)
        assert isinstance(decide(a_call(on_done="rerun"), cooling), PutBack)


class TestDoneByAnotherCall:
    def test_replay_gives_the_saved_result_and_names_the_first_call(self) -> None:
        assert decide(a_call(), a_record(State.DONE, result="7")) == Replay("7", THEIRS)

    def test_it_is_replayed_even_while_a_third_call_holds_the_key(self) -> None:
        assert decide(a_call(), a_record(State.DONE, result="7"), held_by("call-third")) == Replay("7", THEIRS)

    def test_ignore_drops(self) -> None:
        assert isinstance(decide(a_call(on_done="ignore"), a_record(State.DONE, result="7")), Drop)

    def test_ignore_with_a_canvas_replays_because_a_dropped_member_would_hang_the_chord(self) -> None:
        assert decide(a_call(on_done="ignore", canvas=True), a_record(State.DONE, result="7")) == Replay("7", THEIRS)

    def test_fail_names_the_call_that_did_it(self) -> None:
        error = refusal(decide(a_call(on_done="fail"), a_record(State.DONE, result="7")))
        assert isinstance(error, AlreadyDone)
        assert (error.key, error.call_id) == (KEY.key, THEIRS)

    @pytest.mark.parametrize("reason", [TOO_LARGE, NOT_JSON])
    def test_a_result_that_was_not_kept_is_said_to_be_missing(self, reason: str) -> None:
        error = refusal(decide(a_call(), a_record(State.DONE, reason=reason)))
        assert isinstance(error, ResultMissing)
        assert reason in str(error)

    @pytest.mark.parametrize("on_done", ["replay", "ignore"])
    def test_a_copy_of_a_call_that_was_replayed_is_dropped_once_its_callbacks_are_out(self, on_done: OnDone) -> None:
        """Callbacks of one Celery id are sent once, also for the duplicate that got the first call's result."""
        verdict = decide(a_call(on_done=on_done, canvas=True), a_record(State.DONE, result="7"), callbacks_out=True)
        assert isinstance(verdict, Drop)


class TestABegunCall:
    """It has published, charged or retried already: nothing another call does may end it without an answer."""

    @pytest.mark.parametrize("on_held", ON_HELD)
    def test_it_comes_back_when_another_call_holds_the_key(self, on_held: OnHeld) -> None:
        assert isinstance(decide(a_call(on_held=on_held, started=True), holder=held_by(THEIRS)), PutBack)

    @pytest.mark.parametrize("on_done", ["replay", "ignore", "fail"])
    def test_it_gets_the_result_of_the_call_that_finished_it(self, on_done: OnDone) -> None:
        assert decide(a_call(on_done=on_done, started=True), a_record(State.DONE, result="7")) == Replay("7", THEIRS)

    def test_its_copies_may_no_longer_expire(self) -> None:
        waiting = a_record(State.PENDING, OURS, retry_at=NOW + 9 * SECOND)
        for verdict in (decide(a_call(), holder=held_by(OURS)), decide(a_call(), waiting)):
            assert isinstance(verdict, PutBack)
            assert verdict.started

    def test_a_copy_of_an_attempt_that_was_retried_since_is_dropped(self) -> None:
        """The message of the retry is the one that counts: its copy would count the retries anew."""
        retried = a_record(State.PENDING, OURS, retries=1, ended=Ended.RETRIED)
        assert isinstance(decide(a_call(retries=0, canvas=True), retried), Drop)
        assert decide(a_call(retries=1), retried) == Run()

    def test_a_copy_of_a_call_that_raised_is_told_so_and_does_not_run_again(self) -> None:
        failed = a_record(State.PENDING, OURS, ended=Ended.FAILED, failure=Failure("ValueError", "boom"))
        verdict = decide(a_call(repeat=True), failed)
        assert isinstance(verdict, Refuse)
        assert verdict.own
        assert str(verdict.error) == "boom"

    def test_a_fresh_message_under_the_id_of_a_call_that_raised_runs(self) -> None:
        """From a dead-letter queue, or sent again by hand: somebody wants it tried once more."""
        failed = a_record(State.PENDING, OURS, ended=Ended.FAILED, failure=Failure("ValueError", "boom"))
        assert decide(a_call(repeat=False), failed) == Run()

    def test_another_call_may_try_with_other_arguments_what_has_raised(self) -> None:
        failed = a_record(State.PENDING, fingerprint="v1:other", ended=Ended.FAILED, failure=Failure("ValueError", "x"))
        assert decide(a_call(), failed) == Run()


class TestCrashesUnderRerun:
    def test_a_poisonous_call_is_given_up_although_others_ran_between_its_crashes(self) -> None:
        record = a_record(State.RUNNING, OURS, crashes=3, crashed_call=OURS, finished_calls=(THEIRS,))
        assert isinstance(decide(a_call(on_done="rerun"), record, claimed=True), GiveUp)

    def test_another_call_does_not_pay_for_it_and_does_not_clear_it(self) -> None:
        record = a_record(State.RUNNING, OURS, crashes=3, crashed_call=THEIRS, crashed_at=NOW - 9 * SECOND)
        assert decide(a_call(on_done="rerun"), record, claimed=True) == Run()
        assert after_run(a_call(on_done="rerun"), record, Returned(1, "1")).crashes == 3

    def test_a_call_given_up_is_not_run_again(self) -> None:
        call = a_call(on_done="rerun")
        finished = gave_up(call, a_record(State.RUNNING, OURS, crashes=3)).finished
        assert finished is not None
        later = a_record(State.DONE, finished_calls=tuple(finished), finished_results=finished)
        assert isinstance(decide(call, later), Drop)


class TestOtherContent:
    @pytest.mark.parametrize("state", [state for state in State if state not in (State.FAILED, State.UNCERTAIN)])
    def test_another_call_with_other_arguments_is_refused_with_the_names_that_differ(self, state: State) -> None:
        record = a_record(state, fingerprint="v1:other", digests={"month": "m2", "amount": "a"})
        error = refusal(decide(a_call(), record))
        assert isinstance(error, KeyReused)
        assert (error.key, error.differing) == (KEY.key, ["amount", "month"])
        assert "amount, month" in str(error)

    @pytest.mark.parametrize("state", State)
    def test_it_is_never_said_of_the_same_call(self, state: State) -> None:
        verdict = decide(a_call(), a_record(state, OURS, fingerprint="v1:other", digests={"month": "m2"}))
        assert not (isinstance(verdict, Refuse) and isinstance(verdict.error, KeyReused))

    @pytest.mark.parametrize(("ours", "theirs"), [(None, "v1:same"), ("v1:same", None), (None, None)])
    def test_where_one_side_has_no_fingerprint_nothing_is_compared(self, ours: str | None, theirs: str | None) -> None:
        """So a deploy that turns fingerprints on, or rerun off, refuses nobody."""
        call = a_call(key=replace(KEY, fingerprint=ours))
        assert decide(call, a_record(State.DONE, result="7", fingerprint=theirs)) == Replay("7", THEIRS)

    def test_a_record_past_its_retention_is_not_compared(self) -> None:
        assert decide(a_call(), a_record(State.DONE, fingerprint="v1:other", expires_at=NOW)) == Run()


class TestFailedForGood:
    @pytest.mark.parametrize("call_id", [OURS, THEIRS])
    def test_every_call_is_told_how_it_failed(self, call_id: str) -> None:
        failure = Failure("shop.errors.Declined", "card declined", "card")
        error = refusal(decide(a_call(), a_record(State.FAILED, call_id, failure=failure)))
        assert isinstance(error, PermanentFailure)
        assert (str(error), error.rule, error.error) == ("card declined", "card", "shop.errors.Declined")

    def test_a_failure_without_details_still_has_a_message(self) -> None:
        assert KEY.key in str(refusal(decide(a_call(), a_record(State.FAILED))))

    def test_it_is_forgotten_after_its_retention(self) -> None:
        assert decide(a_call(), a_record(State.FAILED, expires_at=NOW)) == Run()


class TestHeldByThisCall:
    @pytest.mark.parametrize("on_held", ON_HELD)
    @pytest.mark.parametrize("on_done", ON_DONE)
    @pytest.mark.parametrize("canvas", [False, True])
    def test_a_copy_is_put_back_until_the_lease_ends_whatever_the_options_say(
        self, on_held: OnHeld, on_done: OnDone, canvas: bool
    ) -> None:
        """A redelivered copy may be the last copy."""
        verdict = decide(a_call(on_held=on_held, on_done=on_done, canvas=canvas), holder=held_by(OURS, 9.0), chance=0.5)
        assert isinstance(verdict, PutBack)
        assert verdict.delay == pytest.approx(9.3)

    def test_a_lease_in_the_row_counts_like_one_in_a_store(self) -> None:
        running = a_record(State.RUNNING, OURS, lease_until=NOW + 9 * SECOND)
        assert decide(a_call(), running) == decide(a_call(), holder=held_by(OURS, 9.0))

    @given(st.floats(0, 1, exclude_max=True))
    def test_the_copy_comes_when_the_lease_is_over_and_not_all_copies_at_once(self, chance: float) -> None:
        verdict = decide(a_call(), holder=held_by(OURS, 9.0), chance=chance)
        assert isinstance(verdict, PutBack)
        assert 9.1 <= verdict.delay <= 9.5

    def test_how_often_it_came_back_does_not_matter(self) -> None:
        assert decide(a_call(tries=9), holder=held_by(OURS)) == decide(a_call(), holder=held_by(OURS))


class TestHeldByAnotherCall:
    @pytest.mark.parametrize(
        ("tries", "delay"), [(0, 1.0), (1, 2.0), (2, 4.0), (3, 8.0), (4, 9.0), (5, 9.0), (10_000, 9.0)]
    )
    def test_put_back_waits_a_second_doubling_up_to_the_remaining_ttl(self, tries: int, delay: float) -> None:
        verdict = decide(a_call(tries=tries), holder=held_by(THEIRS, 9.0), chance=0.0)
        assert isinstance(verdict, PutBack)
        assert verdict.delay == pytest.approx(delay + 0.1)

    def test_put_back_waits_a_second_at_least_even_when_the_lease_is_nearly_over(self) -> None:
        verdict = decide(a_call(), holder=held_by(THEIRS, 0.01))
        assert isinstance(verdict, PutBack)
        assert verdict.delay >= 1.0

    def test_wait_tries_again_soon_and_puts_back_when_its_time_is_over(self) -> None:
        call = a_call(on_held="wait", options=LeaseOptions(key="k", wait=5.0))
        assert decide(call, holder=held_by(THEIRS), waited=0.0, chance=0.0) == Wait(0.2)
        assert decide(call, holder=held_by(THEIRS), waited=4.9, chance=0.9) == Wait(pytest.approx(0.1))  # type: ignore[arg-type]
        assert isinstance(decide(call, holder=held_by(THEIRS), waited=5.0), PutBack)

    def test_ignore_drops(self) -> None:
        assert isinstance(decide(a_call(on_held="ignore"), holder=held_by(THEIRS)), Drop)

    def test_ignore_with_a_canvas_is_put_back_because_the_rest_would_hang(self) -> None:
        assert isinstance(decide(a_call(on_held="ignore", canvas=True), holder=held_by(THEIRS)), PutBack)

    def test_fail_says_who_holds_the_key_and_for_how_long(self) -> None:
        error = refusal(decide(a_call(on_held="fail"), holder=held_by(THEIRS, 9.0)))
        assert isinstance(error, LeaseHeld)
        assert (error.key, error.remaining, error.holder) == (KEY.key, 9.0, "host-a/17")

    @pytest.mark.parametrize("remaining", [-1, 0])
    def test_a_lease_in_the_row_that_is_over_holds_nobody(self, remaining: int) -> None:
        assert decide(a_call(), a_record(State.RUNNING, lease_until=NOW + remaining)) == Run()

    def test_a_running_row_whose_lease_lives_elsewhere_is_for_the_lease_store_to_judge(self) -> None:
        assert decide(a_call(), a_record(State.RUNNING, lease_until=None)) == Run()


class TestWaitingForItsRetryTime:
    @pytest.mark.parametrize("state", [State.PENDING, State.COOLING])
    def test_another_call_waits_until_then(self, state: State) -> None:
        verdict = decide(a_call(), a_record(state, retry_at=NOW + 30 * SECOND), chance=0.0)
        assert isinstance(verdict, PutBack)
        assert verdict.delay == pytest.approx(30.1)

    @pytest.mark.parametrize("state", [State.PENDING, State.COOLING])
    @pytest.mark.parametrize("retry_at", [None, NOW, NOW - SECOND])
    def test_it_runs_once_the_time_is_over(self, state: State, retry_at: int | None) -> None:
        assert decide(a_call(), a_record(state, retry_at=retry_at)) == Run()

    def test_the_call_that_waits_is_granted_the_travel_time_of_its_message(self) -> None:
        """Its message was sent before the row was closed, so it may come a little early."""
        grace = int(RETRY_GRACE * SECOND)
        early = a_record(State.PENDING, OURS, retry_at=NOW + grace)
        assert decide(a_call(), early) == Run()
        assert isinstance(decide(a_call(), replace(early, retry_at=NOW + grace + 1)), PutBack)
        assert isinstance(decide(a_call(), replace(early, call_id=THEIRS)), PutBack)

    @pytest.mark.parametrize("on_held", ON_HELD)
    def test_what_is_to_happen_to_held_keys_says_nothing_about_it(self, on_held: OnHeld) -> None:
        record = a_record(State.PENDING, retry_at=NOW + 30 * SECOND)
        assert isinstance(decide(a_call(on_held=on_held), record), PutBack)

    def test_other_states_ignore_a_leftover_time(self) -> None:
        assert decide(a_call(), a_record(State.RUNNING, retry_at=NOW + 30 * SECOND)) == Run()


class TestHops:
    @pytest.mark.parametrize(
        "facts",
        [
            Facts(holder=held_by(OURS, 7_200.0)),
            Facts(holder=held_by(THEIRS, 7_200.0)),
            Facts(record=a_record(State.PENDING, retry_at=NOW + 7_200 * SECOND)),
        ],
        ids=["own copy", "another call", "retry time"],
    )
    def test_no_wait_is_longer_than_the_broker_can_be_trusted_with(self, facts: Facts) -> None:
        verdict = before_run(a_call(longest_hop=30.0, tries=20), facts)
        assert isinstance(verdict, PutBack)
        assert verdict.delay == 30.0

    def test_a_hop_is_never_no_hop(self) -> None:
        verdict = decide(a_call(), holder=held_by(OURS, -5.0))
        assert isinstance(verdict, PutBack)
        assert verdict.delay == SHORTEST_DELAY


class TestClaimed:
    def claimed(self, crashes: int = 0, *, just_now: bool = True, **changes: Any) -> Record:
        crashed_at = NOW if just_now else NOW - 60 * SECOND
        return a_record(
            State.RUNNING, OURS, crashes=crashes, crashed_at=crashed_at if crashes else None, started_at=NOW, **changes
        )

    def verdict(self, record: Record, **options: Any) -> Verdict:
        return decide(a_call(options=LeaseOptions(key="k", **options)), record, claimed=True)

    def test_a_claimed_key_runs(self) -> None:
        assert self.verdict(self.claimed(), max_crashes=3) == Run()

    def test_the_lease_in_the_claimed_row_is_our_own(self) -> None:
        assert self.verdict(self.claimed(lease_until=NOW + 15 * SECOND)) == Run()

    @pytest.mark.parametrize(
        ("crashes", "verdict"), [(1, Run()), (2, StandBack(5.0)), (3, StandBack(30.0)), (8, StandBack(30.0))]
    )
    def test_after_a_crash_it_runs_at_once_then_in_5_then_in_30_seconds(self, crashes: int, verdict: Verdict) -> None:
        assert self.verdict(self.claimed(crashes), max_crashes=9) == verdict

    @pytest.mark.parametrize("limit", [1, 2, 3])
    def test_it_gives_up_after_so_many_crashes_in_a_row(self, limit: int) -> None:
        assert not isinstance(self.verdict(self.claimed(limit - 1), max_crashes=limit), GiveUp)
        verdict = self.verdict(self.claimed(limit), max_crashes=limit)
        assert isinstance(verdict, GiveUp)
        assert verdict.error.rule == outcomes.CRASH_LOOP
        assert f"{limit} times in a row" in str(verdict.error)

    @pytest.mark.parametrize("crashes", [2, 3, 9])
    def test_a_crash_is_answered_once(self, crashes: int) -> None:
        """After the pause the row is claimed from pending, and the crash was not just now."""
        assert self.verdict(self.claimed(crashes, just_now=False), max_crashes=9) == Run()

    def test_a_row_claimed_after_its_retention_runs(self) -> None:
        assert self.verdict(self.claimed(expires_at=None)) == Run()


@dataclass(frozen=True)
class Combination:
    call: Call
    facts: Facts
    verdict: Verdict

    @property
    def finished(self) -> bool:
        record = self.facts.record
        if self.facts.callbacks_out:
            return True
        return record is not None and not record.expired and decisions.finished_by(self.call, record)

    @property
    def live(self) -> bool:
        record = self.facts.record
        return self.facts.holder is not None or (record is not None and decisions.holder_in(record) is not None)

    @property
    def same(self) -> bool:
        record, holder = self.facts.record, self.facts.holder
        return all(found is None or found.call_id == OURS for found in (record, holder))


ROWS: dict[str, dict[str, Any]] = {
    "pending": {"state": State.PENDING},
    "pending, later": {"state": State.PENDING, "retry_at": NOW + 60 * SECOND},
    "pending, in a moment": {"state": State.PENDING, "retry_at": NOW + SECOND // 2},
    "running in its row": {"state": State.RUNNING, "lease_until": NOW + 9 * SECOND},
    "running, lease over": {"state": State.RUNNING, "lease_until": NOW - SECOND},
    "running, lease elsewhere": {"state": State.RUNNING},
    "done": {"state": State.DONE, "result": "1"},
    "done, result too large": {"state": State.DONE, "reason": TOO_LARGE},
    "done, ignored": {"state": State.DONE, "reason": "ignored"},
    "done, long ago": {"state": State.DONE, "result": "1", "expires_at": NOW - 1},
    "cooling": {"state": State.COOLING, "retry_at": NOW + 60 * SECOND},
    "cooled": {"state": State.COOLING, "retry_at": NOW - SECOND},
    "failed": {"state": State.FAILED, "failure": Failure("E", "no")},
    "failed, long ago": {"state": State.FAILED, "expires_at": NOW - 1},
    "uncertain": {"state": State.UNCERTAIN},
}
LISTS: tuple[dict[str, Any], ...] = (
    {},
    {"finished_calls": (OURS, THEIRS), "finished_results": {OURS: "1", THEIRS: "2"}},
    {"finished_calls": (OURS,), "finished_results": {OURS: None}},
)


def combinations() -> Iterator[Combination]:
    rows: list[Record | None] = [None]
    for row, call_id, fingerprint, listed in product(
        ROWS.values(), (OURS, THEIRS), ("v1:same", "v1:other", None), LISTS
    ):
        changes = {name: value for name, value in row.items() if name != "state"}
        rows.append(a_record(row["state"], call_id, fingerprint=fingerprint, **changes, **listed))
    holders = (None, held_by(OURS), held_by(THEIRS))
    calls = [
        a_call(on_held=on_held, on_done=on_done, canvas=canvas)
        for on_held, on_done, canvas in product(ON_HELD, ON_DONE, (False, True))
    ]
    for call, row, holder, out in product(calls, rows, holders, (False, True)):
        facts = Facts(record=row, holder=holder, callbacks_out=out)
        yield Combination(call, facts, before_run(call, facts))


class TestEveryCombination:
    """Some 50 000 combinations of row, holder, options, canvas and callbacks."""

    def breaches(self, broken: Any) -> list[Combination]:
        return [found for found in combinations() if broken(found)][:3]

    def test_there_is_a_verdict_for_each(self) -> None:
        assert self.breaches(lambda one: not isinstance(one.verdict, get_args(Verdict))) == []

    def test_a_delivery_with_a_canvas_is_dropped_only_as_this_calls_finished_business(self) -> None:
        assert self.breaches(lambda one: isinstance(one.verdict, Drop) and one.call.canvas and not one.finished) == []

    def test_a_held_key_never_runs(self) -> None:
        assert self.breaches(lambda one: isinstance(one.verdict, Run) and one.live) == []

    def test_what_this_call_has_finished_is_answered_and_never_run_or_put_back(self) -> None:
        assert self.breaches(lambda one: one.finished and not isinstance(one.verdict, Replay | Drop | Refuse)) == []

    def test_nothing_is_dropped_unasked(self) -> None:
        """A drop is finished business of this call, or what ``ignore`` asks for."""

        def unasked(one: Combination) -> bool:
            options = one.call.options
            asked = (options.on_held == "ignore" and one.live) or options.on_done == "ignore"
            return isinstance(one.verdict, Drop) and not one.finished and not asked

        assert self.breaches(unasked) == []

    def test_the_options_about_other_calls_say_nothing_about_the_same_call(self) -> None:
        seen: dict[Any, Verdict] = {}
        for one in combinations():
            if one.same:
                known = (repr(one.facts), one.call.canvas)
                assert repr(seen.setdefault(known, one.verdict)) == repr(one.verdict), one

    def test_the_same_call_is_never_refused_for_being_held_done_or_different(self) -> None:
        told = (LeaseHeld, AlreadyDone, KeyReused)
        assert (
            self.breaches(
                lambda one: one.same and isinstance(one.verdict, Refuse) and isinstance(one.verdict.error, told)
            )
            == []
        )

    def test_only_the_option_makes_a_delivery_wait_in_its_process(self) -> None:
        assert self.breaches(lambda one: isinstance(one.verdict, Wait) and one.call.options.on_held != "wait") == []

    def test_only_a_claim_gives_up_or_stands_back(self) -> None:
        assert self.breaches(lambda one: isinstance(one.verdict, GiveUp | StandBack)) == []

    def test_every_delay_can_be_published(self) -> None:
        def wild(one: Combination) -> bool:
            delays = isinstance(one.verdict, PutBack)
            return delays and not SHORTEST_DELAY <= one.verdict.delay <= one.call.longest_hop  # type: ignore[union-attr]

        assert self.breaches(wild) == []


class TestAStoreThatCameUpEmpty:
    def test_a_running_key_is_left_alone_until_its_holder_has_had_its_ttl(self) -> None:
        running = a_record(State.RUNNING, lease_ttl=15.0)
        verdict = store_came_up_empty(a_call(), running, 4.0, 0.0)
        assert isinstance(verdict, PutBack)
        assert verdict.delay == pytest.approx(11.0)
        assert store_came_up_empty(a_call(), running, 15.0, 0.0) == Run()

    @pytest.mark.parametrize("state", [state for state in State if state is not State.RUNNING])
    def test_any_other_key_may_be_claimed_at_once(self, state: State) -> None:
        assert store_came_up_empty(a_call(), a_record(state), 0.0, 0.0) == Run()
        assert store_came_up_empty(a_call(), None, 0.0, 0.0) == Run()


class TestStoresAway:
    @pytest.mark.parametrize(("tries", "most"), [(0, 5), (1, 10), (2, 20), (3, 40), (4, 60), (5, 60), (10_000, 60)])
    def test_a_delivery_stays_away_5_s_doubling_to_60(self, tries: int, most: float) -> None:
        assert store_pause(tries, 1.0) == pytest.approx(most)
        assert store_pause(tries, 0.0) == pytest.approx(0.8 * most)

    def test_an_outcome_is_tried_again_soon_and_then_every_two_seconds(self) -> None:
        pauses = [settle_pause(tries) for tries in range(8)]
        assert pauses == sorted(pauses)
        assert (pauses[0], pauses[-1], settle_pause(10_000)) == (0.05, 2.0, 2.0)

    def test_an_outcome_is_tried_for_the_settle_timeout(self) -> None:
        assert settle_until(a_call(options=LeaseOptions(settle_timeout=60.0)), now=100.0, taken=90.0) == 160.0

    def test_a_hard_limit_cuts_it_short(self) -> None:
        call = a_call(time_limit=30.0, options=LeaseOptions(settle_timeout=60.0))
        assert settle_until(call, now=100.0, taken=90.0) == 119.0
        call = a_call(time_limit=30.0, options=LeaseOptions(settle_timeout=5.0))
        assert settle_until(call, now=100.0, taken=90.0) == 105.0


RUNNING = a_record(State.RUNNING, OURS, attempt=4, failures=2, crashes=1)
FAILURE = Failure("ValueError", "boom")


class TestAfterTheRun:
    def outcome(self, ending: Any, record: Record = RUNNING, **changes: Any) -> Outcome:
        return after_run(a_call(**changes), record, ending)

    def test_a_value_is_done_and_clears_the_counts(self) -> None:
        outcome = self.outcome(Returned({"a": 1}, '{"a": 1}'))
        assert (outcome.state, outcome.ended, outcome.result) == (State.DONE, Ended.RETURNED, '{"a": 1}')
        assert (outcome.attempt, outcome.failures, outcome.crashes, outcome.retry_after) == (4, 0, 0, None)

    def test_a_value_that_cannot_be_kept_is_done_all_the_same(self) -> None:
        outcome = self.outcome(Returned(object(), None, NOT_JSON))
        assert (outcome.state, outcome.result, outcome.reason) == (State.DONE, None, NOT_JSON)

    def test_an_exception_leaves_the_key_free_and_counts_a_failure_not_a_crash(self) -> None:
        outcome = self.outcome(Raised(ValueError("boom"), FAILURE))
        assert (outcome.state, outcome.ended, outcome.failure) == (State.PENDING, Ended.FAILED, FAILURE)
        assert (outcome.attempt, outcome.failures, outcome.crashes, outcome.retry_after) == (4, 3, 0, None)

    @pytest.mark.parametrize(
        ("ending", "ended"),
        [(Lost("taken"), Ended.LOST), (Interrupted(SystemExit()), Ended.INTERRUPTED)],
    )
    def test_an_abandoned_attempt_is_given_back_and_counts_as_nothing(self, ending: Any, ended: Ended) -> None:
        outcome = self.outcome(ending)
        assert (outcome.state, outcome.ended) == (State.PENDING, ended)
        assert (outcome.attempt, outcome.failures, outcome.crashes, outcome.retry_after) == (3, 2, 1, None)

    @pytest.mark.parametrize(("before", "pause"), [(0, None), (1, 5.0), (2, 30.0)])
    def test_a_hard_limit_is_a_crash_with_its_pause(self, before: int, pause: float | None) -> None:
        options = LeaseOptions(key="k", max_crashes=9)
        outcome = self.outcome(
            Terminated(SystemExit(), "hard time limit"), replace(RUNNING, crashes=before), options=options
        )
        assert (outcome.state, outcome.ended) == (State.PENDING, Ended.TERMINATED)
        assert (outcome.crashes, outcome.retry_after) == (before + 1, pause)

    def test_the_last_crash_allowed_fails_for_good(self) -> None:
        outcome = self.outcome(Terminated(SystemExit(), "hard time limit"), replace(RUNNING, crashes=2))
        assert (outcome.state, outcome.crashes, outcome.reason) == (State.FAILED, 3, outcomes.CRASH_LOOP)
        assert outcome.failure is not None
        assert outcome.failure.rule == outcomes.CRASH_LOOP

    @pytest.mark.parametrize("delay", [None, 0.0, 30.0])
    @pytest.mark.parametrize("ended", [Ended.RETRIED, Ended.REJECTED])
    def test_a_retry_of_the_user_waits_for_its_countdown(self, delay: float | None, ended: Ended) -> None:
        outcome = self.outcome(Passed(Exception(), again=True, delay=delay, ended=ended))
        assert (outcome.state, outcome.ended, outcome.retry_after) == (State.PENDING, ended, delay)
        assert (outcome.attempt, outcome.failures, outcome.crashes) == (4, 2, 0)

    @pytest.mark.parametrize("ended", [Ended.IGNORED, Ended.REJECTED])
    def test_the_users_ignore_and_reject_are_done_without_a_result(self, ended: Ended) -> None:
        outcome = self.outcome(Passed(Exception(), again=False, ended=ended))
        assert (outcome.state, outcome.result, outcome.reason) == (State.DONE, None, ended.value)

    @pytest.mark.parametrize(
        "ending",
        [
            Returned(1, "1"),
            Raised(ValueError(), FAILURE),
            Lost("taken"),
            Interrupted(SystemExit()),
            Terminated(SystemExit(), "hard time limit"),
            Passed(Exception(), again=True),
            Passed(Exception(), again=False, ended=Ended.IGNORED),
        ],
        ids=lambda ending: type(ending).__name__,
    )
    def test_no_ending_leaves_the_row_running(self, ending: Any) -> None:
        """A row found running would be counted as a crash."""
        outcome = self.outcome(ending)
        assert outcome.state is not State.RUNNING
        assert outcome.retention == 7 * 86_400.0

    def test_without_rerun_no_calls_are_remembered(self) -> None:
        assert self.outcome(Returned(1, "1")).finished is None


class TestRememberedCalls:
    def finished(self, result: str | None, *before: str) -> list[tuple[str, str | None]]:
        record = replace(RUNNING, finished_calls=before, finished_results={name: f'"{name}"' for name in before})
        outcome = after_run(a_call(on_done="rerun"), record, Returned(None, result))
        assert outcome.finished is not None
        return list(outcome.finished.items())

    def test_the_call_joins_the_list_as_the_newest(self) -> None:
        assert self.finished("1", "a", "b") == [("a", '"a"'), ("b", '"b"'), (OURS, "1")]

    def test_the_last_sixteen_are_kept(self) -> None:
        names = [f"call-{number}" for number in range(REMEMBERED_CALLS)]
        kept = self.finished("1", *names)
        assert REMEMBERED_CALLS == 16
        assert [name for name, _ in kept] == [*names[1:], OURS]

    def test_a_call_is_listed_once(self) -> None:
        assert self.finished("1", OURS, "b") == [("b", '"b"'), (OURS, "1")]

    def test_a_long_result_is_not_copied_into_the_list(self) -> None:
        longest = "1" * REMEMBERED_RESULT_MAX
        assert self.finished(longest)[-1] == (OURS, longest)
        assert self.finished(longest + "1")[-1] == (OURS, None)

    def test_a_failure_does_not_join_the_list(self) -> None:
        outcome = after_run(a_call(on_done="rerun"), RUNNING, Raised(ValueError(), FAILURE))
        assert outcome.finished is None

    def test_what_it_remembers_is_what_it_answers(self) -> None:
        """The list written at the end of a run keeps the very next copy of the call from running again."""
        outcome = after_run(a_call(on_done="rerun"), RUNNING, Returned(None, "1"))
        assert outcome.finished is not None
        later = a_record(
            State.RUNNING, finished_calls=tuple(outcome.finished), finished_results=outcome.finished, fingerprint=None
        )
        assert decide(a_call(on_done="rerun"), later) == Replay("1", OURS)


class TestUnrunAttempts:
    def test_giving_up_fails_for_good_and_gives_the_attempt_back(self) -> None:
        outcome = gave_up(a_call(), replace(RUNNING, crashes=3))
        assert (outcome.state, outcome.ended, outcome.reason) == (State.FAILED, Ended.CRASHED, outcomes.CRASH_LOOP)
        assert (outcome.attempt, outcome.crashes) == (3, 3)

    def test_the_caller_and_the_record_agree_on_why(self) -> None:
        record = replace(RUNNING, crashes=3, crashed_at=NOW, started_at=NOW)
        verdict = decide(a_call(), record, claimed=True)
        outcome = gave_up(a_call(), record)
        assert isinstance(verdict, GiveUp)
        failed = a_record(State.FAILED, OURS, failure=outcome.failure)
        told = refusal(decide(a_call(), failed))
        assert isinstance(told, PermanentFailure)
        assert told.rule == verdict.error.rule

    def test_standing_back_waits_and_keeps_how_the_attempt_before_ended(self) -> None:
        before = Attempt(Ended.CRASHED, FAILURE, "host-b/9")
        outcome = stood_back(a_call(), replace(RUNNING, crashes=2, previous=before), 5.0)
        assert (outcome.state, outcome.ended, outcome.failure) == (State.PENDING, Ended.CRASHED, FAILURE)
        assert (outcome.attempt, outcome.crashes, outcome.retry_after) == (3, 2, 5.0)

    def test_standing_back_without_a_pause_leaves_the_key_free(self) -> None:
        assert stood_back(a_call(), RUNNING, 0.0).retry_after is None

    @pytest.mark.parametrize(("crashes", "pause"), [(0, 0.0), (1, 0.0), (2, 5.0), (3, 30.0), (99, 30.0)])
    def test_crashes_pause_from_the_second_on(self, crashes: int, pause: float) -> None:
        assert crash_pause(crashes) == pause
