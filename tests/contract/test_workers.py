"""The leases of workers on a real Redis: who is registered, who returns the messages of a dead
worker, and that each message is returned once.
"""

import math
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
from celery.platforms import EX_FAILURE
from celery.worker import state
from kombu import Connection, Consumer, Exchange, Queue
from kombu.exceptions import OperationalError
from redis.exceptions import AuthenticationError, ResponseError

from celery_leases.stores.redis.workers import Workers, own_name
from celery_leases.testing.waits import wait_until
from celery_leases.worker import takeover
from celery_leases.worker.fetching import noted_at_once
from celery_leases.worker.takeover import WorkerLease, _return_page
from tests.support.servers import RedisServer
from tests.unit.doc_pages import page

PREFIX = "celery_leases:unacked"
TURNS = int(os.environ.get("TURNS", "5"))


@pytest.fixture(params=["", "app1:"], ids=["plain", "global_keyprefix"])
def connection(request: pytest.FixtureRequest, leases_redis: RedisServer) -> Iterator[Connection]:
    """A connection of kombu to a database of its own."""
    url = f"{leases_redis.url.rpartition('/')[0]}/14"
    options = {"global_keyprefix": request.param, "socket_timeout": 5}
    with Connection(url, transport_options=options) as opened:
        opened.default_channel.client.flushdb()
        noted_at_once(opened.default_channel, Mock())
        yield opened


@pytest.fixture
def channel(connection: Connection) -> Any:
    """Its channel."""
    return connection.default_channel


@pytest.fixture
def workers(channel: Any) -> Workers:
    """The workers of that broker."""
    return Workers(channel.pool, f"{channel.global_keyprefix}{PREFIX}")


def fetched(connection: Connection, number: int, **headers: Any) -> list[Any]:
    """Publish and fetch so many messages, without acknowledging them."""
    queue = connection.SimpleQueue("work")
    for place in range(number):
        queue.put({"n": place}, headers=headers)
    return [queue.get(timeout=5) for _ in range(number)]


def waiting(connection: Connection) -> list[int]:
    """The numbers of the messages in the queue, which are removed from it."""
    channel, found = connection.channel(), []
    while (message := channel.basic_get("work")) is not None:
        found.append(message.payload["n"] if hasattr(message, "payload") else message)
        channel.basic_ack(message.delivery_tag)
    return sorted(found)


Holding = Callable[..., tuple[Any, ...]]


@pytest.fixture
def holding(connection: Connection, workers: Workers, channel: Any) -> Holding:
    """Gives the lease of a worker, and messages that it has fetched and registered."""

    def held(ttl: float, number: int = 1) -> tuple[Any, ...]:
        lease, messages = opened(connection, "a", ttl), fetched(connection, number)
        for message in messages:
            lease.received(message)
        lease._renew(workers, channel)
        return lease, *messages

    return held


def dies(workers: Workers, name: str, *messages: Any) -> None:
    """Let the lease of a worker with these messages, or tags, end."""
    workers.enter(name, 60)
    added = {
        getattr(each, "delivery_tag", each): getattr(each, "fetched_at", "") for each in messages
    }
    workers.renew(name, 0.001, 60, added, [])
    wait_until(lambda: name in ended(workers), 5, "the lease to end")


def ended(workers: Workers) -> list[str]:
    """The workers whose leases have ended, as another worker is told."""
    workers.enter("b", 60)
    return list(workers.renew("b", 60, 60, {}, []) or ())


def next_ended(workers: Workers) -> str:
    """The only worker whose lease has ended, as soon as it has."""
    wait_until(lambda: bool(ended(workers)), 5, "the lease to end")
    (name,) = ended(workers)
    return name


def take_over(workers: Workers, channel: Any, name: str, ttl: float = 60.0) -> None:
    """Return the messages of an ended worker as far as that is possible."""
    lease = WorkerLease("c", Mock(), PREFIX, ttl, {"leased"})
    assert all(lease._return_messages(workers, channel, name))


def fetched_at(channel: Any, message: Any, seconds_ago: float) -> None:
    """Let kombu have fetched a message so long ago."""
    message.fetched_at = time.time() - seconds_ago
    channel.client.zadd("unacked_index", {message.delivery_tag: message.fetched_at})


def test_a_worker_is_known_until_it_is_forgotten(workers: Workers) -> None:
    assert workers.renew("a", 10, 60, {"t1": ""}, []) is None
    assert workers.listed() == []
    workers.enter("a", 60)
    assert workers.renew("a", 10, 60, {"t1": "", "t2": ""}, []) == []
    assert workers.renew("a", 10, 60, {"t3": ""}, ["t1"]) == []
    (state,) = workers.listed()
    assert (state.name, state.messages) == ("a", 2)
    assert state.remaining is not None
    assert 9 < state.remaining <= 10
    workers.forget("a")
    assert workers.listed() == []


