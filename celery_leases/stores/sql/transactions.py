"""The user's own transaction, in which a record is locked or completed.

The user gives a SQLAlchemy session or connection, or a DB-API connection, to the database of the
records. Django's ``connections[alias]`` counts as a DB-API connection.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from sqlalchemy import Connection, Executable
from sqlalchemy.orm import Session, scoped_session

from celery_leases.errors import LeaseLost, WrongDatabase
from celery_leases.record import Outcome, Record, State
from celery_leases.stores.sql import rows
from celery_leases.stores.sql.commit_hooks import call_at_end, execute_in, extend_at_commit
from celery_leases.stores.sql.dbapi import (
    dialect_by_format,
    first_row,
    in_transaction,
)
from celery_leases.stores.sql.dialects import Fault, Mark, Writes, touched
from celery_leases.stores.sql.joining import connection_of, driver_of, refuse_unjoinable
from celery_leases.stores.sql.records import SqlRecordStore
from celery_leases.stores.urls import display_database_url

T = TypeVar("T")


class JoinedTransaction:
    """A transaction of the user's own in the records' database, which a body has passed to
    ``guard()`` or ``complete()``, or a caller to ``delay_in()``.
    """

    def __init__(self, given: Any, records: SqlRecordStore) -> None:
        self.records = records
        self._given = given.registry() if isinstance(given, scoped_session) else given
        self._dialect = records.database.dialect
        self._is_open: Callable[[], bool] | None = None
        self._mark: Mark | None = None

    def join(self, key: str) -> None:
        """Join the transaction; begin one if the user gave a SQLAlchemy session or connection.
        Raises :class:`WrongDatabase` if the transaction cannot be joined.

        Every other method calls this first.
        """
        if self._is_open is not None:
            return
        refuse_unjoinable(key, self._given, self.records.database)
        self._is_open = open_check(self._given)
        if not isinstance(self._given, Session | Connection):
            self._mark = self._dialect.mark(driver_of(self._given), self.records.database.engine)

    def guard(self, record: Record) -> None:
        """Lock the record's row; raise :class:`LeaseLost` if the attempt no longer owns it."""
        look = self._dialect.reads_snapshots
        self._lock(self.records.guard, rows.guard_parameters(record), record, look=look)
        if isinstance(self._given, Session | Connection):
            extend_at_commit(connection_of(self._given), self.records, record)

    def has_completed(self, record: Record) -> bool:
        """Whether this transaction sees that the attempt has completed the record."""
        found = self.read(record.stored_key, record.key)
        return found is not None and found.is_attempt(State.DONE, record.owner, record.fence)

    def complete(self, record: Record, outcome: Outcome) -> None:
        """Write the outcome, which is committed with the user's rows. Raises :class:`LeaseLost` as
        :meth:`guard` does.
        """
        self._lock(*self.records.settlement(record, outcome), record)

    def write(self, writes: Writes, key: str) -> bool:
        """Execute *writes* in order until one touches a row; returns whether one did so."""
        return any(self._write_touches(write, key) for write in writes)

    def read(self, stored_key: str, key: str, *, newest: bool = False) -> Record | None:
        """The row of a key as this transaction sees it. With *newest*, the last committed row, even
        if the transaction's snapshot is older.

        At MySQL's default isolation level a plain SELECT reads the snapshot, but a write changes
        the last committed row.
        """
        found = self.records.statements.select_row
        if newest and self._dialect.reads_snapshots:
            found = found.with_for_update()
        row = self._execute(found, {"stored_key": stored_key}, key, first_row)
        return rows.to_record(row) if row is not None else None

    def call_when_ended(self, done: Callable[[], None]) -> bool:
        """Call *done* once the transaction is committed or rolled back; returns ``False`` if that
        cannot be observed.

        In an ``atomic`` block of Django only the commit can be observed.
        """
        if isinstance(self._given, Session):
            call_at_end(self._given, done)
        elif self.is_of_django and self._given.in_atomic_block:
            self._given.on_commit(done)
        else:
            return False
        return True

    @property
    def is_of_django(self) -> bool:
        """Whether the connection is Django's, which may be used after the transaction has ended."""
        return hasattr(self._given, "vendor") and callable(getattr(self._given, "on_commit", None))

    def is_open(self) -> bool:
        """Whether the transaction is neither committed nor rolled back."""
        try:
            return self._is_open is not None and self._is_open()
        except Exception:  # noqa: BLE001 - a connection that raises an error counts as closed
            return False

    def is_over(self) -> bool:
        """Whether this transaction has certainly ended, even if its connection has begun another
        one. May cost a round trip.
        """
        return not self.is_open() or (self._mark is not None and self._mark.is_over())

    def is_of(self, given: Any) -> bool:
        """Whether *given* is in this transaction."""
        other = given.registry() if isinstance(given, scoped_session) else given
        if other is self._given:
            return True
        if isinstance(other, Session | Connection) and not other.in_transaction():
            return False
        with suppress(Exception):  # a connection that raises an error counts as another one
            return driver_of(other) is driver_of(self._given) is not None
        return False

    def roll_back(self) -> bool:
        """Roll back if this transaction is certainly open; returns whether it was open. A later
        transaction of the same connection is not rolled back.
        """
        if not self.is_open() or (self._mark is not None and not self._mark.is_surely_open()):
            return False
        with suppress(Exception):  # it ends with its connection
            self._given.rollback()
        return True

    def _lock(
        self,
        statement: Executable,
        values: Mapping[str, Any],
        record: Record,
        *,
        look: bool = False,
    ) -> None:
        """Execute *statement*, which locks the record's row; raise :class:`LeaseLost` if it matches
        no row. The transaction is marked before, or afterwards if the statement has begun it.

        *look*: the driver may report changed rows rather than matched rows, so 0 must be verified
        with a SELECT.
        """
        self.join(record.key)
        if self._mark is not None:
            self._mark.set()
        if not self._touched(statement, values, record.key) and not (
            look and self._execute(self.records.lock_row, values, record.key, first_row)
        ):
            self._raise_lost(record)
        if self._mark is not None:
            self._mark.set()

    def _write_touches(self, write: Executable, key: str) -> bool:
        try:
            return self._touched(write, {}, key)
        except Exception as error:
            if self._dialect.fault(error) is Fault.DUPLICATE:
                return False
            raise

    def _touched(self, statement: Executable, values: Mapping[str, Any], key: str) -> bool:
        return self._execute(statement, values, key, touched)

    def _execute(
        self, statement: Executable, values: Mapping[str, Any], key: str, take: Callable[[Any], T]
    ) -> T:
        """Execute *statement* in the transaction; returns what *take* reads from the result or
        cursor.
        """
        values = self.records.database.timed(values)
        self.join(key)
        try:
            if isinstance(self._given, Session | Connection):
                return take(execute_in(connection_of(self._given), statement, values))
            return self._by_cursor(statement, values, take)
        except Exception as error:
            explained = self._explained(key, error)
            if explained is None:
                raise
            raise explained from error

    def _explained(self, key: str, error: Exception) -> WrongDatabase | None:
        """An error with advice for a known error of the database; ``None`` for any other."""
        causes = (
            error,
            error.__cause__ or error,
        )  # Django's errors have the driver's as their cause
        faults = set(map(self._dialect.fault, causes))
        if Fault.LOCKED in faults and not self._dialect.has_server:
            return WrongDatabase(
                f"{key}: SQLite: the database is locked; begin the transaction with BEGIN IMMEDIATE and keep it short, "
                f"because a plain BEGIN cannot write once another transaction has written ({error})"
            )
        table = self.records.tables.records.name
        if table in str(error) and Fault.NO_TABLE in faults:
            return WrongDatabase(f"{key}: {self._where_to_join()} ({' '.join(str(error).split())})")
        return None

    def _where_to_join(self) -> str:
        return (
            "its record cannot be found through this session or connection; use one on "
            f"{display_database_url(self.records.database.engine.url)}, with the schema of the records"
        )

    def _by_cursor(
        self, statement: Executable, values: Mapping[str, Any], take: Callable[[Any], T]
    ) -> T:
        dialect = self.records.database.engine.dialect
        if hasattr(self._given, "vendor"):  # Django's cursors require %s on every database
            dialect = dialect_by_format(dialect)
        compiled = statement.compile(dialect=dialect)  # type: ignore[attr-defined]
        bound = compiled.construct_params(dict(values))
        given = [bound[name] for name in compiled.positiontup] if compiled.positional else bound
        cursor = self._given.cursor()
        try:
            cursor.execute(str(compiled), given)
            return take(cursor)
        finally:
            cursor.close()

    def _raise_lost(self, record: Record) -> None:
        now = self.records.read(record.stored_key)
        ours = now is not None and now.is_attempt(State.RUNNING, record.owner, record.fence)
        if ours and self._dialect.has_server:
            raise WrongDatabase(
                f"{record.key}: {self._where_to_join()}; or its transaction began before this attempt"
            )
        message = f"{record.key}: the lease is lost: the record was changed by another attempt or an operator"
        raise LeaseLost(
            message, record.key, "the record was changed by another attempt or an operator"
        )


def open_check(given: Any) -> Callable[[], bool]:
    """A function that returns whether the transaction of *given* is still open. Begins a
    transaction if *given* is a SQLAlchemy session or connection.
    """
    if isinstance(given, Session):
        given = given.connection()  # a session's own transaction is inactive while it commits
    if isinstance(given, Connection):
        if given.get_transaction() is None:
            given.begin()
        transaction = given.get_transaction()
        return lambda: transaction is not None and transaction.is_active
    return lambda: in_transaction(driver_of(given))
