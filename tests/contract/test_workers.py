"""The leases of workers on a real Redis: who is registered, who returns the messages of a dead
worker, and that each message is returned once.
"""

import os
import re
import threading
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock
from uuid import uuid4

import pytest
from kombu import Connection, Exchange, Queue
from redis.exceptions import AuthenticationError

from celery_leases.stores.redis.workers import Workers
from celery_leases.testing.waits import wait_until
from celery_leases.worker.takeover import WorkerLease, _take_over
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
        yield opened


@pytest.fixture
def channel(connection: Connection) -> Any:
    """Its channel."""
    return connection.default_channel


@pytest.fixture
def workers(channel: Any) -> Workers:
    """The workers of that broker."""
    return Workers(channel.pool, f"{channel.global_keyprefix}{PREFIX}")


def fetched(connection: Connection, number: int) -> list[Any]:
    """Publish and fetch so many messages, without acknowledging them."""
    queue = connection.SimpleQueue("work")
    for place in range(number):
        queue.put({"n": place})
    return [queue.get(timeout=5) for _ in range(number)]


def waiting(connection: Connection) -> list[int]:
    """The numbers of the messages in the queue, which are removed from it."""
    channel, found = connection.channel(), []
    while (message := channel.basic_get("work")) is not None:
        found.append(message.payload["n"] if hasattr(message, "payload") else message)
        channel.basic_ack(message.delivery_tag)
    return sorted(found)


def test_a_worker_is_known_until_it_is_forgotten(workers: Workers) -> None:
    assert workers.renew("a", 10, 60, {"t1": "task", "t2": "task"}, []) == (False, [])
    assert workers.renew("a", 10, 60, {"t3": "task"}, ["t1"]) == (True, [])
    (state,) = workers.listed()
    assert (state.name, state.messages) == ("a", 2)
    assert state.remaining is not None
    assert 9 < state.remaining <= 10
    workers.forget("a")
    assert workers.listed() == []


def test_only_a_lease_that_has_ended_is_taken(workers: Workers) -> None:
    workers.renew("a", 10, 60, {"t1": "task"}, [])
    assert workers.take("a") is None
    workers.renew("a", 0.001, 60, {}, [])
    wait_until(lambda: workers.renew("b", 10, 60, {}, [])[1] == ["a"], 5, "the lease to end")
    taken = workers.take("a")
    assert taken is not None
    ended, tags = taken
    assert (ended.partition("!")[0], tags) == ("a", ["t1"])
    assert workers.renew("a", 10, 60, {}, [])[0] is False  # so it learns of that
    assert workers.renew("b", 10, 60, {}, []) == (True, [ended])  # until all are returned
    assert (workers.claim(ended, "t1"), workers.claim(ended, "t1")) == (True, False)
    assert workers.take(ended) is None
    assert workers.renew("b", 10, 60, {}, []) == (True, [])


def test_a_worker_without_messages_is_removed(workers: Workers) -> None:
    workers.renew("a", 0.001, 60, {}, [])
    wait_until(lambda: workers.renew("b", 10, 60, {}, [])[1] == ["a"], 5, "the lease to end")
    assert workers.take("a") is None
    assert [state.name for state in workers.listed()] == ["b"]


