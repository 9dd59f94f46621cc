"""What a Redis lease store reports when Redis refuses commands, stops, freezes, or restarts
empty.
"""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from celery_leases.decide.answers import Acquired, Renewal, RenewalResult
from celery_leases.errors import StoreUnavailable
from celery_leases.groups.slots import Ask
from celery_leases.stores.redis.clients import limited
from celery_leases.stores.redis.leases import RedisLeaseStore
from celery_leases.testing.contracts.calls import fresh_key, make_call
from celery_leases.testing.contracts.group_case import closing
from celery_leases.testing.waits import wait_until
from tests.support.servers import RedisServer
from tests.support.servers.local import free_port

TIMEOUT = 0.4
SLACK = 1.5
SECRET = "s3cret-w0rd"


@pytest.fixture
def server(leases_redis: RedisServer) -> Iterator[RedisServer]:
    """A server for this test; without *leases_redis* it is skipped."""
    with RedisServer(options=("--lua-time-limit", "100")) as started:
        yield started


@pytest.fixture
def store(server: RedisServer) -> Iterator[RedisLeaseStore]:
    """A store on it with an open connection, whose scripts are cached."""
    opened = RedisLeaseStore.from_url(server.url, timeout=TIMEOUT)
    for step in steps(opened).values():
        step()
    yield opened
    opened.close()


def steps(store: RedisLeaseStore, key: str = "") -> dict[str, Callable[[], Any]]:
    """All methods that call the server."""
    call = make_call(key or fresh_key())
    return {
        "acquire": lambda: store.acquire(call),
        "age": lambda: store.age(call.key.stored),
        "renew": lambda: store.renew([Renewal(call.key.stored, call.token, 15.0)]),
        "reassert": lambda: store.reassert(call, call.options.ttl),
        "holder": lambda: store.holder(call.key.stored),
        "held": lambda: store.held([call.key.stored]),
        "swap_mark": lambda: store.swap_mark(call.key.stored, "m", None, "x", 5.0),
        "mark": lambda: store.mark(call.key.stored, "m"),
        "new_order": lambda: store.new_order(call.key.stored),
        "burst": lambda: store.burst(call.key.stored),
        "cool": lambda: store.cool(call.key.stored, call.token, 15.0),
        "end_cooldown": lambda: store.end_cooldown(call.key.stored),
        "release": lambda: store.release(call.key.stored, call.token),
        "close_group": lambda: store.groups.close("g", closing(15.0), call.token),
        "closed_group": lambda: store.groups.get("g"),
        "closed_groups": lambda: list(store.groups.all()),
        "past_closings": lambda: store.groups.history(["g"]),
        "all past_closings": store.groups.history,
        "slots": lambda: store.groups.slots(["g"]),
        "room": lambda: store.groups.room({"g": Ask(1)}),
        "open_group as probe": lambda: store.groups.open("g", call.token),
        "open_group": lambda: store.groups.open("g"),
    }


STEPS = tuple(steps(RedisLeaseStore(None, "", "")))


def refusal(step: Callable[[], Any]) -> StoreUnavailable:
    """The error of a step, which must come in time and show no secret."""
    began = time.monotonic()
    with pytest.raises(StoreUnavailable) as caught:
        step()
    assert time.monotonic() - began < TIMEOUT + SLACK
    assert SECRET not in f"{caught.value} {caught.value.args!r}"
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__
    return caught.value


@pytest.mark.parametrize("step", STEPS)
def test_an_unreachable_server_has_executed_nothing(step: str) -> None:
    port = free_port()
    store = RedisLeaseStore.from_url(f"redis://:{SECRET}@127.0.0.1:{port}/3", timeout=TIMEOUT)
    error = refusal(steps(store)[step])
    assert error.executed is False
    assert f"127.0.0.1:{port}/3" in str(error)


def test_a_name_that_does_not_resolve_and_a_socket_that_is_not_there_are_refusals() -> None:
    for url in ("redis://no-such-host.invalid/0", "unix:///no/such.sock"):
        assert (
            refusal(steps(RedisLeaseStore.from_url(url, timeout=TIMEOUT))["acquire"]).executed
            is False
        )


