"""Facts about the servers: version, latency, clock, eviction policy and persistence."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Final

from celery_leases.stores.sql.records import SqlRecordStore
from celery_leases.stores.urls import display_database_url

ROUND_TRIPS: Final = 5
"""The number of measured round trips."""
MIN_REDIS: Final = (6, 2)


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """One server: its ``part`` in the set-up, its address without a password, and its version.

    ``latency`` is the median of some round trips, ``clock_ahead`` how far its clock is ahead of the
    local one, both in seconds. ``trouble``: why the server did not answer.
    """

    part: str
    address: str
    version: str | None = None
    latency: float | None = None
    clock_ahead: float | None = None
    trouble: str | None = None

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class RedisServerFacts:
    """Facts about a Redis server; ``None`` for a fact that this user may not read.

    ``persistent``: whether the server writes its data to disk. ``policy``: its
    ``maxmemory-policy``. ``alone``: a primary that accepts writes when it has lost its replicas.
    """

    version: str | None
    latency: float | None
    clock_ahead: float | None
    policy: str | None
    persistent: bool | None
    alone: bool | None = None

    @property
    def too_old(self) -> bool:
        """Whether the Lua scripts need a later version."""
        return self.version is not None and _numbers(self.version) < MIN_REDIS


def redis_facts(client: Any) -> RedisServerFacts:
    """Facts about the server of a redis-py *client*; raises redis-py's errors if the server does
    not answer.
    """
    from redis.exceptions import RedisError, ResponseError

    latency = ahead = None
    with suppress(ResponseError):  # the user may lack the right to any of these commands
        latency = _measured(client.ping)
    with suppress(RedisError):
        ahead = _clock_ahead(lambda: _seconds(client.time()))
    info: Mapping[str, Any] = {}
    with suppress(RedisError):
        info = client.info()
    policy = info.get("maxmemory_policy")
    persistent: bool | None = None
    with suppress(RedisError):
        saves = client.config_get("save").get("save")
        persistent = bool(saves) or bool(info.get("aof_enabled"))
    version = info.get("redis_version")
    # Redis only shows the number of its good replicas if min-replicas-to-write is set.
    alone = "min_slaves_good_slaves" not in info if info else None
    return RedisServerFacts(version, latency, ahead, policy, persistent, alone)


def records_facts(records: SqlRecordStore) -> ServerFacts:
    """Facts about the database of *records*; raises ``StoreUnavailable`` if it does not answer."""
    latency = _measured(records.now)
    ahead = _clock_ahead(lambda: records.now() / 1e6)
    address = display_database_url(records.database.engine.url)
    return ServerFacts("records", address, records.database.dialect.product, latency, ahead)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())


def _measured(ask: Callable[[], Any]) -> float:
    """The median time of several round trips in seconds. The first is not counted, because it may
    open a connection.
    """
    ask()
    spans = []
    for _ in range(ROUND_TRIPS):
        began = time.perf_counter()
        ask()
        spans.append(time.perf_counter() - began)
    return median(spans)


def _clock_ahead(ask: Callable[[], float]) -> float:
    """How many seconds the server's clock is ahead of this machine's, if request and reply take
    equally long.
    """
    before = time.time()
    theirs = ask()
    return theirs - (before + time.time()) / 2


def _seconds(parts: tuple[int, int]) -> float:
    return parts[0] + parts[1] / 1e6
