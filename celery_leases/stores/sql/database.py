"""One SQL database: its engine, its clock, and single statements in autocommit mode."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final, Generic, TypeVar
from weakref import WeakSet

from sqlalchemy import (
    URL,
    Connection,
    CursorResult,
    Engine,
    Executable,
    create_engine,
    event,
    make_url,
)
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError, OperationalError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from celery_leases.errors import (
    ColumnMissing,
    LeaseConfigurationError,
    StoreUnavailable,
    ValueRefused,
)
from celery_leases.protocol.deadlines import LONGEST_WAIT
from celery_leases.stores.faults import FAULTS
from celery_leases.stores.sql.compiled_statements import CompiledStatement, Row, Statements
from celery_leases.stores.sql.connections import BoundedPool, Lending, OnePool
from celery_leases.stores.sql.dialects import mysql, postgresql
from celery_leases.stores.sql.dialects.names import database_now
from celery_leases.stores.sql.upserts import Writes, touched
from celery_leases.stores.urls import rewritten_url, shown, shown_database, without_secrets

T = TypeVar("T")
SUPPORTED = ("sqlite", "postgresql", "mysql", "mariadb")
DRIVERS: Final[Mapping[str, Sequence[str]]] = {
    "postgresql": postgresql.DRIVERS,
    **dict.fromkeys(mysql.FAMILY, mysql.DRIVERS),
}
"""The drivers of each server; the first installed one is used."""
MODULES: Final = {"mysqldb": "MySQLdb"}
_TO_WRITE: Final = 'write "postgresql+psycopg://host/database", "mysql+pymysql://host/database" or "sqlite:///file.db"'
BUSY_TIMEOUT = 5.0
POOL_SIZE: Final = 10
OF_SQLITE: Final = "OperationalError"
UNDEFINED_IN_SQLITE: Final = ("no such column", "has no column named")
LOCKED: Final = "database is locked"
"""What SQLite says while another connection writes."""

ONE_WRITER = "if this task has an open transaction that has written, end it first"
DATABASE_ERRORS: Final = (SQLAlchemyError, *FAULTS)
"""Errors of a driver, its pool or Python."""

LOOK = "try again, or look for an idle one in pg_stat_activity (SHOW ENGINE INNODB STATUS)"


def engine_for(
    url: str, size: int = POOL_SIZE, longest_wait: float = LONGEST_WAIT, *, migrates: bool = False
) -> Engine:
    """An engine for *url*: autocommit, no statements when a connection is returned, at most *size*
    connections.

    If all of them are in use, a statement waits for one, at most *longest_wait* seconds. A server
    that is silent for 15 s is given up, unless the engine *migrates*: then its statements may take
    long. Raises :class:`LeaseConfigurationError` for an unsupported database or a missing driver.
    """
    parsed = _parsed(url)
    backend, of_mysql = parsed.get_backend_name(), parsed.get_backend_name() in mysql.FAMILY
    options: dict[str, Any] = {
        "poolclass": BoundedPool,
        "pool_size": size,
        "pool_timeout": longest_wait,
    }
    # Some statements read two unrelated rows by their keys, which SQLAlchemy would warn about.
    options["enable_from_linting"] = False
    if backend == "postgresql":
        options["connect_args"] = postgresql.connect_args(parsed)
    if backend == "sqlite":
        options["connect_args"] = {"timeout": BUSY_TIMEOUT, "check_same_thread": False}
        if parsed.database in (None, "", ":memory:"):
            del options["pool_size"], options["pool_timeout"]
            options["poolclass"] = OnePool
    if of_mysql:
        parsed = mysql.without_end(parsed) if migrates else parsed
        options["connect_args"] = mysql.connect_args(parsed, migrates=migrates)
    try:
        engine = create_engine(
            parsed, isolation_level="AUTOCOMMIT", pool_reset_on_return=None, **options
        )
    except (
        ModuleNotFoundError,
        SQLAlchemyError,
        TypeError,
    ) as error:  # the last is an option SQLAlchemy is too old for
        extra = "mysql" if of_mysql else backend
        raise LeaseConfigurationError(
            f"leases_database_url={shown_database(parsed)!r} has no driver here ({error}); "
            f"pip install 'celery-leases[{extra}]'"
        ) from None
    if of_mysql:
        event.listen(engine, "connect", mysql.prepare)
        # In autocommit mode a ROLLBACK is unnecessary and would cost a round trip.
        engine.dialect.do_rollback = _nothing  # type: ignore[assignment, method-assign]
    if backend == "sqlite":
        event.listen(engine, "connect", _prepare_sqlite)
    elif backend == "postgresql":
        event.listen(
            engine, "do_connect", postgresql.connect_to_migrate if migrates else postgresql.connect
        )
    return engine


@contextmanager
def migrating(engine: Engine) -> Iterator[Engine]:
    """An engine for the same database whose statements may take as long as they need, until the end
    of the block.
    """
    if engine.dialect.name == "sqlite":
        yield engine
        return
    made = engine_for(rewritten_url(engine.url), migrates=True)
    try:
        yield made
    finally:
        made.dispose()


def _parsed(url: str) -> URL:
    """The URL of a supported database, with a driver that is installed where *url* names none."""
    try:
        parsed = make_url(url)
    except (SQLAlchemyError, ValueError, TypeError) as error:
        raise LeaseConfigurationError(
            f"leases_database_url={shown(url)!r} is not a database URL ({type(error).__name__}); {_TO_WRITE}"
        ) from None
    backend, _, driver = parsed.drivername.partition("+")
    backend = "postgresql" if backend == "postgres" else backend
    if backend not in SUPPORTED:
        raise LeaseConfigurationError(
            f"leases_database_url={shown(url)!r}: records can be stored in {' or '.join(SUPPORTED)}; {_TO_WRITE}"
        )
    drivers = DRIVERS.get(backend)
    if drivers is None:
        return parsed
    if driver and driver not in drivers:
        raise LeaseConfigurationError(
            f"leases_database_url={shown(url)!r}: the driver must be {' or '.join(drivers)}; {_TO_WRITE}"
        )
    found = driver or next(filter(_is_installed, drivers), next(iter(drivers)))
    return parsed.set(drivername=f"{backend}+{found}")


def _is_installed(driver: str) -> bool:
    try:
        import_module(MODULES.get(driver, driver))
    except ImportError:
        return False
    return True


def _nothing(_: Any) -> None:
    pass


def _prepare_sqlite(connection: Any, _: Any) -> None:
    # FULL: a done record must survive a power failure; NORMAL may lose the last commits of a WAL
    # database.
    for pragma in ("journal_mode=WAL", "synchronous=FULL"):
        connection.execute(f"PRAGMA {pragma}").close()


_open: WeakSet[Database] = WeakSet()


def _leave_to_the_parent() -> None:
    for database in list(_open):
        database.close(inherited=True)


# Two processes on one connection would get each other's replies.
os.register_at_fork(after_in_child=_leave_to_the_parent)


def host_now() -> int:
    """The time of this machine, in microseconds since the epoch."""
    return time.time_ns() // 1000


class _KeyPresentError(Exception):
    """An insert was refused because its key exists."""


def _found_dead(error: DBAPIError) -> bool:
    """Whether the connection was closed, so that a new one helps. ``False`` after a timeout: the
    statement is not repeated, because it could take as long again.
    """
    silent = isinstance(error.orig, TimeoutError) or "timed out" in str(error.orig)
    return error.connection_invalidated and not silent


def misses_a_column(error: Exception) -> bool:
    """Whether a statement names a column that its table does not have, by SQLAlchemy's error or the
    driver's.
    """
    cause = getattr(error, "orig", None) or error
    return (
        postgresql.state_of(cause) == postgresql.UNDEFINED_COLUMN
        or mysql.code_of(error) == mysql.UNDEFINED_COLUMN
        or (
            type(cause).__name__ == OF_SQLITE
            and any(words in str(cause) for words in UNDEFINED_IN_SQLITE)
        )
    )


def _refuses_a_value(error: Exception) -> bool:
    """Whether the database or its driver refuses a value, so that repetition does not help."""
    cause = getattr(error, "orig", None) or error
    without_nul = isinstance(cause, ValueError) and "NUL" in str(cause)  # psycopg2
    too_large = mysql.code_of(error) in mysql.TOO_LARGE
    return (
        isinstance(error, DataError)
        or isinstance(cause, UnicodeEncodeError | OverflowError)
        or without_nul
        or too_large
    )


@dataclass(frozen=True, slots=True)
class _Taking(Generic[T]):
    """How a value is read after a statement: from SQLAlchemy's result, or from the driver's
    cursor.
    """

    of_result: Callable[[CursorResult[Any]], T]
    of_cursor: Callable[[CompiledStatement, Any], T]


_FIRST: Final[_Taking[Row | None]] = _Taking(
    lambda result: result.mappings().first(), CompiledStatement.first
)
_ALL: Final[_Taking[Sequence[Row]]] = _Taking(
    lambda result: result.mappings().all(), CompiledStatement.all
)
_COUNT: Final[_Taking[int]] = _Taking(
    lambda result: result.rowcount, lambda _, cursor: int(cursor.rowcount)
)
_NUMBER: Final[_Taking[int]] = _Taking(
    lambda result: result.lastrowid, lambda _, cursor: int(cursor.lastrowid)
)
_TOUCHED: Final[_Taking[bool]] = _Taking(touched, CompiledStatement.touched)


class Database:
    """Executes statements. After a dead connection or a deadlock the statement is repeated once, so
    every statement must be repeatable.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.now = database_now(engine.dialect)
        self.host_clock = engine.dialect.name == "sqlite"
        #: The time for statements on SQLite, which has no clock: microseconds since the epoch.
        self.host_now: Callable[[], int] = host_now
        self._statements = Statements(engine.dialect)
        self._driver_error: type[Exception] = engine.dialect.loaded_dbapi.Error
        # Psycopg looks up the converters of all values again for each cursor, and for each change
        # of its statement. An open cursor of SQLite may hold a lock.
        self._keeps_cursors = engine.dialect.name == "postgresql"
        _open.add(self)

    def first(self, statement: Executable, values: Mapping[str, Any]) -> Row | None:
        """Run *statement*; returns its first row. Raises :class:`StoreUnavailable`, as the methods
        below do.
        """
        return self._run(statement, values, _FIRST)

    def all(self, statement: Executable, values: Mapping[str, Any]) -> Sequence[Row]:
        """Run *statement*; returns all its rows."""
        return self._run(statement, values, _ALL)

    def touch(self, writes: Writes, values: Mapping[str, Any]) -> bool:
        """Run *writes* in order until one touches a row; returns whether one did."""
        return any(self._touches(write, values) for write in writes)

    def count(self, statement: Executable, values: Mapping[str, Any]) -> int:
        """Run *statement*; returns how many rows it touched."""
        return self._run(statement, values, _COUNT)

    def number(self, statement: Executable, values: Mapping[str, Any]) -> int | None:
        """Run *statement*, an insert for MySQL; returns its ``LAST_INSERT_ID``, or ``None`` if its
        key exists.
        """
        try:
            return self._run(statement, values, _NUMBER)
        except _KeyPresentError:
            return None

    def nobody_writes(self) -> bool:
        """Whether no connection to this SQLite database is in a transaction that has written."""

        def begin(connection: Connection) -> bool:
            connection.exec_driver_sql("BEGIN IMMEDIATE")
            connection.exec_driver_sql("ROLLBACK")
            return True

        return self._unless_locked(begin) or False

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Convert errors of the database to :class:`StoreUnavailable`, or to :class:`ValueRefused`
        if it refused a value.
        """
        try:
            yield
        except DATABASE_ERRORS as error:
            raise self._ours(error) from error

    def close(self, *, inherited: bool = False) -> None:
        """Close the connections; *inherited*: without a message to the server, because they belong
        to the parent process.
        """
        self.engine.dispose(close=not inherited)

    def _touches(self, write: Executable, values: Mapping[str, Any]) -> bool:
        try:
            return self._run(write, values, _TOUCHED)
        except _KeyPresentError:
            return False

    def _run(self, statement: Executable, values: Mapping[str, Any], taking: _Taking[T]) -> T:
        if self.host_clock:
            values = {**values, "now": self.host_now()}
        try:
            compiled = self._statements.compiled(statement)
            try:
                return self._once(statement, compiled, values, taking)
            except DBAPIError as error:
                if not (_found_dead(error) or mysql.code_of(error) == mysql.DEADLOCK):
                    raise
            return self._once(statement, compiled, values, taking)
        except DATABASE_ERRORS as error:
            raise self._ours(error) from error

    def _once(
        self,
        statement: Executable,
        compiled: CompiledStatement | None,
        values: Mapping[str, Any],
        taking: _Taking[T],
    ) -> T:
        try:
            if compiled is not None:
                return self._on_cursor(compiled, values, taking.of_cursor)
            return self._by_sqlalchemy(statement, values, taking.of_result)
        except IntegrityError as error:
            if mysql.is_duplicate(error):
                raise _KeyPresentError from error
            raise

    def _by_sqlalchemy(
        self,
        statement: Executable,
        values: Mapping[str, Any],
        take: Callable[[CursorResult[Any]], T],
    ) -> T:
        with self.engine.connect() as connection:
            try:
                taken = take(connection.execute(statement, values))
            except SQLAlchemyError:
                raise
            except BaseException as error:
                if not self._is_whole(error):
                    connection.invalidate(error)
                raise
        self._statements.executed(statement)
        return taken

    def _on_cursor(
        self,
        compiled: CompiledStatement,
        values: Mapping[str, Any],
        take: Callable[[CompiledStatement, Any], T],
    ) -> T:
        """Execute *compiled* on the driver's own cursor; raises the errors that SQLAlchemy
        would.
        """
        parameters = compiled.parameters(values)
        pool: Lending = self.engine.pool  # type: ignore[assignment]
        record, cursor = pool.lend(), None
        try:
            connection = record.get_connection()
            cursor = record.info.pop(compiled, None) or connection.cursor()
            cursor.execute(compiled.text, parameters)
            taken = take(compiled, cursor)
            if self._keeps_cursors:
                record.info[compiled] = cursor
            else:
                cursor.close()
        except self._driver_error as error:
            dead = self._is_dead(error, record.dbapi_connection)
            if dead:
                pool.found_dead(record, error)
            raise DBAPIError.instance(
                compiled.text,
                parameters,
                error,
                self._driver_error,
                connection_invalidated=dead,
                dialect=self.engine.dialect,
            ) from error
        except BaseException as error:
            if not self._is_whole(error):
                record.invalidate(error)
            elif cursor is not None:
                cursor.close()
            raise
        finally:
            pool.take_back(record)
        return taken

    def _is_dead(self, error: Exception, connection: Any) -> bool:
        """Whether an error of the driver means that *connection* is unusable; ``None`` if none was
        made.
        """
        dialect: Any = self.engine.dialect
        return dialect.is_disconnect(error, connection, None) or postgresql.is_outdated(error)

    def _is_whole(self, error: BaseException) -> bool:
        """Whether a connection may be used again after *error* interrupted its statement.

        It may not if data were sent, because the next statement would read the answer to this one.
        SQLite has no such answers, and its connection may be the whole database.
        """
        return self.host_clock or (isinstance(error, Exception) and _refuses_a_value(error))

    def _unless_locked(self, step: Callable[[Connection], T]) -> T | None:
        with self.errors(), self.engine.connect() as connection:
            connection.exec_driver_sql("PRAGMA busy_timeout=0").close()
            try:
                return step(connection)
            except OperationalError as error:
                if LOCKED not in str(error):
                    raise
                return None
            finally:
                connection.exec_driver_sql(
                    f"PRAGMA busy_timeout={int(BUSY_TIMEOUT * 1000)}"
                ).close()

    def _ours(self, error: Exception) -> StoreUnavailable | ValueRefused:
        cause = getattr(error, "orig", None) or error
        if _refuses_a_value(error):
            return ValueRefused(
                f"the database refuses a value: {' '.join(str(cause).split())}", False
            )
        if misses_a_column(error):
            shown = without_secrets(" ".join(str(cause).split()), self.engine.url)
            return ColumnMissing(f"{shown_database(self.engine.url)}: {shown}", False)
        refused = (
            postgresql.state_of(cause) == postgresql.LOCK_NOT_AVAILABLE
            or mysql.code_of(cause) in mysql.NOT_EXECUTED
        )
        one_writer = self.host_clock and LOCKED in str(cause)
        executed = False if isinstance(error, PoolTimeout) or refused or one_writer else None
        text = f"{type(cause).__name__}: {without_secrets(' '.join(str(cause).split()), self.engine.url)}"
        if refused:
            text = f"another transaction has locked the row, or this statement was part of a deadlock; {LOOK} ({text})"
        if one_writer:
            text = f"{text}: SQLite allows one writer at a time; {ONE_WRITER}"
        return StoreUnavailable(f"{shown_database(self.engine.url)}: {text}", executed)