@pytest.mark.parametrize("step", STEPS)
def test_a_frozen_server_is_unknown(server: RedisServer, store: RedisLeaseStore, step: str) -> None:
    """It is asked once, and the call waits for the timeout."""
    fresh = store.bounded(TIMEOUT)
    server.pause()
    try:
        assert refusal(steps(store)[step]).executed is None
        assert refusal(steps(fresh)[step]).executed is None
    finally:
        server.resume()


def test_a_frozen_servers_lease_is_its_tokens(server: RedisServer, store: RedisLeaseStore) -> None:
    call = make_call(fresh_key())
    server.pause()
    assert refusal(lambda: store.acquire(call)).executed is None
    server.resume()
    wait_until(
        lambda: store.holder(call.key.stored) is not None,
        10,
        "the server to execute what it was sent",
    )
    assert store.acquire(make_call(call.key.stored)) != Acquired()
    assert store.acquire(call) == Acquired()
    assert store.release(call.key.stored, call.token)


def test_a_dying_server_is_unknown(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    store = RedisLeaseStore.from_url(server.url, timeout=20.0)
    assert store.holder("x") is None
    sent = threading.Event()
    connections: Any = limited(redis.Connection)
    send: Any = connections.send_unlimited

    def seen(self: Any, *args: Any, **kwargs: Any) -> Any:
        answer = send(self, *args, **kwargs)
        sent.set()
        return answer

    monkeypatch.setattr(connections, "send_unlimited", seen)
    errors: list[StoreUnavailable] = []

    def ask() -> None:
        try:
            store.acquire(make_call(fresh_key()))
        except StoreUnavailable as error:
            errors.append(error)

    server.pause()
    asking = threading.Thread(target=ask)
    asking.start()
    assert sent.wait(10)
    server.kill()
    asking.join(15)
    assert [error.executed for error in errors] == [None]
    store.close()


def test_a_restarted_server_counts_as_new(server: RedisServer, store: RedisLeaseStore) -> None:
    call = make_call(fresh_key())
    assert store.acquire(call) == Acquired()
    server.kill()
    server.start()
    assert store.renew([Renewal(call.key.stored, call.token, 15.0)]) == [RenewalResult.MISSING]
    newcomer = make_call(call.key.stored)
    assert store.acquire(newcomer) == Acquired()
    assert store.age(call.key.stored) < 0.5
    assert store.release(call.key.stored, newcomer.token)
    assert store.reassert(call, call.options.ttl)
    holder = store.holder(call.key.stored)
    assert holder is not None
    assert holder.token == call.token


def test_an_emptied_server_may_lose_leases(server: RedisServer, store: RedisLeaseStore) -> None:
    """Or one that evicts keys."""
    call = make_call(fresh_key())
    assert store.acquire(call) == Acquired()
    key = call.key.stored
    assert [store.may_have_lost_leases(key, seconds) for seconds in (0.0, 3600.0)] == [False, True]
    with redis.Redis.from_url(server.url) as admin:
        admin.config_set("maxmemory-policy", "volatile-ttl")
        assert not store.may_have_lost_leases(key, 0.0)
        admin.config_set("maxmemory", 1)
        with pytest.raises(redis.ResponseError):
            admin.set("the server", "is full")
        admin.config_set("maxmemory", 0)
        assert store.holder(key) is None
        assert store.may_have_lost_leases(key, 0.0)
        admin.config_set("maxmemory-policy", "noeviction")
        assert not store.may_have_lost_leases(key, 0.0)


def test_a_server_that_cannot_write_did_nothing(
    server: RedisServer, store: RedisLeaseStore
) -> None:
    with redis.Redis.from_url(server.url) as admin:
        for option, wrong, right in (("maxmemory", 1, 0), ("min-replicas-to-write", 1, 0)):
            admin.config_set(option, wrong)
            for step in ("acquire", "reassert", "swap_mark", "close_group"):
                error = refusal(steps(store)[step])
                assert error.executed is False, error
            admin.config_set(option, right)
        admin.replicaof("127.0.0.1", str(free_port()))
        assert refusal(steps(store)["acquire"]).executed is False
        admin.replicaof("NO", "ONE")
    assert steps(store)["acquire"]() == Acquired()


@pytest.mark.parametrize("step", STEPS)
def test_a_busy_server_did_nothing(server: RedisServer, store: RedisLeaseStore, step: str) -> None:

    def run_for_ever() -> None:
        with (
            redis.Redis.from_url(server.url, socket_timeout=60) as client,
            pytest.raises(redis.ResponseError),
        ):
            client.eval("while true do end", 0)

    def busy() -> bool:
        try:
            admin.ping()
        except redis.ResponseError:
            return True
        except redis.TimeoutError:
            pass
        return False

    with redis.Redis.from_url(server.url, socket_timeout=5) as admin:
        admin.ping()
        running = threading.Thread(target=run_for_ever)
        running.start()
        wait_until(busy, 10, "BUSY")
        try:
            error = refusal(steps(store)[step])
            assert error.executed is False
            assert "BUSY" in str(error)
        finally:
            admin.script_kill()
            running.join(10)


def test_a_login_that_is_wrong_missing_or_not_allowed_is_a_refusal(server: RedisServer) -> None:
    port = server.port
    with redis.Redis.from_url(server.url) as admin:
        admin.acl_setuser(
            "meek", enabled=True, passwords=[f"+{SECRET}"], keys=["*"], commands=["+get", "+pttl"]
        )
        admin.config_set("requirepass", "right")
        try:
            for login in ("", f":{SECRET}@", f"nobody:{SECRET}@"):
                store = RedisLeaseStore.from_url(
                    f"redis://{login}127.0.0.1:{port}/0", timeout=TIMEOUT
                )
                for step in ("acquire", "renew", "mark", "closed_groups"):
                    assert refusal(steps(store)[step]).executed is False
            store = RedisLeaseStore.from_url(
                f"redis://meek:{SECRET}@127.0.0.1:{port}/0", timeout=TIMEOUT
            )
            for step in ("acquire", "renew", "closed_groups"):
                assert refusal(steps(store)[step]).executed is False
            assert store.mark("a", "m") is None
        finally:
            admin.config_set("requirepass", "")


def test_one_refused_lease_fails_no_others(server: RedisServer, store: RedisLeaseStore) -> None:
    ours, theirs = make_call(f"g:ours-{fresh_key()}"), make_call(fresh_key())
    for call in (ours, theirs):
        assert store.acquire(call) == Acquired()
    with redis.Redis.from_url(server.url) as admin:
        admin.acl_setuser(
            "half",
            enabled=True,
            passwords=[f"+{SECRET}"],
            keys=["celery_leases:{g:ours*"],
            commands=["+@all"],
        )
    half = RedisLeaseStore.from_url(
        f"redis://half:{SECRET}@127.0.0.1:{server.port}/0", timeout=TIMEOUT
    )
    renewals = [Renewal(call.key.stored, call.token, 60.0) for call in (theirs, ours, theirs)]
    refused, renewed, refused_too = half.renew(renewals)
    assert renewed is RenewalResult.OURS
    for answer in (refused, refused_too):
        assert isinstance(answer, StoreUnavailable)
        assert answer.executed is False
    assert refusal(lambda: half.renew(renewals[:1])).executed is False
    assert refusal(lambda: half.holder(theirs.key.stored)).executed is False


def test_a_bounded_store_has_connections(server: RedisServer, store: RedisLeaseStore) -> None:
    patient = RedisLeaseStore.from_url(server.url, timeout=30.0)
    hasty = patient.bounded(0.2)
    assert (hasty.name, hasty.prefix) == (patient.name, patient.prefix)
    assert hasty._client.connection_pool is not patient._client.connection_pool
    call = make_call(fresh_key())
    assert patient.acquire(call) == Acquired()
    assert hasty.renew([Renewal(call.key.stored, call.token, 15.0)]) == [RenewalResult.OURS]
    server.pause()
    assert refusal(lambda: hasty.holder(call.key.stored)).executed is None
    server.resume()
    hasty.close()
    assert patient.holder(call.key.stored) is not None
    patient.close()
