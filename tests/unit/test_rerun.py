"""With ``runs="each"`` each call is work of its own; the record lists those that finished."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Any

import pytest

from celery_leases.decide import attempt_history
from celery_leases.decide.after_failure import after_failure
from celery_leases.decide.after_run import (
    FINISHED_CALLS_MAX,
    FINISHED_RESULT_MAX,
    after_run,
    child_exited,
    stopped_by_crash_loop,
)
from celery_leases.decide.attempt_history import CRASHED_CALLS_MAX
from celery_leases.decide.before_run import after_claim
from celery_leases.decide.claim import claimed
from celery_leases.decide.endings import ExitCause, Returned
from celery_leases.decide.repairs import settled
from celery_leases.decide.verdicts import Drop, Raise, Reschedule, Return, Run
from celery_leases.errors import CoolingDown, PermanentFailure, ResultMissing
from celery_leases.failures.actions import cooldown, permanent, retry
from celery_leases.record import Ended, Record, State
from tests.unit.decision_inputs import (
    NOW,
    OURS,
    RUNNING,
    SECOND,
    THEIRS,
    a_call,
    a_record,
    decide,
    held_by,
    raised,
    refusal,
    waiting,
)

STORE = "redis://one"


class TestRerun:
    def listed(self, state: State, **changes: Any) -> Record:
        return a_record(
            state,
            fingerprint=None,
            finished_calls=(OURS, THEIRS),
            finished_results={OURS: "1", THEIRS: "2"},
            **changes,
        )

    @pytest.mark.parametrize("state", State)
    def test_a_call_on_the_list_never_runs_again_in_any_state_of_the_key(self, state) -> None:
        assert decide(a_call(runs="each"), self.listed(state, lease_until=NOW + SECOND)) == Return(
            1, OURS
        )

    def test_a_call_on_the_list_is_dropped_once_its_callbacks_are_out(self) -> None:
        verdict = decide(
            a_call(runs="each", canvas=True), self.listed(State.RUNNING), callbacks_sent=True
        )
        assert isinstance(verdict, Drop)

    def test_a_call_on_the_list_whose_result_was_overwritten_gets_an_error_and_does_not_run(self):
        record = replace(self.listed(State.DONE), finished_results={OURS: None, THEIRS: "2"})
        assert isinstance(refusal(decide(a_call(runs="each"), record)), ResultMissing)

    def test_another_call_runs(self) -> None:
        record = a_record(State.DONE, result="2", fingerprint=None, finished_calls=(THEIRS,))
        assert decide(a_call(runs="each"), record) == Run()

    def test_another_call_runs_after_a_permanent_failure(self) -> None:
        assert decide(a_call(runs="each"), a_record(State.FAILED)) == Run()

    def test_the_call_that_failed_for_good_gets_its_failure(self) -> None:
        assert isinstance(
            refusal(decide(a_call(runs="each"), a_record(State.FAILED, OURS))), PermanentFailure
        )

    def test_arguments_are_not_compared(self) -> None:
        assert decide(a_call(runs="each"), a_record(State.DONE, fingerprint="v1:other")) == Run()

    @pytest.mark.parametrize("canvas", [False, True])
    def test_a_live_lease_holds_another_call_back(self, canvas: bool) -> None:
        running = a_record(State.RUNNING, fingerprint=None, lease_until=NOW + 9 * SECOND)
        assert isinstance(decide(a_call(runs="each", canvas=canvas), running), Reschedule)

    def test_a_lease_taken_by_a_third_call_holds_back_although_the_last_run_is_done(self) -> None:
        done = a_record(State.DONE, fingerprint=None, finished_calls=(THEIRS,))
        assert isinstance(decide(a_call(runs="each"), done, held_by("call-third")), Reschedule)

    def test_a_cooldown_holds_another_call_back(self) -> None:
        cooling = waiting(State.COOLING, 60, fingerprint=None)
        assert isinstance(refusal(decide(a_call(runs="each"), cooling)), CoolingDown)
        assert isinstance(decide(a_call(runs="each", on_busy="wait"), cooling), Reschedule)
        assert decide(a_call(runs="each"), waiting(State.COOLING, 0, fingerprint=None)) == Run()

    def test_a_countdown_holds_another_call_back(self) -> None:
        assert isinstance(
            decide(a_call(runs="each"), waiting(State.PENDING, 60, fingerprint=None)),
            Reschedule,
        )


class TestCrashesUnderRerun:
    def test_a_poisonous_call_is_given_up_although_others_ran_between_its_crashes(self) -> None:
        record = a_record(
            State.RUNNING, OURS, crashes=3, crashed_call=OURS, finished_calls=(THEIRS,)
        )
        assert isinstance(after_claim(a_call(runs="each"), record), Raise)

    def test_another_call_does_not_pay_for_it_and_does_not_clear_it(self) -> None:
        record = a_record(
            State.RUNNING, OURS, crashes=3, crashed_call=THEIRS, crashed_at=NOW - 9 * SECOND
        )
        assert after_claim(a_call(runs="each"), record) == Run()
        assert after_run(a_call(runs="each"), record, Returned(1, "1")).crashes == 3

    @pytest.mark.parametrize("known", [True, False], ids=["seen", "suspected"])
    def test_calls_that_crash_in_turn_all_end(self, known: bool) -> None:
        """Also if there are more than a row counts."""
        row, bodies, waiting = None, 0, deque(f"call-{number}" for number in range(30))
        while waiting:
            call = a_call(runs="each", call_id=waiting.popleft(), token=f"token-{bodies}")
            row = claimed(row, call, STORE, NOW)
            if isinstance(after_claim(call, row), Raise):
                row = settled(row, stopped_by_crash_loop(call, row), NOW)
                continue
            bodies += 1
            waiting.append(call.call_id)
            if known:
                row = settled(row, child_exited(call, row, ExitCause.KILLED), NOW)
                row = replace(row, retry_at=None)
        assert bodies <= 30 * 4
        assert row is not None
        assert len(row.other_crashes or {}) <= CRASHED_CALLS_MAX + 1

    @pytest.mark.parametrize("state", [None, State.RUNNING], ids=["", "a crash in between"])
    def test_a_key_whose_calls_fail_in_turn_cools_down(self, state: State | None) -> None:
        """They would call a service that is down once a second otherwise."""
        row, waits, now = None, [], NOW
        for number in range(12):
            call = a_call(runs="each", call_id=f"call-{number % 2}", token=f"token-{number}")
            row = claimed(row, call, STORE, now)
            outcome = after_failure(call, row, raised(retry()), 0.0)
            row = settled(row, outcome, now)
            row = replace(row, state=state or row.state)
            waits.append(outcome.retry_after or 0.0)
            now += round(waits[-1] * 1e6) + SECOND
        assert waits[:3] == sorted({*waits[:3]})
        assert max(waits) > 100 * waits[0]  # it has cooled down

    @pytest.mark.parametrize(
        ("counts", "crashes", "gone"),
        [([2] * 14 + [1], 0, None), ([2] * 15 + [1], 1, "call-15"), ([3] * 16, 0, "last")],
    )
    def test_beyond_sixteen_others_a_call_goes_on_from_the_fewest_crashes(
        self, counts: list[int], crashes: int, gone: str | None
    ) -> None:
        others = {f"call-{number}": count for number, count in enumerate(counts)}
        row = a_record(State.PENDING, crashed_call="last", crashes=3, other_crashes=others)
        new = attempt_history.crashes_counted_for(row, OURS, 3)
        assert (new.crashes, new.crashed_call) == (crashes, OURS)
        left = {call: count for call, count in (others | {"last": 3}).items() if call != gone}
        assert new.other_crashes == left

    def test_a_call_that_crashed_and_another_that_did_count_alone(self) -> None:
        row = a_record(State.RUNNING, THEIRS, crashes=2, crashed_call="third")
        row = claimed(row, a_call(runs="each", token="token-2"), STORE, NOW)
        assert (row.crashes, row.crashed_call, row.other_crashes) == (1, THEIRS, {"third": 2})
        died = settled(row, child_exited(a_call(runs="each"), row, ExitCause.KILLED), NOW)
        assert (died.crashes, died.crashed_call) == (1, OURS)
        assert died.other_crashes == {"third": 2, THEIRS: 1}
        third = claimed(died, a_call(runs="each", call_id="third", token="token-3"), STORE, NOW)
        assert (third.crashes, third.crashed_call) == (2, "third")
        assert third.other_crashes == {THEIRS: 1, OURS: 1}
        lives = attempt_history.with_end(third, "token-1", Ended.LOST, THEIRS)
        assert lives is not None
        assert (lives.crashes, lives.other_crashes) == (2, {THEIRS: 0, OURS: 1})
        ours_lives = attempt_history.with_end(third, "token-1", Ended.LOST, OURS)
        assert ours_lives is not None
        assert (ours_lives.crashes, ours_lives.other_crashes) == (2, {THEIRS: 1, OURS: 0})
        theirs = claimed(
            replace(lives, state=State.PENDING),
            a_call(runs="each", call_id=THEIRS, token="token-4"),
            STORE,
            NOW,
        )
        assert after_run(a_call(runs="each"), theirs, Returned(1, "1")).other_crashes == {
            THEIRS: 0,
            OURS: 1,
        }

    def test_a_call_given_up_is_not_run_again(self) -> None:
        call = a_call(runs="each")
        finished = stopped_by_crash_loop(call, a_record(State.RUNNING, OURS, crashes=3)).finished
        assert finished is not None
        later = a_record(State.DONE, finished_calls=tuple(finished), finished_results=finished)
        again = decide(call, later)
        assert isinstance(again, Raise)
        assert isinstance(again.error, PermanentFailure)
        assert "its process died" in str(again.error)
        assert again.own


class TestRememberedCalls:
    def finished(self, result: str | None, *before: str) -> list[tuple[str, str | None]]:
        record = replace(
            RUNNING, finished_calls=before, finished_results={name: f'"{name}"' for name in before}
        )
        outcome = after_run(a_call(runs="each"), record, Returned(None, result))
        assert outcome.finished is not None
        return list(outcome.finished.items())

    def test_the_call_joins_the_list_as_the_newest(self) -> None:
        assert self.finished("1", "a", "b") == [("a", '"a"'), ("b", '"b"'), (OURS, "1")]

    def test_the_last_sixteen_are_stored(self) -> None:
        names = [f"call-{number}" for number in range(FINISHED_CALLS_MAX)]
        kept = self.finished("1", *names)
        assert FINISHED_CALLS_MAX == 16
        assert [name for name, _ in kept] == [*names[1:], OURS]

    def test_a_call_is_listed_once(self) -> None:
        assert self.finished("1", OURS, "b") == [("b", '"b"'), (OURS, "1")]

    def test_a_long_result_is_not_copied_into_the_list(self) -> None:
        longest = "1" * FINISHED_RESULT_MAX
        assert self.finished(longest)[-1] == (OURS, longest)
        assert self.finished(longest + "1")[-1] == (OURS, None)

    def test_a_failure_that_waits_does_not_join_the_list(self) -> None:
        call, ending = a_call(runs="each"), raised(cooldown("60s"))
        assert after_failure(call, RUNNING, ending, 0.0).finished is None

    def test_a_copy_of_a_call_that_failed_for_good_gets_its_failure_from_the_row(self) -> None:
        """Its process may have died before its caller got the failure; if the copy were dropped, a
        chord would wait for ever.
        """
        call, ending = a_call(runs="each", canvas=True, repeat=True), raised(permanent())
        outcome = after_failure(call, RUNNING, ending, 0.0)
        assert outcome.finished is not None
        listed: dict[str, Any] = {
            "finished_calls": tuple(outcome.finished),
            "finished_results": outcome.finished,
        }
        failed = a_record(State.FAILED, OURS, failure=outcome.failure, **listed)
        for record in (failed, a_record(State.RUNNING, **listed)):
            verdict = decide(call, record)
            assert isinstance(verdict, Raise)
            assert (str(verdict.error), verdict.own) == ("ValueError: boom", True)

    def test_what_it_remembers_is_what_it_answers(self) -> None:
        outcome = after_run(a_call(runs="each"), RUNNING, Returned(None, "1"))
        assert outcome.finished is not None
        later = a_record(
            State.RUNNING,
            finished_calls=tuple(outcome.finished),
            finished_results=outcome.finished,
            fingerprint=None,
        )
        assert decide(a_call(runs="each"), later) == Return(1, OURS)
