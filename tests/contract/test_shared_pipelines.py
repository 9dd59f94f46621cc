"""Calls of one process that share round trips to Redis: each has its own answer."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import pytest
import redis

from celery_leases.call import Call
from celery_leases.decide.answers import Acquired, Refusal, Refused
from celery_leases.errors import StoreUnavailable
from celery_leases.stores.redis.direct import DirectCommands
from celery_leases.stores.redis.leases import RedisLeaseStore
from celery_leases.testing.contracts import SeparateLeaseStoreContract
from celery_leases.testing.contracts.calls import fresh_key, make_call
from tests.contract.shared_trips import at_once, trip_under_way
from tests.crash.cutting_proxy import CuttingProxy
from tests.support.servers import RedisServer

MANY = 50


@pytest.fixture(scope="module")
def leases_redis_url() -> Iterator[str]:
    """The URL of a server without other clients."""
    with RedisServer() as server:
        yield server.url


def sharing(url: str, timeout: float = 2.0) -> RedisLeaseStore:
    store = RedisLeaseStore.from_url(url, prefix="shared", timeout=timeout)
    store.share_trips(lambda: 0)
    assert store.acquire(make_call(fresh_key())) == Acquired()
    return store


@pytest.fixture
def store(leases_redis_url: str) -> Iterator[RedisLeaseStore]:
    made = sharing(leases_redis_url)
    yield made
    made.close()


class TestLeases(SeparateLeaseStoreContract):
    """Its calls come one after the other, or in threads."""

    @pytest.fixture
    def store(self, store: RedisLeaseStore) -> RedisLeaseStore:
        return store


def new_calls(number: int = MANY) -> list[Call]:
    return [make_call(fresh_key()) for _ in range(number)]


def acquired(store: RedisLeaseStore, calls: Sequence[Call]) -> list[Any]:
    """What all *calls* get at once."""
    commands = store._commands
    assert isinstance(commands, DirectCommands)
    return at_once(commands._trips, [partial(store.acquire, call) for call in calls])


def test_leases_that_are_taken_at_once_share_a_trip(
    store: RedisLeaseStore, leases_redis_url: str
) -> None:
    calls, taken = new_calls(), make_call(fresh_key())
    assert store.acquire(taken) == Acquired()
    with redis.Redis.from_url(leases_redis_url) as client:
        before = client.info("stats")["total_reads_processed"]  # type: ignore[index]
        *answers, refused = acquired(store, [*calls, make_call(taken.key.stored)])
        after = client.info("stats")["total_reads_processed"]  # type: ignore[index]
    assert after - before == 2, "one trip, and that of the test"
    assert answers == [Acquired()] * MANY
    assert isinstance(refused, Refused)
    assert refused.why is Refusal.HELD
    assert [store.holder(call.key.stored).token for call in calls] == [  # type: ignore[union-attr]
        call.token for call in calls
    ]


def test_a_lease_that_is_freed_during_a_trip_goes_in_the_next_one(store: RedisLeaseStore) -> None:
    calls = new_calls(3)
    assert [store.acquire(call) for call in calls] == [Acquired()] * 3
    with trip_under_way(store._commands._trips):  # type: ignore[attr-defined]
        for call in calls:
            store.end(call.key.stored, call.token)
        assert len(store.held([call.key.stored for call in calls])) == 3
    assert store.held([call.key.stored for call in calls]) == set()


def test_a_key_of_another_program_fails_alone(
    store: RedisLeaseStore, leases_redis_url: str
) -> None:
    calls = new_calls()
    with redis.Redis.from_url(leases_redis_url) as client:
        client.lpush(store._keys.lease(calls[-1].key.stored), "theirs")
    *answers, refused = acquired(store, calls)
    assert answers == [Acquired()] * (MANY - 1)
    assert isinstance(refused, StoreUnavailable)
    assert refused.executed is False


def test_lost_scripts_are_sent_again(store: RedisLeaseStore, leases_redis_url: str) -> None:
    calls = new_calls()
    with redis.Redis.from_url(leases_redis_url) as client:
        client.script_flush()
        assert acquired(store, calls) == [Acquired()] * MANY
        client.script_flush()
    with trip_under_way(store._commands._trips):  # type: ignore[attr-defined]
        for call in calls:
            store.end(call.key.stored, call.token)
    assert store.held([call.key.stored for call in calls]) == set()


@pytest.mark.parametrize("before", [False, True], ids=["its reply", "the request"])
def test_a_lost_connection_fails_no_call(leases_redis_url: str, before: bool) -> None:
    with CuttingProxy(urlsplit(leases_redis_url).port or 0) as proxy:
        store, calls = sharing(f"redis://127.0.0.1:{proxy.port}/0"), new_calls()
        proxy.cut(calls[-1].token.encode(), before=before)
        assert acquired(store, calls) == [Acquired()] * MANY
        assert proxy.was_cut.is_set()
        store.close()


def test_a_silent_server_fails_each_call(leases_redis_url: str) -> None:
    with CuttingProxy(urlsplit(leases_redis_url).port or 0) as proxy:
        store, calls = sharing(f"redis://127.0.0.1:{proxy.port}/0", timeout=0.2), new_calls(5)
        proxy.silent = True
        answers = acquired(store, calls)
        assert [type(answer) for answer in answers] == [StoreUnavailable] * 5
        assert len({id(answer) for answer in answers}) == 5
        proxy.silent = False
        assert store.acquire(calls[0]) == Acquired()
        store.close()
