"""The user's own transaction, in which a record is locked or completed.

It is given as a SQLAlchemy session or connection, or as a plain DB-API connection to the same database; Django's
``connections[alias]`` is one in this sense.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from sqlalchemy import Connection, Executable, event
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session, SessionTransaction, scoped_session

from celery_leases.core.errors import LeaseLost, WrongDatabase
from celery_leases.core.records import Outcome, Record, State
from celery_leases.stores import rows
from celery_leases.stores.sql import SqlRecordStore

LOCKED = "database is locked"
WAITING = "celery_leases_waiting"
AUTOCOMMIT = "it is in autocommit mode, so nothing would commit together; begin a transaction first"


class JoinedTransaction:
    """One open transaction of the user's; see :class:`celery_leases.steps.UserTransaction`."""

    def __init__(self, given: Any, records: SqlRecordStore) -> None:
        self.records = records
        self._given = given.registry() if isinstance(given, scoped_session) else given
        self._is_open: Callable[[], bool] = _opening(self._given)

    def guard(self, record: Record) -> None:
        """Lock the record's row, or raise :class:`LeaseLost` because it is not the attempt's any more."""
        if not self._touched(self.records.guarding, rows.of_guard(record), record.key):
            self._refuse(record)

    def complete(self, record: Record, outcome: Outcome) -> None:
        """Write the outcome, to be committed with the user's rows; raises :class:`LeaseLost` as :meth:`guard` does."""
        if not self._touched(self.records.settling, rows.of_outcome(record, outcome), record.key):
            self._refuse(record)

    def write(self, statement: Executable, values: Mapping[str, Any], key: str) -> bool:
        """Execute *statement* in it; whether it has touched a row."""
        return self._touched(statement, values, key)

    def when_ended(self, done: Callable[[], None]) -> bool:
        """Have *done* called once it is committed or rolled back; ``False`` where nobody would tell."""
        session = self._given
        if not isinstance(session, Session):
            return False
        session.connection()
        waiting = session.info.setdefault(WAITING, {})
        if not event.contains(session, "after_transaction_end", _tell_waiting):
            event.listen(session, "after_transaction_end", _tell_waiting)
        waiting.setdefault(session.get_transaction(), []).append(done)
        return True

    def is_open(self) -> bool:
        """Whether it is neither committed nor rolled back."""
        try:
            return self._is_open()
        except Exception:  # noqa: BLE001 - a connection that cannot be asked is closed
            return False

    def roll_back(self) -> None:
        """End it."""
        with suppress(Exception):  # it ends with its connection
            self._given.rollback()

    def _touched(self, statement: Executable, values: Mapping[str, Any], key: str) -> bool:
        if self.records.database.host_clock:
            values = {**values, "now": time.time_ns() // 1000}
        self._check(key)
        try:
            if isinstance(self._given, Session | Connection):
                connection = self._given.connection() if isinstance(self._given, Session) else self._given
                return bool(connection.execute(statement, dict(values)).rowcount)
            return self._by_cursor(statement, values)
        except OperationalError as error:
            raise _explained(error) from error
        except Exception as error:
            if LOCKED in str(error):
                raise _explained(error) from error
            raise

    def _by_cursor(self, statement: Executable, values: Mapping[str, Any]) -> bool:
        compiled = statement.compile(dialect=self.records.database.engine.dialect)  # type: ignore[attr-defined]
        bound = compiled.construct_params(dict(values))
        given = [bound[name] for name in compiled.positiontup] if compiled.positional else bound
        cursor = self._given.cursor()
        try:
            cursor.execute(str(compiled), given)
            return bool(cursor.rowcount)
        finally:
            cursor.close()

    def _check(self, key: str) -> None:
        """Refuse what can never commit the record together with the user's rows."""
        ours = self.records.database.engine
        if isinstance(self._given, Session | Connection):
            connection = self._given.connection() if isinstance(self._given, Session) else self._given
            theirs = connection.engine
            if theirs.dialect.name != ours.dialect.name or theirs.url.database != ours.url.database:
                raise WrongDatabase(
                    f"{key}: the records are in {ours.url!r}, the session is on {theirs.url!r}; a done record "
                    "can only be committed with rows of its own database"
                )
            if connection.get_execution_options().get("isolation_level") == "AUTOCOMMIT":
                raise WrongDatabase(f"{key}: {AUTOCOMMIT}")
            driver = connection.connection.dbapi_connection
        elif hasattr(self._given, "cursor"):
            driver = getattr(self._given, "connection", None) or self._given
        else:
            kind = type(self._given).__name__
            raise WrongDatabase(f"{key}: {kind} is no SQLAlchemy Session or Connection, nor a DB-API connection")
        by_itself = getattr(driver, "autocommit", False) is True
        if hasattr(driver, "in_transaction"):  # sqlite3 says so by its isolation level; psycopg's None is the server's
            by_itself = by_itself or getattr(driver, "isolation_level", "") is None
        if by_itself and not _in_transaction(driver):
            raise WrongDatabase(f"{key}: {AUTOCOMMIT}")

    def _refuse(self, record: Record) -> None:
        now = self.records.read(record.stored_key)
        ours = now is not None and (now.state, now.fence, now.owner) == (State.RUNNING, record.fence, record.owner)
        if ours and self.records.database.engine.dialect.name != "sqlite":
            raise WrongDatabase(
                f"{record.key}: its record is not to be found through this session or connection; use one on "
                f"{self.records.database.engine.url!r}, with the schema of the records"
            )
        message = f"{record.key}: the lease is lost: the record has moved on"
        raise LeaseLost(message, record.key, "the record has moved on")


def _tell_waiting(session: Session, transaction: SessionTransaction) -> None:
    for done in session.info.get(WAITING, {}).pop(transaction, ()):
        done()


def _opening(given: Any) -> Callable[[], bool]:
    """How to ask whether the transaction that is open, or is to be opened, goes on."""
    if isinstance(given, Session):
        given.connection()  # begins one where none is open
        begun = given.get_transaction()
        return lambda: begun is not None and begun.is_active
    if isinstance(given, Connection):
        if given.get_transaction() is None:
            given.begin()
        transaction = given.get_transaction()
        return lambda: transaction is not None and transaction.is_active
    return lambda: _in_transaction(getattr(given, "connection", None) or given)


def _in_transaction(driver: Any) -> bool:
    """Whether a DB-API connection is inside a transaction, by the ways of psycopg, psycopg2 and sqlite3."""
    if hasattr(driver, "in_transaction"):
        return bool(driver.in_transaction)
    info = getattr(driver, "info", None)
    status = getattr(info, "transaction_status", None)
    if status is not None:
        return int(status) in (1, 2, 3)  # active, in a transaction, in a failed one: libpq's PQTRANS_*
    return not getattr(driver, "closed", False)


def _explained(error: Exception) -> Exception:
    if LOCKED not in str(error):
        return error
    return WrongDatabase(
        "SQLite: the database is locked; begin the transaction with BEGIN IMMEDIATE and keep it short, as a plain "
        f"BEGIN cannot become a writer once another has written ({error})"
    )