def test_only_a_lease_that_has_ended_is_taken(workers: Workers) -> None:
    """And then by one caller at a time."""
    workers.enter("a", 60)
    workers.renew("a", 10, 60, {"t1": ""}, [])
    assert workers.take("a", 60) is None
    dies(workers, "a")
    name, tags = workers.take("a", 0.3) or ("", [])
    assert (own_name(name), tags) == ("a", ["t1"])
    assert workers.renew("a", 10, 60, {}, []) is None  # so it learns of that
    assert (workers.take(name, 60), ended(workers)) == (None, [])
    wait_until(lambda: ended(workers) == [name], 5, "the lease of the first caller to end")
    assert workers.take(name, 60) == (name, ["t1"])
    assert ("a", None) in [(one.name, one.remaining) for one in workers.listed()]


def test_a_name_like_that_of_an_ended_worker_is_a_name(workers: Workers) -> None:
    name = "celery@wow!1/77/ab"
    dies(workers, name, "t1")
    taken, _ = workers.take(name, 60) or ("", [])
    assert (own_name(name), own_name(taken)) == (name, name)
    assert workers.renew(name, 10, 60, {}, []) is None


def test_a_worker_without_messages_is_removed(workers: Workers) -> None:
    dies(workers, "a")
    take_over(workers, Mock(), "a")
    assert [state.name for state in workers.listed()] == ["b"]


