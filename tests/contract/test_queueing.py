"""Records that are written when a call is published, on each database."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from celery_leases.decide.repairs import NewCall
from celery_leases.keys import CallKey
from celery_leases.record import Ended, Record, State
from celery_leases.stores.sql.outbox import Outbox
from celery_leases.stores.sql.records import SqlRecordStore
from celery_leases.testing.contracts.calls import fresh_key, make_call
from celery_leases.testing.contracts.record_case import closed, outcome, row, won
from tests.contract.sql_stores import statements_of

DATABASE = "database"
SPANS: dict[str, Any] = {"ttl": 15.0, "retention": 3600.0}


@pytest.fixture
def outbox(sql_records: SqlRecordStore) -> Outbox:
    return Outbox(sql_records)


def queue(outbox: Outbox, key: str, call_id: str) -> bool:
    """Write the record of a call that is being published; returns whether the key had none."""
    message = json.dumps({"task": "task", "options": {"task_id": call_id}})
    call = NewCall("task", CallKey(key, key), call_id, message, **SPANS)
    return outbox.database.touch(outbox.enqueue_writes(call), {})


def reassign(outbox: Outbox, old: Record, call_id: str, *, new_generation: bool = False) -> bool:
    """Assign *old* to a call; returns whether it was unchanged."""
    key = CallKey(old.key, old.stored_key)
    call = NewCall("task", key, call_id, '{"task": "task"}', **SPANS)
    writes = outbox.reassign_writes(old, call, new_generation=new_generation)
    return outbox.database.touch(writes, {})


def test_a_queued_record_is_one_statement(outbox: Outbox, sql_records: SqlRecordStore) -> None:
    key = fresh_key()
    with statements_of(outbox.database) as statements:
        assert queue(outbox, key, "call-1")
    assert len(statements) == 1
    assert not queue(outbox, key, "call-2")
    found = row(sql_records, key)
    assert (found.state, found.call_id, found.queued) == (State.PENDING, "call-1", True)
    assert found.publish_at is not None
    assert found.started_at == found.created_at > 0
    outbox.sent(key, "call-2")
    assert row(sql_records, key).publish_at is not None
    outbox.sent(key, "call-1")
    found = row(sql_records, key)
    assert found.publish_at is None
    assert found.published_at is not None
    assert found.message is not None


def test_an_unpublished_call_frees_its_key(outbox: Outbox, sql_records: SqlRecordStore) -> None:
    """Unless a worker has started it."""
    key, other = fresh_key(), fresh_key()
    queue(outbox, key, "call-1")
    outbox.withdraw(key, "call-1", 3600.0)
    found = row(sql_records, key)
    assert found.forgotten
    assert found.expires_at is not None
    assert reassign(outbox, found, "call-2")
    assert row(sql_records, key).queued
    queue(outbox, other, "call-1")
    won(sql_records, make_call(other, call_id="call-1"), DATABASE)
    outbox.withdraw(other, "call-1", 3600.0)
    assert row(sql_records, other).state is State.RUNNING


def test_an_unpublished_call_that_has_run_keeps_its_key(
    outbox: Outbox, sql_records: SqlRecordStore
) -> None:
    """It waits for its next attempt: the broker had its message, and only the reply was lost."""
    key = fresh_key()
    queue(outbox, key, "call-1")
    record = won(sql_records, make_call(key, call_id="call-1"), DATABASE)
    closed(sql_records, record, State.PENDING, ended=Ended.FAILED, resumes=True)
    outbox.withdraw(key, "call-1", 3600.0)
    found = row(sql_records, key)
    assert (found.call_id, found.resumes) == ("call-1", True)


@pytest.mark.parametrize("published", [True, False])
def test_the_end_of_a_call_keeps_the_message_of_another_one(
    outbox: Outbox, sql_records: SqlRecordStore, published: bool
) -> None:
    """Celery ends a call that waits, while another one is queued for its key."""
    key = fresh_key()
    queue(outbox, key, "queued")
    if published:
        outbox.sent(key, "queued")
    waits = {"ended": Ended.FAILED, "retry_after": 60.0, "resumes": True}
    closed(sql_records, won(sql_records, make_call(key), DATABASE), State.COOLING, **waits)
    ends: dict[str, Any] = {"ended": Ended.TERMINATED, "unrun": True}
    assert sql_records.close_waiting(key, lambda seen: outcome(seen, State.PENDING, **ends))
    after = row(sql_records, key)
    assert not after.resumes
    assert json.loads(str(after.message))["options"]["task_id"] == "queued"
    assert (after.publish_at is None) == published


def test_the_end_of_a_call_drops_its_message(outbox: Outbox, sql_records: SqlRecordStore) -> None:
    key = fresh_key()
    queue(outbox, key, "call-1")
    assert sql_records.close_waiting(
        key, lambda seen: outcome(seen, State.PENDING, ended=Ended.TERMINATED)
    )
    after = row(sql_records, key)
    assert (after.message, after.publish_at) == (None, None)


def test_an_unpublished_call_on_which_another_caller_relies_stays_due(
    outbox: Outbox, sql_records: SqlRecordStore
) -> None:
    """The relay publishes it at once. A caller that has seen an older row reads it again."""
    key, other = fresh_key(), fresh_key()
    queue(outbox, key, "call-1")
    seen = row(sql_records, key)
    assert outbox.share(seen)
    assert outbox.share(row(sql_records, key))
    outbox.withdraw(key, "call-1", 3600.0)
    assert row(sql_records, key).call_id == "call-1"
    assert key in outbox.due(1000)
    queue(outbox, other, "call-1")
    seen = row(sql_records, other)
    outbox.withdraw(other, "call-1", 3600.0)
    assert not outbox.share(seen)


def test_a_key_without_a_call_is_taken(outbox: Outbox, sql_records: SqlRecordStore) -> None:
    key = fresh_key()
    record = won(sql_records, make_call(key, call_id="call-1"), DATABASE)
    done = closed(
        sql_records,
        record,
        State.DONE,
        result='"saved"',
        failures=2,
        finished={"call-1": '"saved"'},
    )
    assert reassign(outbox, done, "call-2", new_generation=True)
    assert not reassign(outbox, done, "call-3", new_generation=True)
    found = row(sql_records, key)
    assert (found.state, found.call_id, found.attempt) == (State.PENDING, "call-2", 0)
    assert (found.failures, found.result, found.ended) == (0, None, None)
    assert found.generation == done.generation + 1
    assert found.fence > done.fence
    assert found.finished_calls == ("call-1",)
    assert [past.ended for past in found.history] == [Ended.RETURNED]
    claimed = won(sql_records, make_call(key, call_id="call-2", each_runs=True), DATABASE)
    assert (claimed.attempt, claimed.generation) == (1, found.generation)

    cooling = fresh_key()
    record = won(sql_records, make_call(cooling, call_id="call-1"), DATABASE)
    failed = closed(sql_records, record, State.COOLING, ended=Ended.FAILED, failures=2)
    assert reassign(outbox, replace(failed, resumes=False), "call-2")
    found = row(sql_records, cooling)
    assert (found.failures, found.attempt, found.queued) == (2, 1, True)
