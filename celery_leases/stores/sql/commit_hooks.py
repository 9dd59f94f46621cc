"""Actions at the commit, and at the end, of the user's SQLAlchemy transactions.

Guarded leases are extended again just before the commit, in the same transaction. So another
transaction that has waited for the row reads an unexpired lease after the commit, even if the
transaction took long.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import Connection, CursorResult, Executable, RootTransaction, event
from sqlalchemy.orm import Session, SessionTransaction

from celery_leases import deadlines
from celery_leases.concurrency import os_threads
from celery_leases.record import Record
from celery_leases.stores.sql import rows
from celery_leases.stores.sql.records import SqlRecordStore

GUARDED: Final = "celery_leases_guarded"
"""The key of ``Connection.info`` for the guarded transaction."""
WAITING: Final = "celery_leases_waiting"
"""The key of ``Session.info`` for the callbacks at the end of its transactions."""


@dataclass(frozen=True, slots=True)
class _Guarded:
    """A transaction and the records it has guarded: by stored key, with the time of the guard."""

    transaction: RootTransaction | None
    records: dict[str, tuple[SqlRecordStore, Record, float]]


def execute_in(
    connection: Connection, statement: Executable, values: Mapping[str, Any]
) -> CursorResult[Any]:
    """Execute *statement* in the user's transaction, without the user's ``schema_translate_map``.

    The settings name the schema of the records; the schema of a tenant must not replace it.
    """
    return connection.execute(
        statement, dict(values), execution_options={"schema_translate_map": None}
    )


def extend_at_commit(connection: Connection, store: SqlRecordStore, record: Record) -> None:
    """Extend the lease of *record* when the transaction of *connection*, which has guarded it,
    commits.

    The lease is not extended again if the guard is recent, so that most of the ttl is left.
    """
    if record.lease_until is None:
        return
    guarded = connection.info.get(GUARDED)
    transaction = connection.get_transaction()
    if guarded is None or guarded.transaction is not transaction:
        guarded = connection.info[GUARDED] = _Guarded(transaction, {})
    guarded.records[record.stored_key] = (store, record, os_threads.boot_clock())
    event.listen(connection, "commit", _before_commit)  # SQLAlchemy adds a listener only once


def _before_commit(connection: Connection) -> None:
    guarded: _Guarded | None = connection.info.pop(GUARDED, None)
    if guarded is None or guarded.transaction is not connection.get_transaction():
        return
    for store, record, since in guarded.records.values():
        if os_threads.boot_clock() - since > deadlines.renewal_due(0.0, record.lease_ttl):
            values = store.database.timed(rows.guard_parameters(record))
            execute_in(connection, store.guard, values)


def call_at_end(session: Session, done: Callable[[], None]) -> None:
    """Call *done* once the transaction of *session* is committed or rolled back. Begins a
    transaction if there is none.
    """
    session.connection()
    waiting = session.info.setdefault(WAITING, {})
    if not event.contains(session, "after_transaction_end", _call_waiting):
        event.listen(session, "after_transaction_end", _call_waiting)
    waiting.setdefault(session.get_transaction(), []).append(done)


def _call_waiting(session: Session, transaction: SessionTransaction) -> None:
    for done in session.info.get(WAITING, {}).pop(transaction, ()):
        done()