def test_several_workers_return_each_message_once(
    connection: Connection, workers: Workers, channel: Any
) -> None:
    """Also while the messages are fetched again."""
    for turn in range(TURNS):
        messages = fetched(connection, 8)
        tags = {message.delivery_tag: "task" for message in messages}
        workers.renew(f"dead{turn}", 0.001, 60, tags, [])
        wait_until(lambda: bool(workers.renew("b", 60, 60, {}, [])[1]), 5, "the lease to end")
        names = list(workers.renew("b", 60, 60, {}, [])[1])
        barrier = threading.Barrier(3)

        def restore(names: list[str] = names, barrier: threading.Barrier = barrier) -> None:
            with connection.clone() as own:
                other = own.default_channel
                its = Workers(other.pool, f"{other.global_keyprefix}{PREFIX}")
                barrier.wait()
                while names:
                    for name in names:
                        _take_over(its, other, name)
                    names = list(its.renew(uuid4().hex, 60, 60, {}, [])[1])

        threads = [threading.Thread(target=restore) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert waiting(connection) == list(range(8))
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
        workers.renew("a", 0.001, 60, {message.delivery_tag: "task"}, [])
        wait_until(lambda: workers.renew("b", 60, 60, {}, [])[1] == ["a"], 5, "the lease to end")
        _take_over(workers, stranger.default_channel, "a")
        (ended,) = workers.renew("b", 60, 60, {}, [])[1]
        assert first.default_channel.client.hlen("unacked") == 1
        _take_over(workers, first.default_channel, ended)
        assert workers.take(ended) is None
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
        lease.received(message, "task")
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


def test_a_late_acknowledgement_leaves_the_message_to_its_new_worker(
    connection: Connection, workers: Workers, channel: Any
) -> None:
    lease = opened(connection, "a", 1.0)
    (message,) = fetched(connection, 1)
    lease.received(message, "task")
    lease._renew(workers, channel)
    wait_until(lambda: workers.renew("b", 10, 60, {}, [])[1] == ["a"], 5, "the lease to end")
    _take_over(workers, channel, "a")
    (again,) = [connection.SimpleQueue("work").get(timeout=5)]
    assert again.delivery_tag == message.delivery_tag
    message.ack()
    assert message.acknowledged
    lease._renew(workers, channel)
    assert channel.client.hlen("unacked") == 1
    again.ack()


def test_without_another_worker_a_late_acknowledgement_counts(
    connection: Connection, workers: Workers, channel: Any
) -> None:
    lease = opened(connection, "a", 1.0)
    messages = fetched(connection, 2)
    for message in messages:
        lease.received(message, "task")
    lease._renew(workers, channel)
    wait_until(lambda: (workers.listed()[0].remaining or 0) < 0, 5, "the lease to end")
    messages[0].ack()
    messages[1].reject(requeue=True)
    assert channel.client.hlen("unacked") == 2
    lease._renew(workers, channel)
    assert not channel.client.hlen("unacked")
    assert waiting(connection) == [1]


def test_what_ends_late_is_acknowledged_when_the_worker_stops(
    connection: Connection, workers: Workers, channel: Any
) -> None:
    lease = opened(connection, "a", 1.0)
    messages = fetched(connection, 2)
    for message in messages:
        lease.received(message, "task")
    lease._renew(workers, channel)
    wait_until(lambda: (workers.listed()[0].remaining or 0) < 0, 5, "the lease to end")
    messages[0].ack()
    assert channel.client.hlen("unacked") == 2
    lease._stopping = True
    lease._work(channel)
    assert channel.client.hlen("unacked") == 1
    wait_until(lambda: not workers.listed(), 5, "the lease to be removed")
    messages[1].ack()
    assert not channel.client.hlen("unacked")


def test_a_refusal_after_a_renewal_does_not_let_late_acknowledgements_through(
    connection: Connection, workers: Workers, channel: Any
) -> None:
    """Such as a password that has changed."""
    lease = opened(connection, "a", 1.0)
    (message,) = fetched(connection, 1)
    lease.received(message, "task")
    lease._renew(workers, channel)
    assert not lease._refused_by(AuthenticationError("WRONGPASS"))
    wait_until(lambda: (workers.listed()[0].remaining or 0) < 0, 5, "the lease to end")
    message.ack()
    assert channel.client.hlen("unacked") == 1


def test_an_emptied_broker_gets_the_registrations_again(
    connection: Connection, workers: Workers, channel: Any
) -> None:
    lease = opened(connection, "a", 10.0)
    (message,) = fetched(connection, 1)
    lease.received(message, "task")
    lease._renew(workers, channel)
    workers.forget("a")
    lease._renew(workers, channel)
    assert [one.messages for one in workers.listed()] == [1]
    message.ack()
    assert not channel.client.hlen("unacked")


def test_the_lease_of_a_worker_whose_loop_stands_still_ends(
    connection: Connection, workers: Workers
) -> None:
    lease = opened(connection, "a", 1.0)
    worker = Mock()
    lease.watch_loop(worker)
    (_, loop_runs), _ = worker.hub.call_repeatedly.call_args
    lease.start()
    wait_until(lambda: [one.name for one in workers.listed()] == ["a"], 5, "the lease")
    wait_until(lambda: (workers.listed()[0].remaining or 0) < 0, 10, "the lease to end")
    loop_runs()
    wait_until(lambda: (workers.listed()[0].remaining or 0) > 0, 5, "the lease to be renewed")
    lease.stop()


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
        lease.received(messages[0], "task")
        with caplog.at_level("INFO", "celery_leases"):
            lease.start()
            wait_until(lambda: "no lease of its own" in caplog.text, 5, "the log line")
        lease.received(messages[1], "task")
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
            *("ACL", "SETUSER", "worker", "reset", "on", ">secret", "~celery_leases:*", "+select"),
            *("+ping", "+client", "+hello", *rights.split()),
        )
    with Connection(url.replace("redis://", "redis://worker:secret@")) as connection:
        workers = Workers(connection.default_channel.pool, PREFIX)
        workers.renew("a", 0.001, 60, {"t1": "task", "t2": "task"}, [])
        wait_until(lambda: workers.renew("b", 10, 60, {}, ["t9"])[1] == ["a"], 5, "the end")
        taken = workers.take("a")
        assert taken is not None
        assert workers.claim(taken[0], "t1")
        assert len(workers.listed()) == 2
        workers.forget("b")
