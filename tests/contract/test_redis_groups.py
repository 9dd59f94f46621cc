"""Groups in Redis with the published suite, and what only Redis does: round trips, new servers,
values of other programs, names of keys.
"""

import time
from typing import Any

import pytest
import redis

from celery_leases.decide.answers import Acquired, Refusal, Refused, Renewal
from celery_leases.failures.cooldown_policies import CooldownPolicy
from celery_leases.groups.slots import AHEAD, Ask, Slots, dump
from celery_leases.stores.redis.clients import limited
from celery_leases.stores.redis.leases import RedisLeaseStore
from celery_leases.testing.contracts import GroupHistoryContract, GroupStoreContract
from celery_leases.testing.contracts.calls import acquired, fresh_key, held, make_call, why
from celery_leases.testing.contracts.group_case import (
    POLICY,
    closed,
    closing,
    found,
    freed,
    probe_due,
)
from tests.contract.redis_stores import OpenStore

GROUP = "openai:gpt"
SLOTS, PAST = (f"celery_leases:{{group:{GROUP}}}:{part}" for part in ("slots", "past"))


@pytest.fixture
def store(open_store: OpenStore) -> RedisLeaseStore:
    return open_store()


class TestGroups(GroupStoreContract, GroupHistoryContract):
    """The published suite for groups, which the script that takes a lease reads."""

    @pytest.fixture
    def store(self, open_store: OpenStore) -> RedisLeaseStore:
        return open_store()


def test_a_client_that_decodes_its_replies_can_be_used(open_store: OpenStore) -> None:
    store = open_store(decode_responses=True)
    probe_due(store, GROUP)
    call = make_call(fresh_key(), group=GROUP)
    assert store.acquire(call) == Acquired(probe=True)
    assert why(store.acquire(make_call(fresh_key(), group=GROUP))) is Refusal.CLOSED
    assert [closed_group.group for closed_group in store.groups.all()] == [GROUP]
    assert store.groups.close(GROUP, closing(60.0), call.token).in_a_row == 2
    assert found(store, GROUP).message == "slow"


def test_a_new_server_is_noticed_at_a_group_too(store: RedisLeaseStore) -> None:
    """The caller gives the probe slot back with the lease if the row is running."""
    probe_due(store, GROUP)
    call = make_call(fresh_key(), group=GROUP)
    assert store.acquire(call) == Acquired(probe=True)
    assert store.age(call.key.stored) < 0.5
    freed(store, GROUP, call.token)
    closed(store, GROUP, 60.0)
    assert why(store.acquire(make_call(fresh_key(), group=GROUP))) is Refusal.CLOSED


def test_a_held_or_cooling_key_is_reported_at_any_group(store: RedisLeaseStore) -> None:
    running, cooling = (make_call(fresh_key(), group=GROUP) for _ in range(2))
    for call in (running, cooling):
        assert store.acquire(call) == Acquired()
    assert store.cool(cooling.key.stored, cooling.token, 60.0)
    probe_due(store, GROUP)
    for _ in range(2):
        assert held(store.acquire(make_call(running.key.stored, group=GROUP)))
        assert why(store.acquire(make_call(cooling.key.stored, group=GROUP))) is Refusal.COOLING
        assert found(store, GROUP).probe is None
        assert store.acquire(running) == Acquired()
        closed(store, GROUP, 60.0)


