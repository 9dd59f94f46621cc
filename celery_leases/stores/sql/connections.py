"""Connection pools with a limit for each process."""

from __future__ import annotations

import logging
import time
from typing import Any, Final, Protocol

from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.pool import Pool, StaticPool
from sqlalchemy.pool.base import _ConnectionRecord

from celery_leases.concurrency.resource_pool import PoolExhausted, ResourcePool

logger: Final = logging.getLogger("sqlalchemy.pool")
"""The logger of SQLAlchemy's pools. The pools here log nothing at DEBUG, because a real thread must
not log under eventlet.
"""


class ConnectionLender(Protocol):
    """A pool that also lends connections without SQLAlchemy's wrapper."""

    def acquire(self) -> _ConnectionRecord:
        """Take a connection out of the pool until :meth:`take_back`. Its ``get_connection()`` opens
        it if necessary.
        """
        ...

    def release(self, record: _ConnectionRecord) -> None:
        """Return the connection to the pool."""
        ...

    def invalidate_dead(self, record: _ConnectionRecord, error: BaseException) -> None:
        """Close a dead connection. Connections of the same age are replaced at their next use."""
        ...


class BoundedPool(Pool):
    """At most *pool_size* connections, which stay open while idle.

    If all are in use, callers wait in their order of arrival, for *timeout* seconds or as long as
    :data:`celery_leases.concurrency.resource_pool.max_wait` says. Then
    :class:`sqlalchemy.exc.TimeoutError` is raised.
    """

    def __init__(
        self, creator: Any, pool_size: int = 10, timeout: float = 10.0, **given: Any
    ) -> None:
        super().__init__(creator, **given)
        self.logger = logger
        self._resource_pool = ResourcePool(pool_size, self._new_record, timeout)
        self._is_disposed = False

    def acquire(self) -> _ConnectionRecord:
        """See :class:`Lending`."""
        try:
            return self._resource_pool.acquire()
        except PoolExhausted as error:
            raise PoolTimeout(
                f"connections of this process: {error}; see leases_pool_size"
            ) from None

    def release(self, record: _ConnectionRecord) -> None:
        """See :class:`Lending`."""
        if self._is_disposed:
            record.close()
        self._resource_pool.release(record)

    def invalidate_dead(self, record: _ConnectionRecord, error: BaseException) -> None:
        """See :class:`Lending`."""
        if self._invalidate_time < record.starttime:
            self._invalidate_time = time.time()
        record.invalidate(error)

    def recreate(self) -> BoundedPool:
        """An empty pool of the same kind."""
        self.logger.info("Pool recreating")
        return type(self)(
            self._creator,
            pool_size=self._resource_pool.size,
            timeout=self._resource_pool.longest,
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
        self._is_disposed = True
        for record in self._resource_pool.drain():
            record.close()

    def status(self) -> str:
        """How many connections there are."""
        return f"{len(self._resource_pool.all())} of at most {self._resource_pool.size}"

    def _new_record(self) -> _ConnectionRecord:
        return _ConnectionRecord(self, connect=False)

    def _do_get(self) -> _ConnectionRecord:
        return self.acquire()

    def _do_return_conn(self, record: Any) -> None:
        self.release(record)


class SingleConnectionPool(StaticPool):
    """One connection for all threads, for an in-memory database, which exists in one connection
    only.
    """

    def __init__(self, creator: Any, **given: Any) -> None:
        super().__init__(creator, **given)
        self.logger = logger

    def acquire(self) -> _ConnectionRecord:
        """See :class:`Lending`."""
        record: _ConnectionRecord = self._do_get()  # type: ignore[assignment]
        return record

    def release(self, record: _ConnectionRecord) -> None:
        """See :class:`Lending`."""

    def invalidate_dead(self, record: _ConnectionRecord, error: BaseException) -> None:
        """See :class:`Lending`."""
        record.invalidate(error)
