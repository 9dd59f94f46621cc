"""One SQL database: its engine, its clock, and single statements that are each committed by themselves."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeVar
from weakref import WeakSet

from sqlalchemy import Connection, CursorResult, Engine, Executable, RowMapping, create_engine, event, make_url
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError, OperationalError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.pool import StaticPool

from celery_leases.core.errors import KeyUnusable, LeaseConfigurationError, StoreUnavailable
from celery_leases.stores import mysql, postgres
from celery_leases.stores.claims import database_now
from celery_leases.stores.upserts import Writes, touched

T = TypeVar("T")
SUPPORTED = ("sqlite", "postgresql", "mysql", "mariadb")
BUSY_TIMEOUT = 5.0
LOCKED: Final = "database is locked"
"""What SQLite says while another connection writes."""

ONE_WRITER = "is a transaction open that has written, such as one of this very body's? End it first"
LOOK = "try again, or see pg_stat_activity (SHOW ENGINE INNODB STATUS) for one that is idle"


def engine_for(url: str) -> Engine:
    """An engine for *url*: autocommit, and no chatter when a connection goes back to the pool.

    Raises :class:`LeaseConfigurationError` for a database that is not supported, or a driver that is missing.
    """
    try:
        parsed = make_url(url)
        backend = parsed.get_backend_name()
    except SQLAlchemyError as error:
        raise LeaseConfigurationError(f"leases_database_url is not a database URL: {error}") from None
    if backend not in SUPPORTED:
        raise LeaseConfigurationError(
            f"leases_database_url={str(parsed)!r}: records are kept in {' or '.join(SUPPORTED)}; "
            'write "postgresql+psycopg://host/database", "mysql+pymysql://host/database" or "sqlite:///file.db"'
        )
    of_mysql = backend in mysql.FAMILY
    if of_mysql and parsed.get_driver_name() not in mysql.DRIVERS:
        raise LeaseConfigurationError(
            f"leases_database_url={str(parsed)!r}: the driver is to be one of {' or '.join(mysql.DRIVERS)}; "
            'write "mysql+pymysql://host/database"'
        )
    options: dict[str, Any] = {"pool_size": 0}
    if parsed.get_driver_name().startswith("psycopg"):
        options["connect_args"] = postgres.connect_args(parsed)
    if backend == "sqlite":
        options["connect_args"] = {"timeout": BUSY_TIMEOUT, "check_same_thread": False}
        if parsed.database in (None, "", ":memory:"):
            options = {"connect_args": options["connect_args"], "poolclass": StaticPool}
    if of_mysql:
        options["connect_args"] = mysql.connect_args(parsed)
    try:
        engine = create_engine(parsed, isolation_level="AUTOCOMMIT", pool_reset_on_return=None, **options)
    except (
        ModuleNotFoundError,
        SQLAlchemyError,
        TypeError,
    ) as error:  # the last is an option SQLAlchemy is too old for
        extra = "mysql" if of_mysql else backend
        raise LeaseConfigurationError(
            f"leases_database_url={str(parsed)!r} has no driver here ({error}); pip install 'celery-leases[{extra}]'"
        ) from None
    if of_mysql:
        event.listen(engine, "connect", mysql.prepare)
        # A statement that has committed by itself needs no ROLLBACK after it, which would be a round trip of its own.
        engine.dialect.do_rollback = _nothing  # type: ignore[assignment, method-assign]
    if backend == "sqlite":
        event.listen(engine, "connect", _prepare_sqlite)
    elif backend == "postgresql":
        event.listen(engine, "do_connect", postgres.connect)
    return engine


def _nothing(_: Any) -> None:
    pass


def _prepare_sqlite(connection: Any, _: Any) -> None:
    # FULL: a done record must outlive a power cut; NORMAL may lose the last commits of a WAL database.
    for pragma in ("journal_mode=WAL", "synchronous=FULL"):
        connection.execute(f"PRAGMA {pragma}").close()


_open: WeakSet[Database] = WeakSet()


def _leave_to_the_parent() -> None:
    for database in list(_open):
        database.close(inherited=True)


# A connection used by two processes answers the one with what the other asked.
os.register_at_fork(after_in_child=_leave_to_the_parent)


class _KeyPresentError(Exception):
    """An insert was refused because its key is there already."""


def _found_dead(error: DBAPIError) -> bool:
    """Whether the connection was gone, so that a new one does better; not silent, for which all patience is spent."""
    silent = isinstance(error.orig, TimeoutError) or "timed out" in str(error.orig)
    return error.connection_invalidated and not silent


class Database:
    """Runs statements. A connection found dead is replaced and the statement repeated once, so all must bear that.

    So is a statement that the database has taken back because of a deadlock.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.now = database_now(engine.dialect)
        self.host_clock = engine.dialect.name == "sqlite"
        _open.add(self)

    def first(self, statement: Executable, values: Mapping[str, Any]) -> RowMapping | None:
        """Run *statement*; its first row. Raises :class:`StoreUnavailable`, as the other two do."""
        return self._run(statement, values, lambda result: result.mappings().first())

    def all(self, statement: Executable, values: Mapping[str, Any]) -> Sequence[RowMapping]:
        """Run *statement*; all its rows."""
        return self._run(statement, values, lambda result: result.mappings().all())

    def touch(self, writes: Writes, values: Mapping[str, Any]) -> bool:
        """Run *writes* in turn until one touches a row; whether one did."""
        return any(self._touches(write, values) for write in writes)

    def count(self, statement: Executable, values: Mapping[str, Any]) -> int:
        """Run *statement*; how many rows it touched."""
        return self._run(statement, values, lambda result: result.rowcount)

    def all_at_once(self, statement: Executable, values: Mapping[str, Any]) -> Sequence[RowMapping]:
        """As :meth:`all`; but on SQLite it waits for no other writer, and gives no rows while there is one."""
        if not self.host_clock:
            return self.all(statement, values)
        given = {**values, "now": time.time_ns() // 1000}
        return self._unless_locked(lambda connection: connection.execute(statement, given).mappings().all()) or ()

    def nobody_writes(self) -> bool:
        """Whether no connection to this SQLite database is in a transaction that has written."""

        def begin(connection: Connection) -> bool:
            connection.exec_driver_sql("BEGIN IMMEDIATE")
            connection.exec_driver_sql("ROLLBACK")
            return True

        return self._unless_locked(begin) or False

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Turn what the database raises into :class:`StoreUnavailable`."""
        try:
            yield
        except DataError as error:
            raise KeyUnusable(f"the database refuses a value of this call: {error.orig}") from error
        except (SQLAlchemyError, OSError) as error:
            raise self._unavailable(error) from error

    def close(self, *, inherited: bool = False) -> None:
        """Let the connections go; *inherited*: without a word to the server, as they are the parent's."""
        self.engine.dispose(close=not inherited)

    def _touches(self, write: Executable, values: Mapping[str, Any]) -> bool:
        try:
            return self._run(write, values, touched)
        except _KeyPresentError:
            return False

    def _run(self, statement: Executable, values: Mapping[str, Any], take: Callable[[CursorResult[Any]], T]) -> T:
        if self.host_clock:
            values = {**values, "now": time.time_ns() // 1000}
        try:
            return self._once(statement, values, take)
        except DBAPIError as error:
            with self.errors():
                if not (_found_dead(error) or mysql.code_of(error) == mysql.DEADLOCK):
                    raise
        with self.errors():
            return self._once(statement, values, take)

    def _once(self, statement: Executable, values: Mapping[str, Any], take: Callable[[CursorResult[Any]], T]) -> T:
        try:
            with self.engine.connect() as connection:
                return take(connection.execute(statement, values))
        except IntegrityError as error:
            if mysql.is_duplicate(error):
                raise _KeyPresentError from error
            raise

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
                connection.exec_driver_sql(f"PRAGMA busy_timeout={int(BUSY_TIMEOUT * 1000)}").close()

    def _unavailable(self, error: Exception) -> StoreUnavailable:
        cause = getattr(error, "orig", None) or error
        refused = (
            getattr(cause, "sqlstate", None) == postgres.LOCK_NOT_AVAILABLE
            or mysql.code_of(cause) in mysql.NOT_EXECUTED
        )
        one_writer = self.host_clock and LOCKED in str(cause)
        executed = False if isinstance(error, PoolTimeout) or refused or one_writer else None
        text = f"{type(cause).__name__}: {' '.join(str(cause).split())}"
        if refused:
            text = f"another transaction has the row locked, or takes part in a deadlock with us; {LOOK} ({text})"
        if one_writer:
            text = f"{text}: SQLite has one writer at a time; {ONE_WRITER}"
        return StoreUnavailable(f"{self.engine.url!r}: {text}", executed)
