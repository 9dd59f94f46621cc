"""What the suites of effects share: fixtures, and functions that begin and finish effects."""

from __future__ import annotations

from dataclasses import replace

import pytest

from celery_leases.effect import Begun, Effect, Found, scope_of
from celery_leases.record import Record
from celery_leases.stores.sql.effects import SqlEffectStore
from celery_leases.stores.sql.records import SqlRecordStore
from celery_leases.testing.contracts.record_case import RecordCase

CHARGE = "charge"
MARGIN = 30e6
"""The maximum difference of two times within a test, in microseconds."""


class EffectCase(RecordCase):
    """The fixtures of the suites of effects."""

    @pytest.fixture
    def effects(self, records: SqlRecordStore) -> SqlEffectStore:
        """The store under test, on the database of *records*; override this."""
        raise NotImplementedError("override the fixture `effects` with an effect store")


def begin(
    effects: SqlEffectStore,
    record: Record,
    name: str = CHARGE,
    taken: int | None = None,
    keep: float | None = None,
) -> Begun | Found | None:
    """The store's answer to an intent of the attempt on *record*. With *keep*, a retention in
    seconds, the effect belongs to the call.
    """
    scope = scope_of(record, each_runs=keep is not None, retention=keep or 0.0)
    return effects.begin(record, name, f"{record.stored_key}/{name}"[:64], scope, taken)


def sent(
    effects: SqlEffectStore,
    record: Record,
    name: str = CHARGE,
    taken: int | None = None,
    keep: float | None = None,
) -> Effect:
    """The effect, whose intent must be accepted."""
    begun = begin(effects, record, name, taken, keep)
    assert isinstance(begun, Begun), begun
    return begun.effect


def finished(
    effects: SqlEffectStore, effect: Effect, result: str = '"ok"', reference: str | None = None
) -> bool:
    """Whether the reply was accepted."""
    return effects.finish(effect, result, reference)


def found_of(effects: SqlEffectStore, record: Record) -> list[Effect]:
    """The effects of the record's generation and of its call, without the time at which they were
    read.
    """
    return [replace(effect, now=0) for effect in effects.of_key(record)]


def purge(records: SqlRecordStore, batch: int = 100) -> None:
    """Purge until nothing is left to purge."""
    while records.purge(batch):
        pass
