"""One SQL database: its engine, its clock, and statements in autocommit mode."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final, Generic, TypeVar
from weakref import WeakKeyDictionary, WeakSet

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
from sqlalchemy.engine import ExceptionContext
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError, OperationalError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.pool.base import _ConnectionRecord

from celery_leases.concurrency import wait_limit
from celery_leases.deadlines import LONGEST_CONNECTION_TIMEOUT
from celery_leases.errors import LeaseConfigurationError, StoreUnavailable, ValueRefused
from celery_leases.stores.python_errors import PYTHON_ERRORS
from celery_leases.stores.sql.compiled_statements import CompiledStatement, Row, Statements
from celery_leases.stores.sql.connections import BoundedPool, ConnectionLender, SingleConnectionPool
from celery_leases.stores.sql.dialects import mysql, postgresql
from celery_leases.stores.sql.dialects.names import database_now
from celery_leases.stores.sql.upserts import Writes, touched
from celery_leases.stores.urls import (
    display_database_url,
    display_url,
    without_secrets,
)

T = TypeVar("T")
SUPPORTED = ("sqlite", "postgresql", "mysql", "mariadb")
DRIVERS: Final[Mapping[str, Sequence[str]]] = {
    "postgresql": postgresql.DRIVERS,
    **dict.fromkeys(mysql.FAMILY, mysql.DRIVERS),
}
"""The supported drivers of each server. If the URL names none, the first installed one is used."""
MODULES: Final = {"mysqldb": "MySQLdb"}
_TO_WRITE: Final = 'write "postgresql+psycopg://host/database", "mysql+pymysql://host/database" or "sqlite:///file.db"'
CURSORS: Final = "celery_leases_cursors"
"""The name under which a connection of the pool has its idle cursors."""
BUSY_TIMEOUT = 5.0
BUSY: Final = "celery_leases_busy_timeout"
"""The name under which a connection of SQLite has its timeout, if that was changed."""
POOL_SIZE: Final = 10
LOCKED: Final = "database is locked"
"""SQLite's error while another connection writes."""

ONE_WRITER = "if this task has an open transaction that has written, end it first"
MAY_BE_TOO_LARGE: Final = 100_000
"""Bytes of a statement after whose failure a server is asked what it allows."""
DATABASE_ERRORS: Final = (SQLAlchemyError, *PYTHON_ERRORS)
"""Errors of SQLAlchemy, a driver, a pool or Python."""

HOW_TO_UNLOCK = "try again, or look for an idle one in pg_stat_activity (SHOW ENGINE INNODB STATUS)"


def engine_for(
    url: str,
    size: int = POOL_SIZE,
    longest_wait: float = LONGEST_CONNECTION_TIMEOUT,
) -> Engine:
    """An engine for *url* in autocommit mode, with at most *size* connections.

    If all connections are in use, a statement waits at most *longest_wait* seconds for one. A
    statement fails after 15 s without an answer. Raises :class:`LeaseConfigurationError` for an
    unsupported database or a missing driver.
    """
    parsed = _parsed(url)
    backend, on_mysql = parsed.get_backend_name(), parsed.get_backend_name() in mysql.FAMILY
    options: dict[str, Any] = {
        "poolclass": BoundedPool,
        "pool_size": size,
        "pool_timeout": longest_wait,
    }
    # Some statements read rows of two tables without a join, about which SQLAlchemy would warn.
    options["enable_from_linting"] = False
    if backend == "postgresql":
        options["connect_args"] = postgresql.connect_args(parsed)
        if reason := postgresql.refused_threshold(parsed):
            raise LeaseConfigurationError(
                f"leases_database_url={display_database_url(parsed)!r}: {reason}"
            )
    if backend == "sqlite":
        options["connect_args"] = {"timeout": BUSY_TIMEOUT, "check_same_thread": False}
        if parsed.database in (None, "", ":memory:"):
            del options["pool_size"], options["pool_timeout"]
            options["poolclass"] = SingleConnectionPool
    if on_mysql:
        options["connect_args"] = mysql.connect_args(parsed)
    try:
        engine = create_engine(
            parsed, isolation_level="AUTOCOMMIT", pool_reset_on_return=None, **options
        )
    except (
        ModuleNotFoundError,
        SQLAlchemyError,
        TypeError,
    ) as error:  # TypeError: SQLAlchemy is too old for an option
        extra, driver = ("mysql", "pymysql") if on_mysql else ("postgresql", "psycopg")
        write = f"pip install 'celery-leases[{extra}]'"
        if parsed.drivername != f"{backend}+{driver}":  # the extra does not bring that driver
            write = f"write {backend}+{driver}://… and {write}, or install the driver that the URL names"
        raise LeaseConfigurationError(
            f"leases_database_url={display_database_url(parsed)!r} has no driver here ({error}); {write}"
        ) from None
    event.listen(engine, "handle_error", _invalidate_outdated)
    if on_mysql:
        event.listen(engine, "do_connect", mysql.connect)
        event.listen(engine, "connect", mysql.prepare)
        # In autocommit mode a ROLLBACK is unnecessary and would cost a round trip.
        engine.dialect.do_rollback = _nothing  # type: ignore[assignment, method-assign]
    if backend == "sqlite":
        event.listen(engine, "connect", _prepare_sqlite)
    elif backend == "postgresql":
        event.listen(engine, "do_connect", postgresql.connect)
    return engine


