"""The user's own transaction, in which a record is locked or completed.

It is given as a SQLAlchemy session or connection, or as a plain DB-API connection to the same database; Django's
``connections[alias]`` is one in this sense.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TypeVar

from sqlalchemy import URL, Connection, CursorResult, Executable, event
from sqlalchemy.orm import Session, SessionTransaction, scoped_session

from celery_leases.core.errors import LeaseLost, WrongDatabase
from celery_leases.core.records import Outcome, Record, State
from celery_leases.stores import rows
from celery_leases.stores.sql import SqlRecordStore

T = TypeVar("T")
LOCKED: Final = "database is locked"
NO_SUCH_TABLE: Final = "no such table"
UNDEFINED_TABLE: Final = "42P01"
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

    def has_completed(self, record: Record) -> bool:
        """Whether the record is done under its attempt, as far as this transaction sees."""
        found = self.read(record.stored_key, record.key)
        return found is not None and (found.state, found.fence, found.owner) == (State.DONE, record.fence, record.owner)

    def complete(self, record: Record, outcome: Outcome) -> None:
        """Write the outcome, to be committed with the user's rows; raises :class:`LeaseLost` as :meth:`guard` does."""
        if not self._touched(self.records.settling, rows.of_outcome(record, outcome), record.key):
            self._refuse(record)

    def write(self, statement: Executable, values: Mapping[str, Any], key: str) -> bool:
        """Execute *statement*, which returns the row it touches, in it; whether there was one."""
        return self._execute(statement, values, key, _first) is not None

    def read(self, stored_key: str, key: str) -> Record | None:
        """The row of a key as this transaction sees it."""
        table = self.records.tables.records
        row = self._execute(self.records.reading.where(table.c.stored_key == stored_key), {}, key, _first)
        return rows.to_record(row) if row is not None else None

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

    def is_of(self, given: Any) -> bool:
        """Whether *given* is in this very transaction."""
        other = given.registry() if isinstance(given, scoped_session) else given
        if other is self._given:
            return True
        if isinstance(other, Session | Connection) and not other.in_transaction():
            return False
        with suppress(Exception):  # what cannot be asked is another one
            return _driver(other) is _driver(self._given)
        return False

    def roll_back(self) -> None:
        """End it."""
        with suppress(Exception):  # it ends with its connection
            self._given.rollback()

    def _touched(self, statement: Executable, values: Mapping[str, Any], key: str) -> bool:
        return self._execute(statement, values, key, lambda executed: bool(executed.rowcount > 0))

    def _execute(self, statement: Executable, values: Mapping[str, Any], key: str, take: Callable[[Any], T]) -> T:
        """Execute *statement* in it; what *take* makes of the result or cursor."""
        if self.records.database.host_clock:
            values = {**values, "now": time.time_ns() // 1000}
        self._check(key)
        try:
            if isinstance(self._given, Session | Connection):
                connection = self._given.connection() if isinstance(self._given, Session) else self._given
                return take(connection.execute(statement, dict(values)))
            return self._by_cursor(statement, values, take)
        except Exception as error:
            explained = self._explained(key, error)
            if explained is None:
                raise
            raise explained from error

    def _explained(self, key: str, error: Exception) -> WrongDatabase | None:
        """What is to be said of an error in other words than the database's."""
        if LOCKED in str(error):
            return WrongDatabase(
                f"{key}: SQLite: the database is locked; begin the transaction with BEGIN IMMEDIATE and keep it short, "
                f"as a plain BEGIN cannot become a writer once another has written ({error})"
            )
        table = self.records.tables.records.name
        if table in str(error) and (NO_SUCH_TABLE in str(error) or UNDEFINED_TABLE in _codes(error)):
            return WrongDatabase(f"{key}: {self._elsewhere()} ({' '.join(str(error).split())})")
        return None

    def _elsewhere(self) -> str:
        return (
            "its record is not to be found through this session or connection; use one on "
            f"{self.records.database.engine.url!r}, with the schema of the records"
        )

    def _by_cursor(self, statement: Executable, values: Mapping[str, Any], take: Callable[[Any], T]) -> T:
        compiled = statement.compile(dialect=self.records.database.engine.dialect)  # type: ignore[attr-defined]
        bound = compiled.construct_params(dict(values))
        given = [bound[name] for name in compiled.positiontup] if compiled.positional else bound
        cursor = self._given.cursor()
        try:
            cursor.execute(str(compiled), given)
            return take(cursor)
        finally:
            cursor.close()

    def _check(self, key: str) -> None:
        """Refuse what can never commit the record together with the user's rows."""
        ours = self.records.database.engine
        if isinstance(self._given, Session | Connection):
            connection = self._given.connection() if isinstance(self._given, Session) else self._given
            theirs = connection.engine
            if theirs.dialect.name != ours.dialect.name or _named(theirs.url) != _named(ours.url):
                raise WrongDatabase(
                    f"{key}: the records are in {ours.url!r}, the session is on {theirs.url!r}; a done record "
                    "can only be committed with rows of its own database"
                )
            if connection.get_execution_options().get("isolation_level") == "AUTOCOMMIT":
                raise WrongDatabase(f"{key}: {AUTOCOMMIT}")
        elif not hasattr(self._given, "cursor"):
            kind = type(self._given).__name__
            raise WrongDatabase(f"{key}: {kind} is no SQLAlchemy Session or Connection, nor a DB-API connection")
        driver = _driver(self._given)
        by_itself = getattr(driver, "autocommit", False) is True
        if hasattr(driver, "in_transaction"):  # sqlite3 says so by its isolation level; psycopg's None is the server's
            by_itself = by_itself or getattr(driver, "isolation_level", "") is None
        if by_itself and not _in_transaction(driver):
            raise WrongDatabase(f"{key}: {AUTOCOMMIT}")

    def _refuse(self, record: Record) -> None:
        now = self.records.read(record.stored_key)
        ours = now is not None and (now.state, now.fence, now.owner) == (State.RUNNING, record.fence, record.owner)
        if ours and self.records.database.engine.dialect.name != "sqlite":
            raise WrongDatabase(f"{record.key}: {self._elsewhere()}")
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
    return lambda: _in_transaction(_driver(given))


def _driver(given: Any) -> Any:
    """The DB-API connection that *given* is, or works on."""
    if isinstance(given, Session):
        given = given.connection()
    if isinstance(given, Connection):
        return given.connection.dbapi_connection
    return getattr(given, "connection", None) or given


def _named(url: URL) -> str | None:
    """The database a URL names; a file by its whole path."""
    name = url.database
    is_file = url.get_backend_name() == "sqlite" and name and not name.startswith(("file:", ":"))
    return str(Path(name).resolve()) if is_file and name else name


def _first(executed: Any) -> Any:
    """The first row of a result, or of a cursor, whatever its rows are made as."""
    if isinstance(executed, CursorResult):
        return executed.mappings().first()
    row = executed.fetchone()
    if row is None or isinstance(row, Mapping):
        return row
    return dict(zip([column[0] for column in executed.description], row, strict=True))


def _codes(error: Exception) -> set[str | None]:
    causes = (error, getattr(error, "orig", None), error.__cause__)
    return {getattr(cause, name, None) for cause in causes for name in ("sqlstate", "pgcode")}


def _in_transaction(driver: Any) -> bool:
    """Whether a DB-API connection is inside a transaction, by the ways of psycopg, psycopg2 and sqlite3."""
    if hasattr(driver, "in_transaction"):
        return bool(driver.in_transaction)
    info = getattr(driver, "info", None)
    status = getattr(info, "transaction_status", None)
    if status is not None:
        return int(status) in (1, 2, 3)  # active, in a transaction, in a failed one: libpq's PQTRANS_*
    return not getattr(driver, "closed", False)
