"""What only a cluster does: gates on another node, an epoch for each slot, slots that move, and
nodes that are down.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any, Self

import pytest
import redis
from redis.crc import key_slot

from celery_leases.call import Call
from celery_leases.decide.answers import (
    Acquired,
    Refusal,
    Renewal,
    RenewalResult,
)
from celery_leases.errors import LeaseConfigurationError, StoreUnavailable
from celery_leases.stores.redis import cooldown_group_scripts, lease_scripts
from celery_leases.stores.redis.clients import limited
from celery_leases.stores.redis.cluster import Cluster
from celery_leases.stores.redis.leases import RedisLeaseStore
from celery_leases.stores.redis.values import Keys
from celery_leases.testing.contracts.calls import fresh_key, held, make_call, why
from celery_leases.testing.contracts.group_case import closed, found, probe_due
from celery_leases.testing.waits import wait_until
from tests.support.servers import RedisCluster, RedisServer
from tests.support.servers.local import free_port

TIMEOUT = 0.5
SLACK = 1.5
GROUP = "openai:gpt"


@pytest.fixture(scope="module")
def shared(leases_redis: RedisServer) -> Iterator[RedisCluster]:
    """A cluster for this module, whose nodes may be stopped."""
    with RedisCluster() as started:
        yield started


@pytest.fixture
def cluster(shared: RedisCluster) -> Iterator[RedisCluster]:
    yield shared
    for node in shared.nodes:
        if node.alive:
            node.resume()
        node.start()
    shared.await_agreed()
    for node in shared.nodes:
        with redis.Redis(port=node.port) as client:
            client.flushall()


@pytest.fixture
def store(cluster: RedisCluster) -> Iterator[RedisLeaseStore]:
    opened = RedisLeaseStore.from_url(cluster.url, timeout=TIMEOUT)
    yield opened
    opened.close()


def leases_on(cluster: RedisCluster, store: RedisLeaseStore) -> dict[RedisServer, Call]:
    calls: dict[RedisServer, Call] = {}
    while len(calls) < len(cluster.nodes):
        call = make_call(fresh_key())
        calls.setdefault(cluster.node_of(store._keys.lease(call.key.stored)), call)
    for call in calls.values():
        assert store.acquire(call) == Acquired()
    return calls


def renewal(call: Call) -> Renewal:
    return Renewal(call.key.stored, call.token, call.options.ttl)


def group_apart(cluster: RedisCluster, store: RedisLeaseStore, call: Call) -> str:
    """A group whose gate is on another node than the lease of *call*."""
    node = cluster.node_of(store._keys.lease(call.key.stored))
    return next(
        name
        for name in map(str, range(100))
        if cluster.node_of(store._keys.slots(name)) is not node
    )


@pytest.mark.parametrize("prefix", ["celery_leases", "team:{x}", "a}b", "ü"])
@pytest.mark.parametrize("stored_key", ["t:task|key", "g:{", "g:}{a}", "", "}", "{}x"])
def test_a_lease_shares_its_slot_with_its_epoch(prefix: str, stored_key: str) -> None:
    keys = Keys(prefix, clustered=True)
    assert key_slot(keys.epoch(stored_key).encode()) == key_slot(keys.lease(stored_key).encode())
    assert len({key_slot(name.encode()) for name in (keys.slots("a{b}c"), keys.past("a{b}c"))}) == 1


@pytest.mark.parametrize("prefix", ["{}", "a{b", "{}{x}"])
def test_a_prefix_that_would_separate_the_keys_of_a_lease_is_refused(prefix: str) -> None:
    """Its brace would begin the hash tag of every key."""
    with pytest.raises(LeaseConfigurationError, match="leases_prefix"):
        RedisLeaseStore.from_url("redis+cluster://h", prefix=prefix)


def test_every_slot_has_an_epoch_of_its_own(cluster: RedisCluster, store: RedisLeaseStore) -> None:
    first, second = make_call("g:{a"), make_call("g:{b")
    assert store.acquire(first) == Acquired()
    wait_until(lambda: store.age(first.key.stored) > 0.05, 10, "the slot to age")
    assert store.age(second.key.stored) == 0.0
    assert store._client.send([("PTTL", store._keys.epoch(first.key.stored))])[0] > 29 * 86_400_000


def test_a_request_in_a_group_takes_two_round_trips_and_three_at_a_closed_gate(
    cluster: RedisCluster, store: RedisLeaseStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request for a held key reads no gate."""
    probe_due(store, "probed")
    closed(store, "closed", 60.0)
    for node in cluster.nodes:
        with redis.Redis(port=node.port) as admin:
            for script in (
                lease_scripts.ACQUIRE,
                lease_scripts.RELEASE,
                cooldown_group_scripts.TAKE,
            ):
                admin.script_load(script.text)
    leases_on(cluster, store)
    call = make_call(fresh_key(), group="probed")
    assert store.acquire(call) == Acquired(probe=True)
    sent: list[Any] = []
    connections: Any = limited(redis.Connection)
    send: Any = connections.send_unlimited

    def counted(self: Any, command: Any, check_health: bool = True) -> Any:
        sent.append(command)
        return send(self, command, check_health)

    monkeypatch.setattr(connections, "send_unlimited", counted)
    steps: tuple[tuple[int, Callable[[], Any]], ...] = (
        (1, lambda: store.acquire(make_call(fresh_key()))),
        (2, lambda: store.acquire(make_call(fresh_key(), group="open"))),
        (3, lambda: store.acquire(make_call(fresh_key(), group="closed"))),
        (2, lambda: store.acquire(call)),
        (1, lambda: store.acquire(make_call(call.key.stored, group="probed"))),
        (1, lambda: store.release(call.key.stored, call.token)),
    )
    for trips, step in steps:
        sent.clear()
        step()
        assert len(sent) == trips


