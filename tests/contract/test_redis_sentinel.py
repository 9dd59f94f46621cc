"""What only Sentinel does: a primary that dies, freezes or steps down, and Sentinels that do not
answer.
"""

import time
from collections.abc import Iterator

import pytest
import redis

from celery_leases.call import Call
from celery_leases.decide.answers import (
    Acquired,
    Renewal,
    RenewalResult,
)
from celery_leases.errors import StoreUnavailable
from celery_leases.stores.redis.leases import RedisLeaseStore
from celery_leases.testing.contracts.calls import fresh_key, held, make_call
from celery_leases.testing.waits import wait_until
from tests.support.servers import RedisSentinels, RedisServer
from tests.support.servers.local import free_port

TIMEOUT = 0.6
SLACK = 1.5


@pytest.fixture
def sentinels(leases_redis: RedisServer) -> Iterator[RedisSentinels]:
    with RedisSentinels() as started:
        yield started


@pytest.fixture
def store(sentinels: RedisSentinels) -> Iterator[RedisLeaseStore]:
    """A store whose server has had its data for long enough, with a connection to the primary."""
    opened = RedisLeaseStore.from_url(sentinels.url, timeout=TIMEOUT)
    assert opened.acquire(make_call(fresh_key())) == Acquired()
    yield opened
    opened.close()


def short() -> Call:
    return make_call(fresh_key(), ttl=0.01)


def renewed(store: RedisLeaseStore, call: Call) -> RenewalResult | None:
    """The result of a renewal; ``None`` if the store does not answer in time."""
    began = time.monotonic()
    try:
        (answer,) = store.renew([Renewal(call.key.stored, call.token, call.options.ttl)])
    except StoreUnavailable:
        # The call itself, the Sentinels, and connecting to the primary.
        assert time.monotonic() - began < 3 * TIMEOUT + SLACK
        return None
    assert isinstance(answer, RenewalResult)
    return answer


def acquired(store: RedisLeaseStore, call: Call) -> bool:
    """Whether the store could give *call* its lease: not if no Sentinel knows a primary."""
    try:
        return store.acquire(call) == Acquired()
    except StoreUnavailable:
        return False


def replicated(sentinels: RedisSentinels) -> bool:
    """Whether the replica has all data of the primary."""
    offsets = set()
    for server in sentinels.servers:
        with redis.Redis(port=server.port) as client:
            info = client.info("replication")
            offsets.add(info.get("slave_repl_offset", info["master_repl_offset"]))
    return len(offsets) == 1


@pytest.mark.parametrize("end", ["killed", "frozen"])
def test_it_survives_a_failover(
    sentinels: RedisSentinels, store: RedisLeaseStore, end: str
) -> None:
    call, other = make_call(fresh_key()), make_call(fresh_key())
    assert store.acquire(call) == Acquired()
    wait_until(lambda: replicated(sentinels), 10, "the replica")
    old = sentinels.primary
    old.kill() if end == "killed" else old.pause()
    wait_until(lambda: renewed(store, call) is RenewalResult.OURS, 30, "the failover")
    wait_until(
        lambda: sentinels.primary is not old, 30, "the first Sentinel to know what the store knows"
    )
    assert held(store.acquire(make_call(call.key.stored)))
    assert store.acquire(other) == Acquired()
    assert store.age(other.key.stored) == 0.0
    assert store.acquire(short()) == Acquired()
    if end == "frozen":
        old.resume()


def test_a_lease_left_behind_is_missing(sentinels: RedisSentinels, store: RedisLeaseStore) -> None:
    wait_until(lambda: replicated(sentinels), 10, "the replica")
    (replica,) = (server for server in sentinels.servers if server is not sentinels.primary)
    call = make_call(fresh_key(), ttl=60.0)
    with redis.Redis(port=replica.port) as admin:
        admin.replicaof("127.0.0.1", str(free_port()))
    assert store.acquire(call) == Acquired()
    sentinels.primary.kill()
    wait_until(lambda: renewed(store, call) is RenewalResult.MISSING, 30, "the failover")
    newcomer = make_call(call.key.stored)
    assert store.acquire(newcomer) == Acquired()
    assert store.age(call.key.stored) < 0.5
    assert store.release(call.key.stored, newcomer.token)
    assert store.reassert(call, call.options.ttl)
    assert held(store.acquire(make_call(call.key.stored)))


