"""What the suites of records share: fixtures, and functions that claim, settle and compare rows."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from celery_leases.call import Call
from celery_leases.decide.answers import Refused
from celery_leases.record import (
    Ended,
    Outcome,
    Record,
    State,
)
from celery_leases.stores.sql.records import SqlRecordStore
from celery_leases.testing.contracts.calls import claimed, fresh_key, make_call

STORE = "redis:one"
"""The lease store in the claims. It is separate from the records, so each lease counts as lost."""

PassTime = Callable[[float], None]


class RecordCase:
    """The fixtures of the suites of records. ``short`` is a time in seconds that tests let pass."""

    short = 0.4

    @pytest.fixture
    def records(self) -> SqlRecordStore:
        """The store under test; override this."""
        raise NotImplementedError("override the fixture `records` with a record store")

    @pytest.fixture
    def pass_time(self) -> PassTime:
        """Lets seconds pass on the store's clock. Override this if that clock can be moved."""
        return time.sleep

    @pytest.fixture
    def key(self) -> str:
        """A stored key of the test's own."""
        return fresh_key()


def won(records: SqlRecordStore, call: Call, lease_store: str = STORE) -> Record:
    """The row after a claim, which must succeed."""
    return claimed(records.claim(call, lease_store))


def refused(records: SqlRecordStore, call: Call, lease_store: str = STORE) -> Record:
    """The row that refuses the claim. The claim must not change the row."""
    before = row(records, call.key.stored)
    claim = records.claim(call, lease_store)
    assert isinstance(claim, Refused), claim
    assert claim.record is not None
    assert timeless(claim.record) == before
    assert row(records, call.key.stored) == before
    return claim.record


def row(records: SqlRecordStore, key: str) -> Record:
    """The row, without the time at which it was read."""
    record = records.read(key)
    assert record is not None
    return timeless(record)


def timeless(record: Record) -> Record:
    """The record, without the time at which it was read."""
    return replace(record, now=0)


def outcome(
    record: Record, state: State = State.DONE, ended: Ended = Ended.RETURNED, **more: Any
) -> Outcome:
    """An outcome with the row's counts and a retention of an hour, unless *more* changes them."""
    given: dict[str, Any] = {
        "attempt": record.attempt,
        "failures": record.failures,
        "crashes": record.crashes,
        "retention": 3600.0,
    }
    return Outcome(state, ended, **(given | more))


def closed(
    records: SqlRecordStore, record: Record, state: State = State.DONE, **more: Any
) -> Record:
    """The row after the outcome was written, which must succeed."""
    assert records.settle(record, outcome(record, state, **more))
    return row(records, record.stored_key)


def waiting(
    records: SqlRecordStore,
    call: Call,
    retry_after: float,
    state: State = State.PENDING,
) -> Record:
    """The row after a failed attempt that may be repeated in *retry_after* seconds."""
    return closed(records, won(records, call), state, ended=Ended.RETRIED, retry_after=retry_after)


def again(call: Call, **more: Any) -> Call:
    """Another attempt of the same call."""
    given: dict[str, Any] = {
        "call_id": call.call_id,
        "ttl": call.options.ttl,
        "fingerprint": call.key.fingerprint,
    }
    return make_call(call.key.stored, **(given | more))
