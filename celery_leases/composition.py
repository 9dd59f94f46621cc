"""Makes the components that run an app's leased tasks from its settings: stores, renewer,
runner.
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
from celery_leases.counting import Counting
from celery_leases.protocol.deadlines import (
    LONGEST_CONNECTION_TIMEOUT,
    call_timeout,
    connection_timeout,
)
from celery_leases.protocol.options import DATABASE, DEFAULT_TTL
from celery_leases.protocol.ports import (
    Clock,
    LeaseStoreSettings,
    MarkStore,
    Observer,
    SeparateLeaseStore,
)
from celery_leases.settings import IN_MEMORY, Settings
from celery_leases.stores.registry import open_lease_store

if TYPE_CHECKING:  # SQLAlchemy and redis-py are imported when the first store is opened
    from celery_leases.stores.sql.effects import SqlEffectStore
    from celery_leases.stores.sql.leases import DatabaseLeaseStore
    from celery_leases.stores.sql.metrics import SqlMetrics
    from celery_leases.stores.sql.records import SqlRecordStore

AnyStore: TypeAlias = "SeparateLeaseStore | DatabaseLeaseStore"
"""A lease store that also stores marks and gates."""
STORE_TIMEOUT = 2.0


class BootClock:
    """The clock of :func:`celery_leases.concurrency.os_threads.boot_clock`."""

    now = staticmethod(os_threads.boot_clock)

    def sleep(self, seconds: float) -> None:
        """Sleep; under gevent and eventlet other greenlets run meanwhile."""
        time.sleep(max(0.0, seconds))


@dataclass(eq=False)
class Parts:
    """The components of one app in one process: *renewer* renews its leases, *execution* runs its
    calls, and *marks* are those of waiting copies and callbacks.
    """

    settings: Settings
    leases: AnyStore
    records: SqlRecordStore
    effects: SqlEffectStore
    marks: MarkStore
    renewer: Renewer
    context: Context
    execution: Execution
    #: Counts what the calls do, with ``leases_metrics``.
    counting: Counting | None = None
    _opened: list[tuple[AnyStore, SqlRecordStore]] = field(default_factory=list)

    def close(self, *, inherited: bool = False) -> None:
        """Close all connections. *inherited*: they belong to the parent process, which continues to
        use them.
        """
        if not inherited:  # its threads are not in this process
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
) -> Parts:
    """Make the components. Connections are opened on first use. *stopping*: whether the process is
    shutting down.
    """
    wait = connection_timeout(shortest_ttl)
    # The keeper, and bodies that call Redis, have a connection of their own, within the same
    # number.
    records = open_records(settings, settings.pool_size - (2 if os_threads.green() else 1), wait)
    leases = lease_store(settings, records, settings.pool_size - 2, wait)
    clock = clock or BootClock()
    within = call_timeout(shortest_ttl)
    in_memory = settings.database_url == IN_MEMORY
    # The keeper must not wait for tasks that use all connections. It is a system thread, and must
    # not use the locks of greenlets. Records in memory have one connection for all threads, and
    # keep only the latest keys.
    kept_records = records if in_memory else open_records(settings, 1)
    kept = _bounded(leases, kept_records, within, wait), kept_records
    asked = _bounded(leases, records, within, wait), records
    # The thread that purges is a system thread too.
    purged = open_records(settings, 1) if os_threads.green() and not in_memory else records
    counting: Counting | None = None
    if settings.metrics and not in_memory:
        observer = counting = _counting(observer, purged)
        records.tag = counting.tag
    host = f"{socket.gethostname()}/{os.getpid()}"
    context = Context(
        leases, records, leases, leases, observer, clock, random.random, host, time.time, stopping
    )
    keeping = replace(context, leases=kept[0], records=kept[1])
    asking = replace(context, leases=asked[0])
    renewer = renewed_by(keeping, asking, None if in_memory else purged)
    effects = open_effects(records)
    opened = [(leases, records), kept, asked, (leases, purged)]
    execution = Execution(context, renewer)
    return Parts(
        settings, leases, records, effects, leases, renewer, context, execution, counting, opened
    )


def open_records(
    settings: Settings, size: int | None = None, longest_wait: float = LONGEST_CONNECTION_TIMEOUT
) -> SqlRecordStore:
    """The record store of the settings, with at most *size* connections; the default is that of the
    settings.

    If all connections are in use, a call waits for one for *longest_wait* seconds, unless its lease
    allows less.
    """
    from celery_leases.stores.sql.database import engine_for
    from celery_leases.stores.sql.records import SqlRecordStore
    from celery_leases.stores.sql.schema import Tables

    engine = engine_for(settings.database_url, size or settings.pool_size, longest_wait)
    return SqlRecordStore(engine, Tables(settings.database_schema))


def open_effects(records: SqlRecordStore) -> SqlEffectStore:
    """The effects in the database of *records*."""
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
    """The lease store of the settings; *size* and *longest_wait* as in :func:`open_records`, if it
    is separate from the records.
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
    """Counts what *observer* observes, over the connections of *records*, from a system thread."""
    from celery_leases.stores.sql.metrics import tag

    return Counting(observer, open_metrics(records), tag)


def _bounded(
    leases: AnyStore, records: SqlRecordStore, timeout: float, longest_wait: float
) -> AnyStore:
    """The same lease store with other connections: those of *records*, or connections with
    *timeout* per call.
    """
    from celery_leases.stores.sql.leases import DatabaseLeaseStore

    return (
        DatabaseLeaseStore(records)
        if isinstance(leases, DatabaseLeaseStore)
        else leases.bounded(timeout, longest_wait)
    )
