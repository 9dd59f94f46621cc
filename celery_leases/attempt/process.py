"""What this process has to run the calls of one app: stores, the renewer, clocks, and what Celery
needs. It is made from the settings.
"""

from __future__ import annotations

import os
import random
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

from celery_leases.attempt.renewal import Renewer, Stores
from celery_leases.concurrency import os_threads
from celery_leases.deadlines import (
    LONGEST_CONNECTION_TIMEOUT,
    call_timeout,
    connection_timeout,
)
from celery_leases.options import DATABASE, DEFAULT_TTL
from celery_leases.settings import IN_MEMORY, Settings
from celery_leases.stores.interfaces import (
    Clock,
    LeaseStoreSettings,
    MarkedLeaseStore,
    MarkStore,
    Observer,
)
from celery_leases.stores.registry import open_lease_store
from celery_leases.text.cleaning import storable

if TYPE_CHECKING:  # SQLAlchemy and redis-py are imported when the first store is opened
    from celery_leases.stores.sql.effects import SqlEffectStore
    from celery_leases.stores.sql.records import SqlRecordStore
    from celery_leases.stores.sql.transactions import JoinedTransaction

STORE_TIMEOUT = 2.0
"""Seconds that a call to a separate lease store may take to connect, and again to get its reply."""
HOST_MAX = 255
"""Characters of a stored ``hostname/pid``."""

_compiled: dict[tuple[str, str | None], SqlRecordStore] = {}
"""The record stores with compiled statements, by the URL and the schema of their database."""


class BootClock:
    """The clock of :func:`celery_leases.concurrency.os_threads.boot_clock`."""

    now = staticmethod(os_threads.boot_clock)

    def sleep(self, seconds: float) -> None:
        """Sleep; under gevent and eventlet other greenlets run meanwhile."""
        time.sleep(max(0.0, seconds))


def never() -> bool:
    """Whether a process that does not end is shutting down."""
    return False


@dataclass(eq=False)
class Process:
    """What this process has to run the calls of one app.

    ``rand`` gives random numbers in [0, 1). ``host`` is ``hostname/pid``. ``wall_time`` gives
    seconds since the epoch, for times that people see. ``stopping``: whether the process is
    shutting down, so that nothing is repeated for long. ``publisher`` publishes its messages.
    """

    settings: Settings
    leases: MarkedLeaseStore
    records: SqlRecordStore
    effects: SqlEffectStore
    renewer: Renewer
    observer: Observer
    clock: Clock
    host: str
    rand: Callable[[], float] = random.random
    wall_time: Callable[[], float] = time.time
    stopping: Callable[[], bool] = never
    app: Any = None
    publisher: Any = None
    #: The ``LeaseClient`` on the same stores, once one was made.
    client: Any = None
    #: The last order that the lease store has given to a call under ``lease_runs="latest"``, and
    #: when, by the local clock; both in microseconds.
    last_order: tuple[int, int] = (0, 0)
    _opened: list[Stores] = field(default_factory=list)
    _checked: bool = False

    @property
    def in_memory(self) -> bool:
        """Whether the records are in the memory of this process, as they are for eager calls."""
        return self.settings.database_url == IN_MEMORY

    @cached_property
    def database(self) -> str:
        """The identity of the records database, read once."""
        return self.records.identity()

    def check_once(self) -> None:
        """Raise :class:`~celery_leases.errors.SchemaOutdated` unless this release knows the tables.

        After the first success nothing is checked again.
        """
        if not self._checked:
            self.records.check()
            self._checked = True

    def share_statements(self) -> None:
        """Compile the usual statements, and let all record stores that are opened later for this
        database share them, also in forks. The database has answered before.
        """
        self.records.compile_statements()
        _compiled[_database(self.settings)] = self.records

    def transaction(self, given: Any) -> JoinedTransaction | None:
        """The transaction of *given*, a session or connection of the user's; ``None`` if the
        records are in memory and the commit cannot be observed.
        """
        if not self.in_memory:
            from celery_leases.stores.sql.transactions import JoinedTransaction

            return JoinedTransaction(given, self.records)
        # Records in memory cannot be committed together with rows of a database, so they are
        # written after the commit.
        from celery_leases.stores.memory import EagerTransaction, commit_is_observable

        return EagerTransaction(given, self.records) if commit_is_observable(given) else None

    def close(self, *, inherited: bool = False) -> None:
        """Close all connections. *inherited*: they are those of the parent process, which continues
        to use them.
        """
        if not inherited:  # the threads of the parent are not in this process
            self.renewer.close()
        for stores in self._opened:
            stores.records.database.close(inherited=inherited)
            if not inherited:
                stores.leases.close()