def _parsed(url: str) -> URL:
    """The URL of a supported database. If *url* names no driver, it gets an installed one."""
    try:
        parsed = make_url(url)
    except (SQLAlchemyError, ValueError, TypeError) as error:
        raise LeaseConfigurationError(
            f"leases_database_url={display_url(url)!r} is not a database URL ({type(error).__name__}); {_TO_WRITE}"
        ) from None
    backend, _, driver = parsed.drivername.partition("+")
    backend = "postgresql" if backend == "postgres" else backend
    if backend not in SUPPORTED:
        raise LeaseConfigurationError(
            f"leases_database_url={display_url(url)!r}: records can be stored in {' or '.join(SUPPORTED)}; {_TO_WRITE}"
        )
    drivers = DRIVERS.get(backend)
    if drivers is None:
        return parsed
    if driver and driver not in drivers:
        raise LeaseConfigurationError(
            f"leases_database_url={display_url(url)!r}: the driver must be {' or '.join(drivers)}; {_TO_WRITE}"
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


def _is_outdated(error: BaseException) -> bool:
    """Whether the statement was not executed, and may be on a new connection."""
    return (
        postgresql.is_outdated(error) or postgresql.is_read_only(error) or mysql.is_read_only(error)
    )


def _invalidate_outdated(context: ExceptionContext) -> None:
    """Replace the connection of a statement that SQLAlchemy has executed."""
    if _is_outdated(context.original_exception):
        context.is_disconnect = True


def _prepare_sqlite(connection: Any, _: Any) -> None:
    # FULL: a done record must survive a power failure. With NORMAL the last commits of a WAL
    # database may be lost.
    for pragma in ("journal_mode=WAL", "synchronous=FULL"):
        connection.execute(f"PRAGMA {pragma}").close()


def _limit_busy_timeout(connection: Any, info: MutableMapping[Any, Any]) -> None:
    """Let a statement on SQLite wait for another writer as long as this delivery may."""
    seconds = wait_limit.bounded(BUSY_TIMEOUT)
    if seconds != info.get(BUSY, BUSY_TIMEOUT):
        connection.execute(f"PRAGMA busy_timeout={int(seconds * 1000)}").close()
        info[BUSY] = seconds


_open: WeakSet[Database] = WeakSet()


def _drop_inherited_connections() -> None:
    for database in list(_open):
        database.close(inherited=True)


# Two processes on one connection would read each other's replies.
os.register_at_fork(after_in_child=_drop_inherited_connections)


def host_now() -> int:
    """The time of this machine, in microseconds since the epoch."""
    return time.time_ns() // 1000


class _KeyPresentError(StoreUnavailable):
    """An insert failed because its key exists. For a statement that does not expect this, it is an
    error of the store.
    """


def _needs_new_connection(error: DBAPIError) -> bool:
    """Whether the connection was closed, so that the statement is worth repeating on a new one.
    ``False`` after a timeout, because the statement could take as long again.
    """
    silent = isinstance(error.orig, TimeoutError) or "timed out" in str(error.orig)
    return error.connection_invalidated and not silent


def _refuses_a_value(error: Exception) -> bool:
    """Whether the database or its driver refuses a value, so that the error would repeat."""
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
class _ResultReader(Generic[T]):
    """Reads a value after a statement, from SQLAlchemy's result or from the driver's cursor."""

    from_result: Callable[[CursorResult[Any]], T]
    from_cursor: Callable[[CompiledStatement, Any], T]


_FIRST: Final[_ResultReader[Row | None]] = _ResultReader(
    lambda result: result.mappings().first(), CompiledStatement.first
)
_ALL: Final[_ResultReader[Sequence[Row]]] = _ResultReader(
    lambda result: result.mappings().all(), CompiledStatement.all
)
_COUNT: Final[_ResultReader[int]] = _ResultReader(
    lambda result: result.rowcount, lambda _, cursor: int(cursor.rowcount)
)
_NUMBER: Final[_ResultReader[int]] = _ResultReader(
    lambda result: result.lastrowid, lambda _, cursor: int(cursor.lastrowid)
)
_TOUCHED: Final[_ResultReader[bool]] = _ResultReader(touched, CompiledStatement.touched)


def _cursors_of(record: _ConnectionRecord) -> MutableMapping[CompiledStatement, Any]:
    """The idle cursors of a connection. SQLAlchemy forgets them when it reconnects; the cursor of a
    statement that no longer exists goes with it.
    """
    cursors: MutableMapping[CompiledStatement, Any] | None = record.info.get(CURSORS)
    if cursors is None:
        cursors = record.info[CURSORS] = WeakKeyDictionary()
    return cursors


class Database:
    """Executes statements in autocommit mode. After a deadlock, or on a dead connection, a
    statement is executed a second time, so every statement must be repeatable.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.now = database_now(engine.dialect)
        self.host_clock = engine.dialect.name == "sqlite"
        #: The clock for statements on SQLite, which has no server: microseconds since the epoch.
        self.host_now: Callable[[], int] = host_now
        self._statements = Statements(engine.dialect)
        self._driver_error: type[Exception] = engine.dialect.loaded_dbapi.Error
        # Psycopg looks up the converters of all values again for each cursor, and for each change
        # of its statement. An open cursor of SQLite may hold a lock.
        self._keeps_cursors = engine.dialect.name == "postgresql"
        #: Shortens the wait for a reply on a connection. That of PostgreSQL's driver limits itself.
        self._limit_wait: Callable[[Any, MutableMapping[Any, Any]], None] | None = (
            _limit_busy_timeout
            if self.host_clock
            else mysql.limit_read_timeout
            if engine.dialect.driver == mysql.PYMYSQL
            else None
        )
        _open.add(self)

    def first(self, statement: Executable, values: Mapping[str, Any]) -> Row | None:
        """Run *statement*; returns its first row. Raises :class:`StoreUnavailable`, as do the other
        methods.
        """
        return self._run(statement, values, _FIRST)

    def all(self, statement: Executable, values: Mapping[str, Any]) -> Sequence[Row]:
        """Run *statement*; returns all its rows."""
        return self._run(statement, values, _ALL)

    def touch(self, writes: Writes, values: Mapping[str, Any]) -> bool:
        """Run *writes* in order until one touches a row; returns whether one did so."""
        return any(self._touches(write, values) for write in writes)

    def count(self, statement: Executable, values: Mapping[str, Any]) -> int:
        """Run *statement*; returns how many rows it touched."""
        return self._run(statement, values, _COUNT)

    def first_unless_present(self, statement: Executable, values: Mapping[str, Any]) -> Row | None:
        """Run a statement that inserts a row, and returns at least one row; ``None`` if the key
        exists.
        """
        try:
            return self._run(statement, values, _FIRST)
        except _KeyPresentError:
            return None

    def number(self, statement: Executable, values: Mapping[str, Any]) -> int | None:
        """Run an INSERT on MySQL; returns ``LAST_INSERT_ID``, or ``None`` if the key exists."""
        try:
            return self._run(statement, values, _NUMBER)
        except _KeyPresentError:
            return None

    def has_no_writer(self) -> bool:
        """Whether no connection has an open transaction that has written to this SQLite
        database.
        """

        def begin(connection: Connection) -> bool:
            connection.exec_driver_sql("BEGIN IMMEDIATE")
            connection.exec_driver_sql("ROLLBACK")
            return True

        return self._unless_locked(begin) or False

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Convert errors of the database to :class:`StoreUnavailable`, or to :class:`ValueRefused`
        if the database refused a value.
        """
        try:
            yield
        except DATABASE_ERRORS as error:
            raise self._converted(error) from error

    def close(self, *, inherited: bool = False) -> None:
        """Close the connections. *inherited*: only forget them, because they belong to the parent
        process.
        """
        self.engine.dispose(close=not inherited)

    def _touches(self, write: Executable, values: Mapping[str, Any]) -> bool:
        try:
            return self._run(write, values, _TOUCHED)
        except _KeyPresentError:
            return False

    def _run(self, statement: Executable, values: Mapping[str, Any], reader: _ResultReader[T]) -> T:
        if self.host_clock:
            values = {**values, "now": self.host_now()}
        try:
            compiled = self._statements.compiled(statement)
            try:
                return self._once(statement, compiled, values, reader)
            except DBAPIError as error:
                if not (_needs_new_connection(error) or mysql.code_of(error) == mysql.DEADLOCK):
                    raise
            return self._once(statement, compiled, values, reader)
        except DATABASE_ERRORS as error:
            if mysql.is_lost(error) and self._is_too_large(values):
                text = f"{mysql.size_of(values.values())} bytes are more than max_allowed_packet"
                raise ValueRefused(f"the database refuses a value: {text}", False) from error
            raise self._converted(error) from error

    def _is_too_large(self, values: Mapping[str, Any]) -> bool:
        """Whether MySQL has closed the connection because *values* are too large for it. Only
        asked after an error.
        """
        size = mysql.size_of(values.values())
        if size < MAY_BE_TOO_LARGE:
            return False
        try:
            with self.engine.connect() as connection:
                allowed = connection.exec_driver_sql(mysql.MAX_PACKET).scalar_one()
        except DATABASE_ERRORS:
            return False  # an outage
        return size > int(allowed)

    def _once(
        self,
        statement: Executable,
        compiled: CompiledStatement | None,
        values: Mapping[str, Any],
        reader: _ResultReader[T],
    ) -> T:
        try:
            if compiled is not None:
                return self._on_cursor(compiled, values, reader.from_cursor)
            return self._by_sqlalchemy(statement, values, reader.from_result)
        except IntegrityError as error:
            if mysql.is_duplicate(error) or (
                postgresql.state_of(error) == postgresql.UNIQUE_VIOLATION
            ):
                text = f"{display_database_url(self.engine.url)}: a row with this key exists"
                raise _KeyPresentError(text, False) from error
            raise

    def _by_sqlalchemy(
        self,
        statement: Executable,
        values: Mapping[str, Any],
        read: Callable[[CursorResult[Any]], T],
    ) -> T:
        with self.engine.connect() as connection:
            if self._limit_wait is not None:
                self._limit_wait(connection.connection.dbapi_connection, connection.info)
            try:
                value = read(connection.execute(statement, values))
            except SQLAlchemyError:
                raise
            except BaseException as error:
                if not self._is_reusable(error):
                    connection.invalidate(error)
                raise
        self._statements.executed(statement)
        return value

    def _on_cursor(
        self,
        compiled: CompiledStatement,
        values: Mapping[str, Any],
        read: Callable[[CompiledStatement, Any], T],
    ) -> T:
        """Execute *compiled* on the driver's own cursor; raises the same errors as SQLAlchemy."""
        parameters = compiled.parameters(values)
        pool: ConnectionLender = self.engine.pool  # type: ignore[assignment]
        record, cursor = pool.acquire(), None
        try:
            connection = record.get_connection()
            if self._limit_wait is not None:
                self._limit_wait(connection, record.info)
            cursors = _cursors_of(record) if self._keeps_cursors else {}
            cursor = cursors.pop(compiled, None) or connection.cursor()
            cursor.execute(compiled.text, parameters)
            value = read(compiled, cursor)
            if self._keeps_cursors:
                cursors[compiled] = cursor
            else:
                cursor.close()
        except self._driver_error as error:
            dead = self._is_dead(error, record.dbapi_connection)
            if dead:
                pool.invalidate_dead(record, error)
            raise DBAPIError.instance(
                compiled.text,
                parameters,
                error,
                self._driver_error,
                connection_invalidated=dead,
                dialect=self.engine.dialect,
            ) from error
        except BaseException as error:
            if not self._is_reusable(error):
                record.invalidate(error)
            elif cursor is not None:
                cursor.close()
            raise
        finally:
            pool.release(record)
        return value

    def _is_dead(self, error: Exception, connection: Any) -> bool:
        """Whether an error of the driver means that *connection*, which is ``None`` if connecting
        failed, is unusable.
        """
        dialect: Any = self.engine.dialect
        return dialect.is_disconnect(error, connection, None) or _is_outdated(error)

    def _is_reusable(self, error: BaseException) -> bool:
        """Whether a connection may be used again after *error* interrupted its statement.

        It may not be if data were sent to a server, because the next statement would read the reply
        to this one. SQLite has no server, and an in-memory database would be lost with its
        connection.
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

    def _converted(self, error: Exception) -> StoreUnavailable | ValueRefused:
        cause = getattr(error, "orig", None) or error
        if _refuses_a_value(error):
            return ValueRefused(
                f"the database refuses a value: {' '.join(str(cause).split())}", False
            )
        refused = (
            postgresql.state_of(error) == postgresql.LOCK_NOT_AVAILABLE
            or mysql.code_of(error) in mysql.NOT_EXECUTED
        )
        one_writer = self.host_clock and LOCKED in str(cause)
        not_executed = (
            isinstance(error, PoolTimeout) or refused or one_writer or _is_outdated(cause)
        )
        executed = False if not_executed else None
        text = f"{type(cause).__name__}: {without_secrets(' '.join(str(cause).split()), self.engine.url)}"
        if refused:
            text = (
                "another transaction has locked the row, or this statement was part of a deadlock; "
                f"{HOW_TO_UNLOCK} ({text})"
            )
        if one_writer:
            text = f"{text}: SQLite allows one writer at a time; {ONE_WRITER}"
        return StoreUnavailable(f"{display_database_url(self.engine.url)}: {text}", executed)