def test_several_workers_return_each_message_once(
    connection: Connection, workers: Workers, channel: Any
) -> None:
    """Also while the messages are fetched again."""
    for turn in range(TURNS):
        messages = fetched(connection, 8)
        dies(workers, f"dead{turn}", *messages)
        names = ended(workers)
        barrier = threading.Barrier(3)

        def restore(names: list[str] = names, barrier: threading.Barrier = barrier) -> None:
            with connection.clone() as own:
                other = own.default_channel
                its = Workers(other.pool, f"{other.global_keyprefix}{PREFIX}")
                barrier.wait()
                while names:
                    for name in names:
                        take_over(its, other, name, 0.001)
                    names = ended(its)

        threads = [threading.Thread(target=restore) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert waiting(connection) == list(range(8))
        assert not channel.client.hlen("unacked")


def test_leased_messages_that_nobody_has_registered_are_returned_too(
    connection: Connection, workers: Workers, channel: Any
) -> None:
    """If they were fetched when the worker died. Others, and those of plain tasks, stay."""
    for headers in ({"task": "leased"}, {"task": "unknown", "celery_leases": "1:k"}):
        dead = fetched(connection, 3, **headers)
        others = [*fetched(connection, 1, task="plain"), *fetched(connection, 1)]
        early, registered, just_now = fetched(connection, 3, **headers)
        channel.client.hset("unacked", "broken", "{}")
        channel.client.zadd("unacked_index", {"broken": time.time() - 1})
        for message in (*dead, *others, registered):
            fetched_at(channel, message, 1)
        fetched_at(channel, dead[1], 5 + 20 + 60 - 2)  # its reply did not come
        fetched_at(channel, early, 5 + 20 + 60 + 1)
        fetched_at(channel, just_now, 0)
        workers.enter("living", 60)
        workers.renew("living", 60, 60, {registered.delivery_tag: registered.fetched_at}, [])
        dies(workers, "dead/1/word/20000", dead[0])
        take_over(workers, channel, "dead/1/word/20000")
        assert waiting(connection) == [0, 1, 2]
        left = (*others, early, registered, just_now)
        assert all(channel.client.hget("unacked", message.delivery_tag) for message in left)
        assert channel.client.hlen("unacked") == len(left) + 1  # and the broken one
        assert sorted(one.name for one in workers.listed()) == ["b", "living"]
        for message in left:
            message.ack()


def test_a_message_that_nobody_has_registered_is_returned_once(
    connection: Connection, workers: Workers, channel: Any
) -> None:
    """Although two workers have died that may have fetched it, and both are taken over."""
    messages = fetched(connection, 45, task="leased")
    for message in messages:
        fetched_at(channel, message, 1)
    with connection.clone() as second:
        other = second.default_channel
        its = Workers(other.pool, f"{other.global_keyprefix}{PREFIX}")
        for name in ("dead", "dead too"):
            dies(workers, name)
        for name, added in (("gone!1", ["t1"]), ("gone too!1", [])):
            workers.enter(name, 60)
            assert workers.register(name, 60, {"t1": ""}, "unacked_index") == added
        lease = WorkerLease("c", Mock(), PREFIX, 60.0, {"leased"})
        steps = [
            lease._return_messages(workers, channel, "dead"),
            lease._return_messages(its, other, "dead too"),
        ]
        while steps:
            steps = [each for each in steps if next(each, False)]
    assert waiting(connection) == list(range(45))
    assert not channel.client.hlen("unacked")


def test_a_message_goes_back_through_the_exchange_by_which_it_came(
    connection: Connection, workers: Workers
) -> None:
    """A worker that does not know the exchange leaves the message to one that does: kombu would
    drop it.
    """
    queue = Queue("by_topic", Exchange("topics", "topic"), "a.#")
    with connection.clone() as first, connection.clone() as stranger:
        with first.Producer() as producer:
            producer.publish({"n": 1}, exchange=queue.exchange, routing_key="a.b", declare=[queue])
        message = queue(first.default_channel).get()
        dies(workers, "a", message)
        take_over(workers, stranger.default_channel, "a", 0.001)
        left = next_ended(workers)
        assert first.default_channel.client.hlen("unacked") == 1
        take_over(workers, first.default_channel, left)
        assert [state.name for state in workers.listed()] == ["b"]
        again = queue(first.default_channel).get()
        assert (again.payload, again.delivery_info["routing_key"]) == ({"n": 1}, "a.b")
        again.ack()


def opened(connection: Connection, name: str, ttl: float) -> WorkerLease:
    """The lease of a worker, not started."""
    prefix = f"{connection.default_channel.global_keyprefix}{PREFIX}"
    return WorkerLease(name, connection.clone, prefix, ttl)


def test_acknowledged_messages_are_registered_no_longer(
    connection: Connection, workers: Workers, channel: Any
) -> None:
    lease = opened(connection, "a", 5.0)
    messages = fetched(connection, 3)
    for message in messages:
        lease.received(message)
    messages[0].ack()  # before it was registered
    lease.start()
    wait_until(lambda: [one.messages for one in workers.listed()] == [2], 5, "the registration")
    messages[1].ack()
    messages[2].reject(requeue=True)
    wait_until(lambda: [one.messages for one in workers.listed()] == [0], 5, "the end of both")
    assert not channel.client.hlen("unacked")
    assert waiting(connection) == [2]
    lease.stop()
    assert workers.listed() == []


@pytest.mark.parametrize("ends", ["ack", "requeue", "dropped"])
@pytest.mark.parametrize("received", ["early", "late"])
def test_a_worker_ends_no_message_that_another_one_has_fetched_again(
    connection: Connection,
    workers: Workers,
    channel: Any,
    monkeypatch: pytest.MonkeyPatch,
    received: str,
    ends: str,
) -> None:
    """It did not see that the message was returned: its lease never ended, or it stood still when
    it had fetched the message.
    """
    monkeypatch.setattr(takeover, "TIMEOUT", 0)  # nothing renews it here
    lease, (message,) = opened(connection, "a", 60.0), fetched(connection, 1)
    if received == "early":
        lease.received(message)
        lease._renew(workers, channel)
    with connection.clone() as other:
        other.default_channel.qos.restore_by_tag(message.delivery_tag)
        again = other.SimpleQueue("work").get(timeout=5)
        assert again.delivery_tag == message.delivery_tag
        if received == "late":
            lease.received(message)
            lease._renew(workers, channel)
        if ends == "ack":
            message.ack()
        elif ends == "requeue":
            message.reject(requeue=True)
        else:
            lease.reconnected()
        lease._renew(workers, channel)
        assert channel.client.hlen("unacked") == 1
        assert not channel.client.llen("work")
        again.ack()


def test_a_renewal_acknowledges_all_messages_that_have_ended(
    connection: Connection, workers: Workers, channel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that have come and ended meanwhile too; if its reply is lost, the next one repeats
    that.
    """
    lease = opened(connection, "a", 5.0)
    lease._renew(workers, channel)
    messages = fetched(connection, 4)
    for message in messages[:2]:
        lease.received(message)
    lease._renew(workers, channel)
    for message in messages[2:]:
        lease.received(message)
    for message in messages:
        message.ack()
        assert message.acknowledged
    assert not messages[0].channel.qos._delivered.keys() - messages[0].channel.qos._dirty
    assert channel.client.hlen("unacked") == 4
    renew = workers.renew
    with monkeypatch.context() as patched:
        patched.setattr(workers, "renew", lambda *args: (renew(*args), 1 / 0))
        with pytest.raises(ZeroDivisionError):
            lease._renew(workers, channel)
    assert not channel.client.hlen("unacked")
    assert not channel.client.zcard("unacked_index")
    asked = Mock(wraps=renew)
    monkeypatch.setattr(workers, "renew", asked)
    for _ in range(2):
        lease._renew(workers, channel)
    assert [len(each.args[5]) for each in asked.call_args_list] == [4, 0]
    assert [one.messages for one in workers.listed()] == [0]


def test_what_ends_while_the_worker_stops_is_acknowledged_at_once(
    channel: Any, holding: Holding
) -> None:
    """There may be no renewal any more."""
    lease, message = holding(5.0)
    lease._stopping = True
    message.ack()
    assert not channel.client.hlen("unacked")


def test_a_late_acknowledgement_leaves_the_message_to_its_new_worker(
    connection: Connection, workers: Workers, channel: Any, holding: Holding
) -> None:
    lease, message = holding(1.0)
    wait_until(lambda: ended(workers) == [lease._name], 5, "the lease to end")
    take_over(workers, channel, lease._name)
    (again,) = [connection.SimpleQueue("work").get(timeout=5)]
    assert again.delivery_tag == message.delivery_tag
    message.ack()
    assert message.acknowledged
    lease._renew(workers, channel)
    assert channel.client.hlen("unacked") == 1
    again.ack()


def test_kombu_does_not_return_what_the_next_worker_has(
    connection: Connection, workers: Workers, channel: Any
) -> None:
    """It closes the channel of a worker that has lost its lease and its connection."""
    with connection.clone() as of_worker:
        noted_at_once(of_worker.default_channel, Mock())
        (message,) = fetched(of_worker, 1)
        lease = opened(connection, "a", 1.0)
        lease.received(message)
        lease._renew(workers, channel)
        wait_until(lambda: ended(workers) == [lease._name], 5, "the lease to end")
        take_over(workers, channel, lease._name)
        again = connection.SimpleQueue("work").get(timeout=5)
        lease._renew(workers, channel)
        message.channel.close()
        assert channel.client.hlen("unacked") == 1
        assert waiting(connection) == []
        again.ack()


def test_a_worker_that_stands_still_while_it_renews_leaves_its_messages_to_others(
    connection: Connection, workers: Workers, channel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = opened(connection, "a", 1.0)
    (message,) = fetched(connection, 1)
    lease.received(message)
    lease._renew(workers, channel)
    own = workers.renew

    def stands_still(*args: Any) -> Any:
        monkeypatch.undo()
        wait_until(lambda: ended(workers) == [lease._name], 5, "the lease to end")
        take_over(workers, channel, lease._name)
        return own(*args)

    monkeypatch.setattr(workers, "renew", stands_still)
    lease._renew(workers, channel)
    again = connection.SimpleQueue("work").get(timeout=5)
    message.ack()
    lease._renew(workers, channel)
    assert channel.client.hlen("unacked") == 1
    again.ack()


@pytest.mark.parametrize("ago", [0.0, 200.0])
def test_a_message_whose_fetch_got_no_reply_is_returned(
    connection: Connection, workers: Workers, channel: Any, ago: float
) -> None:
    """The worker that has fetched it lives on, and has perhaps stood still before it read that its
    connection was lost.
    """
    lease = opened(connection, "a", 1.0)
    (message,) = fetched(connection, 1, task="leased")
    fetched_at(channel, message, ago)
    lease.unanswered(ago)
    lease._renew(workers, channel)
    lease._renew(workers, channel)
    (other,) = {one.name for one in workers.listed()} - {lease._name}
    wait_until(lambda: other in ended(workers), 5, "its lease to end")
    take_over(workers, channel, other)
    assert waiting(connection) == [0]


@pytest.mark.parametrize("first_ends", ["before", "between", "after"])
def test_a_message_that_comes_again_is_acknowledged_by_its_second_run_only(
    connection: Connection, workers: Workers, channel: Any, first_ends: str, holding: Holding
) -> None:
    """The worker has got it back itself, after another one has returned it."""
    lease, message = holding(1.0)
    wait_until(lambda: ended(workers) == [lease._name], 5, "the lease to end")
    take_over(workers, channel, lease._name)
    again = connection.SimpleQueue("work").get(timeout=5)
    assert again.delivery_tag == message.delivery_tag
    if first_ends == "before":
        message.ack()
    lease.received(again)
    if first_ends == "between":
        message.ack()
    if first_ends != "after":
        lease._renew(workers, channel)
        lease._renew(workers, channel)
        assert channel.client.hlen("unacked") == 1
    again.ack()
    if first_ends == "after":
        message.ack()
    lease._renew(workers, channel)
    assert not channel.client.hlen("unacked")


def test_without_another_worker_a_late_acknowledgement_counts(
    connection: Connection, workers: Workers, channel: Any, holding: Holding
) -> None:
    lease, *messages = holding(1.0, 2)
    wait_until(lambda: (workers.listed()[0].remaining or 0) < 0, 5, "the lease to end")
    messages[0].ack()
    messages[1].reject(requeue=True)
    assert channel.client.hlen("unacked") == 1
    lease._renew(workers, channel)
    assert not channel.client.hlen("unacked")
    assert waiting(connection) == [1]


def test_what_ends_late_is_acknowledged_when_the_worker_stops(
    connection: Connection, workers: Workers, channel: Any, holding: Holding
) -> None:
    lease, *messages = holding(1.0, 2)
    wait_until(lambda: (workers.listed()[0].remaining or 0) < 0, 5, "the lease to end")
    messages[0].ack()
    assert channel.client.hlen("unacked") == 2
    lease._stopping = True
    lease._work(channel)
    assert workers.listed() == []
    assert not channel.client.hlen("unacked")
    assert waiting(connection) == [1]  # was not acknowledged, and kombu has not returned it
    messages[1].ack()


def test_what_kombu_has_returned_is_not_returned_again_when_the_worker_stops(
    connection: Connection, workers: Workers, channel: Any
) -> None:
    """It may run elsewhere by then."""
    with connection.clone() as of_worker:
        noted_at_once(of_worker.default_channel, Mock())
        (message,) = fetched(of_worker, 1)
        lease = opened(connection, "a", 5.0)
        lease.received(message)
        lease._renew(workers, channel)
        message.channel.close()
        again = connection.SimpleQueue("work").get(timeout=5)
        lease._stopping = True
        lease._work(channel)
        assert again.delivery_tag == message.delivery_tag
        assert channel.client.hlen("unacked") == 1
        message.ack()
        assert channel.client.hlen("unacked") == 1
        again.ack()


def test_the_lease_of_a_worker_that_failed_ends_by_itself(
    connection: Connection, workers: Workers, channel: Any
) -> None:
    """The error may have interrupted kombu between the fetch of a message and its delivery."""
    lease = opened(connection, "a", 1.0)
    messages = fetched(connection, 2, task="leased")
    lease.received(messages[0])
    lease.start()
    fetched_at(channel, messages[1], 1)
    lease._worker = Mock(exitcode=EX_FAILURE)
    lease.stop()
    assert waiting(connection) == [0]
    take_over(workers, channel, next_ended(workers))
    assert waiting(connection) == [1]
    assert not channel.client.hlen("unacked")


def test_what_celery_drops_with_its_connection_is_returned(
    connection: Connection,
    workers: Workers,
    channel: Any,
    monkeypatch: pytest.MonkeyPatch,
    holding: Holding,
) -> None:
    """And runs that are not over keep their messages."""
    lease, *messages = holding(5.0, 3)
    running = Mock(_message=messages[1])
    monkeypatch.setattr(state, "active_requests", {running})
    messages[2].ack()
    monkeypatch.setattr(takeover, "TIMEOUT", 0)  # nothing renews it here
    lease.reconnected()
    lease._renew(workers, channel)
    again = connection.SimpleQueue("work").get(timeout=5)
    assert again.payload == {"n": 0}
    assert channel.client.hlen("unacked") == 2
    lease._renew(workers, channel)
    assert [one.messages for one in workers.listed()] == [1]
    messages[0].ack()  # a pool of threads runs it all the same
    messages[1].ack()
    lease._renew(workers, channel)
    assert channel.client.hlen("unacked") == 1
    assert channel.client.hget("unacked", again.delivery_tag)


def test_it_returns_dropped_messages_after_each_reconnect(monkeypatch: pytest.MonkeyPatch) -> None:
    """And watches the loop again, whose timers Celery may have cleared."""
    lease = Mock()
    monkeypatch.setattr(takeover, "current", lease)
    consumer = Mock()
    takeover.start(consumer)
    consumer.init_callback(consumer)
    assert lease.reconnected.call_count == lease.watch_loop.call_count == 2


def test_a_message_is_returned_or_stays_registered(
    connection: Connection, workers: Workers, channel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the worker that returns it dies in between, another one does it."""
    (message,) = fetched(connection, 1)
    dies(workers, "a", message)
    with monkeypatch.context() as patched:
        patched.setattr(channel, "_do_restore_message", Mock(side_effect=ConnectionError))
        with pytest.raises(ConnectionError):
            take_over(workers, channel, "a", 0.001)
    left = next_ended(workers)
    take_over(workers, channel, left)
    assert waiting(connection) == [0]


@pytest.mark.parametrize("fetched_again", [False, True])
def test_a_message_that_kombu_returns_at_the_same_moment_is_returned_once(
    connection: Connection,
    workers: Workers,
    channel: Any,
    monkeypatch: pytest.MonkeyPatch,
    fetched_again: bool,
) -> None:
    """Its visibility timeout is over. Whoever has fetched it since then keeps it."""
    (message,) = fetched(connection, 1)
    dies(workers, "a", message)
    its = channel._do_restore_message
    held = []

    def restored(*args: Any) -> None:
        with connection.clone() as other:
            other.default_channel.qos.restore_by_tag(message.delivery_tag)
        if fetched_again:
            held.append(connection.SimpleQueue("work").get(timeout=5))
        its(*args)

    monkeypatch.setattr(channel, "_do_restore_message", restored)
    take_over(workers, channel, "a")
    assert [one.name for one in workers.listed()] == ["b"]
    assert channel.client.hlen("unacked") == len(held)
    for one in held:
        one.ack()
    assert waiting(connection) == ([] if held else [0])


def test_it_logs_in_the_thread_of_the_greenlets(
    connection: Connection, workers: Workers, channel: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Its own thread might wait for their lock of logging for ever."""
    lease = opened(connection, "a", 5.0)
    lease._hub = calls = Mock()
    dies(workers, "other", *fetched(connection, 1))
    with caplog.at_level("INFO", "celery_leases"):
        assert all(lease._return_messages(workers, channel, "other"))
        lease._failed(ConnectionError())
    assert not caplog.records
    assert calls.call_count == 2
    assert waiting(connection) == [0]


def test_messages_are_returned_while_the_broker_is_busy(
    connection: Connection, workers: Workers, channel: Any
) -> None:
    """All workers change the keys of kombu that a transaction of kombu would watch."""
    messages = fetched(connection, 20)
    dies(workers, "a", *messages)
    over = threading.Event()

    def busy() -> None:
        with connection.clone() as own:
            client = own.default_channel.client
            while not over.is_set():
                client.hset("unacked", "other", "{}")

    thread = threading.Thread(target=busy)
    thread.start()
    try:
        began = time.monotonic()
        take_over(workers, channel, "a")
        assert time.monotonic() - began < 5
    finally:
        over.set()
        thread.join()
    assert waiting(connection) == list(range(20))


def test_one_request_returns_many_messages(
    connection: Connection, workers: Workers, channel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a worker that has prefetched thousands must not take minutes. The one that waited
    for longest comes first.
    """
    messages = fetched(connection, 45)
    dies(workers, "a", *messages)
    returned = Mock(wraps=workers.give_back)
    monkeypatch.setattr(workers, "give_back", returned)
    take_over(workers, channel, "a")
    assert returned.call_count == math.ceil(45 / takeover.PAGE) < 5
    oldest = connection.SimpleQueue("work").get(timeout=5)
    assert oldest.payload == {"n": 0}
    oldest.requeue()
    assert waiting(connection) == list(range(45))


def test_a_worker_keeps_its_lease_while_it_returns_many_messages(
    connection: Connection, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    its = takeover._return_page
    monkeypatch.setattr(takeover, "PAGE", 2)
    monkeypatch.setattr(takeover, "_return_page", lambda *args: (time.sleep(0.2), its(*args))[1])
    messages = fetched(connection, 40)
    dies(workers, "dead", *messages)
    workers.forget("b")
    lease = opened(connection, "a", 3.0)
    lease.start()
    wait_until(lambda: len(workers.listed()) == 2, 5, "the lease")

    def over() -> bool:
        (remaining,) = [one.remaining for one in workers.listed() if one.name == lease._name]
        assert (remaining or 0) > 0
        return len(workers.listed()) == 1

    wait_until(over, 20, "all messages to be returned")
    lease.stop()
    assert waiting(connection) == list(range(40))


def test_a_worker_that_could_not_renew_lets_the_others_renew_first(
    connection: Connection, workers: Workers, channel: Any
) -> None:
    """After an outage of the broker the leases of all workers have ended."""
    (message,) = fetched(connection, 1)
    dies(workers, "other", message)
    workers.forget("b")
    lease = opened(connection, "a", 3.0)
    lease.start()
    wait_until(lambda: len(workers.listed()) == 2, 5, "the lease")
    workers.renew("other", 60, 60, {}, [])
    wait_until(lambda: lease._clock() - lease._renewed_since > 2, 5, "two renewals")
    lease.stop()
    assert [(one.name, one.messages) for one in workers.listed()] == [("other", 1)]
    message.ack()


def test_before_its_first_renewal_a_worker_acknowledges_as_celery_does(
    connection: Connection, workers: Workers, channel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the broker refuses the lease for an unknown reason."""
    lease = opened(connection, "a", 5.0)
    (message,) = fetched(connection, 1)
    lease.received(message)
    with monkeypatch.context() as patched:
        patched.setattr(workers, "renew", Mock(side_effect=ResponseError("CROSSSLOT")))
        with pytest.raises(ResponseError):
            lease._renew(workers, channel)
    message.ack()
    assert not channel.client.hlen("unacked")


def test_a_renewal_that_arrives_late_does_not_revive_a_worker(
    connection: Connection, workers: Workers, channel: Any, holding: Holding
) -> None:
    """Its messages were returned, and it must learn of that. A cut network delivers late."""
    lease, message = holding(1.0)
    before = lease._name
    wait_until(lambda: ended(workers) == [before], 5, "the lease to end")
    take_over(workers, channel, before)
    workers.renew(before, 60, 60, {}, [])
    lease._renew(workers, channel)
    assert lease._name != before
    again = connection.SimpleQueue("work").get(timeout=5)
    message.ack()
    lease._renew(workers, channel)
    assert channel.client.hlen("unacked") == 1
    assert sorted(one.messages for one in workers.listed()) == [0, 0]
    again.ack()


@pytest.mark.parametrize("fails", ["renew", "enter"])
def test_what_came_after_the_lease_had_ended_is_acknowledged(
    connection: Connection,
    workers: Workers,
    channel: Any,
    monkeypatch: pytest.MonkeyPatch,
    fails: str,
    holding: Holding,
) -> None:
    """Nobody has returned it, even if the next lease could not be begun at once."""
    lease, _ = holding(1.0)
    wait_until(lambda: ended(workers) == [lease._name], 5, "the lease to end")
    take_over(workers, channel, lease._name)
    assert waiting(connection) == [0]
    (second,) = fetched(connection, 1)
    lease.received(second)
    with monkeypatch.context() as patched:
        patched.setattr(workers, fails, Mock(side_effect=ConnectionError))
        with pytest.raises(ConnectionError):
            lease._renew(workers, channel)
    lease._renew(workers, channel)
    second.ack()
    lease._renew(workers, channel)
    assert not channel.client.hlen("unacked")


@pytest.mark.parametrize("ends", ["before", "after"])
def test_a_late_acknowledgement_leaves_what_was_never_registered_to_its_new_worker(
    connection: Connection, workers: Workers, channel: Any, ends: str
) -> None:
    """The worker stood still before it registered the message, which another one has found."""
    lease = opened(connection, "a", 1.0)
    lease._renew(workers, channel)
    (message,) = fetched(connection, 1, task="leased")
    lease.received(message)
    wait_until(lambda: ended(workers) == [lease._name], 5, "the lease to end")
    take_over(workers, channel, lease._name)
    again = connection.SimpleQueue("work").get(timeout=5)
    workers.renew("b", 60, 60, {again.delivery_tag: again.fetched_at}, [])
    if ends == "before":
        message.ack()
    lease._renew(workers, channel)
    if ends == "after":
        message.ack()
    lease._renew(workers, channel)
    assert channel.client.hlen("unacked") == 1
    again.ack()


def test_a_refusal_after_a_renewal_does_not_let_late_acknowledgements_through(
    workers: Workers, channel: Any, holding: Holding
) -> None:
    """Such as a password that has changed."""
    lease, message = holding(1.0)
    assert not lease._refused_by(AuthenticationError("WRONGPASS"))
    wait_until(lambda: (workers.listed()[0].remaining or 0) < 0, 5, "the lease to end")
    message.ack()
    assert channel.client.hlen("unacked") == 1


def test_a_worker_fetches_nothing_before_it_has_a_lease(
    connection: Connection, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody would return it if the worker were killed in between. So it is after an outage of the
    broker.
    """
    enters, enter, its = threading.Event(), threading.Event(), Workers.enter

    def slowly(self: Workers, name: str, ttl: float) -> None:
        enters.set()
        enter.wait(10)
        its(self, name, ttl)

    monkeypatch.setattr(Workers, "enter", slowly)
    monkeypatch.setattr(takeover, "TIMEOUT", 60)
    lease = opened(connection, "a", 5.0)
    for begins in (lease.start, lease.reconnected):
        enters.clear()
        enter.clear()
        starting = threading.Thread(target=begins)
        starting.start()
        assert enters.wait(10)
        starting.join(0.2)
        assert starting.is_alive()
        enter.set()
        starting.join(10)
        assert [one.name for one in workers.listed()] == [lease._name]
        workers.forget(lease._name)
    lease.stop()


def test_the_lease_follows_its_worker_to_another_broker(
    connection: Connection, workers: Workers
) -> None:
    """Elsewhere its acknowledgements would reach no message."""
    url = f"{connection.as_uri().rpartition('/')[0]}/13"
    options = connection.transport_options
    with Connection(url, transport_options=options) as other:
        other.default_channel.client.flushdb()
        consumer = Mock(connection=connection)
        connect = partial(takeover._connection_like, consumer, options)
        prefix = f"{connection.default_channel.global_keyprefix}{PREFIX}"
        lease = WorkerLease("a", connect, prefix, 5.0)
        lease.start()
        assert [one.name for one in workers.listed()] == [lease._name]
        consumer.connection = other
        lease.reconnected()
        there = Workers(other.default_channel.pool, prefix)
        assert [one.name for one in there.listed()] == [lease._name]
        (message,) = fetched(other, 1)
        lease.received(message)
        message.ack()
        wait_until(lambda: not other.default_channel.client.hlen("unacked"), 5, "the ack")
        lease.stop()


def test_the_lease_uses_no_broker_that_its_worker_does_not_use(leases_redis: RedisServer) -> None:
    closed = "redis://127.0.0.1:1/0"
    used = Connection([closed, leases_redis.url])
    made = takeover._connection_like(Mock(connection=used), {"max_retries": 1})
    with pytest.raises(OperationalError):
        _ = made.default_channel
    used.maybe_switch_next()
    with takeover._connection_like(Mock(connection=used), {}) as made:
        assert made.default_channel.client.ping()


def test_an_emptied_broker_gets_the_registrations_again(
    workers: Workers, channel: Any, holding: Holding
) -> None:
    lease, message = holding(10.0)
    workers.forget(lease._name)
    lease._renew(workers, channel)
    assert [one.messages for one in workers.listed()] == [1]
    message.ack()
    workers.forget(lease._name)
    lease._renew(workers, channel)
    assert not channel.client.hlen("unacked")


def test_the_lease_of_a_worker_whose_loop_stands_still_ends(
    connection: Connection, workers: Workers
) -> None:
    lease = opened(connection, "a", 1.0)
    consumer = Mock(connection=connection)
    lease.watch_loop(consumer)
    (_, loop_runs, channel), _ = consumer.controller.hub.call_repeatedly.call_args
    lease.start()
    wait_until(lambda: len(workers.listed()) == 1, 5, "the lease")
    wait_until(lambda: (workers.listed()[0].remaining or 0) < 0, 10, "the lease to end")
    loop_runs(channel)
    wait_until(lambda: (workers.listed()[0].remaining or 0) > 0, 5, "the lease to be renewed")
    lease.stop()


def test_a_worker_whose_loop_runs_again_has_a_lease_at_once(
    connection: Connection, workers: Workers
) -> None:
    """It gets messages again, which nobody would return if it were killed without a lease."""
    lease = opened(connection, "a", 60.0)
    consumer = Mock(connection=connection)
    lease.watch_loop(consumer)
    (_, loop_runs, channel), _ = consumer.controller.hub.call_repeatedly.call_args
    lease._loop_seen -= 61.0
    lease.start()
    wait_until(lambda: lease._renewed_since < math.inf, 5, "the thread to wait for the loop")
    assert not workers.listed()
    loop_runs(channel)
    assert len(workers.listed()) == 1
    lease.stop()


def test_a_worker_without_an_event_loop_reads_what_kombu_leaves_unread(
    connection: Connection,
) -> None:
    """The prefetch limit fell while kombu waited for a message, which is out of its queue now."""
    patient = {**connection.transport_options, "polling_interval": 60}
    broker, got = connection.default_channel.client, list[Any]()
    with connection.clone(transport_options=patient) as own:
        channel = own.default_channel
        receiver = Consumer(channel, [Queue("work")], callbacks=[lambda _, one: got.append(one)])
        receiver.qos(prefetch_count=2)
        receiver.consume()
        connection.SimpleQueue("work").put({"n": 0})
        own.drain_events(timeout=5)
        with pytest.raises(TimeoutError):
            own.drain_events(timeout=0.01)
        receiver.qos(prefetch_count=1)
        connection.SimpleQueue("work").put({"n": 1})
        wait_until(lambda: not broker.llen("work"), 5, "the message to leave its queue")
        with suppress(TimeoutError):  # which kombu before 5.7 does not raise then
            own.drain_events(timeout=0.01)
        assert len(got) == 1
        consumer = Mock(connection=own)
        consumer.controller.hub = None
        opened(connection, "a", 1.0).watch_loop(consumer)
        (_, soon, (read, *args)), _ = consumer.controller.timer.call_repeatedly.call_args
        assert soon is consumer.call_soon
        read(*args)
        assert [one.payload for one in got] == [{"n": 0}, {"n": 1}]
        read(*args)
        for one in got:
            one.ack()


def test_a_broker_that_forbids_it_leaves_all_as_in_celery(
    leases_redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    """It is said once, and the messages are acknowledged."""
    url = f"{leases_redis.url.rpartition('/')[0]}/14"
    with Connection(url) as admin:
        admin.default_channel.client.flushdb()
        admin.default_channel.client.execute_command(
            "ACL", "SETUSER", "narrow", "on", ">secret", "~*", "&*", "+@all", "-zrangebyscore"
        )
    with Connection(url.replace("redis://", "redis://narrow:secret@")) as connection:
        lease = opened(connection, "a", 5.0)
        messages = fetched(connection, 2)
        lease.received(messages[0])
        with caplog.at_level("INFO", "celery_leases"):
            lease.start()
            wait_until(lambda: "no lease of its own" in caplog.text, 5, "the log line")
        lease.received(messages[1])
        for message in messages:
            message.ack()
        assert not connection.default_channel.client.hlen("unacked")
        lease.stop()
        assert caplog.text.count("no lease of its own") == 1


def test_the_documented_rights_are_enough(leases_redis: RedisServer) -> None:
    """With those that kombu needs."""
    (rights,) = re.findall(r"broker\* also needs `([^`]+)`", page("stores"))
    url = f"{leases_redis.url.rpartition('/')[0]}/14"
    with Connection(url) as admin:
        admin.default_channel.client.flushdb()
        admin.default_channel.client.execute_command(
            *("ACL", "SETUSER", "worker", "reset", "on", ">secret", "~celery_leases:*"),
            *("~unacked*", "+select", "+ping", "+client", "+hello", *rights.split()),
        )
    with Connection(url.replace("redis://", "redis://worker:secret@")) as connection:
        workers = Workers(connection.default_channel.pool, PREFIX)
        dies(workers, "a", "t1", "t2")
        workers.renew("b", 60, 60, {}, ["t9"])
        taken, _ = workers.take("a", 60) or ("", [])
        channel = connection.default_channel
        channel.qos._remove_from_indices("t1").execute()
        assert _return_page(workers, channel, taken, ["t1"]) == (0, 0)
        assert [one.messages for one in workers.listed() if one.name == "a"] == [1]
        workers.forget("b")
