"""The contract of record stores for outcomes, and for the end of the retention."""

from __future__ import annotations

from dataclasses import replace

import pytest

from celery_leases.record import Ended, Failure, State
from celery_leases.stores.sql.records import SqlRecordStore
from celery_leases.testing.contracts.calls import fresh_key, make_call
from celery_leases.testing.contracts.record_case import (
    PassTime,
    RecordCase,
    closed,
    outcome,
    refused,
    row,
    waiting,
    won,
)

MARGIN = 30e6
"""The maximum difference of two times within a test, in microseconds."""


class SettleContract(RecordCase):
    """Every outcome is a compare-and-set on state, fence and owner."""

    def test_success_is_written_with_its_result(self, records: SqlRecordStore, key: str) -> None:
        """The row is done, finished now, and expires after the retention."""
        record = won(records, make_call(key))
        done = closed(records, record, result='{"b": [1, "ü"]}', retention=3600.0, reason="why")
        assert (done.state, done.result, done.reason) == (State.DONE, '{"b": [1, "ü"]}', "why")
        assert (done.fence, done.owner, done.attempt) == (record.fence, record.owner, 1)
        assert done.finished_at is not None
        assert done.expires_at is not None
        assert abs(done.finished_at - record.started_at) < MARGIN
        assert abs(done.expires_at - done.finished_at - 3600e6) < 1e6
        assert done.retry_at is None

    def test_failure_is_written_with_its_error_and_retry_time(
        self, records: SqlRecordStore, key: str
    ) -> None:
        """And with the counts of the outcome, whatever they were before."""
        failure = Failure("shop.errors.Declined", "declined: ü", "rule-7")
        record = won(records, make_call(key))
        found = closed(
            records,
            record,
            State.PENDING,
            ended=Ended.FAILED,
            attempt=4,
            failures=3,
            crashes=2,
            failure=failure,
            retry_after=120.0,
        )
        assert (found.state, found.attempt, found.failures, found.crashes) == (
            State.PENDING,
            4,
            3,
            2,
        )
        assert found.failure == failure
        assert found.retry_at is not None
        assert found.finished_at is not None
        assert abs(found.retry_at - found.finished_at - 120e6) < 1e6

    def test_a_waiting_row_does_not_expire_before_its_time(
        self, records: SqlRecordStore, key: str
    ) -> None:
        """Even with a shorter retention."""
        found = waiting(records, make_call(key), 120.0)
        assert found.retry_at is not None
        assert found.expires_at is None or found.expires_at >= found.retry_at

    @pytest.mark.parametrize("wrong", ["fence", "owner"])
    def test_only_fence_and_owner_settle(
        self, records: SqlRecordStore, key: str, wrong: str
    ) -> None:
        """A stale attempt changes nothing."""
        record = won(records, make_call(key))
        before = row(records, key)
        stale = (
            replace(record, fence=record.fence - 1)
            if wrong == "fence"
            else replace(record, owner="stranger")
        )
        assert not records.settle(stale, outcome(stale, result='"stale"'))
        assert row(records, key) == before

    def test_an_attempt_that_was_overtaken_cannot_settle(
        self, records: SqlRecordStore, key: str
    ) -> None:
        """Neither while its successor runs, nor after the successor has finished."""
        zombie = won(records, make_call(key))
        successor = won(records, make_call(key))
        assert not records.settle(zombie, outcome(zombie, result='"zombie"'))
        closed(records, successor, result='"right"')
        assert not records.settle(zombie, outcome(zombie, result='"zombie"'))
        assert row(records, key).result == '"right"'

    def test_a_repeated_settlement_is_harmless(self, records: SqlRecordStore, key: str) -> None:
        """The reply to the commit may have been lost: writing the same outcome again succeeds, and
        changes nothing.
        """
        record = won(records, make_call(key))
        done = closed(records, record, result='"a"')
        assert records.settle(record, outcome(record, result='"a"'))
        assert row(records, key) == done

    def test_an_attempt_closed_by_another_is_not_settled(
        self, records: SqlRecordStore, key: str
    ) -> None:
        """Another process has settled the row as crashed: a success that was not written must not
        count as written.
        """
        record = won(records, make_call(key))
        given_back = closed(records, record, State.PENDING, ended=Ended.TERMINATED, crashes=1)
        assert not records.settle(record, outcome(record, result='"late"'))
        assert row(records, key) == given_back

    def test_an_unknown_row_cannot_be_settled(self, records: SqlRecordStore, key: str) -> None:
        """The row may have been purged."""
        record = replace(won(records, make_call(key)), stored_key=fresh_key())
        assert not records.settle(record, outcome(record))
        assert records.read(record.stored_key) is None

    # -- retention ---------------------------------------------------------------------------------

    @pytest.mark.parametrize("state", [State.DONE, State.FAILED, State.PENDING])
    def test_a_row_counts_as_absent_after_its_retention(
        self, records: SqlRecordStore, key: str, state: State, pass_time: PassTime
    ) -> None:
        """The next claim is a first attempt. Of the old row only the fence matters, which grows."""
        old = closed(
            records,
            won(records, make_call(key, fingerprint="v1:a")),
            state,
            ended=Ended.FAILED,
            retention=self.short,
            failures=3,
            crashes=2,
            attempt=5,
            result='"old"',
            finished={"some-call": None},
        )
        pass_time(1.2 * self.short)
        record = won(records, make_call(key, fingerprint="v1:b"))
        assert (record.attempt, record.failures, record.crashes) == (1, 0, 0)
        assert (record.fingerprint, record.result, record.previous) == ("v1:b", None, None)
        assert record.finished_calls == ()
        assert record.created_at <= record.started_at
        assert not record.just_crashed
        assert record.expires_at is None
        assert record.fence > old.fence

    def test_a_done_row_is_refused_until_its_retention_is_over(
        self, records: SqlRecordStore, key: str
    ) -> None:
        """The retention here is 60 seconds."""
        closed(records, won(records, make_call(key)), retention=60.0)
        refused(records, make_call(key))

    def test_old_rows_are_purged_in_batches(
        self, records: SqlRecordStore, pass_time: PassTime
    ) -> None:
        """Running rows and rows whose retention is not over stay."""
        old = [fresh_key() for _ in range(5)]
        running, lasting = (
            won(records, make_call(fresh_key())),
            won(records, make_call(fresh_key())),
        )
        closed(records, lasting, retention=3600.0)
        fences = {}
        for key in old:
            fences[key] = closed(records, won(records, make_call(key)), retention=self.short).fence
        pass_time(1.2 * self.short)
        purged: list[int] = []
        while not purged or purged[-1]:
            purged.append(records.purge(2))
        assert max(purged) <= 2
        assert sum(purged) >= len(old)
        assert all(records.read(key) is None for key in old)
        assert row(records, running.stored_key).state is State.RUNNING
        assert row(records, lasting.stored_key).state is State.DONE
        for key in old:
            assert won(records, make_call(key)).fence > fences[key]
