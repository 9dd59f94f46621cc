"""The rule of the claim: who may have a row, and what the row is afterwards."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from celery_leases.call import Call
from celery_leases.decide.answers import Refusal
from celery_leases.decide.before_run import before_run
from celery_leases.decide.claim import claimed, dated, decide, refusal
from celery_leases.decide.verdicts import Facts, Run
from celery_leases.errors import LeaseStoreMismatch
from celery_leases.options import DATABASE
from celery_leases.record import (
    Attempt,
    Ended,
    Failure,
    Record,
    State,
)
from tests.unit.decision_inputs import KEY, NOW, OURS, SECOND, THEIRS, WHEN_DONE, a_call, a_record
from tests.unit.test_combinations import COOLED, FINGERPRINTS, ROWS, rows

STORE = "redis://one"


def a_claim(**changes: Any) -> Call:
    """A call of another attempt than that of the rows."""
    return a_call(**({"token": "token-2", "host": "host-b/18"} | changes))


class TestRowsOfNewKeys:
    @pytest.mark.parametrize("store", [STORE, DATABASE])
    def test_the_row_of_an_insert_is_the_row_that_is_claimed_then(self, store: str) -> None:
        """The time of the insert is known only afterwards."""
        call = a_claim()
        assert dated(claimed(None, call, store, 0), NOW) == claimed(None, call, store, NOW)


class TestOneRule:
    def test_what_is_decided_before_the_claim_is_what_the_claim_decides(self) -> None:
        verdicts = [before_run(call, Facts(record=row)) for row, call in situations()]
        refusals = [refusal(row, call) for row, call in situations()]
        assert [isinstance(verdict, Run) for verdict in verdicts] == [
            why is None for why in refusals
        ]
        assert set(Refusal) - set(refusals) == {
            *(Refusal.EMPTIED, Refusal.LAPSED, Refusal.CHANGED, Refusal.COOLING, Refusal.CLOSED),
            Refusal.FULL,
        }


def situations() -> list[tuple[Record | None, Call]]:
    calls = [
        a_call(**when_done, repeat=repeat, retries=retries, prior=prior)
        for when_done, repeat, retries, prior in product(
            WHEN_DONE, (False, True), (0, 2), ((), ("token-1",))
        )
    ]
    found = list(rows(ROWS | COOLED, FINGERPRINTS))
    retried = {"retries": 1, "ended": Ended.RETRIED, "retry_at": NOW + SECOND // 2}
    found += [a_record(State.PENDING, call, **retried) for call in (OURS, THEIRS)]
    return list(product(found, calls))


class TestARunningRow:
    @pytest.mark.parametrize(
        ("until", "why"), [(None, None), (NOW - SECOND, None), (NOW, None), (NOW + 1, Refusal.HELD)]
    )
    def test_it_is_left_alone_while_its_lease_lasts(self, until, why) -> None:
        row = a_record(State.RUNNING, lease_store=DATABASE, lease_until=until)
        assert decide(row, a_claim(), DATABASE) is why

    @pytest.mark.parametrize(
        ("takeover_until", "why"),
        [(NOW - 5 * SECOND, None), (NOW - 5 * SECOND - 1, Refusal.LAPSED)],
    )
    def test_a_lapsed_lease_is_taken_by_a_look_that_was_carried_out_in_time(
        self, takeover_until: int, why: Refusal | None
    ) -> None:
        row = a_record(State.RUNNING, lease_store=DATABASE, lease_until=NOW - SECOND)
        assert decide(row, a_claim(), DATABASE, takeover_until=takeover_until) is why
        assert (
            decide(row, a_claim(prior=(row.owner,)), DATABASE, takeover_until=takeover_until)
            is None
        )

    @pytest.mark.parametrize(
        ("age", "why"), [(0.0, Refusal.EMPTIED), (14.9, Refusal.EMPTIED), (15.0, None)]
    )
    def test_one_under_a_store_that_came_up_empty_is_left_alone_for_its_own_ttl(
        self, age: float, why: Refusal | None
    ) -> None:
        """The ttl of the call does not matter."""
        for ttl in (0.1, 600.0):
            assert decide(a_record(State.RUNNING), a_claim(ttl=ttl), STORE, emptied=age) is why
        assert (
            decide(a_record(State.RUNNING), a_claim(prior=("token-1",)), STORE, emptied=age) is None
        )
        for state in (State.PENDING, State.COOLING):
            assert decide(a_record(state), a_claim(), STORE, emptied=age) is None

    def test_the_age_of_the_lease_store_is_asked_only_where_the_row_of_another_attempt_would_be_taken(
        self,
    ) -> None:
        """If the row is the lease, no other store can lose it."""
        assert decide(a_record(State.RUNNING), a_claim(), STORE) is Refusal.EMPTIED
        in_database = a_record(State.RUNNING, lease_store=DATABASE)
        assert decide(in_database, a_claim(), DATABASE) is None
        for row, call in situations():
            if row is None or row.state is not State.RUNNING or refusal(row, call) is not None:
                assert decide(row, call, STORE) is not Refusal.EMPTIED, (row, call)

    def test_what_an_earlier_attempt_of_the_call_left_open_is_taken_at_once(self) -> None:
        row = a_record(State.RUNNING, OURS, lease_store=DATABASE, lease_until=NOW + 9 * SECOND)
        assert decide(row, a_claim(), DATABASE) is Refusal.HELD
        assert decide(row, a_claim(prior=("token-0", row.owner)), DATABASE) is None

    def test_one_under_another_lease_store_is_an_error_that_names_both(self) -> None:
        with pytest.raises(LeaseStoreMismatch) as caught:
            decide(a_record(State.RUNNING), a_claim(), "redis://two")
        assert (caught.value.ours, caught.value.theirs) == ("redis://two", STORE)
        assert decide(a_record(State.PENDING), a_claim(), "redis://two") is None


@pytest.mark.parametrize(
    ("state", "ended", "resumes", "why"),
    [
        (State.RUNNING, None, False, Refusal.SUPERSEDED),
        (State.PENDING, Ended.RETRIED, False, Refusal.SUPERSEDED),
        (State.PENDING, Ended.LOST, True, Refusal.SUPERSEDED),
        (State.PENDING, Ended.LOST, False, None),
    ],
)
def test_a_later_retry_that_runs_or_will_run_supersedes_the_call(
    state, ended, resumes, why
) -> None:
    row = a_record(state, OURS, retries=2, ended=ended, resumes=resumes)
    assert [refusal(row, a_claim(retries=retries)) for retries in (1, 2)] == [why, None]


class TestTheRowAfterwards:
    def test_a_new_row_has_the_values_of_the_call(self) -> None:
        claim = a_claim(message="{}", retention=60.0, retries=2)
        row = claimed(None, claim, STORE, NOW)
        assert (row.state, row.owner, row.call_id, row.retries) == (
            State.RUNNING, "token-2", OURS, 2,
        )  # fmt: skip
        assert (row.attempt, row.generation, row.failures, row.crashes) == (1, 0, 0, 0)
        assert {row.fence, row.created_at, row.started_at, row.now} == {NOW}
        assert (row.message, row.retention, row.lease_store, row.lease_until) == (
            "{}",
            60.0,
            STORE,
            None,
        )
        assert claimed(None, a_claim(), DATABASE, NOW).lease_until == NOW + 15 * SECOND

    @pytest.mark.parametrize(
        ("clock", "fence"), [(NOW, NOW), (NOW - 20 * SECOND, NOW - 9 * SECOND + 1)]
    )
    def test_the_fence_grows_whatever_the_clock_says(self, clock: int, fence: int) -> None:
        row = a_record(State.PENDING)
        assert claimed(replace(row, now=clock), a_claim(), STORE, clock).fence == fence > row.fence

    def test_an_attempt_after_another_keeps_its_counts_and_how_it_ended(self) -> None:
        failure = Failure("E", "no")
        row = a_record(
            State.PENDING,
            OURS,
            attempt=2,
            failures=1,
            cooldowns=1,
            ended=Ended.FAILED,
            failure=failure,
            resumes=True,
        )
        after = claimed(row, a_claim(), STORE, NOW)
        assert (after.attempt, after.failures, after.cooldowns, after.crashes) == (3, 1, 1, 0)
        assert after.previous == Attempt(Ended.FAILED, failure, row.holder)
        assert (after.ended, after.failure, after.just_crashed) == (None, None, False)

    def test_a_running_row_without_an_outcome_is_a_suspected_crash(self) -> None:
        after = claimed(a_record(State.RUNNING, crashes=1), a_claim(), STORE, NOW)
        assert (after.crashes, after.crashed_call, after.just_crashed) == (2, THEIRS, True)
        assert after.previous == Attempt(Ended.ABANDONED, None, "host-a/17")

    def test_a_row_that_the_same_attempt_left_open_is_no_crash(self) -> None:
        after = claimed(a_record(State.RUNNING, crashes=1), a_claim(prior=("token-1",)), STORE, NOW)
        assert (after.crashes, after.crashed_call, after.just_crashed) == (1, None, False)
        assert after.previous == Attempt(Ended.LOST, None, "host-a/17")

    @pytest.mark.parametrize(("last", "crashes"), [(None, 3), (THEIRS, 3), ("third", 1)])
    def test_under_rerun_crashes_in_a_row_are_those_of_one_call(self, last, crashes) -> None:
        row = a_record(State.RUNNING, THEIRS, crashes=2, crashed_call=last)
        assert claimed(row, a_claim(runs="each"), STORE, NOW).crashes == crashes

    def test_another_call_of_a_rerun_task_begins_a_generation(self) -> None:
        counts: dict[str, Any] = {
            "failures": 2, "quick_retries": 1, "cooldowns": 1, "failed_at": NOW,
        }  # fmt: skip
        row = a_record(
            State.DONE, attempt=3, ended=Ended.RETURNED, finished_calls=(THEIRS,), **counts
        )
        after = claimed(row, a_claim(runs="each"), STORE, NOW)
        assert (after.attempt, after.generation, after.previous) == (1, 1, None)
        assert (after.failures, after.quick_retries, after.cooldowns, after.failed_at) == (
            0, 0, 0, None,
        )  # fmt: skip
        assert after.finished_calls == (THEIRS,)

    def test_a_row_whose_retention_is_over_starts_again(self) -> None:
        row = a_record(State.FAILED, attempt=3, crashes=2, finished_calls=("x",), expires_at=NOW)
        assert decide(row, a_claim(), STORE) is None
        after = claimed(row, a_claim(), STORE, NOW)
        assert (after.attempt, after.generation, after.crashes, after.finished_calls) == (
            1, 1, 0, (),
        )  # fmt: skip
        assert (after.expires_at, after.created_at) == (None, row.created_at)

    def test_a_call_retains_its_fingerprint(self) -> None:
        row = a_record(State.PENDING, OURS)
        assert (
            claimed(row, a_claim(key=replace(KEY, fingerprint="v2:new")), STORE, NOW).fingerprint
            == row.fingerprint
        )
        for other in (a_record(State.PENDING), a_record(State.PENDING, OURS, fingerprint=None)):
            assert (
                claimed(
                    other, a_claim(key=replace(KEY, fingerprint="v2:new")), STORE, NOW
                ).fingerprint
                == "v2:new"
            )

    @pytest.mark.parametrize(
        ("kept", "publish_at", "given", "message"),
        [
            ("a", None, "b", "b"),
            ("a", None, None, "a"),
            ("a", NOW, "b", "a"),
            (None, None, "b", "b"),
        ],
    )
    def test_a_message_that_must_still_be_published_stays(self, kept, publish_at, given, message):
        row = a_record(State.PENDING, message=kept, publish_at=publish_at)
        assert claimed(row, a_claim(message=given), STORE, NOW).message == message