def test_a_request_refused_there_has_no_lease(
    cluster: RedisCluster, store: RedisLeaseStore
) -> None:
    call = make_call(fresh_key())
    group = group_apart(cluster, store, call)
    closed(store, group, 60.0)
    for _ in range(2):
        assert why(store.acquire(make_call(call.key.stored, group=group))) is Refusal.CLOSED
        assert store.holder(call.key.stored) is None
        store.groups.open(group)
        probe_due(store, group)
        assert store.acquire(make_call(fresh_key(), group=group)) == Acquired(probe=True)
    assert store.acquire(call) == Acquired()


def test_a_silent_gate_refuses_every_request(cluster: RedisCluster, store: RedisLeaseStore) -> None:
    """A probe slot is never taken without its lease."""
    call = make_call(fresh_key())
    group = group_apart(cluster, store, call)
    probe_due(store, group)
    gate = cluster.node_of(store._keys.slots(group))
    gate.pause()
    with pytest.raises(StoreUnavailable):
        store.acquire(make_call(call.key.stored, call.token, group=group))
    assert store.release(call.key.stored, call.token)
    gate.resume()
    store.groups.release_slot(group, call.token)
    assert found(store, group).probe is None
    lease = cluster.node_of(store._keys.lease(call.key.stored))
    lease.pause()
    with pytest.raises(StoreUnavailable):
        store.acquire(make_call(call.key.stored, call.token, group=group))
    assert found(store, group).probe is None


