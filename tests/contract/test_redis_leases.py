"""Redis leases against the published suites, and what is their own: epochs, foreign values, lost scripts."""

import multiprocessing
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import redis

from celery_leases.core.ports import Acquired, Held, Kept, LeaseStore, MarkStore, Renewal, Unsettled
from celery_leases.stores.redis import RedisLeaseStore
from celery_leases.testing.contracts import MarkStoreContract, SeparateLeaseStoreContract
from celery_leases.testing.contracts.bids import fresh_key, make_bid
from celery_leases.testing.process import wait_until
from tests.contract.redis_stores import OpenStore, open_store, valkey_url

__all__ = ["open_store", "valkey_url"]

MONTH = 30 * 86_400


@pytest.fixture
def store(open_store: OpenStore) -> RedisLeaseStore:
    """The default store on an empty server."""
    return open_store()


@pytest.fixture
def key() -> str:
    """A stored key of the test's own."""
    return fresh_key()


class TestLeases(SeparateLeaseStoreContract):
    """The published suite for lease stores."""

    @pytest.fixture
    def store(self, open_store: OpenStore) -> LeaseStore:
        """One of the three servers."""
        return open_store()


class TestMarks(MarkStoreContract):
    """The published suite for mark stores."""

    @pytest.fixture
    def marks(self, open_store: OpenStore) -> MarkStore:
        """One of the three servers."""
        return open_store()


def test_a_client_that_decodes_its_replies_will_do(open_store: OpenStore, key: str) -> None:
    """Whoever gives a client of their own may have one of either kind."""
    store = open_store(decode_responses=True)
    bid = make_bid(key)
    assert store.acquire(bid) == Unsettled(0.0)
    assert store.acquire(bid, settled=True) == Acquired()
    assert isinstance(store.acquire(make_bid(key)), Held)
    assert store.renew([Renewal(key, bid.token, 60)]) == [Kept.OURS]
    holder = store.holder(key)
    assert holder is not None
    assert holder.token == bid.token
    assert [found for found, _ in store.holders()] == [key]
    assert store.swap_mark(key, "m", None, "x", 5)
    assert store.mark(key, "m") == "x"
    assert store.release(key, bid.token)


# -- a store that came up empty ----------------------------------------------------------------------------


def test_a_store_that_came_up_empty_grants_nothing_for_one_ttl(store: RedisLeaseStore, key: str) -> None:
    """Live holders need that long to assert their leases again."""
    bid = make_bid(key, ttl=0.5)
    assert store.acquire(bid) == Unsettled(0.0)
    assert store.holder(key) is None
    ages = [0.0]

    def granted() -> bool:
        answer = store.acquire(bid)
        if isinstance(answer, Unsettled):
            ages.append(answer.age)
        return isinstance(answer, Acquired)

    wait_until(granted, 10, "the store to settle")
    assert ages == sorted(ages)
    assert 0.3 < ages[-1] < 0.5


def test_how_old_is_old_enough_depends_on_the_bid(store: RedisLeaseStore, key: str) -> None:
    """A long lease takes long to be asserted again."""
    assert store.acquire(make_bid(fresh_key(), ttl=0.3)) == Unsettled(0.0)
    wait_until(lambda: isinstance(store.acquire(make_bid(key, ttl=0.3)), Acquired), 10, "the store to settle")
    assert isinstance(store.acquire(make_bid(fresh_key(), ttl=60.0)), Unsettled)


def test_a_settled_bid_leaves_the_epoch_alone(store: RedisLeaseStore, key: str) -> None:
    """Others must still be told that the store is young."""
    assert store.acquire(make_bid(key), settled=True) == Acquired()
    assert store.acquire(make_bid(fresh_key())) == Unsettled(0.0)


def test_a_held_key_is_held_in_a_young_store_too(store: RedisLeaseStore, key: str) -> None:
    """The epoch only matters where the key is free."""
    bid = make_bid(key)
    assert store.acquire(bid, settled=True) == Acquired()
    assert store.acquire(bid) == Acquired()
    assert isinstance(store.acquire(make_bid(key)), Held)


