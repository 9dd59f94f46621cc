"""Commands that bypass redis-py's pool: each reply belongs to its command, whatever happened to
the previous one.
"""

import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from celery_leases.concurrency import os_threads
from celery_leases.decide.answers import Acquired
from celery_leases.errors import StoreUnavailable
from celery_leases.stores.redis.clients import limited, redis_address
from celery_leases.stores.redis.direct import DirectClient, packed
from celery_leases.stores.redis.leases import RedisLeaseStore
from celery_leases.testing.contracts.calls import fresh_key, make_call
from celery_leases.testing.waits import wait_until
from tests.support.servers import RedisServer

PATIENCE = 10.0
"""How long the server may take to notice that a connection is closed, in seconds."""


class Interruption(BaseException):
    """An exception of a signal handler: a soft time limit, or the loss of a lease."""


@pytest.fixture(scope="module")
def leases_redis_url() -> Iterator[str]:
    """The URL of a server without other clients."""
    with RedisServer() as server:
        yield server.url


@pytest.fixture
def store(leases_redis_url: str) -> Iterator[RedisLeaseStore]:
    made = RedisLeaseStore.from_url(leases_redis_url, prefix="unawaited")
    assert isinstance(made._client, DirectClient)
    assert send(made, "ECHO", "first") == b"first"
    yield made
    made.close()


def send(store: RedisLeaseStore, *command: Any) -> Any:
    """The reply to one command."""
    return store._commands.execute(*command)


def connections(url: str) -> int:
    """The number of clients of the server, without the one that counts them."""
    with redis.Redis.from_url(url) as admin:
        return len(admin.client_list(_type="normal")) - 1


