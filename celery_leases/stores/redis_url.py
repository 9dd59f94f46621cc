"""From ``leases_url`` to a Redis client of our own: bounded in time, never repeating a command by itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import redis
from kombu.utils import symbol_by_name
from kombu.utils.url import parse_ssl_cert_reqs, url_to_parts
from redis.backoff import NoBackoff
from redis.retry import Retry

from celery_leases.core.errors import LeaseConfigurationError

TLS: Final = ("rediss", "valkeys")
TCP: Final = ("redis", "valkey", *TLS)
UNIX: Final = ("unix", "socket", "redis+socket", "valkey+socket")
LOOPBACK: Final = ("localhost", "127.0.0.1", "::1", "0.0.0.0")  # noqa: S104 - recognised, never bound
_KEPT: Final = ("client_name", "socket_keepalive", "socket_keepalive_options")
# redis-py 8 stops at 100 connections; a gevent worker may use more at once.
_CONNECTIONS: Final = 2**31


@dataclass(frozen=True, slots=True)
class RedisAddress:
    """Where a Redis is, and how to log in. ``name`` is its identity, without a password, however it is spelled."""

    name: str
    connection_class: type[Any]
    parameters: Mapping[str, Any] = field(repr=False)

    def client(self, timeout: float) -> redis.Redis:
        """A client over its own connections, each connect and each read of which takes at most *timeout* seconds."""
        bounds: dict[str, Any] = {"socket_timeout": timeout, "socket_connect_timeout": timeout}
        if self.connection_class is redis.UnixDomainSocketConnection:
            del bounds["socket_connect_timeout"]
        pool = redis.ConnectionPool(
            connection_class=self.connection_class,
            max_connections=_CONNECTIONS,
            retry=Retry(NoBackoff(), 0),
            **bounds,
            **self.parameters,
        )
        return redis.Redis(connection_pool=pool)


def redis_address(url: str, options: Mapping[str, Any] | None = None) -> RedisAddress:
    """Read *url* in the forms of redis-py and of kombu, with kombu's transport *options*.

    ``redis``, ``rediss``, ``valkey``, ``valkeys``, ``unix``, ``redis+socket``. ``ssl`` in *options* is ``True`` or a
    mapping like Celery's ``broker_use_ssl``. Raises :class:`LeaseConfigurationError` for everything else.
    """
    options = options or {}
    scheme = url.partition("://")[0]
    if scheme not in TCP + UNIX:
        raise _refused(url, "is not the URL of one Redis or Valkey server")
    if ";" in url:
        raise _refused(url, "lists several servers, but leases are kept on one")
    try:
        parts = url_to_parts(url)
        query = dict(parts.query)
        unix = scheme in UNIX
        path = (parts.path or "").strip("/")
        database = int(query.get("db") or query.get("virtual_host") or ("" if unix else path) or 0)
        tls = None if unix else _tls(scheme, query, options)
    except (ValueError, KeyError) as error:
        raise _refused(url, f"cannot be read ({type(error).__name__})") from None
    given = {name: options[name] for name in _KEPT if options.get(name) is not None}
    named = {"username": parts.username, "password": parts.password}
    login = _login(url, query | {name: value for name, value in named.items() if value}, options)
    if unix:
        client_name = {"client_name": given["client_name"]} if "client_name" in given else {}
        parameters = {"path": f"/{path}", "db": database} | client_name | login
        return RedisAddress(f"redis:/{path}/{database}", redis.UnixDomainSocketConnection, parameters)
    host, port = parts.hostname or "127.0.0.1", parts.port or 6379
    shown = "127.0.0.1" if host in LOOPBACK else f"[{host}]" if ":" in host else host
    parameters = {"host": host, "port": port, "db": database} | given | login | (tls or {})
    connection_class = redis.Connection if tls is None else redis.SSLConnection
    return RedisAddress(f"redis:{shown}:{port}/{database}", connection_class, parameters)


def without_password(url: str) -> str:
    """*url* without user, password and query, however badly it is formed."""
    scheme, separator, _ = url.partition("://")
    rest = url.rpartition("://")[2]
    return f"{scheme if separator else ''}{separator}{rest.rpartition('@')[2].partition('?')[0]}"


def _login(url: str, given: Mapping[str, str], options: Mapping[str, Any]) -> dict[str, Any]:
    provider = given.get("credential_provider") or options.get("credential_provider")
    if provider is None:
        return {name: given[name] for name in ("username", "password") if name in given}
    if isinstance(provider, str):
        try:
            provider = symbol_by_name(provider)()
        except (ImportError, AttributeError) as error:
            raise _refused(url, f"has a credential_provider that cannot be imported ({error})") from None
    return {"credential_provider": provider}


def _tls(scheme: str, query: Mapping[str, str], options: Mapping[str, Any]) -> dict[str, Any] | None:
    chosen = options.get("ssl")
    tls: dict[str, Any] = dict(chosen) if isinstance(chosen, Mapping) else {}
    tls |= {name: value for name, value in query.items() if name.startswith("ssl_")}
    if not chosen and not tls and scheme not in TLS:
        return None
    if "ssl_check_hostname" in query:
        tls["ssl_check_hostname"] = query["ssl_check_hostname"].lower() != "false"
    if "ssl_cert_reqs" in query:
        tls["ssl_cert_reqs"] = parse_ssl_cert_reqs(query["ssl_cert_reqs"])
    return tls


def _refused(url: str, why: str) -> LeaseConfigurationError:
    return LeaseConfigurationError(
        f'leases_url={without_password(url)!r} {why}; write leases_url = "redis://host:6379/1" '
        '(or rediss://, valkey://, unix:///path), or leases_url = "database" to keep leases beside the records'
    )
