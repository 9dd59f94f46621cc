"""Reads ``leases_url``: which Redis servers it names, how to log in, and which URLs are refused."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from kombu.utils import symbol_by_name
from kombu.utils.url import parse_ssl_cert_reqs, url_to_parts

from celery_leases.errors import LeaseConfigurationError
from celery_leases.stores.urls import display_url

TLS: Final = ("rediss", "valkeys")
TCP: Final = ("redis", "valkey", *TLS)
UNIX: Final = ("unix", "socket", "redis+socket", "valkey+socket")
SENTINEL: Final = ("sentinel",)
CLUSTER: Final = tuple(f"{scheme}+cluster" for scheme in TCP)
SCHEMES: Final = TCP + UNIX + SENTINEL + CLUSTER
LOOPBACK: Final = ("localhost", "127.0.0.1", "::1", "0.0.0.0")  # noqa: S104 - recognised, never bound
PORTS: Final = {"sentinel": 26379}
_PASSED: Final = ("client_name", "socket_keepalive", "socket_keepalive_options")


@dataclass(frozen=True, slots=True)
class RedisUrl:
    """The parts of a URL. ``nodes`` are hosts and ports: several for Sentinel and a cluster,
    otherwise one. ``path`` has no leading or trailing slashes.
    """

    url: str = field(repr=False)
    scheme: str
    nodes: tuple[tuple[str, int], ...]
    path: str
    query: Mapping[str, str] = field(repr=False)
    login: Mapping[str, str] = field(repr=False)

    def database(self) -> int:
        """The number of the database; raises :class:`LeaseConfigurationError`."""
        path = "" if self.scheme in UNIX else self.path
        try:
            return int(self.query.get("db") or self.query.get("virtual_host") or path or 0)
        except ValueError:
            raise self.url_error("cannot be read: its database is not a number") from None

    def credentials(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """User and password, or a credential provider, as parameters of a connection."""
        provider = self.query.get("credential_provider") or options.get("credential_provider")
        if provider is None:
            return dict(self.login)
        if isinstance(provider, str):
            try:
                provider = symbol_by_name(provider)()
            except (ImportError, AttributeError) as error:
                raise self.url_error(
                    f"has a credential_provider that cannot be imported ({error})"
                ) from None
        return {"credential_provider": provider}

    def tls(self, options: Mapping[str, Any]) -> dict[str, Any] | None:
        """The ``ssl_*`` parameters of a connection; ``None`` for one without TLS."""
        chosen = options.get("ssl")
        tls: dict[str, Any] = dict(chosen) if isinstance(chosen, Mapping) else {}
        tls |= {name: value for name, value in self.query.items() if name.startswith("ssl_")}
        if not chosen and not tls and self.scheme.removesuffix("+cluster") not in TLS:
            return None
        if "ssl_check_hostname" in self.query:
            tls["ssl_check_hostname"] = self.query["ssl_check_hostname"].lower() != "false"
        if "ssl_cert_reqs" in self.query:
            try:
                tls["ssl_cert_reqs"] = parse_ssl_cert_reqs(self.query["ssl_cert_reqs"])
            except KeyError:
                raise self.url_error("cannot be read: its ssl_cert_reqs is unknown") from None
        return tls

    def url_error(self, why: str) -> LeaseConfigurationError:
        """The error to raise for this URL."""
        return url_error(self.url, why)


def read_url(url: str) -> RedisUrl:
    """Read *url* in the forms of redis-py and of kombu; raises :class:`LeaseConfigurationError` for
    any other.

    Several servers are URLs separated by ``;``, or hosts separated by commas.
    """
    scheme = url.partition("://")[0]
    if scheme not in SCHEMES:
        raise url_error(url, "is not the URL of a Redis or Valkey server")
    where, _, query = url.partition("?")
    each = re.split("[;,]", where) if scheme in SENTINEL + CLUSTER else [url]
    if ";" in url and len(each) == 1:
        raise url_error(url, "lists several servers, but leases need one server")
    try:
        parts = [url_to_parts(one if "://" in one else f"{scheme}://{one}") for one in each]
        nodes = tuple(
            (part.hostname or "127.0.0.1", part.port or PORTS.get(scheme, 6379)) for part in parts
        )
        given = dict(url_to_parts(f"{scheme}://h?{query}").query)
    except (ValueError, KeyError) as error:
        raise url_error(url, f"cannot be read ({type(error).__name__})") from None
    if {part.scheme for part in parts} != {scheme}:
        raise url_error(url, "names servers of several kinds")
    paths = {part.path.strip("/") for part in parts if part.path and part.path.strip("/")}
    logins = {(part.username, part.password) for part in parts if part.password or part.username}
    if len(paths) > 1 or len(logins) > 1:
        raise url_error(url, "names several databases or logins, but the servers must be one store")
    named = dict(zip(("username", "password"), next(iter(logins), (None, None)), strict=True))
    login = {name: given[name] for name in named if name in given}
    login |= {name: value for name, value in named.items() if value}
    return RedisUrl(url, scheme, nodes, next(iter(paths), ""), given, login)


def passed_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The transport *options* of kombu that are passed to redis-py unchanged. None of them delays
    or retries a command.
    """
    return {name: options[name] for name in _PASSED if options.get(name) is not None}


def without_password(url: str) -> str:
    """*url* without users, passwords and query, also if it is malformed."""
    scheme = url.partition("://")[0]
    each = re.split("[;,]", url) if scheme in SENTINEL + CLUSTER else [url]
    # A part before an @ may be the beginning of a password that contains a separator.
    sure = [
        one
        for place, one in enumerate(each)
        if "@" in one or not any("@" in later for later in each[place:])
    ]
    return (
        f"{scheme}://{','.join(display_url(one).rpartition('://')[2] for one in sure)}"
        if len(each) > 1
        else display_url(url)
    )


def url_error(url: str, why: str) -> LeaseConfigurationError:
    """The error to raise for *url*, with what to write instead."""
    return LeaseConfigurationError(
        f'leases_url={without_password(url)!r} {why}; write leases_url = "redis://host:6379/1" '
        '(or rediss://, valkey://, unix:///path, "sentinel://host1:26379;sentinel://host2:26379/1", '
        '"redis+cluster://host1:6379,host2:6379"), or leases_url = "database" to store leases with the records'
    )