@pytest.mark.parametrize("how", ["killed", "frozen"])
def test_a_dead_node_fails_its_leases(
    cluster: RedisCluster, store: RedisLeaseStore, how: str
) -> None:
    calls = leases_on(cluster, store)
    gone = cluster.nodes[1]
    gone.kill() if how == "killed" else gone.pause()
    for _ in range(3):
        began = time.monotonic()
        answers = store.renew([renewal(call) for call in calls.values()])
        assert time.monotonic() - began < 2 * TIMEOUT + SLACK
        for node, answer in zip(calls, answers, strict=True):
            if node is gone:
                assert isinstance(answer, StoreUnavailable)
            else:
                assert answer is RenewalResult.OURS
    for node, call in calls.items():
        if node is gone:
            with pytest.raises(StoreUnavailable) as caught:
                store.acquire(call)
            assert caught.value.executed is (False if how == "killed" else None)
            with pytest.raises(StoreUnavailable):
                store.renew([renewal(call)])
        else:
            assert held(store.acquire(make_call(call.key.stored)))
    with pytest.raises(StoreUnavailable):
        store.held([call.key.stored for call in calls.values()])


class FakeNode:
    """A client of a node with a third of the slots, which may not answer until a timeout."""

    frozen = False

    def __init__(self, asked: list[int], port: int) -> None:
        self._asked = asked
        self._port = port

    def execute_command(self, *command: str) -> list[list[Any]]:
        self._wait()
        return [[0, 5000, [b"h", 1]], [5001, 10_000, [b"h", 2]], [10_001, 16_383, [b"h", 3]]]

    def pipeline(self, *, transaction: bool) -> Any:
        node = self

        class Pipeline(list[Any]):
            def __enter__(self) -> Self:
                return self

            def __exit__(self, *_: object) -> None: ...

            def execute_command(self, *command: Any) -> None:
                self.append(command)

            def execute(self, raise_on_error: bool) -> list[int]:
                node._asked.append(node._port)
                node._wait()
                return [node._port] * len(self)

        return Pipeline()

    def _wait(self) -> None:
        if self.frozen:
            time.sleep(0.35)
            raise redis.TimeoutError("Timeout reading from socket")


