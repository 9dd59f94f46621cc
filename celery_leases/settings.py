"""The ``leases_*`` settings of an app: read, validated, and completed with defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlsplit

from celery_leases.errors import LeaseConfigurationError
from celery_leases.options import DATABASE, LONGEST_COUNTDOWN, OPTION_NAMES, hint_of
from celery_leases.stores.redis import url
from celery_leases.text.durations import seconds

DEFAULT_DATABASE = "sqlite:///celery_leases.db"
IN_MEMORY = "sqlite://"
REDIS_SCHEMES = url.SCHEMES
RABBIT_SCHEMES = ("amqp", "amqps", "pyamqp")
POOL_SIZE: Final = 10
"""Connections of a process to each store, at most; the default of ``leases_pool_size``."""
SMALLEST_POOL: Final = 3
"""One connection for the thread that renews, one for the thread that purges or for calls of bodies,
and one for everything else.
"""
CONSUMER_TIMEOUT = 1800.0
"""RabbitMQ's default of ``consumer_timeout``: seconds from a delivery to its acknowledgement."""

_SETTINGS = (
    "url",
    "transport_options",
    "database_url",
    "database_schema",
    "pool_size",
    "prefix",
    "eager_stores",
)
_NOT_APP_WIDE = ("key", "fingerprint")
_VISIBILITY_TIMEOUTS = {"redis": 3600.0, "rediss": 3600.0, "sentinel": 3600.0, "sqs": 1800.0}


@dataclass(frozen=True, slots=True)
class Settings:
    """The ``leases_*`` settings of an app, with defaults. Times are seconds."""

    #: The lease store: a Redis or Valkey server, its Sentinels or a cluster
    #: (docs/reference/stores.md#urls), or ``"database"``: the claimed row is the lease. By default
    #: the broker if it is Redis, else ``"database"``.
    leases_url: str = field(repr=False)
    #: The database of the records: PostgreSQL, MySQL, MariaDB or SQLite
    #: (docs/reference/databases.md). By default ``sqlite:///celery_leases.db`` with a broker on
    #: this machine; otherwise it must be set.
    database_url: str = field(repr=False)
    #: The schema of the tables, or another database of the same MySQL server.
    database_schema: str | None = None
    #: Connections of one process to the database, at most; and as many to a lease store in Redis.
    #: At least 3 (docs/how-to/operating.md#connections).
    pool_size: int = POOL_SIZE
    #: The beginning of the keys of the lease store. Applications that share it need different ones.
    prefix: str = "celery_leases"
    #: ``True``: eager calls, and under ``task_always_eager`` also ``lease_status()``,
    #: ``delay_in()`` and ``LeaseClient.from_app()``, use the stores of the settings instead of
    #: stores in memory.
    eager_stores: bool = False
    #: kombu's transport options for the lease store, such as ``master_name``
    #: (docs/reference/stores.md#options). By default those of the broker, if it is the lease store.
    transport_options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    #: The longest countdown of a reschedule: half the visibility timeout, on RabbitMQ a third of
    #: the consumer timeout, at most 10 minutes.
    longest_countdown: float = LONGEST_COUNTDOWN
    #: RabbitMQ's ``consumer_timeout``.
    consumer_timeout: float = CONSUMER_TIMEOUT
    #: App-wide defaults of task options.
    defaults: Mapping[str, Any] = field(default_factory=dict)


