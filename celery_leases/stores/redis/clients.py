"""Makes Redis clients from ``leases_url``. They have time limits, and do not retry commands."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final, cast

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from redis.sentinel import (
    Sentinel,
    SentinelConnectionPool,
    SentinelManagedConnection,
    SentinelManagedSSLConnection,
)

from celery_leases.concurrency import wait_limit
from celery_leases.stores.redis.cluster import Cluster
from celery_leases.stores.redis.direct import DirectClient
from celery_leases.stores.redis.url import (
    CLUSTER,
    LOOPBACK,
    SENTINEL,
    UNIX,
    RedisUrl,
    passed_options,
    read_url,
)

# redis-py 8 stops at 100 connections; a gevent worker may use more at once.
_CONNECTIONS: Final = 2**31


def _limited(connection_class: type[Any]) -> type[Any]:
    """*connection_class* with timeouts that are shortened to
    :func:`celery_leases.concurrency.wait_limit.bounded` before each command.
    """

    class LimitedConnection(connection_class):
        #: The timeout of the socket.
        _current: float | None = None

        def limit_wait(self) -> None:
            """Let the open socket wait as long as this delivery may."""
            seconds = wait_limit.bounded(self.socket_timeout)
            if seconds != self._current and self._sock is not None:
                self._sock.settimeout(seconds)
                self._current = seconds

        def send_packed_command(self, command: Any, check_health: bool = True) -> None:
            if wait_limit.in_use:
                self.limit_wait()
            self.send_unlimited(command, check_health)

        #: For a caller that has called :meth:`limit_wait`.
        send_unlimited = connection_class.send_packed_command

        def _connect(self) -> Any:
            name = "socket_connect_timeout"
            given = getattr(self, name, self.socket_timeout)
            setattr(self, name, wait_limit.bounded(cast("float", given)))
            try:
                sock = super()._connect()
            finally:
                setattr(self, name, given)
            self._current = wait_limit.bounded(self.socket_timeout)
            sock.settimeout(self._current)
            return sock

    return LimitedConnection


limited: Final = cast("Callable[[type[Any]], type[Any]]", cache(_limited))


@dataclass(frozen=True, slots=True)
class RedisAddress:
    """The address and login of a Redis server. ``name`` identifies the server without its password,
    and is the same for all URLs of the server.
    """

    name: str
    connection_class: type[Any]
    parameters: Mapping[str, Any] = field(repr=False)

    def client(self, timeout: float) -> redis.Redis:
        """A client with its own connections. Connecting and reading take at most *timeout* seconds
        each.

        With a credential provider redis-py manages the connections, because it may have to
        authenticate again on an open connection.
        """
        limits = _limits(timeout)
        if self.connection_class is redis.UnixDomainSocketConnection:
            del limits["socket_connect_timeout"]
        pool = redis.ConnectionPool(
            connection_class=limited(self.connection_class), **limits, **self.parameters
        )
        return (
            redis.Redis(connection_pool=pool)
            if "credential_provider" in self.parameters
            else DirectClient(connection_pool=pool)
        )


@dataclass(frozen=True, slots=True)
class SentinelAddress:
    """The primary that the Sentinels know as *master*. ``name`` does not depend on the list of
    Sentinels.
    """

    name: str
    master: str
    sentinels: tuple[tuple[str, int], ...]
    min_other_sentinels: int
    sentinel_parameters: Mapping[str, Any] = field(repr=False)
    connection_class: type[Any]
    parameters: Mapping[str, Any] = field(repr=False)

    def client(self, timeout: float) -> redis.Redis:
        """As :meth:`RedisAddress.client`. Each new connection first asks the Sentinels, which takes
        about *timeout* seconds at most.
        """
        limits = _limits(timeout / len(self.sentinels))
        sentinel = Sentinel(  # type: ignore[no-untyped-call]
            self.sentinels,
            self.min_other_sentinels,
            sentinel_kwargs={**self.sentinel_parameters, **limits},
        )
        for asked in sentinel.sentinels:
            asked_pool = asked.connection_pool
            asked_pool.connection_class = limited(asked_pool.connection_class)
        pool = SentinelConnectionPool(  # type: ignore[no-untyped-call]
            self.master,
            sentinel,
            connection_class=limited(self.connection_class),
            **_limits(timeout),
            **self.parameters,
        )
        return redis.Redis(connection_pool=pool)


@dataclass(frozen=True, slots=True)
class ClusterAddress:
    """A Redis Cluster, found through some of its nodes."""

    name: str
    seeds: tuple[tuple[str, int], ...]
    connection_class: type[Any]
    parameters: Mapping[str, Any] = field(repr=False)

    def client(self, timeout: float) -> Cluster:
        """A client with one :meth:`RedisAddress.client` for each node, opened at its first use."""

        def open_node(host: str, port: int) -> redis.Redis:
            parameters = {**self.parameters, "host": host, "port": port}
            return RedisAddress(self.name, self.connection_class, parameters).client(timeout)

        return Cluster(self.seeds, open_node, timeout)


def redis_address(
    url: str, options: Mapping[str, Any] | None = None
) -> RedisAddress | SentinelAddress | ClusterAddress:
    """Read *url* in the forms of redis-py and of kombu, with kombu's transport *options*.

    The schemes are ``redis`` and ``valkey``, with TLS ``rediss`` and ``valkeys``; ``unix`` and
    ``redis+socket``; ``sentinel``; ``redis+cluster`` and ``rediss+cluster``. These options are
    used: ``socket_keepalive``, ``socket_keepalive_options``, ``client_name``,
    ``credential_provider``, and ``ssl``, which is ``True`` or a mapping like Celery's
    ``broker_use_ssl``; for Sentinel also ``master_name``, ``min_other_sentinels`` and
    ``sentinel_kwargs``. Raises :class:`LeaseConfigurationError` for another URL or a value that
    cannot be read.
    """
    options = options or {}
    read = read_url(url)
    database, tls = read.database(), None if read.scheme in UNIX else read.tls(options)
    given, login = passed_options(options), read.credentials(options)
    if read.scheme in UNIX:
        client_name = {"client_name": given["client_name"]} if "client_name" in given else {}
        parameters = {"path": f"/{read.path}", "db": database} | client_name | login
        return RedisAddress(
            f"redis:/{read.path}/{database}", redis.UnixDomainSocketConnection, parameters
        )
    parameters = {"db": database} | given | login | (tls or {})
    connection_class = redis.Connection if tls is None else redis.SSLConnection
    if read.scheme in SENTINEL:
        return _sentinel(read, options, database, tls is not None, parameters)
    shown = sorted(f"{_shown(host)}:{port}" for host, port in read.nodes)
    if read.scheme in CLUSTER:
        if database:
            raise read.url_error("names a database, which a Redis Cluster does not have")
        del parameters["db"]
        return ClusterAddress(
            f"redis-cluster:{','.join(shown)}", read.nodes, connection_class, parameters
        )
    host, port = read.nodes[0]
    parameters = {"host": host, "port": port} | parameters
    return RedisAddress(f"redis:{shown[0]}/{database}", connection_class, parameters)


def _sentinel(
    read: RedisUrl,
    options: Mapping[str, Any],
    database: int,
    tls: bool,
    parameters: Mapping[str, Any],
) -> SentinelAddress:
    master = read.query.get("master_name") or options.get("master_name")
    if not master:
        raise read.url_error(
            "does not name the primary: end it with ?master_name=mymaster, or write master_name into "
            "leases_transport_options"
        )
    named = {"username": "sentinel_username", "password": "sentinel_password"}
    given: Mapping[str, Any] = options.get("sentinel_kwargs") or {}
    asked = {name: value for name, value in given.items() if not name.startswith("retry")}
    asked |= {name: read.query[said] for name, said in named.items() if said in read.query}
    others = read.query.get("min_other_sentinels") or options.get("min_other_sentinels") or 0
    try:
        min_other_sentinels = int(others)
    except ValueError:
        raise read.url_error(f"has min_other_sentinels={others!r}, which is not a number") from None
    connection_class = SentinelManagedSSLConnection if tls else SentinelManagedConnection
    name = f"redis-sentinel:{master}/{database}"
    return SentinelAddress(
        name, master, read.nodes, min_other_sentinels, asked, connection_class, parameters
    )


@cache
def _version() -> dict[str, Any]:
    """What redis-py tells a server about itself. It would read the files of its distribution for
    each connection.
    """
    return {"driver_info": redis.DriverInfo()} if hasattr(redis, "DriverInfo") else {}


def _limits(timeout: float) -> dict[str, Any]:
    return _version() | {
        "socket_timeout": timeout,
        "socket_connect_timeout": timeout,
        "max_connections": _CONNECTIONS,
        "retry": Retry(NoBackoff(), 0),
    }


def _shown(host: str) -> str:
    return "127.0.0.1" if host in LOOPBACK else f"[{host}]" if ":" in host else host
