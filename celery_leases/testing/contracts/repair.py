"""The contract of record stores for operators: searching and resetting rows."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import pytest

from celery_leases.record import Ended, Failure, State
from celery_leases.stores.sql.records import SqlRecordStore
from celery_leases.testing.contracts.calls import fresh_key, make_call
from celery_leases.testing.contracts.record_case import RecordCase, again, closed, outcome, row, won


class RepairContract(RecordCase):
    """Operators read many rows, and reset a row even if an attempt owns it."""

    def test_rows_are_found_by_state_and_task_latest_first(self, records: SqlRecordStore) -> None:
        """At most *limit* rows."""
        task = f"task-{uuid4().hex}"
        rows = [won(records, make_call(fresh_key(), task=task)) for _ in range(4)]
        keys = [record.stored_key for record in rows]
        closed(records, rows[1])
        closed(records, rows[2], State.FAILED, ended=Ended.FAILED)

        def found(limit: int = 100, *states: State) -> list[str]:
            return [
                record.stored_key
                for record in records.search(states=states, task=task, limit=limit)
            ]

        assert found() == keys[::-1]
        assert found(2) == keys[:1:-1]
        assert found(100, State.RUNNING) == [keys[3], keys[0]]
        assert found(100, State.DONE, State.FAILED) == [keys[2], keys[1]]
        assert found(100, State.UNCERTAIN) == []
        assert records.search(task=f"task-{uuid4().hex}") == []
        assert keys[3] in [
            record.stored_key for record in records.search(states=[State.RUNNING], limit=100_000)
        ]

    @pytest.mark.parametrize("keep", [True, False])
    def test_a_reset_takes_the_row_from_its_owner(
        self, records: SqlRecordStore, key: str, keep: bool
    ) -> None:
        """The row has a new fence, so the owner can no longer write its outcome. Its attempt does
        not count as a crash.
        """
        owner = won(records, make_call(key))
        after = records.reset(key, keep=keep)
        assert after is not None
        assert after.state is State.PENDING
        assert after.fence > owner.fence
        assert after.owner != owner.owner
        assert not records.settle(owner, outcome(owner, result='"late"'))
        assert row(records, key).result is None
        record = won(records, make_call(key))
        assert record.fence > after.fence
        assert record.crashes == 0
        assert not record.just_crashed

    @pytest.mark.parametrize("state", [State.PENDING, State.FAILED, State.UNCERTAIN, State.COOLING])
    def test_a_reset_frees_a_row_that_waits_or_has_failed(
        self, records: SqlRecordStore, key: str, state: State
    ) -> None:
        """It may be claimed at once, with its history."""
        failure = Failure("builtins.ValueError", "bad", "rule")
        given: dict[str, Any] = {
            "ended": Ended.FAILED,
            "failure": failure,
            "failures": 2,
            "attempt": 3,
            "retry_after": 600.0,
        }
        closed(records, won(records, make_call(key)), state, **given)
        assert records.reset(key, keep=True) is not None
        record = won(records, make_call(key))
        assert (record.attempt, record.failures, record.generation) == (4, 2, 0)

    @pytest.mark.parametrize("forgive", [True, False])
    def test_a_forgiven_row_has_no_counts_but_its_history(
        self, records: SqlRecordStore, key: str, forgive: bool
    ) -> None:
        """Failures, cooldowns and crashes are 0. The error stays, and the row still belongs to the
        call, whose message may be on its way.
        """
        failure = Failure("builtins.ValueError", "bad", "rule", "busy", group="g")
        given: dict[str, Any] = {
            "failures": 4,
            "quick_retries": 3,
            "cooldowns": 2,
            "crashes": 1,
            "failed": True,
        }
        given |= {"ended": Ended.FAILED, "failure": failure, "retry_after": 600.0, "resumes": True}
        closed(records, won(records, make_call(key)), State.COOLING, **given)
        after = records.reset(key, keep=True, forgive=forgive)
        assert after is not None
        counts = (
            after.failures,
            after.quick_retries,
            after.cooldowns,
            after.crashes,
            after.failed_at is not None,
        )
        assert counts == ((0, 0, 0, 0, False) if forgive else (4, 3, 2, 1, True))
        assert (after.state, after.retry_at, after.failure, after.resumes) == (
            State.PENDING,
            None,
            failure,
            True,
        )
        record = won(records, make_call(key))
        assert (record.attempt, record.generation, record.failures) == (2, 0, 0 if forgive else 4)
        assert record.previous is not None
        assert record.previous.error == failure

    def test_a_forgotten_row_is_empty_and_of_the_next_generation(
        self, records: SqlRecordStore, key: str
    ) -> None:
        """The next call may have other arguments and gets no saved result, and the same call may
        run again.
        """
        call = make_call(key, fingerprint="v1:a")
        given: dict[str, Any] = {
            "result": '"old"',
            "failures": 2,
            "attempt": 3,
            "finished": {call.call_id: '"old"'},
        }
        closed(records, won(records, call), **given)
        after = records.reset(key, keep=False)
        assert after is not None
        assert (after.generation, after.attempt, after.failures, after.crashes) == (1, 0, 0, 0)
        assert (after.result, after.failure, after.fingerprint) == (None, None, None)
        assert after.finished_calls == ()
        assert after.finished_results is None
        record = won(records, again(call, fingerprint="v1:b"))
        assert (record.attempt, record.generation, record.fingerprint, record.previous) == (
            1,
            1,
            "v1:b",
            None,
        )

    @pytest.mark.parametrize("keep", [True, False])
    def test_a_reset_of_a_row_that_has_moved_on_takes_nothing(
        self, records: SqlRecordStore, key: str, keep: bool
    ) -> None:
        """It was claimed or settled since it was read. An unchanged row is reset."""
        seen = won(records, make_call(key))
        record = won(records, make_call(key))
        assert records.reset(key, keep=keep, seen=seen) is None
        after = closed(records, record)
        assert records.reset(key, keep=keep, seen=record) is None
        assert row(records, key) == after
        taken = records.reset(key, keep=keep, seen=after)
        assert taken is not None
        assert taken.state is State.PENDING

    @pytest.mark.parametrize(
        ("own", "given", "days"), [(30.0, None, 30), (30.0, 2.0, 2), (None, None, 7)]
    )
    def test_a_row_that_was_reset_counts_for_the_retention_of_its_task(
        self, records: SqlRecordStore, key: str, own: float | None, given: float | None, days: int
    ) -> None:
        """The claim has stored the retention. An argument replaces it; without both it is 7
        days.
        """
        day = 86_400.0
        won(records, make_call(key, retention=own * day if own else None))
        after = records.reset(key, keep=True, retention=given * day if given else None)
        assert after is not None
        assert after.expires_at is not None
        assert (after.expires_at - after.now) / 1e6 == pytest.approx(days * day, abs=30)
        assert after.retention == (own or 7) * day

    def test_a_reset_of_an_absent_row_makes_none(self, records: SqlRecordStore, key: str) -> None:
        """There is nothing to reset."""
        assert records.reset(key, keep=True) is None
        assert records.reset(key, keep=False) is None
        assert records.read(key) is None
