"""The contract of record stores for failures: store them, count them, and know whether the call
runs again.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from celery_leases.record import Ended, Failure, Record, State
from celery_leases.stores.sql.records import SqlRecordStore
from celery_leases.testing.contracts.calls import make_call
from celery_leases.testing.contracts.record_case import (
    PassTime,
    RecordCase,
    again,
    closed,
    outcome,
    refused,
    row,
    won,
)

FAILURE = Failure(
    "shop.errors.Declined", "ü \u2028 '\"", "status:429", "rate_limited", "openai:{x}", True, True
)
COUNTED: dict[str, Any] = {"failures": 4, "quick_retries": 3, "cooldowns": 2, "failed": True}
MARGIN = 30e6
"""The maximum difference of two times within a test, in microseconds."""


class FailureContract(RecordCase):
    """Counts belong to a generation. A call that has raised its error to the caller does not run
    again; a call that resumes does.
    """

    @pytest.mark.parametrize(
        "failure",
        [
            FAILURE,
            Failure("", ""),
            Failure("builtins.ValueError", "no"),
            Failure("t", "m", None, "reason"),
            Failure("t" * 400, "\x00", group="g"),
            replace(FAILURE, ambiguous=False),
            replace(FAILURE, operator=False),
        ],
    )
    def test_a_failure_is_remembered_as_it_was_given(
        self, records: SqlRecordStore, key: str, failure: Failure
    ) -> None:
        """All its fields, also once it is the failure of the previous attempt."""
        closed(
            records,
            won(records, make_call(key)),
            State.PENDING,
            ended=Ended.FAILED,
            failure=failure,
        )
        assert row(records, key).failure == failure
        record = won(records, make_call(key))
        assert record.failure is None
        assert record.previous is not None
        assert record.previous.error == failure
        closed(records, record, State.PENDING, ended=Ended.LOST)
        assert row(records, key).failure is None

    def test_counts_are_written_and_outlive_the_next_claim(
        self, records: SqlRecordStore, key: str
    ) -> None:
        """Failures, quick retries, cooldowns, and the time of the last failure."""
        record = won(records, make_call(key))
        assert counts(record) == (0, 0, 0, False)
        found = closed(records, record, State.COOLING, ended=Ended.FAILED, resumes=True, **COUNTED)
        assert counts(found) == (4, 3, 2, True)
        assert found.resumes
        assert found.failed_at == found.finished_at
        assert abs((found.failed_at or 0) - record.started_at) < MARGIN
        record = won(records, make_call(key))
        assert counts(record) == (4, 3, 2, True)
        assert record.failed_at == found.failed_at

    def test_only_a_failure_moves_the_moment_of_the_last_one(
        self, records: SqlRecordStore, key: str
    ) -> None:
        """Another end of an attempt does not change it. A call that never failed has none."""
        assert (
            closed(
                records, won(records, make_call(key)), State.PENDING, ended=Ended.SNOOZED
            ).failed_at
            is None
        )
        failed = closed(
            records,
            won(records, make_call(key)),
            State.PENDING,
            ended=Ended.FAILED,
            failed=True,
        )
        snoozed = closed(records, won(records, make_call(key)), State.PENDING, ended=Ended.SNOOZED)
        assert snoozed.failed_at == failed.failed_at
        assert snoozed.ended is Ended.SNOOZED
        moved = closed(
            records,
            won(records, make_call(key)),
            State.PENDING,
            ended=Ended.FAILED,
            failed=True,
        )
        assert moved.failed_at is not None
        assert failed.failed_at is not None
        assert moved.failed_at > failed.failed_at

    def test_counts_end_with_their_generation(self, records: SqlRecordStore, key: str) -> None:
        """If each call runs, the failures of the next one begin at 0, also if its own first
        attempt dies. Crashes are counted on; so are quick retries and cooldowns of a call that has
        not ended.
        """
        call = make_call(key, each_runs=True)
        closed(records, won(records, call), State.PENDING, ended=Ended.FAILED, **COUNTED)
        assert counts(won(records, again(call, each_runs=True))) == (4, 3, 2, True)
        other = make_call(key, each_runs=True)
        for _ in range(2):
            assert counts(won(records, other)) == (0, 3, 2, True)
            assert counts(row(records, key)) == (0, 3, 2, True)
            other = again(other, each_runs=True)
        record = won(records, other)
        assert record.crashes == 2
        found = closed(records, record, State.PENDING, ended=Ended.FAILED, failures=1, failed=True)
        assert counts(found) == (1, 0, 0, True)
        record = won(records, again(other, each_runs=True))
        assert counts(record) == (1, 0, 0, True)
        closed(records, record, State.DONE, **COUNTED)
        assert counts(won(records, make_call(key, each_runs=True))) == (0, 0, 0, False)

    def test_counts_end_with_the_retention(
        self, records: SqlRecordStore, key: str, pass_time: PassTime
    ) -> None:
        """A row whose retention is over counts as absent, including its failures."""
        more: dict[str, Any] = {"retention": self.short, "resumes": True, **COUNTED}
        closed(
            records,
            won(records, make_call(key)),
            State.COOLING,
            ended=Ended.FAILED,
            **more,
        )
        pass_time(1.2 * self.short)
        assert counts(won(records, make_call(key))) == (0, 0, 0, False)

    # -- does the call run again? ------------------------------------------------------------------

    @pytest.mark.parametrize("state", [State.PENDING, State.COOLING])
    def test_a_copy_of_a_call_that_raised_is_refused(
        self, records: SqlRecordStore, key: str, state: State
    ) -> None:
        """Its caller has got the error. A new message with its id, and any other call, may run."""
        call = make_call(key)
        closed(
            records,
            won(records, call),
            state,
            ended=Ended.FAILED,
            failure=FAILURE,
            failed=True,
        )
        assert refused(records, again(call, repeat=True)).failure == FAILURE
        assert won(records, again(call)).attempt == 2

    @pytest.mark.parametrize("state", [State.PENDING, State.COOLING])
    def test_a_fresh_message_that_waits_for_a_failure_runs_once(
        self, records: SqlRecordStore, key: str, state: State
    ) -> None:
        """A copy of it that comes after that run is refused, because the failure it waited for is
        no longer the last one.
        """
        call = make_call(key)
        ended: dict[str, Any] = {"ended": Ended.FAILED, "failure": FAILURE, "failed": True}
        first = won(records, call)
        closed(records, first, state, **ended)
        second = won(records, again(call, repeat=True, failure_fence=first.fence))
        closed(records, second, state, **ended)
        assert second.attempt == 2
        assert (
            refused(records, again(call, repeat=True, failure_fence=first.fence)).fence
            == second.fence
        )
        assert won(records, again(call, repeat=True, failure_fence=second.fence)).attempt == 3

    @pytest.mark.parametrize("state", [State.PENDING, State.COOLING])
    def test_a_copy_of_a_call_that_resumes_runs_at_its_time(
        self, records: SqlRecordStore, key: str, state: State, pass_time: PassTime
    ) -> None:
        """Not before. Afterwards other calls may run too."""
        call = make_call(key)
        wait = 1.0 + 2 * self.short
        given: dict[str, Any] = {
            "ended": Ended.FAILED,
            "failure": FAILURE,
            "resumes": True,
            "retry_after": wait,
        }
        closed(records, won(records, call), state, **given)
        for rival in (again(call, repeat=True), make_call(key)):
            assert refused(records, rival).resumes
        pass_time(1.2 * wait)
        record = won(records, again(call, repeat=True))
        closed(records, record, state, **given | {"retry_after": None})
        assert won(records, make_call(key)).attempt == 3

    @pytest.mark.parametrize("state", [State.PENDING, State.COOLING])
    @pytest.mark.parametrize("resumes", [True, False])
    def test_a_call_that_comes_back_keeps_its_arguments(
        self, records: SqlRecordStore, key: str, state: State, resumes: bool
    ) -> None:
        """A call with other arguments may take the key of a call that has raised its error, but not
        that of a call that resumes.
        """
        call = make_call(key, fingerprint="v1:a")
        closed(
            records,
            won(records, call),
            state,
            ended=Ended.FAILED,
            failed=True,
            resumes=resumes,
        )
        other = make_call(key, fingerprint="v1:b")
        if resumes:
            assert refused(records, other).fingerprint == "v1:a"
        else:
            assert won(records, other).fingerprint == "v1:b"

    # -- a lost reply ------------------------------------------------------------------------------

    @pytest.mark.parametrize(
        "more",
        [
            {"failure": replace(FAILURE, reason="other")},
            {"failure": None},
            {"resumes": False},
            {"reason": "other"},
            {"failures": 5},
            {"cooldowns": 0},
            {"quick_retries": 0},
            {"attempt": 0},
        ],
    )
    def test_another_outcome_of_the_same_attempt_is_not_taken_for_ours(
        self, records: SqlRecordStore, key: str, more: dict[str, Any]
    ) -> None:
        """The same outcome is, because the reply to the first try may have been lost."""
        record = won(records, make_call(key))
        given: dict[str, Any] = {
            "ended": Ended.FAILED,
            "failure": FAILURE,
            "resumes": True,
            "reason": "r" * 300,
        }
        given |= {"retry_after": 60.0, **COUNTED}
        written = closed(records, record, State.COOLING, **given)
        assert records.settle(record, outcome(record, State.COOLING, **given))
        assert not records.settle(record, outcome(record, State.COOLING, **given | more))
        assert row(records, key) == written


def counts(record: Record) -> tuple[int, int, int, bool]:
    """The counts of the record's generation, and whether it has failed."""
    return record.failures, record.quick_retries, record.cooldowns, record.failed_at is not None