def test_emptying_the_store_starts_a_new_epoch(store: RedisLeaseStore, key: str) -> None:
    """FLUSHALL takes the epoch with the leases; it lasts a month at most."""
    assert store.acquire(make_bid(key)) == Unsettled(0.0)
    assert MONTH - 60 < store._client.pttl("celery_leases:epoch") / 1000 <= MONTH
    store._client.pexpire("celery_leases:epoch", (MONTH - 3600) * 1000)
    assert store.acquire(make_bid(key)) == Acquired()
    store._client.flushall()
    assert store.acquire(make_bid(key)) == Unsettled(0.0)


# -- values that are not ours ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "call_id", "host"),
    [
        (b"garbage", "", ""),
        (b"", "", ""),
        (b"tok {not json", "", ""),
        (b"tok [1, 2]", "", ""),
        (b"\xff\xfe \x00", "", ""),
        (b'tok {"v":9,"call":7,"ttl":"soon","more":{}}', "7", ""),
        (b'tok {"v":2,"ttl":5,"host":"h/1","call":"c","boot":"x"}', "c", "h/1"),
    ],
)
def test_a_foreign_value_is_held_for_its_ttl(
    store: RedisLeaseStore, key: str, value: bytes, call_id: str, host: str
) -> None:
    """By a holder we may know nothing of; nothing of ours changes it."""
    lease = store._keys.lease(key)
    store._client.set(lease, value, px=60_000)
    bid = make_bid(key)
    for settled in (True, False):
        answer = store.acquire(bid, settled=settled)
        assert isinstance(answer, Held)
        assert (answer.holder.call_id, answer.holder.host) == (call_id, host)
        assert 50 < answer.holder.remaining <= 60
    assert store.renew([Renewal(key, bid.token, 90)]) == [Kept.OTHER]
    assert not store.reassert(bid)
    assert not store.release(key, bid.token)
    holder = store.holder(key)
    assert holder is not None
    assert holder.call_id == call_id
    assert [found for found, _ in store.holders()] == [key]
    assert store._client.get(lease) == value
    assert store._client.pttl(lease) <= 60_000


def test_a_foreign_type_is_held_too(store: RedisLeaseStore, key: str) -> None:
    """A key that is no string at all, and one that never ends, do not break anything."""
    store._client.hset(store._keys.lease(key), "a", "b")
    bid = make_bid(key)
    answer = store.acquire(bid, settled=True)
    assert isinstance(answer, Held)
    assert answer.holder.token == ""
    assert answer.holder.remaining == 60
    assert store.renew([Renewal(key, bid.token, 90)]) == [Kept.OTHER]
    assert not store.reassert(bid)
    assert not store.release(key, bid.token)
    assert [found for found, _ in store.holders()] == [key]


def test_our_own_lease_without_an_end_gets_one(store: RedisLeaseStore, key: str) -> None:
    """Somebody persisted the key by hand."""
    bid = make_bid(key, ttl=15.0)
    assert store.acquire(bid, settled=True) == Acquired()
    repairs: tuple[Callable[[], bool], ...] = (
        lambda: store.renew([Renewal(key, bid.token, 15.0)]) == [Kept.OURS],
        lambda: store.reassert(bid),
        lambda: store.acquire(bid) == Acquired(),
    )
    for repair in repairs:
        store._client.persist(store._keys.lease(key))
        assert repair()
        assert 0 < store._client.pttl(store._keys.lease(key)) <= 15_000


def test_acquiring_again_never_cuts_a_longer_lease(store: RedisLeaseStore, key: str) -> None:
    """A repeat whose first try was answered, and extended, long ago."""
    bid = make_bid(key, ttl=1.0)
    assert store.acquire(bid, settled=True) == Acquired()
    assert store.renew([Renewal(key, bid.token, 600)]) == [Kept.OURS]
    assert store.acquire(bid) == Acquired()
    holder = store.holder(key)
    assert holder is not None
    assert holder.remaining > 500


@pytest.mark.parametrize("token", ["", "two words", "line\nbreak", "cooling:x"])
def test_a_token_must_be_one_word(store: RedisLeaseStore, key: str, token: str) -> None:
    """A blank ends the token inside the value; a cooldown is no owner."""
    with pytest.raises(ValueError, match="owner token"):
        store.acquire(replace(make_bid(key), token=token))


