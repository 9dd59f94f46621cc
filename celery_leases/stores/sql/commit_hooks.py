"""Actions at the end of SQLAlchemy's transactions.

Guarded leases are extended again just before the commit, in the same transaction: another
transaction that waits for the row finds a live lease after the commit, however long the transaction
took.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import Connection, CursorResult, Executable, RootTransaction, event
from sqlalchemy.orm import Session, SessionTransaction

from celery_leases.concurrency.os_threads import boot_clock
from celery_leases.protocol import deadlines
from celery_leases.protocol.records import Record
from celery_leases.stores.sql import rows
from celery_leases.stores.sql.records import SqlRecordStore

GUARDED: Final = "celery_leases_guarded"
"""The key under which a connection stores its guarded transaction."""
WAITING: Final = "celery_leases_waiting"
"""The key under which a session stores the callbacks for the end of its transactions."""


@dataclass(frozen=True, slots=True)
class _Guarded:
    """A transaction, and the records it has guarded, by stored key, with the time of each guard."""

    transaction: RootTransaction | None
    records: dict[str, tuple[SqlRecordStore, Record, float]]


def execute_in(
    connection: Connection, statement: Executable, values: Mapping[str, Any]
) -> CursorResult[Any]:
    """Execute *statement* in the user's transaction, ignoring the user's ``schema_translate_map``.

    The settings name the schema of the records, which no tenant's schema may replace.
    """
    return connection.execute(
        statement, dict(values), execution_options={"schema_translate_map": None}
    )


def push_out_at_commit(connection: Connection, store: SqlRecordStore, record: Record) -> None:
    """Extend the lease of *record* when the transaction of *connection*, which guards it, commits.

    A recent guard that still leaves most of the ttl is not extended; neither is a row that is no
    longer a lease.
    """
    if record.lease_until is None:
        return
    guarded = connection.info.get(GUARDED)
    transaction = connection.get_transaction()
    if guarded is None or guarded.transaction is not transaction:
        guarded = connection.info[GUARDED] = _Guarded(transaction, {})
    guarded.records[record.stored_key] = (store, record, boot_clock())
    event.listen(
        connection, "commit", _before_commit
    )  # one for all transactions: the same one is not added again


def _before_commit(connection: Connection) -> None:
    guarded: _Guarded | None = connection.info.pop(GUARDED, None)
    if guarded is None or guarded.transaction is not connection.get_transaction():
        return
    for store, record, since in guarded.records.values():
        if boot_clock() - since > deadlines.renewal_due(0.0, record.lease_ttl):
            values = rows.of_guard(record)
            if store.database.host_clock:
                values |= {"now": store.database.host_now()}
            execute_in(connection, store.guarding, values)


def tell_at_end(session: Session, done: Callable[[], None]) -> None:
    """Call *done* once the transaction of *session* is committed or rolled back. Begins one if
    there is none.
    """
    session.connection()
    waiting = session.info.setdefault(WAITING, {})
    if not event.contains(session, "after_transaction_end", _tell_waiting):
        event.listen(session, "after_transaction_end", _tell_waiting)
    waiting.setdefault(session.get_transaction(), []).append(done)


def _tell_waiting(session: Session, transaction: SessionTransaction) -> None:
    for done in session.info.get(WAITING, {}).pop(transaction, ()):
        done()
