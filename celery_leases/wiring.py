"""From an app's settings to the parts that run its leased tasks: stores, renewer, execution."""

from __future__ import annotations

import os
import random
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from celery_leases.core.errors import LeaseConfigurationError
from celery_leases.core.options import OPTION_NAMES
from celery_leases.core.ports import MarkStore, Observer
from celery_leases.core.validity import call_timeout
from celery_leases.entry import Entry
from celery_leases.execution import Execution
from celery_leases.process import native
from celery_leases.renewal import Renewer, Stores
from celery_leases.stores import redis_url
from celery_leases.stores.claims import DATABASE
from celery_leases.stores.database import engine_for
from celery_leases.stores.redis import RedisLeaseStore
from celery_leases.stores.schema import Tables
from celery_leases.stores.sql import SqlRecordStore
from celery_leases.stores.sql_effects import SqlEffectStore
from celery_leases.stores.sql_leases import DatabaseLeaseStore

DEFAULT_DATABASE = "sqlite:///celery_leases.db"
IN_MEMORY = "sqlite://"
REDIS_SCHEMES = redis_url.SCHEMES
STORE_TIMEOUT = 2.0
LONGEST_HOP = 600.0

AnyStore = RedisLeaseStore | DatabaseLeaseStore
"""A lease store, which keeps marks and gates too."""

_SETTINGS = ("url", "transport_options", "database_url", "database_schema", "prefix", "eager_stores")
_NOT_APP_WIDE = ("key", "fingerprint")
_VISIBILITY_TIMEOUTS = {"redis": 3600.0, "rediss": 3600.0, "sentinel": 3600.0, "sqs": 1800.0}


@dataclass(frozen=True, slots=True)
class Settings:
    """What ``leases_*`` settings say about a whole app, defaults filled in."""

    leases_url: str
    database_url: str
    database_schema: str | None = None
    prefix: str = "celery_leases"
    eager_stores: bool = False
    #: kombu's transport options for the lease store: its own, or the broker's where that is the lease store.
    transport_options: Mapping[str, Any] = field(default_factory=dict)
    #: The longest countdown a delivery is put back with, in seconds: half the visibility timeout, at most 10 minutes.
    longest_hop: float = LONGEST_HOP
    #: App-wide defaults of task options.
    defaults: Mapping[str, Any] = field(default_factory=dict)


def read_settings(
    conf: Mapping[str, Any], broker_url: str | None, transport_options: Mapping[str, Any] | None = None
) -> Settings:
    """Read the ``leases_*`` settings; raises :class:`LeaseConfigurationError` for unknown, wrong or missing ones.

    *broker_url* and its *transport_options* are Celery's; the broker is the lease store unless another one is named.
    """
    given = {name.removeprefix("leases_"): value for name, value in conf.items() if name.startswith("leases_")}
    for name in given.keys() - {*_SETTINGS, *OPTION_NAMES}:
        known = ", ".join(f"leases_{known}" for known in (*_SETTINGS, *OPTION_NAMES) if known not in _NOT_APP_WIDE)
        raise LeaseConfigurationError(f"unknown setting leases_{name}; known are {known}")
    for name in given.keys() & set(_NOT_APP_WIDE):
        raise LeaseConfigurationError(f"leases_{name} cannot be set for a whole app; set lease_{name} on each task")
    if given.get("eager_stores") not in (None, True, False):
        raise LeaseConfigurationError(f"leases_eager_stores={given['eager_stores']!r}: write True or False")
    own = given.get("transport_options")
    if not isinstance(own, Mapping | None):
        raise LeaseConfigurationError(f"leases_transport_options={own!r}: write a dict of kombu's transport options")
    broker = broker_url or ""
    options = dict(transport_options or {})
    is_redis = _scheme(broker) in REDIS_SCHEMES
    leases_url = given.get("url") or (broker if is_redis else DATABASE)
    return Settings(
        leases_url=leases_url,
        database_url=given.get("database_url") or _default_database(broker),
        database_schema=given.get("database_schema"),
        prefix=given.get("prefix") or "celery_leases",
        eager_stores=bool(given.get("eager_stores")),
        transport_options=own if own is not None else options if _is_broker(leases_url, broker) else {},
        longest_hop=_longest_hop(broker, options),
        defaults={name: value for name, value in given.items() if name in OPTION_NAMES},
    )


