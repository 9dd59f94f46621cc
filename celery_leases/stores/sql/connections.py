"""The engine of a records database: its URL, its driver, and a limited number of connections."""

from __future__ import annotations

import time
from typing import Any, Final

from sqlalchemy import URL, Engine, create_engine, event, make_url
from sqlalchemy.engine import ExceptionContext
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.pool import Pool
from sqlalchemy.pool.base import _ConnectionRecord

from celery_leases.concurrency.resource_pool import ResourcePool
from celery_leases.deadlines import LONGEST_CONNECTION_TIMEOUT
from celery_leases.errors import LeaseConfigurationError
from celery_leases.stores.sql.dialects import DIALECTS, Dialect, Fault, dialect_of
from celery_leases.stores.sql.dialects.sqlite import LOGGER
from celery_leases.stores.urls import display_database_url, display_url

POOL_SIZE: Final = 10
_TO_WRITE: Final = 'write "postgresql+psycopg://host/database", "mysql+pymysql://host/database" or "sqlite:///file.db"'


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
    parsed, kind = _parsed(url)
    shown = f"leases_database_url={display_database_url(parsed)!r}"
    try:
        options = kind.engine_options(parsed)
    except ValueError as error:
        raise LeaseConfigurationError(f"{shown}: {error}") from None
    if "poolclass" not in options:
        options |= {"poolclass": BoundedPool, "pool_size": size, "pool_timeout": longest_wait}
        options["server"] = display_database_url(parsed)
    try:
        engine = create_engine(
            parsed,
            isolation_level="AUTOCOMMIT",
            pool_reset_on_return=None,
            # Some statements read rows of two tables without a join, about which SQLAlchemy would
            # warn.
            enable_from_linting=False,
            **options,
        )
    except (
        ModuleNotFoundError,
        SQLAlchemyError,
        TypeError,
    ) as error:  # TypeError: SQLAlchemy is too old for an option
        backend = parsed.get_backend_name()
        write = f"pip install 'celery-leases[{kind.NAMES[0]}]'"
        if parsed.get_driver_name() != kind.DRIVERS[0]:  # the extra does not bring that driver
            write = f"write {backend}+{kind.DRIVERS[0]}://… and {write}, or install the driver that the URL names"
        raise LeaseConfigurationError(f"{shown} has no driver here ({error}); {write}") from None
    dialect_of(engine.dialect).listen(engine)
    return _replacing_dead(engine)


def with_other_connections(engine: Engine, size: int, longest_wait: float) -> Engine:
    """An engine for the same database with at most *size* connections of its own. It shares the
    dialect of *engine*, which has connected, so it need not ask the server again what it is.
    """
    pool: BoundedPool = engine.pool  # type: ignore[assignment]
    return _replacing_dead(Engine(pool.resized(size, longest_wait), engine.dialect, engine.url))


def _replacing_dead(engine: Engine) -> Engine:
    """*engine*, which replaces the dead connection of a statement that SQLAlchemy has executed."""
    dialect = dialect_of(engine.dialect)

    def invalidate(context: ExceptionContext) -> None:
        if dialect.fault(context.original_exception) in (Fault.STALE, Fault.READ_ONLY):
            context.is_disconnect = True

    event.listen(engine, "handle_error", invalidate)
    return engine


def _parsed(url: str) -> tuple[URL, type[Dialect]]:
    """The URL of a supported database. If *url* names no driver, it gets an installed one."""
    try:
        parsed = make_url(url)
    except (SQLAlchemyError, ValueError, TypeError) as error:
        raise LeaseConfigurationError(
            f"leases_database_url={display_url(url)!r} is not a database URL ({type(error).__name__}); {_TO_WRITE}"
        ) from None
    backend, _, driver = parsed.drivername.partition("+")
    backend = "postgresql" if backend == "postgres" else backend
    kind = DIALECTS.get(backend)
    if kind is None:
        raise LeaseConfigurationError(
            f"leases_database_url={display_url(url)!r}: records can be stored in {' or '.join(DIALECTS)}; {_TO_WRITE}"
        )
    if not kind.DRIVERS:
        return parsed, kind
    if driver and driver not in kind.DRIVERS:
        raise LeaseConfigurationError(
            f"leases_database_url={display_url(url)!r}: the driver must be {' or '.join(kind.DRIVERS)}; {_TO_WRITE}"
        )
    found = driver or next(filter(kind.has_driver, kind.DRIVERS), kind.DRIVERS[0])
    return parsed.set(drivername=f"{backend}+{found}"), kind


class BoundedPool(Pool, ResourcePool[_ConnectionRecord]):
    """At most *pool_size* connections, which stay open while idle.

    Connections are also lent without SQLAlchemy's wrapper, by ``use()``; their
    ``get_connection()`` opens them if necessary.
    """

    def __init__(
        self,
        creator: Any,
        pool_size: int = POOL_SIZE,
        timeout: float = 10.0,
        server: str = "",
        **given: Any,
    ) -> None:
        Pool.__init__(self, creator, **given)
        ResourcePool.__init__(self, pool_size, self._new_record, timeout, server)
        self.logger = LOGGER

    def invalidate_dead(self, record: _ConnectionRecord, error: BaseException) -> None:
        """Close a dead connection. Connections of the same age are replaced at their next use."""
        if self._invalidate_time < record.starttime:
            self._invalidate_time = time.time()
        record.invalidate(error)

    def recreate(self) -> BoundedPool:
        """An empty pool of the same kind."""
        self.logger.info("Pool recreating")
        return self.resized(self.size, self.longest)

    def resized(self, size: int, longest: float) -> BoundedPool:
        """An empty pool of the same kind with at most *size* connections, for one of which a caller
        waits at most *longest* seconds.
        """
        return type(self)(
            self._creator,
            pool_size=size,
            timeout=longest,
            server=self.name,
            recycle=self._recycle,
            reset_on_return=self._reset_on_return,
            pre_ping=self._pre_ping,
            echo=self.echo,
            logging_name=self._orig_logging_name,
            _dispatch=self.dispatch,
            dialect=self._dialect,
        )

    def dispose(self) -> None:
        """Close all connections. A connection in use is closed when it is returned."""
        self.discard(_ConnectionRecord.close)

    def status(self) -> str:
        """How many connections there are."""
        return f"{len(self.all())} of at most {self.size}"

    def _new_record(self) -> _ConnectionRecord:
        return _ConnectionRecord(self, connect=False)

    def _do_get(self) -> _ConnectionRecord:
        return self.acquire()

    def _do_return_conn(self, record: Any) -> None:
        self.release(record)