def test_a_call_waits_for_one_frozen_node_and_asks_them_in_turn() -> None:
    """Known frozen nodes are asked last; one that answers again is trusted again."""
    asked: list[int] = []
    nodes = {port: FakeNode(asked, port) for port in (1, 2, 3)}
    nodes_of_a_cluster = Cluster([("h", 1)], lambda _, port: nodes[port], timeout=0.3)
    keys: dict[int, str] = {}
    for number in range(100):
        keys.setdefault(min(key_slot(str(number).encode()) // 5001, 2) + 1, str(number))
    commands = [("GET", keys[port]) for port in (1, 2, 3)]
    assert nodes_of_a_cluster.send(commands) == [1, 2, 3]
    nodes[1].frozen = nodes[2].frozen = True
    turns = []
    for _ in range(4):
        asked.clear()
        replies = nodes_of_a_cluster.send(commands)
        assert replies[2] == 3
        assert all(isinstance(reply, redis.RedisError) for reply in replies[:2])
        turns.append(list(asked))
    assert turns == [[1, 2, 3], [3, 1], [3, 2], [3, 1]]
    nodes[1].frozen = nodes[2].frozen = False
    assert nodes_of_a_cluster.send(commands) == [1, 2, 3]


def test_a_node_that_restarts_empty_is_seen(cluster: RedisCluster, store: RedisLeaseStore) -> None:
    calls = leases_on(cluster, store)
    gone = cluster.nodes[2]
    gone.kill()
    gone.start()
    cluster.await_agreed()
    newcomer = make_call(calls[gone].key.stored)
    assert store.acquire(newcomer) == Acquired()
    assert store.age(newcomer.key.stored) < 0.5
    assert store.release(newcomer.key.stored, newcomer.token)
    answers = dict(zip(calls, store.renew([renewal(call) for call in calls.values()]), strict=True))
    assert [node for node, answer in answers.items() if answer is RenewalResult.MISSING] == [gone]
    assert store.reassert(calls[gone], calls[gone].options.ttl)
    held = {call.key.stored for call in calls.values()}
    assert store.held([*held, newcomer.key.stored]) == held


def test_any_node_of_the_url_will_do(cluster: RedisCluster) -> None:
    host, port = "127.0.0.1", cluster.nodes[1].port
    store = RedisLeaseStore.from_url(
        f"redis+cluster://{host}:{free_port()},{host}:{port}", timeout=TIMEOUT
    )
    leases_on(cluster, store)
    store.close()


def test_without_a_node_nothing_was_executed(leases_redis_url: str) -> None:
    hosts = {
        f"127.0.0.1:{free_port()}": "connecting to",
        leases_redis_url.split("/")[2]: "cluster support disabled",
    }
    for host, said in hosts.items():
        store = RedisLeaseStore.from_url(f"redis+cluster://{host}", timeout=TIMEOUT)
        with pytest.raises(StoreUnavailable, match=said) as caught:
            store.acquire(make_call(fresh_key()))
        assert caught.value.executed is False


def test_an_unserved_slot_executes_nothing(cluster: RedisCluster, store: RedisLeaseStore) -> None:
    call = make_call(fresh_key())
    node = cluster.node_of(store._keys.lease(call.key.stored))
    slot = key_slot(store._keys.lease(call.key.stored).encode())
    with redis.Redis(port=node.port) as admin:
        admin.execute_command("CLUSTER", "DELSLOTS", slot)
        for _ in range(2):
            with pytest.raises(StoreUnavailable) as caught:
                store.acquire(call)
            assert caught.value.executed is False
        admin.execute_command("CLUSTER", "ADDSLOTS", slot)
    wait_until(lambda: acquires(store, call), 10, "the slot to be served")


def acquires(store: RedisLeaseStore, call: Call) -> bool:
    try:
        return store.acquire(call) == Acquired()
    except StoreUnavailable:
        return False


def test_a_lease_moves_with_its_slot(cluster: RedisCluster, store: RedisLeaseStore) -> None:
    """A store that knows the old node can renew during and after the migration."""
    call = make_call(fresh_key())
    assert store.acquire(call) == Acquired()
    lease = store._keys.lease(call.key.stored)
    slot, source = key_slot(lease.encode()), cluster.node_of(lease)
    target = next(node for node in cluster.nodes if node is not source)
    with redis.Redis(port=source.port) as old, redis.Redis(port=target.port) as new:
        ids = {client: client.execute_command("CLUSTER", "MYID") for client in (old, new)}
        new.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[old])
        old.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[new])
        assert store.renew([renewal(call)]) == [RenewalResult.OURS]
        epoch = store._keys.epoch(call.key.stored)
        old.execute_command("MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "KEYS", lease, epoch)
        assert store.renew([renewal(call)] * 2) == [RenewalResult.OURS] * 2
        assert store.holder(call.key.stored) is not None
        for client in (new, old):
            client.execute_command("CLUSTER", "SETSLOT", slot, "NODE", ids[new])
        try:
            assert held(store.acquire(make_call(call.key.stored)))
            assert store.acquire(call) == Acquired()
            assert store.held([call.key.stored]) == {call.key.stored}
            assert store.release(call.key.stored, call.token)
        finally:
            new.delete(epoch)
            for client in (old, new):
                client.execute_command("CLUSTER", "SETSLOT", slot, "NODE", ids[old])


def test_lost_scripts_are_sent_again(cluster: RedisCluster, store: RedisLeaseStore) -> None:
    calls = leases_on(cluster, store)
    for node in cluster.nodes:
        with redis.Redis(port=node.port) as admin:
            admin.script_flush()
    assert store.renew([renewal(call) for call in calls.values()]) == [RenewalResult.OURS] * 3
    for node in cluster.nodes[1:]:
        with redis.Redis(port=node.port) as admin:
            admin.script_flush()
    assert store.renew([renewal(call) for call in calls.values()]) == [RenewalResult.OURS] * 3
    assert all(store.release(call.key.stored, call.token) for call in calls.values())