def is_local(broker: str) -> bool:
    """Whether a broker URL names this machine: loopback, a unix socket, memory or the filesystem."""
    scheme = _scheme(broker)
    if scheme in ("memory", "filesystem", "redis+socket", "unix", ""):
        return True
    if scheme not in (*REDIS_SCHEMES, "amqp", "amqps", "pyamqp", "mongodb"):
        return False
    hosts = [urlsplit(part).hostname or "localhost" for part in broker.split(";")]
    return all(host in ("localhost", "127.0.0.1", "::1") for host in hosts)


def _scheme(url: str) -> str:
    return url.split("://", 1)[0].lower() if "://" in url else ""


def _default_database(broker: str) -> str:
    if is_local(broker):
        return DEFAULT_DATABASE
    raise LeaseConfigurationError(
        "the broker is on another machine, so a SQLite file here would not be shared by all workers; write\n"
        '    app.conf.leases_database_url = "postgresql+psycopg://user@host/database"'
    )


def _is_broker(leases_url: str, broker: str) -> bool:
    """Whether the lease store is reached as the broker is: it is the broker, or both are behind Sentinels."""
    return _scheme(broker) in REDIS_SCHEMES and (
        leases_url == broker or _scheme(leases_url) == _scheme(broker) == "sentinel"
    )


def _longest_hop(broker: str, options: Mapping[str, Any]) -> float:
    default = _VISIBILITY_TIMEOUTS.get(_scheme(broker))
    timeout = options.get("visibility_timeout", default)
    return min(float(timeout) / 2, LONGEST_HOP) if timeout else LONGEST_HOP


class BootClock:
    """The clock of :func:`celery_leases.process.native.boot_clock`."""

    def now(self) -> float:
        """Seconds since boot."""
        return native.boot_clock()

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
    records = open_records(settings)
    leases = lease_store(settings, records)
    clock = BootClock()
    within = call_timeout(shortest_ttl)
    # The keeper has connections of its own: it must not wait for a task that holds the last one.
    kept_records = records if settings.database_url == IN_MEMORY else open_records(settings)
    kept = _bounded(leases, kept_records, within), kept_records
    # So have bodies in greenlets that ask: the locks around connections are made for those, and the keeper is a thread.
    asked = (_bounded(leases, records, within), records) if native.green() else kept
    renewer = Renewer(Stores(*kept), Stores(*asked), observer, clock)
    host = f"{socket.gethostname()}/{os.getpid()}"
    entry = Entry(leases, records, leases, leases, observer, clock, random.random, host, hurried, time.time)
    effects = SqlEffectStore(records.database, records.tables)
    opened = [(leases, records), kept, asked]
    return Parts(settings, leases, records, effects, leases, renewer, Execution(entry, renewer), opened)


def open_records(settings: Settings) -> SqlRecordStore:
    """The record store the settings name."""
    return SqlRecordStore(engine_for(settings.database_url), Tables(settings.database_schema))


def lease_store(settings: Settings, records: SqlRecordStore) -> AnyStore:
    """The lease store the settings name."""
    if settings.leases_url == DATABASE:
        return DatabaseLeaseStore(records)
    if _scheme(settings.leases_url) not in REDIS_SCHEMES:
        raise LeaseConfigurationError(
            f'leases_url={settings.leases_url!r}: write "database", or a URL such as "redis://localhost:6379/1"'
        )
    return RedisLeaseStore.from_url(
        settings.leases_url, prefix=settings.prefix, timeout=STORE_TIMEOUT, options=settings.transport_options
    )


def _bounded(leases: AnyStore, records: SqlRecordStore, timeout: float) -> AnyStore:
    """The same lease store over other connections: those of *records*, or its own whose calls end within *timeout*."""
    return DatabaseLeaseStore(records) if isinstance(leases, DatabaseLeaseStore) else leases.bounded(timeout)
