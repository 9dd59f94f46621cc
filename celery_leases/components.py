"""Creates the components that run the leased tasks of an app from its settings: stores, renewer,
execution.
"""

from __future__ import annotations

import os
import random
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeAlias

from celery_leases.attempt.context import Context
from celery_leases.attempt.renewal import Renewer
from celery_leases.attempt.run import Execution
from celery_leases.concurrency import os_threads
from celery_leases.deadlines import (
    LONGEST_CONNECTION_TIMEOUT,
    call_timeout,
    connection_timeout,
)
from celery_leases.metrics_counting import Counting
from celery_leases.options import DATABASE, DEFAULT_TTL
from celery_leases.settings import IN_MEMORY, Settings
from celery_leases.stores.interfaces import (
    Clock,
    LeaseStoreSettings,
    MarkStore,
    Observer,
    SeparateLeaseStore,
)
from celery_leases.stores.registry import open_lease_store

if TYPE_CHECKING:  # SQLAlchemy and redis-py are imported when the first store is opened
    from celery_leases.stores.sql.effects import SqlEffectStore
    from celery_leases.stores.sql.leases import DatabaseLeaseStore
    from celery_leases.stores.sql.metrics import SqlMetrics
    from celery_leases.stores.sql.records import SqlRecordStore

AnyStore: TypeAlias = "SeparateLeaseStore | DatabaseLeaseStore"
"""A lease store that also stores marks and gates."""
STORE_TIMEOUT = 2.0
"""Seconds that a call to a separate lease store may take to connect, and again to get its reply."""


class BootClock:
    """The clock of :func:`celery_leases.concurrency.os_threads.boot_clock`."""

    now = staticmethod(os_threads.boot_clock)

    def sleep(self, seconds: float) -> None:
        """Sleep; under gevent and eventlet other greenlets run meanwhile."""
        time.sleep(max(0.0, seconds))


@dataclass(eq=False)
class Components:
    """The components of one app in one process: ``renewer`` renews its leases, ``execution`` runs
    its calls, ``marks`` notes the copies of calls and whether callbacks are sent.
    """

    settings: Settings
    leases: AnyStore
    records: SqlRecordStore
    effects: SqlEffectStore
    marks: MarkStore
    renewer: Renewer
    context: Context
    execution: Execution
    #: Counts the events of calls, with ``leases_metrics``.
    counting: Counting | None = None
    _opened: list[tuple[AnyStore, SqlRecordStore]] = field(default_factory=list)

    def close(self, *, inherited: bool = False) -> None:
        """Close all connections. *inherited*: they are those of the parent process, which continues
        to use them.
        """
        if not inherited:  # the threads of the parent are not in this process
            self.renewer.close()
            if self.counting is not None:
                self.counting.end()
        for leases, records in self._opened:
            records.database.close(inherited=inherited)
            if not inherited:
                leases.close()