# -- names -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["a*b", "a?", "[ab]", "a\\", "team:{x}", "ü"])
def test_any_prefix_finds_its_own_leases_only(open_store: OpenStore, prefix: str, key: str) -> None:
    """Characters that mean something to SCAN stand for themselves; other prefixes are other stores."""
    store, other = open_store(prefix), open_store("aab")
    assert store.acquire(make_bid(key), settled=True) == Acquired()
    assert other.acquire(make_bid(key), settled=True) == Acquired()
    assert other.acquire(make_bid(fresh_key()), settled=True) == Acquired()
    assert [found for found, _ in store.holders()] == [key]


def test_all_keys_of_a_task_key_share_a_hash_tag(store: RedisLeaseStore, key: str) -> None:
    """Cluster keeps them on one node."""
    assert store.acquire(make_bid(key), settled=True) == Acquired()
    assert store.swap_mark(key, "waiter", None, "x", 5)
    found = {name.decode() for name in store._client.keys("*")}
    assert found == {f"celery_leases:{{{key}}}:lease", f"celery_leases:{{{key}}}:mark:waiter"}


# -- the server forgets, the process forks -----------------------------------------------------------------


def test_lost_scripts_are_sent_again(store: RedisLeaseStore) -> None:
    """SCRIPT FLUSH, or a failover, between any two steps."""
    bids = [make_bid(fresh_key()) for _ in range(50)]
    for bid in bids:
        assert store.acquire(bid, settled=True) == Acquired()
    store._client.script_flush()
    renewals = [Renewal(bid.stored_key, bid.token, 60) for bid in bids]
    assert store.renew(renewals) == [Kept.OURS] * 50
    steps: tuple[Callable[[], bool], ...] = (
        lambda: store.acquire(bids[0]) == Acquired(),
        lambda: store.reassert(bids[1]),
        lambda: store.release(bids[2].stored_key, bids[2].token),
        lambda: store.swap_mark(bids[3].stored_key, "m", None, "x", 5),
        lambda: store.renew(renewals[3:]) == [Kept.OURS] * 47,
    )
    for step in steps:
        store._client.script_flush()
        assert step()


def test_every_step_is_one_round_trip(leases_redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fifty renewals too."""
    store = RedisLeaseStore.from_url(leases_redis_url)
    bids = [make_bid(fresh_key()) for _ in range(50)]
    for bid in bids:
        store.acquire(bid, settled=True)
    renewals = [Renewal(bid.stored_key, bid.token, 60) for bid in bids]
    store.renew(renewals)
    store.release(bids[0].stored_key, bids[0].token)
    sent = []
    send: Any = redis.connection.AbstractConnection.send_packed_command

    def counted(self: Any, command: Any, check_health: bool = True) -> Any:
        sent.append(command)
        return send(self, command, check_health)

    monkeypatch.setattr(redis.connection.AbstractConnection, "send_packed_command", counted)
    for step in (
        lambda: store.acquire(bids[1]),
        lambda: store.acquire(make_bid(bids[1].stored_key)),
        lambda: store.renew(renewals),
        lambda: store.release(bids[2].stored_key, bids[2].token),
        lambda: store.holder(bids[3].stored_key),
    ):
        sent.clear()
        step()
        assert len(sent) == 1
    store.close()


def test_a_forked_child_uses_the_store_it_inherited(leases_redis_url: str, key: str) -> None:
    """Over connections of its own: nobody reads another process's reply."""
    store = RedisLeaseStore.from_url(leases_redis_url)
    names = [f"process-{number}" for number in range(4)]
    for name in names:
        assert store.swap_mark(key, name, None, name, 60.0)

    def read_own_mark(name: str) -> None:
        for _ in range(300):
            assert store.mark(key, name) == name

    fork = multiprocessing.get_context("fork")
    children = [fork.Process(target=read_own_mark, args=(name,)) for name in names[1:]]
    for child in children:
        child.start()
    read_own_mark(names[0])
    for child in children:
        child.join(30)
    assert [child.exitcode for child in children] == [0, 0, 0]
    store.close()
