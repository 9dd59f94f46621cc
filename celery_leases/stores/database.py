"""One SQL database: its engine, its clock, and single statements that are each committed by themselves."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar
from weakref import WeakSet

from sqlalchemy import CursorResult, Dialect, Engine, Executable, RowMapping, create_engine, event, make_url
from sqlalchemy.exc import DataError, DBAPIError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.pool import StaticPool

from celery_leases.core.errors import KeyUnusable, LeaseConfigurationError, StoreUnavailable
from celery_leases.stores.claims import database_now

T = TypeVar("T")
SUPPORTED = ("sqlite", "postgresql")
BUSY_TIMEOUT = 5.0
LOCK_TIMEOUT = 1500
"""Milliseconds; a contender that waits longer for a row is put back."""

LOCK_NOT_AVAILABLE = "55P03"

_LIBPQ = {
    "connect_timeout": 5,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 15_000,
}


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
            'write "postgresql+psycopg://host/database" or "sqlite:///file.db"'
        )
    options: dict[str, Any] = {"pool_size": 0}
    if parsed.get_driver_name().startswith("psycopg"):
        # What libpq can do about a server that is not there any more; the URL's own parameters come first.
        options["connect_args"] = {name: value for name, value in _LIBPQ.items() if name not in parsed.query}
    if backend == "sqlite":
        options["connect_args"] = {"timeout": BUSY_TIMEOUT, "check_same_thread": False}
        if parsed.database in (None, "", ":memory:"):
            options = {"connect_args": options["connect_args"], "poolclass": StaticPool}
    try:
        engine = create_engine(parsed, isolation_level="AUTOCOMMIT", pool_reset_on_return=None, **options)
    except (ModuleNotFoundError, SQLAlchemyError) as error:
        raise LeaseConfigurationError(
            f"leases_database_url={str(parsed)!r} has no driver here ({error}); pip install 'celery-leases[{backend}]'"
        ) from None
    if backend == "sqlite":
        event.listen(engine, "connect", _prepare_sqlite)
    elif backend == "postgresql" and "options" not in parsed.query:
        event.listen(engine, "do_connect", _connect_with_lock_timeout)
    return engine


def _connect_with_lock_timeout(dialect: Dialect, _: Any, args: list[Any], given: dict[str, Any]) -> Any:
    """Bound how long a statement waits for a row that a user's own transaction has locked; poolers may not allow it."""
    try:
        return dialect.connect(*args, **given, options=f"-c lock_timeout={LOCK_TIMEOUT}")
    except Exception as error:
        if "unsupported startup parameter" not in str(error):
            raise
        return dialect.connect(*args, **given)


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


class Database:
    """Runs statements. A connection found dead is replaced and the statement repeated once, so all must bear that."""

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

    def count(self, statement: Executable, values: Mapping[str, Any]) -> int:
        """Run *statement*; how many rows it touched."""
        return self._run(statement, values, lambda result: result.rowcount)

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

    def _run(self, statement: Executable, values: Mapping[str, Any], take: Callable[[CursorResult[Any]], T]) -> T:
        if self.host_clock:
            values = {**values, "now": time.time_ns() // 1000}
        try:
            return self._once(statement, values, take)
        except DBAPIError as error:
            with self.errors():
                if not error.connection_invalidated:
                    raise
        with self.errors():
            return self._once(statement, values, take)

    def _once(self, statement: Executable, values: Mapping[str, Any], take: Callable[[CursorResult[Any]], T]) -> T:
        with self.engine.connect() as connection:
            return take(connection.execute(statement, values))

    def _unavailable(self, error: Exception) -> StoreUnavailable:
        cause = getattr(error, "orig", None) or error
        refused = getattr(cause, "sqlstate", None) == LOCK_NOT_AVAILABLE
        executed = False if isinstance(error, PoolTimeout) or refused else None
        text = " ".join(str(cause).split())
        return StoreUnavailable(f"{self.engine.url!r}: {type(cause).__name__}: {text}", executed)
