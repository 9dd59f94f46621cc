"""Redis leases with the published suites, and what only Redis does: epochs, values of other
programs, lost scripts.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import redis

from celery_leases.decide.answers import (
    Acquired,
    Refusal,
    Renewal,
    RenewalResult,
)
from celery_leases.errors import LeaseStoreMismatch, StoreUnavailable
from celery_leases.stores.interfaces import LeaseStore, MarkStore
from celery_leases.stores.redis.clients import limited
from celery_leases.stores.redis.leases import RedisLeaseStore
from celery_leases.testing.contracts import MarkStoreContract, SeparateLeaseStoreContract
from celery_leases.testing.contracts.calls import fresh_key, held, make_call, why
from celery_leases.testing.contracts.group_case import closed
from celery_leases.testing.waits import wait_until
from tests.contract.redis_stores import OpenStore

MONTH = 30 * 86_400


@pytest.fixture
def store(open_store: OpenStore) -> RedisLeaseStore:
    return open_store()


@pytest.fixture
def key() -> str:
    return fresh_key()


class TestLeases(SeparateLeaseStoreContract):
    @pytest.fixture
    def store(self, open_store: OpenStore) -> LeaseStore:
        return open_store()


class TestMarks(MarkStoreContract):
    @pytest.fixture
    def marks(self, open_store: OpenStore) -> MarkStore:
        return open_store()


def test_a_client_that_decodes_its_replies_can_be_used(open_store: OpenStore, key: str) -> None:
    store = open_store(decode_responses=True)
    call = make_call(key)
    assert store.acquire(call) == Acquired()
    assert held(store.acquire(make_call(key)))
    assert store.renew([Renewal(key, call.token, 60)]) == [RenewalResult.OURS]
    holder = store.holder(key)
    assert holder is not None
    assert holder.token == call.token
    assert store.held([key]) == {key}
    assert store.swap_mark(key, "m", None, "x", 5)
    assert store.mark(key, "m") == "x"
    assert store.release(key, call.token)


@pytest.mark.parametrize("first", ["acquired", "asked"])
def test_a_store_shows_the_age_of_its_data(store: RedisLeaseStore, key: str, first: str) -> None:
    """After a month it counts as new again."""
    if first == "acquired":
        store.acquire(make_call(key))
    assert store.age(key) < 0.1
    wait_until(lambda: store.age(key) > 0.1, 10, "the store to age")
    store.acquire(make_call(fresh_key()))
    assert 0.1 < store.age(fresh_key()) < 10
    assert MONTH - 60 < store._client.pttl("celery_leases:epoch") / 1000 <= MONTH


def test_an_emptied_server_counts_as_new(store: RedisLeaseStore, key: str) -> None:
    store.acquire(make_call(key))
    wait_until(lambda: store.age(key) > 0.05, 10, "the store to age")
    store._client.flushall()
    assert store.age(key) == 0.0


@pytest.mark.parametrize("value", ["", "garbage", "a" * 40, "up", "up 1 name", {"up": "1"}])
def test_another_epoch_counts(
    store: RedisLeaseStore, key: str, value: str | dict[str, str]
) -> None:
    if isinstance(value, dict):
        store._client.hset("celery_leases:epoch", mapping=value)
    else:
        store._client.set("celery_leases:epoch", value)
    assert store.acquire(make_call(key)) == Acquired()
    assert store.age(key) == 0.0
    wait_until(lambda: store.age(key) > 0.05, 10, "the store to age")


@pytest.mark.parametrize(
    "value", [b"garbage", b"", b"tok {not json", b"tok [1, 2]", b"\xff\xfe \x00", {"a": "b"}]
)
def test_a_foreign_value(store: RedisLeaseStore, key: str, value: bytes | dict[str, str]) -> None:
    """No call holds the key, so waiting would never end."""
    lease = store._keys.lease(key)
    if isinstance(value, dict):
        store._client.hset(lease, mapping=value)
    else:
        store._client.set(lease, value, px=60_000)
    call = make_call(key)
    with pytest.raises(
        StoreUnavailable, match="was not written by celery_leases; delete it"
    ) as caught:
        store.acquire(call)
    assert repr(lease) in str(caught.value)
    assert caught.value.executed is False
    assert store.renew([Renewal(key, call.token, 90)]) == [RenewalResult.OTHER]
    assert not store.reassert(call, call.options.ttl)
    assert not store.release(key, call.token)
    holder = store.holder(key)
    assert holder is not None
    assert (holder.call_id, holder.host) == ("", "")
    assert holder.remaining == 60 if isinstance(value, dict) else 50 < holder.remaining <= 60
    assert store.held([key]) == {key}


@pytest.mark.parametrize(
    ("value", "call_id", "host"),
    [
        (b'tok {"v":9,"call":7,"ttl":"soon","more":{}}', "7", ""),
        (b'tok {"v":2,"ttl":5,"host":"h/1","call":"c","boot":"x"}', "c", "h/1"),
    ],
)
def test_a_value_of_a_later_version_is_held_for_its_ttl(
    store: RedisLeaseStore, key: str, value: bytes, call_id: str, host: str
) -> None:
    lease = store._keys.lease(key)
    store._client.set(lease, value, px=60_000)
    call = make_call(key)
    answer = store.acquire(call)
    holder = held(answer)
    assert holder is not None
    assert (holder.call_id, holder.host) == (call_id, host)
    assert 50 < holder.remaining <= 60
    assert store.renew([Renewal(key, call.token, 90)]) == [RenewalResult.OTHER]
    assert not store.release(key, call.token)
    assert store._client.get(lease) == value


@pytest.mark.parametrize("cools", [False, True], ids=["held", "cooling"])
def test_a_lease_of_other_records_differs(store: RedisLeaseStore, key: str, cools: bool) -> None:
    """Two environments with one prefix."""
    call = make_call(key, database="aa")
    assert isinstance(store.acquire(call), Acquired)
    assert not cools or store.cool(key, call.token, 60.0)
    rival = make_call(key, database="bb")
    with pytest.raises(LeaseStoreMismatch, match="leases_prefix") as caught:
        store.acquire(rival)
    assert (caught.value.key, caught.value.ours, caught.value.theirs) == (key, "bb", "aa")
    assert call.host in str(caught.value)
    assert rival.host in str(caught.value)
    for neighbour in (make_call(key, database="aa"), make_call(key)):
        assert why(store.acquire(neighbour)) is (Refusal.COOLING if cools else Refusal.HELD)


def test_our_own_lease_without_an_end_gets_one(store: RedisLeaseStore, key: str) -> None:
    call = make_call(key, ttl=15.0)
    assert store.acquire(call) == Acquired()
    repairs: tuple[Callable[[], bool], ...] = (
        lambda: store.renew([Renewal(key, call.token, 15.0)]) == [RenewalResult.OURS],
        lambda: store.reassert(call, call.options.ttl),
        lambda: store.acquire(call) == Acquired(),
    )
    for repair in repairs:
        store._client.persist(store._keys.lease(key))
        assert repair()
        assert 0 < store._client.pttl(store._keys.lease(key)) <= 15_000


def test_acquiring_again_never_shortens_a_longer_lease(store: RedisLeaseStore, key: str) -> None:
    call = make_call(key, ttl=1.0)
    assert store.acquire(call) == Acquired()
    assert store.renew([Renewal(key, call.token, 600)]) == [RenewalResult.OURS]
    assert store.acquire(call) == Acquired()
    holder = store.holder(key)
    assert holder is not None
    assert holder.remaining > 500


@pytest.mark.parametrize("token", ["", "two words", "line\nbreak", "cooling:x"])
def test_a_token_must_be_one_word(store: RedisLeaseStore, key: str, token: str) -> None:
    with pytest.raises(ValueError, match="owner token"):
        store.acquire(replace(make_call(key), token=token))


@pytest.mark.parametrize("prefix", ["a*b", "a?", "[ab]", "a\\", "team:{x}", "ü"])
def test_any_prefix_has_its_own_leases(open_store: OpenStore, prefix: str, key: str) -> None:
    store, other = open_store(prefix), open_store("aab")
    assert store.acquire(make_call(key)) == Acquired()
    assert other.acquire(make_call(key)) == Acquired()
    closed(store, "ours", 60.0)
    closed(other, "theirs", 60.0)
    assert [closed_group.group for closed_group in store.groups.all()] == ["ours"]
    assert other.acquire(make_call(fresh_key())) == Acquired()
    assert (len([*store.live_holders()]), len([*other.live_holders()])) == (1, 2)
    assert len([*other.live_holders(1)]) == 1


def test_all_keys_of_a_task_key_share_a_hash_tag(store: RedisLeaseStore, key: str) -> None:
    assert store.acquire(make_call(key)) == Acquired()
    assert store.swap_mark(key, "waiter", None, "x", 5)
    found = {name.decode() for name in store._client.keys("*")}
    assert found == {
        f"celery_leases:{{{key}}}:lease",
        f"celery_leases:{{{key}}}:mark:waiter",
        "celery_leases:epoch",
    }


def test_lost_scripts_are_sent_again(store: RedisLeaseStore) -> None:
    calls = [make_call(fresh_key()) for _ in range(50)]
    for call in calls:
        assert store.acquire(call) == Acquired()
    store._client.script_flush()
    renewals = [Renewal(call.key.stored, call.token, 60) for call in calls]
    assert store.renew(renewals) == [RenewalResult.OURS] * 50
    steps: tuple[Callable[[], bool], ...] = (
        lambda: store.acquire(calls[0]) == Acquired(),
        lambda: store.reassert(calls[1], calls[1].options.ttl),
        lambda: store.release(calls[2].key.stored, calls[2].token),
        lambda: store.swap_mark(calls[3].key.stored, "m", None, "x", 5),
        lambda: store.renew(renewals[3:]) == [RenewalResult.OURS] * 47,
    )
    for step in steps:
        store._client.script_flush()
        assert step()


def test_each_step_is_one_trip(leases_redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = RedisLeaseStore.from_url(leases_redis_url)
    calls = [make_call(fresh_key()) for _ in range(50)]
    for call in calls:
        store.acquire(call)
    renewals = [Renewal(call.key.stored, call.token, 60) for call in calls]
    store.renew(renewals)
    store.release(calls[0].key.stored, calls[0].token)
    sent = []
    connections: Any = limited(redis.Connection)
    send: Any = connections.send_unlimited

    def counted(self: Any, command: Any, check_health: bool = True) -> Any:
        sent.append(command)
        return send(self, command, check_health)

    monkeypatch.setattr(connections, "send_unlimited", counted)
    for step in (
        lambda: store.acquire(calls[1]),
        lambda: store.acquire(make_call(calls[1].key.stored)),
        lambda: store.renew(renewals),
        lambda: store.release(calls[2].key.stored, calls[2].token),
        lambda: store.holder(calls[3].key.stored),
    ):
        sent.clear()
        step()
        assert len(sent) == 1
    store.close()