def build(
    settings: Settings,
    observer: Observer,
    shortest_ttl: float = DEFAULT_TTL,
    stopping: Callable[[], bool] = lambda: False,
    *,
    clock: Clock | None = None,
    renewed_by: type[Renewer] = Renewer,
) -> Components:
    """Create the components; connections are opened on first use.

    *shortest_ttl* is that of the app's tasks. *stopping* returns whether the process is shutting
    down.
    """
    wait = connection_timeout(shortest_ttl)
    # The thread that renews has connections of its own, and so have bodies that call Redis. Both
    # count towards leases_pool_size.
    records = open_records(
        settings, settings.pool_size - (2 if os_threads.uses_greenlets() else 1), wait
    )
    leases = lease_store(settings, records, settings.pool_size - 2, wait)
    clock = clock or BootClock()
    within = call_timeout(shortest_ttl)
    in_memory = settings.database_url == IN_MEMORY
    # The thread that renews must not wait for tasks that use all connections. It is a system
    # thread, and must not use the locks of greenlets. Records in memory have one connection for all
    # threads.
    renewal_records = records if in_memory else open_records(settings, 1)
    renewal_leases = _bounded(leases, renewal_records, within, wait)
    body_leases = _bounded(leases, records, within, wait)
    # The thread that purges is a system thread too.
    purge_records = (
        open_records(settings, 1) if os_threads.uses_greenlets() and not in_memory else records
    )
    counting: Counting | None = None
    if settings.metrics and not in_memory:
        observer = counting = _counting(observer, purge_records)
        records.tag = counting.tag
    host = f"{socket.gethostname()}/{os.getpid()}"
    context = Context(
        leases, records, leases, leases, observer, clock, random.random, host, time.time, stopping
    )
    renewal_context = replace(context, leases=renewal_leases, records=renewal_records)
    body_context = replace(context, leases=body_leases)
    renewer = renewed_by(renewal_context, body_context, None if in_memory else purge_records)
    effects = open_effects(records)
    opened = [
        (leases, records),
        (renewal_leases, renewal_records),
        (body_leases, records),
        (leases, purge_records),
    ]
    execution = Execution(context, renewer)
    return Components(
        settings, leases, records, effects, leases, renewer, context, execution, counting, opened
    )


def open_records(
    settings: Settings, size: int | None = None, longest_wait: float = LONGEST_CONNECTION_TIMEOUT
) -> SqlRecordStore:
    """The record store of the settings, with at most *size* connections (by default the pool size
    of the settings).

    If all connections are in use, a call waits for one for at most *longest_wait* seconds, or less
    if its lease ends sooner.
    """
    from celery_leases.stores.sql.connections import engine_for
    from celery_leases.stores.sql.records import SqlRecordStore
    from celery_leases.stores.sql.schema import Tables

    engine = engine_for(settings.database_url, size or settings.pool_size, longest_wait)
    return SqlRecordStore(engine, Tables(settings.database_schema))


def open_effects(records: SqlRecordStore) -> SqlEffectStore:
    """The effect store in the database of *records*."""
    from celery_leases.stores.sql.effects import SqlEffectStore

    return SqlEffectStore(records.database, records.tables)


def open_metrics(records: SqlRecordStore) -> SqlMetrics:
    """The counts of all processes in the database of *records*."""
    from celery_leases.stores.sql.metrics import SqlMetrics

    return SqlMetrics(records.database, records.tables)


def lease_store(
    settings: Settings,
    records: SqlRecordStore,
    size: int | None = None,
    longest_wait: float = LONGEST_CONNECTION_TIMEOUT,
) -> AnyStore:
    """The lease store of the settings. *size* and *longest_wait*, as in :func:`open_records`, are
    for a store that is separate from the records.
    """
    if settings.leases_url == DATABASE:
        from celery_leases.stores.sql.leases import DatabaseLeaseStore

        return DatabaseLeaseStore(records)
    return open_lease_store(
        LeaseStoreSettings(
            settings.leases_url,
            settings.prefix,
            STORE_TIMEOUT,
            size or settings.pool_size,
            longest_wait,
            settings.transport_options,
        )
    )


def _counting(observer: Observer, records: SqlRecordStore) -> Counting:
    """An observer that counts the events for *observer*, and writes the counts over the connections
    of *records*.
    """
    from celery_leases.stores.sql.metrics import tag

    return Counting(observer, open_metrics(records), tag)


def _bounded(
    leases: AnyStore, records: SqlRecordStore, timeout: float, longest_wait: float
) -> AnyStore:
    """The same lease store with other connections: those of *records* if it is in the database,
    otherwise one connection with *timeout* per call.
    """
    from celery_leases.stores.sql.leases import DatabaseLeaseStore

    return (
        DatabaseLeaseStore(records)
        if isinstance(leases, DatabaseLeaseStore)
        else leases.bounded(timeout, longest_wait)
    )
