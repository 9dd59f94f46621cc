"""What happens at the end of SQLAlchemy's transactions, guarded ones and others.

Guarded leases are pushed out again just before the commit, in the same transaction: whoever waits for the row meanwhile
finds a live lease when the commit lets him in, however long the transaction took.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import Connection, CursorResult, Executable, RootTransaction, event
from sqlalchemy.orm import Session, SessionTransaction

from celery_leases.core import validity
from celery_leases.core.records import Record
from celery_leases.process.native import boot_clock
from celery_leases.stores import rows
from celery_leases.stores.sql import SqlRecordStore

GUARDED: Final = "celery_leases_guarded"
"""Where a connection remembers its guarded transaction."""
WAITING: Final = "celery_leases_waiting"
"""Where a session remembers who waits for the end of its transactions."""


@dataclass(frozen=True, slots=True)
class _Guarded:
    """A transaction, and what it has guarded by stored key, with when."""

    transaction: RootTransaction | None
    records: dict[str, tuple[SqlRecordStore, Record, float]]


def execute_in(connection: Connection, statement: Executable, values: Mapping[str, Any]) -> CursorResult[Any]:
    """Execute *statement* in the user's transaction, but on our own tables, wherever he has his schemas translated to.

    A tenant's schema may be anything, and records are where they are configured to be.
    """
    return connection.execute(statement, dict(values), execution_options={"schema_translate_map": None})


def push_out_at_commit(connection: Connection, store: SqlRecordStore, record: Record) -> None:
    """Have the lease of *record* pushed out when the transaction that *connection* is in, which guards it, commits.

    A guard so young that its own push still leaves most of the ttl is left alone; so is a row that is a lease no more.
    """
    if record.lease_until is None:
        return
    guarded = connection.info.get(GUARDED)
    transaction = connection.get_transaction()
    if guarded is None or guarded.transaction is not transaction:
        guarded = connection.info[GUARDED] = _Guarded(transaction, {})
    guarded.records[record.stored_key] = (store, record, boot_clock())
    event.listen(connection, "commit", _before_commit)  # one for all transactions: the same one is not added again


def _before_commit(connection: Connection) -> None:
    guarded: _Guarded | None = connection.info.pop(GUARDED, None)
    if guarded is None or guarded.transaction is not connection.get_transaction():
        return
    for store, record, since in guarded.records.values():
        if boot_clock() - since > validity.renewal_due(0.0, record.lease_ttl):
            values = rows.of_guard(record)
            if store.database.host_clock:
                values |= {"now": time.time_ns() // 1000}
            execute_in(connection, store.guarding, values)


def tell_at_end(session: Session, done: Callable[[], None]) -> None:
    """Have *done* called once the transaction that *session* is in, or now begins, is committed or rolled back."""
    session.connection()
    waiting = session.info.setdefault(WAITING, {})
    if not event.contains(session, "after_transaction_end", _tell_waiting):
        event.listen(session, "after_transaction_end", _tell_waiting)
    waiting.setdefault(session.get_transaction(), []).append(done)


def _tell_waiting(session: Session, transaction: SessionTransaction) -> None:
    for done in session.info.get(WAITING, {}).pop(transaction, ()):
        done()