@pytest.mark.parametrize("where", ["send_unlimited", "read_response"])
def test_an_interruption_leaves_no_reply_for_the_next_command(
    store: RedisLeaseStore, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    connections: Any = limited(redis.Connection)
    usual: Any = getattr(connections, where)

    def interrupted(self: Any, *args: Any, **kwargs: Any) -> Any:
        monkeypatch.undo()
        if where == "send_unlimited":
            usual(self, *args, **kwargs)
        raise Interruption

    monkeypatch.setattr(connections, where, interrupted)
    with pytest.raises(Interruption):
        send(store, "BLPOP", "nobody-pushes", 0)
    assert send(store, "ECHO", "ours") == b"ours"


def test_a_refusal_leaves_its_connection_open(
    store: RedisLeaseStore, leases_redis_url: str
) -> None:
    before = send(store, "CLIENT", "ID")
    with pytest.raises(StoreUnavailable):
        send(store, "NO-SUCH-COMMAND")
    assert send(store, "CLIENT", "ID") == before
    # The server may not have noticed yet that the connections of the test before are closed.
    wait_until(
        lambda: connections(leases_redis_url) == 1, PATIENCE, "the server to have one client"
    )


def test_a_connection_dead_idle_is_replaced(store: RedisLeaseStore, leases_redis_url: str) -> None:
    for time in range(3):
        with redis.Redis.from_url(leases_redis_url) as admin:
            admin.client_kill_filter(_type="normal")
        assert send(store, "INCR", "counted") == time + 1


def test_an_unread_reply_stays_with_its_own(store: RedisLeaseStore, leases_redis_url: str) -> None:
    for _ in range(3):
        request = make_call(fresh_key())
        assert isinstance(store.acquire(request), Acquired)
        store.end(request.key.stored, "another-token")
        assert store.holder(request.key.stored) is not None
        store.end(request.key.stored, request.token)
        assert send(store, "ECHO", "ours") == b"ours"
        assert store.holder(request.key.stored) is None


def test_a_release_without_a_script_is_sent(store: RedisLeaseStore, leases_redis_url: str) -> None:
    """At once, or before the next command."""
    requests = [make_call(fresh_key()) for _ in range(2)]
    with redis.Redis.from_url(leases_redis_url) as admin:
        for request in requests:
            assert isinstance(store.acquire(request), Acquired)
        admin.script_flush()
        store.end(requests[0].key.stored, requests[0].token)
        assert len(admin.keys("unawaited:*:lease")) == 1
        admin.script_flush()
        store.end(requests[1].key.stored, requests[1].token)
        assert send(store, "ECHO", "ours") == b"ours"
        assert not admin.keys("unawaited:*:lease")


def test_a_dead_one_with_a_reply_is_replaced(store: RedisLeaseStore, leases_redis_url: str) -> None:
    with redis.Redis.from_url(leases_redis_url) as admin:
        for time in range(3):
            request = make_call(fresh_key())
            assert isinstance(store.acquire(request), Acquired)
            for _ in range(2):
                store.end(request.key.stored, request.token)
            admin.client_kill_filter(_type="normal")
            assert send(store, "INCR", "counted unawaited") == time + 1
            assert isinstance(store.acquire(request), Acquired)
            admin.script_flush()
            store.end(request.key.stored, request.token)
            assert not admin.keys("unawaited:*:lease")


def test_a_connection_closed_elsewhere_leaves_no_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    closing, close = threading.Event(), threading.Event()
    usual: Any = redis.connection.AbstractConnection.disconnect
    with RedisServer() as server:
        store = RedisLeaseStore.from_url(server.url)
        request = make_call(fresh_key())
        store.end(request.key.stored, request.token)  # is awaited
        server.pause()
        store.end(request.key.stored, request.token)

        def slow(self: Any, *args: Any) -> None:
            if threading.current_thread() is closer:
                closing.set()
                assert close.wait(PATIENCE)
            usual(self, *args)

        closer = threading.Thread(target=store.close)
        monkeypatch.setattr(redis.connection.AbstractConnection, "disconnect", slow)
        closer.start()
        assert closing.wait(PATIENCE)
        answers: list[Any] = []
        asker = threading.Thread(target=lambda: answers.append(send(store, "ECHO", "ours")))
        asker.start()
        server.resume()
        asker.join(PATIENCE)
        monkeypatch.undo()
        close.set()
        closer.join()
        assert answers == [b"ours"]
        store.close()


def test_a_release_that_is_never_answered_fails_no_later_command(
    leases_redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A firewall forgot the connection while the body ran."""
    store = RedisLeaseStore.from_url(leases_redis_url, timeout=0.5)
    request = make_call(fresh_key())
    store.end(request.key.stored, request.token)  # is awaited
    assert isinstance(store.acquire(request), Acquired)
    with monkeypatch.context() as lost:
        lost.setattr(limited(redis.Connection), "send_unlimited", lambda *_: None)
        store.end(request.key.stored, request.token)
    assert send(store, "ECHO", "ours") == b"ours"
    store.close()


def test_threads_share_no_replies(store: RedisLeaseStore, leases_redis_url: str) -> None:
    wrong: list[object] = []
    others = connections(leases_redis_url) - 1

    def ask(name: str) -> None:
        wrong.extend(
            reply for _ in range(300) if (reply := send(store, "ECHO", name)) != name.encode()
        )

    threads = [threading.Thread(target=ask, args=(f"thread {number}",)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not wrong
    assert connections(leases_redis_url) - others <= 8
    store.close()
    assert send(store, "ECHO", "again") == b"again"
    # The server notices later that a client has closed its connection.
    wait_until(
        lambda: connections(leases_redis_url) <= others + 1, PATIENCE, "the end of eight clients"
    )


def test_a_forked_process_opens_connections_of_its_own(store: RedisLeaseStore) -> None:
    before = send(store, "CLIENT", "ID")
    child = os.fork()
    if not child:
        os._exit(0 if send(store, "CLIENT", "ID") != before else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert send(store, "CLIENT", "ID") == before


def test_commands_are_packed_as_redis_py_packs_them() -> None:
    arguments: list[str | int] = ["EVALSHA", "ä😀", 0, 12, -3, "", "two words"]
    theirs = b"".join(redis.Connection().pack_command(*arguments))
    assert packed(arguments) == theirs
    assert packed(arguments[1:], b"$7\r\nEVALSHA\r\n", 1) == theirs


def test_a_look_at_a_connection_reads_nothing() -> None:
    reading, writing = os.pipe()
    look = os_threads.readable_poll(reading)
    assert not look(0)
    os.write(writing, b"x")
    assert look(0)
    assert os.read(reading, 9) == b"x"
    assert not look(0)
    os.close(writing)
    assert look(0)
    os.close(reading)


def test_a_client_with_a_provider_uses_redis_pys_pool(leases_redis_url: str) -> None:
    """Only that can authenticate again."""
    provider = redis.UsernamePasswordCredentialProvider("default", "")
    made = redis_address(leases_redis_url, {"credential_provider": provider}).client(2.0)
    assert not isinstance(made, DirectClient)