def read_settings(
    conf: Mapping[str, Any],
    broker_url: str | None,
    transport_options: Mapping[str, Any] | None = None,
) -> Settings:
    """Read the ``leases_*`` settings; raises :class:`LeaseConfigurationError` for unknown, wrong or
    missing ones.

    All names in *conf* must be those of settings. *broker_url* and its *transport_options* are
    Celery's; the broker is the lease store unless ``leases_url`` names another one.
    """
    given = {name.removeprefix("leases_"): value for name, value in conf.items()}
    for name in sorted(given.keys() - {*_SETTINGS, *OPTION_NAMES}):
        known = [known for known in (*_SETTINGS, *OPTION_NAMES) if known not in _NOT_APP_WIDE]
        written = name if name in conf else f"leases_{name}"
        hint = hint_of("leases_", written, known)
        raise LeaseConfigurationError(f"unknown setting {written}; {hint}")
    for name in given.keys() & set(_NOT_APP_WIDE):
        raise LeaseConfigurationError(
            f"leases_{name} cannot be set for a whole app; set lease_{name} on each task"
        )
    if given.get("eager_stores") not in (None, True, False):
        raise LeaseConfigurationError(
            f"leases_eager_stores={given['eager_stores']!r}: write True or False"
        )
    pool_size = given.get("pool_size")
    pool_size = POOL_SIZE if pool_size is None else pool_size
    if type(pool_size) is not int or pool_size < SMALLEST_POOL:
        raise LeaseConfigurationError(
            f"leases_pool_size={pool_size!r}: write a whole number from {SMALLEST_POOL}, the number of connections "
            "that each process may open to each store"
        )
    own = given.get("transport_options")
    if not isinstance(own, Mapping | None):
        raise LeaseConfigurationError(
            f"leases_transport_options is of type {type(own).__name__}: write a dict of kombu's transport options"
        )
    broker = broker_url or ""
    options = dict(transport_options or {})
    is_redis = scheme_of(broker) in REDIS_SCHEMES
    leases_url = given.get("url") or (broker if is_redis else DATABASE)
    timeout = options.pop("consumer_timeout", None)
    consumer_timeout = (
        CONSUMER_TIMEOUT
        if timeout is None
        else seconds(timeout, "broker_transport_options: consumer_timeout")
    )
    return Settings(
        leases_url=leases_url,
        database_url=given.get("database_url") or _default_database(broker),
        database_schema=given.get("database_schema"),
        pool_size=pool_size,
        prefix=given.get("prefix") or "celery_leases",
        eager_stores=bool(given.get("eager_stores")),
        transport_options=own
        if own is not None
        else options
        if _is_broker(leases_url, broker)
        else {},
        longest_countdown=_longest_countdown(broker, options, consumer_timeout),
        consumer_timeout=consumer_timeout,
        defaults={name: value for name, value in given.items() if name in OPTION_NAMES},
    )


def is_setting(name: str) -> bool:
    """Whether *name*, such as ``leases_url``, is a setting of celery_leases."""
    return name.startswith("leases_") and name.removeprefix("leases_") in (
        *_SETTINGS,
        *OPTION_NAMES,
    )


def is_local(broker: str) -> bool:
    """Whether a broker URL is on this machine: loopback, a unix socket, memory or the
    filesystem.
    """
    scheme = scheme_of(broker)
    if scheme in ("memory", "filesystem", "redis+socket", "unix", ""):
        return True
    if scheme not in (*REDIS_SCHEMES, *RABBIT_SCHEMES, "mongodb"):
        return False
    hosts = [urlsplit(part).hostname or "localhost" for part in broker.split(";")]
    return all(host in ("localhost", "127.0.0.1", "::1") for host in hosts)


def is_rabbit(broker: str) -> bool:
    """Whether a broker URL has a scheme of RabbitMQ."""
    return scheme_of(broker) in RABBIT_SCHEMES


def scheme_of(url: str) -> str:
    """The scheme of a URL in lower case; empty without one."""
    return url.split("://", 1)[0].lower() if "://" in url else ""


def _default_database(broker: str) -> str:
    if is_local(broker):
        return DEFAULT_DATABASE
    raise LeaseConfigurationError(
        "the broker is on another machine, so a SQLite file here would not be shared by all workers; write\n"
        '    app.conf.leases_database_url = "postgresql+psycopg://user@host/database"'
    )


def _is_broker(leases_url: str, broker: str) -> bool:
    """Whether the broker's transport options apply to the lease store: it is the broker, or both
    use Sentinel.
    """
    return scheme_of(broker) in REDIS_SCHEMES and (
        leases_url == broker or scheme_of(leases_url) == scheme_of(broker) == "sentinel"
    )


def _longest_countdown(broker: str, options: Mapping[str, Any], consumer_timeout: float) -> float:
    if is_rabbit(broker):
        # The consumer timeout includes the countdown, during which a worker holds the message, and
        # the run of the body.
        return min(consumer_timeout / 3, LONGEST_COUNTDOWN)
    default = _VISIBILITY_TIMEOUTS.get(scheme_of(broker))
    timeout = options.get("visibility_timeout", default)
    return min(float(timeout) / 2, LONGEST_COUNTDOWN) if timeout else LONGEST_COUNTDOWN