def test_each_step_is_one_request_or_two(
    leases_redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = RedisLeaseStore.from_url(leases_redis_url)
    closed(store, "closed", 60.0)
    probe_due(store, GROUP)
    call, plain = (make_call(fresh_key(), group=GROUP), make_call(fresh_key()))
    for each in (call, make_call(fresh_key())):  # the server has the scripts
        store.acquire(each)
    store.groups.release_slot(GROUP, "x")
    store.cool("x", "x", 1.0)
    store.end_cooldown("x")
    store.renew([Renewal(call.key.stored, call.token, 15.0, slot=(GROUP, 0))])
    closed(store, "opened", 60.0)
    store.groups.open("opened")
    sent: list[bytes] = []
    connections: Any = limited(redis.Connection)
    send: Any = connections.send_unlimited

    def counted(self: Any, command: Any, check_health: bool = True) -> Any:
        sent.append(b"".join([command] if isinstance(command, bytes) else command))
        return send(self, command, check_health)

    monkeypatch.setattr(connections, "send_unlimited", counted)
    for requests, step in (
        (1, lambda: store.acquire(plain)),
        (1, lambda: store.acquire(make_call(fresh_key(), group="open"))),
        (1, lambda: store.acquire(make_call(fresh_key(), group="closed"))),
        (1, lambda: store.acquire(call)),
        (1, lambda: store.acquire(make_call(fresh_key(), group=GROUP))),
        (
            1,
            lambda: store.renew([Renewal(call.key.stored, call.token, 15.0, slot=(GROUP, 0))] * 20),
        ),
        (1, lambda: store.groups.get(GROUP)),
        (2, lambda: store.groups.close(GROUP, closing(60.0), call.token)),
        (1, lambda: store.groups.close(GROUP, closing(30.0), "another")),
        (1, lambda: store.groups.open(GROUP, call.token)),
        (2, lambda: store.groups.open(GROUP)),
        (1, lambda: store.groups.release_slot(GROUP, call.token)),
        (1, lambda: store.cool(call.key.stored, call.token, 60.0)),
        (1, lambda: store.end_cooldown(call.key.stored)),
    ):
        sent.clear()
        step()
        assert len(sent) == requests
        if requests == 1 and plain.key.stored.encode() in sent[0]:
            assert b"group:" not in sent[0]
    store.close()


def test_lost_scripts_are_sent_again(store: RedisLeaseStore) -> None:
    probe_due(store, GROUP)
    call = make_call(fresh_key(), group=GROUP)
    store._client.script_flush()
    assert store.acquire(call) == Acquired(probe=True)
    for step in (
        lambda: found(store, GROUP).probe == call.token,
        lambda: [closed_group.group for closed_group in store.groups.all()] == [GROUP],
        lambda: freed(store, GROUP, call.token).probe is None,
        lambda: closed(store, GROUP, 60.0).in_a_row == 1,
        lambda: store.cool(call.key.stored, call.token, 60.0),
        lambda: store.end_cooldown(call.key.stored),
        lambda: not store.groups.open(GROUP, call.token),
    ):
        store._client.script_flush()
        assert step()


def test_closings_are_forgotten_after_a_quiet_time(store: RedisLeaseStore) -> None:
    closed(store, GROUP, 3600.0)
    assert 3600 + POLICY.quiet - 60 < store._client.pttl(SLOTS) / 1000 <= 3600 + POLICY.quiet
    long = CooldownPolicy(60, 2, 30 * 86_400, 0)
    closed(store, GROUP, 7200.0, policy=long)
    for server_delay in (7300.0, 7200.0):
        closed(store, GROUP, server_delay)
        assert store._client.pttl(SLOTS) / 1000 > long.quiet
    store._client.pexpire(SLOTS, 1)
    call = make_call(fresh_key(), group=GROUP)
    while store.groups.get(GROUP) is not None:
        pass
    assert store.acquire(call) == Acquired()
    assert closed(store, GROUP, 60.0).in_a_row == 1


def test_a_history_that_another_program_wrote_is_replaced(store: RedisLeaseStore) -> None:
    for write in (
        lambda: store._client.set(PAST, b"\xff garbage", px=60_000),
        lambda: store._client.lpush(PAST, "x"),
    ):
        store._client.delete(PAST)
        write()
        assert store.groups.history([GROUP]) == store.groups.history() == {}
        assert closed(store, GROUP, 60.0).in_a_row == 1
        assert len(store.groups.history()[GROUP]) == 1
        assert store.groups.open(GROUP)
        assert store.groups.get(GROUP) is None


def test_the_keys_of_a_group_share_a_hash_tag_and_end(store: RedisLeaseStore) -> None:
    probe_due(store, GROUP)
    store.acquire(make_call("t:x|y", group=GROUP))
    closed(store, GROUP, 60.0)
    found_keys = {name.decode() for name in store._client.keys("*")}
    assert found_keys == {
        SLOTS,
        PAST,
        "celery_leases:{t:x|y}:lease",
        "celery_leases:epoch",
    }
    assert all(store._client.pttl(name) > 0 for name in found_keys)


def test_no_call_waits_until_a_clock_that_was_set_back_has_caught_up(
    store: RedisLeaseStore,
) -> None:
    """As in :mod:`celery_leases.groups.slots`."""
    later = (time.time() + 3600.0) * 1000
    waiting = {"dead": (1.0, later)}
    store._client.set(SLOTS, dump(Slots(began=later, pause=100.0, places=waiting)), px=60_000)
    ask = Ask(1, 100.0, worker="two")
    refused = store.acquire(make_call(fresh_key(), group=GROUP, ask=ask))
    assert isinstance(refused, Refused)
    assert refused.room is not None
    assert refused.room.wait == pytest.approx((AHEAD + 100.0) / 1000, abs=0.01)
    store._client.set(SLOTS, dump(Slots(places=waiting)), px=60_000)
    assert acquired(store.acquire(make_call(fresh_key(), group=GROUP, ask=ask)))


@pytest.mark.parametrize("value", [b"garbage", b"", b"[1, 2]", b"7", b"\xff\xfe \x00", None])
def test_a_value_of_another_program_is_no_group(
    store: RedisLeaseStore, value: bytes | None
) -> None:
    """A closing replaces it."""
    if value is None:
        store._client.hset(SLOTS, "a", "b")
    else:
        store._client.set(SLOTS, value, px=60_000)
    assert store.groups.get(GROUP) is None
    assert store.acquire(make_call(fresh_key(), group=GROUP)) == Acquired()
    probe_due(store, GROUP)
    assert store.acquire(make_call(fresh_key(), group=GROUP)) == Acquired(probe=True)
    assert [closed_group.group for closed_group in store.groups.all()] == [GROUP]
    assert store.groups.open(GROUP)
