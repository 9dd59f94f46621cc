"""What the suites of records share: fixtures, and functions that claim, settle and compare rows."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from celery_leases.record import ClaimRequest, Ended, Outcome, Record, Refused, State, Won
from celery_leases.stores.interfaces import RecordStore
from celery_leases.testing.contracts.claim_requests import fresh_key, make_claim_request

STORE = "redis:one"
"""The lease store in the claims. It is separate from the records, so each lease counts as lost."""

PassTime = Callable[[float], None]


class RecordCase:
    """The fixtures of the suites of records. ``short`` is a time in seconds that tests let pass."""

    short = 0.4

    @pytest.fixture
    def records(self) -> RecordStore:
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


def won(records: RecordStore, claim_request: ClaimRequest, lease_store: str = STORE) -> Record:
    """The row after a claim, which must succeed."""
    claim = records.claim(claim_request, lease_store)
    assert isinstance(claim, Won), claim
    return claim.record


def refused(records: RecordStore, claim_request: ClaimRequest, lease_store: str = STORE) -> Record:
    """The row that refuses the claim. The claim must not change the row."""
    before = row(records, claim_request.stored_key)
    claim = records.claim(claim_request, lease_store)
    assert isinstance(claim, Refused), claim
    assert claim.record is not None
    assert timeless(claim.record) == before
    assert row(records, claim_request.stored_key) == before
    return claim.record


def row(records: RecordStore, key: str) -> Record:
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


def closed(records: RecordStore, record: Record, state: State = State.DONE, **more: Any) -> Record:
    """The row after the outcome was written, which must succeed."""
    assert records.settle(record, outcome(record, state, **more))
    return row(records, record.stored_key)


def waiting(
    records: RecordStore,
    claim_request: ClaimRequest,
    retry_after: float,
    state: State = State.PENDING,
) -> Record:
    """The row after a failed attempt that may be repeated in *retry_after* seconds."""
    return closed(
        records, won(records, claim_request), state, ended=Ended.RETRIED, retry_after=retry_after
    )


def again(claim_request: ClaimRequest, **more: Any) -> ClaimRequest:
    """Another attempt of the same call."""
    given: dict[str, Any] = {
        "call_id": claim_request.call_id,
        "ttl": claim_request.ttl,
        "fingerprint": claim_request.fingerprint,
    }
    return make_claim_request(claim_request.stored_key, **(given | more))
