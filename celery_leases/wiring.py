"""From an app's settings to the parts that run its leased tasks: stores, renewer, execution."""

from __future__ import annotations

import os
import random
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from celery_leases.core.errors import LeaseConfigurationError
from celery_leases.core.options import DATABASE
from celery_leases.core.ports import MarkStore, Observer
from celery_leases.core.validity import LONGEST_WAIT, call_timeout, connection_awaited
from celery_leases.entry import Entry
from celery_leases.execution import Execution
from celery_leases.process import native
from celery_leases.process.lending import Lender, Turn
from celery_leases.renewal import Renewer, Stores
from celery_leases.settings import IN_MEMORY, REDIS_SCHEMES, Settings, scheme_of
from celery_leases.stores import redis_url

if TYPE_CHECKING:  # SQLAlchemy and redis-py are loaded when the first store is opened
    from celery_leases.stores.redis import RedisLeaseStore
    from celery_leases.stores.sql import SqlRecordStore
    from celery_leases.stores.sql_effects import SqlEffectStore
    from celery_leases.stores.sql_leases import DatabaseLeaseStore

AnyStore: TypeAlias = "RedisLeaseStore | DatabaseLeaseStore"
"""A lease store, which keeps marks and gates too."""
STORE_TIMEOUT = 2.0


class BootClock:
    """The clock of :func:`celery_leases.process.native.boot_clock`."""

    now = staticmethod(native.boot_clock)

    def sleep(self, seconds: float) -> None:
        """Wait; under gevent and eventlet others run meanwhile."""
        time.sleep(max(0.0, seconds))


@dataclass
class Parts:
    """The parts of one app in one process."""

    settings: Settings
    leases: AnyStore
    records: SqlRecordStore
    effects: SqlEffectStore
    marks: MarkStore
    renewer: Renewer
    execution: Execution
    _opened: list[tuple[AnyStore, SqlRecordStore]] = field(default_factory=list)

    def close(self, *, inherited: bool = False) -> None:
        """Let all connections go; *inherited*: they are the parent process's, which goes on using them."""
        for leases, records in self._opened:
            records.database.close(inherited=inherited)
            if not inherited:
                leases.close()


def build(
    settings: Settings, observer: Observer, shortest_ttl: float = 15.0, hurried: Callable[[], bool] = lambda: False
) -> Parts:
    """Make the parts; nothing is connected to before it is used. *hurried*: whether the process is to end."""
    wait = connection_awaited(shortest_ttl)
    # The keeper and, in Redis, bodies that ask have a connection of their own, within the same number.
    records = open_records(settings, settings.pool_size - (2 if native.green() else 1), wait)
    leases = lease_store(settings, records, settings.pool_size - 2, wait)
    clock = BootClock()
    within = call_timeout(shortest_ttl)
    in_memory = settings.database_url == IN_MEMORY
    # The keeper must not wait for tasks that have all connections; it is a thread, and the locks of greenlets are not
    # for it. Records in memory have one connection for all threads, and keep the latest keys only.
    kept_records = records if in_memory else open_records(settings, 1)
    kept = _bounded(leases, kept_records, within, wait), kept_records
    asked = _bounded(leases, records, within, wait), records
    # So is the one that purges.
    purged = open_records(settings, 1) if native.green() and not in_memory else records
    renewer = Renewer(Stores(*kept), Stores(*asked), observer, clock, None if in_memory else purged)
    host = f"{socket.gethostname()}/{os.getpid()}"
    entry = Entry(leases, records, leases, leases, observer, clock, random.random, host, hurried, time.time)
    effects = open_effects(records)
    opened = [(leases, records), kept, asked, (leases, purged)]
    return Parts(settings, leases, records, effects, leases, renewer, Execution(entry, renewer), opened)


def open_records(settings: Settings, size: int | None = None, longest_wait: float = LONGEST_WAIT) -> SqlRecordStore:
    """The record store the settings name, over at most *size* connections, by default as many as the settings say.

    Where all are in use, a call waits for one for *longest_wait* seconds, unless its lease allows less.
    """
    from celery_leases.stores.database import engine_for
    from celery_leases.stores.schema import Tables
    from celery_leases.stores.sql import SqlRecordStore

    engine = engine_for(settings.database_url, size or settings.pool_size, longest_wait)
    return SqlRecordStore(engine, Tables(settings.database_schema))


def open_effects(records: SqlRecordStore) -> SqlEffectStore:
    """The effects beside *records*."""
    from celery_leases.stores.sql_effects import SqlEffectStore

    return SqlEffectStore(records.database, records.tables)


def lease_store(
    settings: Settings, records: SqlRecordStore, size: int | None = None, longest_wait: float = LONGEST_WAIT
) -> AnyStore:
    """The lease store the settings name; *size* and *longest_wait* as for :func:`open_records`, where it is Redis."""
    if settings.leases_url == DATABASE:
        from celery_leases.stores.sql_leases import DatabaseLeaseStore

        return DatabaseLeaseStore(records)
    if scheme_of(settings.leases_url) not in REDIS_SCHEMES:
        raise LeaseConfigurationError(
            f"leases_url={redis_url.without_password(settings.leases_url)!r}: "
            'write "database", or a URL such as "redis://localhost:6379/1"'
        )
    from celery_leases.stores.redis import RedisLeaseStore

    return RedisLeaseStore.from_url(
        settings.leases_url,
        prefix=settings.prefix,
        timeout=STORE_TIMEOUT,
        options=settings.transport_options,
        turns=Lender(size or settings.pool_size, Turn, longest_wait),
    )


def _bounded(leases: AnyStore, records: SqlRecordStore, timeout: float, longest_wait: float) -> AnyStore:
    """The same lease store over other connections: those of *records*, or one whose calls end within *timeout*."""
    from celery_leases.stores.sql_leases import DatabaseLeaseStore

    return (
        DatabaseLeaseStore(records) if isinstance(leases, DatabaseLeaseStore) else leases.bounded(timeout, longest_wait)
    )