def open_process(
    settings: Settings,
    observer: Observer,
    shortest_ttl: float = DEFAULT_TTL,
    stopping: Callable[[], bool] = never,
    *,
    clock: Clock | None = None,
    renewed_by: type[Renewer] = Renewer,
    shares_trips: bool = False,
) -> Process:
    """Create what this process has for one app; connections are opened on first use.

    *shortest_ttl* is that of the app's tasks. *shares_trips*: this process runs many bodies at
    once, whose steps share statements.
    """
    wait, within = connection_timeout(shortest_ttl), call_timeout(shortest_ttl)
    in_memory = settings.database_url == IN_MEMORY
    # The thread that renews has connections of its own, and so have bodies that call Redis. Both
    # count towards leases_pool_size.
    records = open_records(
        settings, settings.pool_size - (2 if os_threads.uses_greenlets() else 1), wait
    )
    leases = lease_store(settings, records, settings.pool_size - 2, wait)
    # The thread that renews must not wait for tasks that use all connections. It is a system
    # thread, and must not use the locks of greenlets. Records in memory have one connection for all
    # threads.
    of_renewals = records if in_memory else open_records(settings, 1)
    for_renewals = Stores(_bounded(leases, of_renewals, within, wait), of_renewals)
    for_bodies = Stores(_bounded(leases, records, within, wait), records)
    # The thread that purges is a system thread too.
    purged = open_records(settings, 1) if os_threads.uses_greenlets() and not in_memory else records
    clock = clock or BootClock()
    renewer = renewed_by(for_renewals, for_bodies, observer, clock, None if in_memory else purged)
    if shares_trips:
        records.share_trips(renewer.number_held)
        leases.share_trips(renewer.number_held)
    return Process(
        settings,
        leases,
        records,
        open_effects(records),
        renewer,
        observer,
        clock,
        host_here(),
        stopping=stopping,
        _opened=[Stores(leases, records), for_renewals, for_bodies, Stores(leases, purged)],
    )


def host_here() -> str:
    """``hostname/pid``, as it can be stored."""
    return storable(f"{socket.gethostname()}/{os.getpid()}", HOST_MAX)


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

    size = size or settings.pool_size
    if (compiled := _compiled.get(_database(settings))) is not None:
        return compiled.with_connections(size, longest_wait)
    engine = engine_for(settings.database_url, size, longest_wait)
    return SqlRecordStore(engine, Tables(settings.database_schema))


def _database(settings: Settings) -> tuple[str, str | None]:
    return settings.database_url, settings.database_schema


def open_effects(records: SqlRecordStore) -> SqlEffectStore:
    """The effect store in the database of *records*."""
    from celery_leases.stores.sql.effects import SqlEffectStore

    return SqlEffectStore(records.database, records.tables)


def lease_store(
    settings: Settings,
    records: SqlRecordStore,
    size: int | None = None,
    longest_wait: float = LONGEST_CONNECTION_TIMEOUT,
) -> MarkedLeaseStore:
    """The lease store of the settings. *size* and *longest_wait*, as in :func:`open_records`, are
    for a store that is separate from the records.
    """
    if settings.leases_url == DATABASE:
        from celery_leases.stores.sql.leases import DatabaseLeaseStore

        return DatabaseLeaseStore(records)
    opened = open_lease_store(
        LeaseStoreSettings(
            settings.leases_url,
            settings.prefix,
            STORE_TIMEOUT,
            size or settings.pool_size,
            longest_wait,
            settings.transport_options,
        )
    )
    if opened.groups is not None and isinstance(opened, MarkStore):
        return cast("MarkedLeaseStore", opened)
    from celery_leases.stores.sql.leases import LeasesWithRowMarks

    return cast("MarkedLeaseStore", LeasesWithRowMarks(opened, records))


def _bounded(
    leases: MarkedLeaseStore, records: SqlRecordStore, timeout: float, longest_wait: float
) -> MarkedLeaseStore:
    """The same lease store with other connections: those of *records* if it is in the database,
    otherwise one connection with *timeout* per call.
    """
    from celery_leases.stores.sql.leases import DatabaseLeaseStore, LeasesWithRowMarks

    if isinstance(leases, DatabaseLeaseStore):
        return DatabaseLeaseStore(records)
    bounded, store = leases.bounded(timeout, longest_wait), cast("object", leases)
    if isinstance(store, LeasesWithRowMarks):
        return cast("MarkedLeaseStore", LeasesWithRowMarks(bounded, records))
    return cast("MarkedLeaseStore", bounded)