def test_a_renewal_finds_the_new_primary_while_the_old_one_still_answers(
    sentinels: RedisSentinels, store: RedisLeaseStore
) -> None:
    """The Sentinels have not demoted the old one yet."""
    renewing = store.bounded(TIMEOUT)
    call = make_call(fresh_key(), ttl=60.0)
    assert renewing.acquire(call) == Acquired()
    wait_until(lambda: replicated(sentinels), 10, "the replica")
    old = sentinels.primary
    old.pause()
    wait_until(lambda: sentinels.primary is not old, 30, "the failover")
    with redis.Redis(port=sentinels.primary.port) as admin:
        wait_until(lambda: admin.info("replication")["role"] == "master", 30, "the promotion")
        admin.flushall()
    newcomer = RedisLeaseStore.from_url(sentinels.url, timeout=TIMEOUT)
    taken = make_call(call.key.stored, ttl=60.0)
    # Each Sentinel learns of the failover on its own: none may know a primary that answers yet.
    wait_until(lambda: acquired(newcomer, taken), 30, "the new primary's Sentinels")
    newcomer.close()
    for sentinel in sentinels.sentinels[1:]:
        sentinel.pause()  # alone, the first one does not demote the old primary
    old.resume()
    assert renewed(renewing, call) is RenewalResult.OTHER
    renewing.close()


def test_a_former_primary_does_nothing(sentinels: RedisSentinels, store: RedisLeaseStore) -> None:
    call = make_call(fresh_key())
    assert store.acquire(call) == Acquired()
    wait_until(lambda: replicated(sentinels), 10, "the replica")
    old = sentinels.primary
    with redis.Redis(port=old.port) as admin:
        admin.replicaof(
            "127.0.0.1", str(free_port())
        )  # a call that reaches the server before Sentinel reconfigures it
        with pytest.raises(StoreUnavailable) as caught:
            store.acquire(make_call(fresh_key()))
        assert caught.value.executed is False
        admin.replicaof("NO", "ONE")
    with redis.Redis(port=sentinels.sentinels[0].port) as sentinel:
        sentinel.execute_command("SENTINEL", "FAILOVER", "leases")
    wait_until(lambda: sentinels.primary is not old, 30, "the failover")
    wait_until(lambda: renewed(store, call) is RenewalResult.OURS, 30, "the new primary")
    assert store.acquire(short()) == Acquired()
    assert store.age(call.key.stored) == 0.0


def test_sentinels_that_do_not_answer_are_skipped_in_time(sentinels: RedisSentinels) -> None:
    for sentinel in sentinels.sentinels[:2]:
        sentinel.pause()
    store = RedisLeaseStore.from_url(sentinels.url, timeout=TIMEOUT)
    began = time.monotonic()
    assert store.acquire(make_call(fresh_key())) == Acquired()
    assert time.monotonic() - began < 2 * TIMEOUT + SLACK
    sentinels.sentinels[2].pause()
    alone = store.bounded(TIMEOUT)
    with pytest.raises(StoreUnavailable, match="No master found for 'leases'") as caught:
        alone.acquire(make_call(fresh_key()))
    assert caught.value.executed is False
    assert store.holder("x") is None  # an open connection needs no Sentinel


def test_an_unknown_primary_is_reported_by_its_name(sentinels: RedisSentinels) -> None:
    for wrong in (
        ("master_name=leases", "master_name=other"),
        ("/0?", "/0?min_other_sentinels=3&"),
    ):
        store = RedisLeaseStore.from_url(sentinels.url.replace(*wrong), timeout=2.0)
        with pytest.raises(StoreUnavailable, match="No master found") as caught:
            store.acquire(make_call(fresh_key()))
        assert caught.value.executed is False
