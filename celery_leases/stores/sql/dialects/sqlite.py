"""SQLite: a database in a file, or in the memory of this process. It has no server.

The clock is that of the host. One connection writes at a time, and locks all rows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager, suppress
from secrets import token_hex
from typing import Any, ClassVar, Final, TypeVar

import sqlalchemy
from sqlalchemy import URL, BigInteger, Connection, Engine, Table, bindparam, event
from sqlalchemy.dialects import sqlite
from sqlalchemy.exc import OperationalError
from sqlalchemy.pool import StaticPool
from sqlalchemy.pool.base import _ConnectionRecord
from sqlalchemy.schema import ExecutableDDLElement

from celery_leases.concurrency import wait_limit
from celery_leases.stores.sql.dialects.dialect import Dialect, Fault, Mark, transaction

T = TypeVar("T")
BUSY_TIMEOUT = 5.0
BUSY: Final = "celery_leases_busy_timeout"
"""The name under which a connection has its timeout, if that was changed."""
LOGGER: Final = logging.getLogger("sqlalchemy.pool")
"""The logger of SQLAlchemy's pools. The pools here log nothing at DEBUG, because a real thread must
not log under eventlet.
"""
_LOCKED: Final = "database is locked"


class SQLite(Dialect):
    """SQLite."""

    NAMES = ("sqlite",)
    FAULTS: ClassVar[Mapping[Any, Fault]] = {
        _LOCKED: Fault.LOCKED,
        "readonly database": Fault.READ_ONLY,
        "no such table": Fault.NO_TABLE,
        "no such column": Fault.NO_COLUMN,
        "has no column named": Fault.NO_COLUMN,
    }
    NOW = ":now"
    BEGIN = "BEGIN IMMEDIATE"
    ROW_LOCK = ""
    UNLOCK = (
        "end this task's open transaction if it has written: SQLite allows one writer at a time"
    )
    has_server = False

    def __init__(self, sqlalchemy: sqlalchemy.Dialect) -> None:
        super().__init__(sqlalchemy)
        self.now = bindparam("now", type_=BigInteger)
        self.limit_wait = _limit_busy_timeout

    @classmethod
    def engine_options(cls, url: URL) -> dict[str, Any]:
        options: dict[str, Any] = {
            "connect_args": {"timeout": BUSY_TIMEOUT, "check_same_thread": False}
        }
        if url.database in (None, "", ":memory:"):
            options["poolclass"] = SingleConnectionPool
        return options

    def listen(self, engine: Engine) -> None:
        event.listen(engine, "connect", _prepare)

    @staticmethod
    def code_of(error: BaseException) -> Any:
        text = str(getattr(error, "orig", None) or error)
        return next((words for words in SQLite.FAULTS if words in text), None)

    def insert(self, table: Table) -> sqlite.Insert:
        return sqlite.insert(table)

    def create_schema(self, name: str) -> list[ExecutableDDLElement]:
        return []

    @contextmanager
    def migrating(self, connection: Connection) -> Iterator[bool]:
        yield from transaction(connection, self.BEGIN)

    def mark(self, driver: Any, engine: Engine) -> Mark:
        return _Savepoint(driver, self, engine)

    def has_no_writer(self, engine: Engine) -> bool:
        with engine.connect() as connection:
            connection.exec_driver_sql("PRAGMA busy_timeout=0").close()
            try:
                connection.exec_driver_sql(self.BEGIN)
                connection.exec_driver_sql("ROLLBACK")
            except OperationalError as error:
                if self.fault(error) is not Fault.LOCKED:
                    raise
                return False
            finally:
                restored = f"PRAGMA busy_timeout={int(BUSY_TIMEOUT * 1000)}"
                connection.exec_driver_sql(restored).close()
        return True


class SingleConnectionPool(StaticPool):
    """One connection for all threads, for a database in memory, which exists in one connection
    only.
    """

    def __init__(self, creator: Any, **given: Any) -> None:
        super().__init__(creator, **given)
        self.logger = LOGGER

    def use(self, work: Callable[..., T], *args: Any) -> T:
        """See :class:`celery_leases.stores.sql.connections.BoundedPool`."""
        return work(self._do_get(), *args)

    def invalidate_dead(self, record: _ConnectionRecord, error: BaseException) -> None:
        """See :class:`celery_leases.stores.sql.connections.BoundedPool`."""
        record.invalidate(error)


class _Savepoint(Mark):
    """A savepoint identifies a transaction."""

    def __init__(self, driver: Any, dialect: SQLite, engine: Engine) -> None:
        self._driver, self._dialect, self._engine = driver, dialect, engine
        self._name: str | None = None

    def set(self) -> None:
        if self._name is None and self._driver.in_transaction:
            name = f"celery_leases_{token_hex(8)}"
            self._driver.execute(f"SAVEPOINT {name}")
            self._name = name

    def is_over(self) -> bool:
        with suppress(Exception):
            return self._name is not None and self._dialect.has_no_writer(self._engine)
        return False

    def is_surely_open(self) -> bool:
        if self._name is None:
            return False
        with suppress(Exception):
            self._driver.execute(f"RELEASE {self._name}")
            return True
        return False


def _prepare(connection: Any, _: Any) -> None:
    # FULL: a done record must survive a power failure. With NORMAL the last commits of a WAL
    # database may be lost.
    for pragma in ("journal_mode=WAL", "synchronous=FULL"):
        connection.execute(f"PRAGMA {pragma}").close()


def _limit_busy_timeout(connection: Any, info: MutableMapping[Any, Any]) -> None:
    """Let a statement wait for another writer as long as this delivery may."""
    seconds = wait_limit.bounded(BUSY_TIMEOUT)
    if seconds != info.get(BUSY, BUSY_TIMEOUT):
        connection.execute(f"PRAGMA busy_timeout={int(seconds * 1000)}").close()
        info[BUSY] = seconds
