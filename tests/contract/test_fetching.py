"""A message that a worker fetches from a real Redis is noted when it leaves its queue."""

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from unittest.mock import Mock

import pytest
import redis
from celery.exceptions import WorkerTerminate
from kombu import Connection, Consumer, Queue
from kombu.transport.redis import Channel

from celery_leases.testing.waits import wait_until
from celery_leases.worker import fetching
from celery_leases.worker.fetching import noted_at_once
from tests.crash.test_worker_lease_brokers import OF_KOMBU
from tests.support.servers import RedisServer
from tests.unit.doc_pages import page


@pytest.fixture(params=["", "app1:"], ids=["plain", "global_keyprefix"])
def prefix(request: pytest.FixtureRequest) -> str:
    """With which all keys of the broker begin."""
    return str(request.param)


@pytest.fixture
def url(leases_redis: RedisServer) -> str:
    """A database of its own."""
    return f"{leases_redis.url.rpartition('/')[0]}/13"


@pytest.fixture
def connection(prefix: str, url: str) -> Iterator[Connection]:
    """A connection of kombu whose channel notes at once, and waits for a minute."""
    options = {"global_keyprefix": prefix, "socket_timeout": 5, "polling_interval": 60}
    with Connection(url, transport_options=options) as opened:
        opened.default_channel.client.flushdb()
        noted_at_once(opened.default_channel, Mock())
        yield opened


@dataclass(frozen=True)
class Broker:
    """What is in that database, under keys that begin with *prefix*."""

    client: redis.Redis
    prefix: str

    def queued(self, queue: str = "work") -> int:
        """How many messages are in a queue."""
        return int(self.client.llen(self.prefix + queue))

    def wait_until_fetched(self) -> None:
        wait_until(lambda: not self.queued(), 5, "the message to leave its queue")

    def noted(self) -> list[Any]:
        """The notes of unacknowledged messages, of which each has its time."""
        notes = self.client.hgetall(f"{self.prefix}unacked")
        times = self.client.zrange(f"{self.prefix}unacked_index", 0, -1)
        assert sorted(notes) == sorted(times)
        return [json.loads(note) for note in notes.values()]

    def time(self, tag: str) -> float:
        """When that message was fetched."""
        return float(self.client.zscore(f"{self.prefix}unacked_index", tag) or "nan")


@pytest.fixture
def broker(connection: Connection, url: str, prefix: str) -> Iterator[Broker]:
    """That database."""
    with redis.Redis.from_url(url) as client:
        yield Broker(client, prefix)


def consumer(connection: Connection, got: list[Any], *queues: str, **options: Any) -> Consumer:
    """It puts each message into *got*."""
    made = Consumer(
        connection.default_channel,
        [Queue(name, **options) for name in queues],
        callbacks=[lambda _, message: got.append(message)],
        accept=["json", "text/plain"],
    )
    made.consume()
    return made


def publish(connection: Connection, *bodies: object, queue: str = "work", **options: Any) -> None:
    """Put these messages into a queue."""
    with connection.clone() as own, own.SimpleQueue(queue) as opened:
        for body in bodies:
            opened.put(body, **options)


def drain(connection: Connection, got: list[Any], number: int) -> None:
    """Wait until *got* has so many messages."""
    while len(got) < number:
        connection.drain_events(timeout=5)


def is_idle(connection: Connection) -> bool:
    """Read all replies; the worker waits for the next message then."""
    with suppress(TimeoutError):
        while True:
            connection.drain_events(timeout=0.1)
    return bool(connection.default_channel._in_poll)


def ask(connection: Connection) -> None:
    """Send the request for the next message, as each turn of the loop does, and read no reply."""
    connection.transport.cycle.on_poll_start()


def test_a_message_is_noted_before_the_worker_has_read_it(
    connection: Connection, broker: Broker
) -> None:
    """So it is not lost if the worker is killed in between."""
    publish(connection, {"n": 1})
    got: list[Any] = []
    consumer(connection, got, "work")
    ask(connection)
    broker.wait_until_fetched()
    assert (len(broker.noted()), got) == (1, [])
    broker.client.config_resetstat()
    drain(connection, got, 1)
    assert "cmdstat_exec" not in broker.client.info("commandstats")  # kombu notes it no second time
    assert got[0].payload == {"n": 1}
    got[0].ack()
    assert not broker.noted()


def test_the_note_is_that_of_kombu(connection: Connection, broker: Broker, url: str) -> None:
    """Also of empty lists, long numbers and names that JSON escapes."""
    body = {"empty": [], "none": {}, "number": 12345678901234567890, "small": 1e-7, "name": 'ü"/'}
    publish(connection, body, queue='wörk/"1"', headers={"list": [], "float": 1.0})
    got: list[Any] = []
    consumer(connection, got, 'wörk/"1"')
    drain(connection, got, 1)
    tag, qos = got[0].delivery_tag, got[0].channel.qos
    ours, at = broker.noted(), broker.time(tag)
    type(qos).append(qos, got[0], tag)
    assert broker.noted() == ours
    assert 0 <= broker.time(tag) - at < 5
    got[0].fetched_at = broker.time(tag)
    got[0].reject(requeue=True)
    drain(connection, got, 2)
    assert got[1].payload == body
    got[1].ack()


def test_the_order_is_that_of_kombu(connection: Connection, broker: Broker) -> None:
    """By priority, then by turns from each queue, and the oldest message first."""
    publish(connection, "a9", queue="a", priority=9)
    publish(connection, "a1", "a2", queue="a")
    publish(connection, "b1", "b2", queue="b")
    got: list[Any] = []
    consumer(connection, got, "a", "b")
    drain(connection, got, 5)
    assert [one.payload for one in got] == ["a1", "b1", "a2", "b2", "a9"]
    for one in got:
        one.ack()
    assert not broker.noted()


def test_no_more_are_fetched_than_the_prefetch_limit_allows(
    connection: Connection, broker: Broker
) -> None:
    publish(connection, 1, 2, 3)
    got: list[Any] = []
    consumer(connection, got, "work").qos(prefetch_count=2)
    drain(connection, got, 2)
    with pytest.raises(TimeoutError):
        connection.drain_events(timeout=0.01)
    ask(connection)
    assert (broker.queued(), len(broker.noted())) == (1, 2)
    got[0].ack()
    drain(connection, got, 3)
    assert [one.payload for one in got] == [1, 2, 3]


def commands(broker: Broker) -> list[str]:
    """The last command of each connection that is neither a test's nor kombu's for publishing."""
    return [each["cmd"] for each in broker.client.client_list() if each["cmd"] != "client|list"]


def test_a_waiting_worker_leaves_a_message_in_its_queue(
    connection: Connection, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another worker finds it there if this one is killed before it has noted the message."""
    monkeypatch.setattr(fetching, "WAIT", 4)
    got: list[Any] = []
    consumer(connection, got, "work")
    assert is_idle(connection)
    assert "blmove" in commands(broker)
    publish(connection, 1, 2)
    wait_until(lambda: broker.queued() == 1, 5, "a message to be moved")
    assert broker.queued(f"work{Channel.sep}3") == 1
    drain(connection, got, 2)
    assert [one.payload for one in got] == [1, 2]
    assert len(broker.noted()) == 2
    assert is_idle(connection)
    with connection.clone() as other:
        publish(connection, 3)
        wait_until(lambda: not broker.queued(), 5, "a message to be moved")
        theirs: list[Any] = []
        consumer(other, theirs, "work")
        drain(other, theirs, 1)
        assert is_idle(connection)
        assert [[one.payload for one in each] for each in (got, theirs)] == [[1, 2], [3]]


def test_a_waiting_worker_sees_each_priority(connection: Connection, broker: Broker) -> None:
    """It waits for all when it has seen one."""
    got: list[Any] = []
    consumer(connection, got, "work")
    assert is_idle(connection)
    publish(connection, 1, priority=9)
    drain(connection, got, 1)
    assert is_idle(connection)
    assert "brpop" in commands(broker)
    publish(connection, 2, priority=6)
    drain(connection, got, 2)
    assert [one.payload for one in got] == [1, 2]
    assert len(broker.noted()) == 2


def test_the_documented_rights_are_enough(connection: Connection, url: str) -> None:
    """With those that kombu needs."""
    (rights,) = re.findall(r"broker\* also needs `([^`]+)`", page("stores"))
    user = ("reset", "on", ">secret", "~*", "&*", *rights.split(), *OF_KOMBU.split())
    with redis.Redis.from_url(url) as client:
        client.execute_command("ACL", "SETUSER", "narrow", *user)
        narrow = url.replace("redis://", "redis://narrow:secret@")
        with Connection(narrow, transport_options=connection.transport_options) as own:
            noted_at_once(own.default_channel, Mock())
            consumer(own, [], "work")
            assert is_idle(own)
            assert "blmove" in commands(Broker(client, ""))


@pytest.mark.parametrize(
    ("queues", "options", "user"),
    [
        (["work", "other"], {}, []),
        (["work"], {"expires": 60}, []),
        (["work"], {}, ["-blmove"]),
    ],
    ids=["two queues", "a queue that expires", "forbidden"],
)
def test_kombu_waits_where_a_message_cannot_stay_in_its_queue(
    url: str, queues: list[str], options: dict[str, Any], user: list[str]
) -> None:
    """In between, the script fetches."""
    with redis.Redis.from_url(url) as client:
        client.flushdb()
        rights = ("on", ">secret", "~*", "&*", "+@all", *user)
        client.execute_command("ACL", "SETUSER", "narrow", "reset", *rights)
        broker = Broker(client, "")
        with Connection(url.replace("redis://", "redis://narrow:secret@")) as own:
            if options and not hasattr(own.default_channel, "_expires"):
                pytest.skip("this version of kombu lets no queue expire")
            noted_at_once(own.default_channel, Mock())
            got: list[Any] = []
            consumer(own, got, *queues, **options)
            assert is_idle(own)
            wait_until(lambda: "brpop" in commands(broker), 5, "kombu to wait")
            publish(own, 1)
            drain(own, got, 1)
            publish(own, 2)
            ask(own)
            broker.wait_until_fetched()
            assert len(broker.noted()) == 2
            drain(own, got, 2)
            assert [one.payload for one in got] == [1, 2]
            assert all(one.fetched_at == broker.time(one.delivery_tag) for one in got)


@pytest.mark.parametrize(
    "stored",
    [
        "no json",
        "[]",
        '{"properties": 1}',
        '{"properties": {"delivery_tag": "t"}}',
        '{"properties": {"delivery_tag": "t", "delivery_info": {"exchange": ""}}}',
        '{"properties": {"delivery_info": {"exchange": "", "routing_key": "work"}}}',
    ],
)
def test_what_kombu_cannot_note_is_left_to_it(
    connection: Connection, broker: Broker, stored: str
) -> None:
    broker.client.lpush(f"{broker.prefix}work", stored)
    got: list[Any] = []
    consumer(connection, got, "work")
    ask(connection)
    connection.transport.cycle.get(None, timeout=5)
    assert (broker.queued(), broker.noted()) == (1, [])
    ask(connection)
    broker.wait_until_fetched()
    with suppress(Exception):
        connection.transport.cycle.get(None, timeout=5)
    assert not broker.noted()
    assert not broker.queued(f"work{Channel.sep}3")


def test_a_message_that_kombu_cannot_read_is_not_noted(
    connection: Connection, broker: Broker
) -> None:
    """The worker ends by it, as with kombu alone, and it does not come back to the next one."""
    way = {"exchange": "", "routing_key": "work"}
    properties = {"delivery_tag": "t", "delivery_info": way, "body_encoding": "base64"}
    stored = json.dumps({"body": "x", "properties": properties})
    broker.client.lpush(f"{broker.prefix}work", stored)
    consumer(connection, [], "work")
    with pytest.raises(ValueError, match="base64"):
        connection.drain_events(timeout=5)
    assert (broker.queued(), broker.noted()) == (0, [])


def test_a_message_is_noted_still_if_a_signal_interrupts_its_delivery(
    connection: Connection, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Celery's handlers raise wherever the main thread is."""
    got: list[Any] = []
    consumer(connection, got, "work")
    publish(connection, 1)

    def interrupted(*_: Any) -> None:
        raise WorkerTerminate(1)

    with monkeypatch.context() as patched:
        patched.setattr(connection.default_channel.connection, "_deliver", interrupted)
        with pytest.raises(WorkerTerminate):
            drain(connection, got, 1)
    assert len(broker.noted()) == 1


def test_a_message_that_needs_no_acknowledgement_is_not_noted(
    connection: Connection, broker: Broker
) -> None:
    publish(connection, 1)
    got: list[Any] = []
    consumer(connection, got, "work", no_ack=True)
    drain(connection, got, 1)
    assert [one.payload for one in got] == [1]
    assert not broker.noted()


@pytest.mark.parametrize("by_another", [False, True], ids=["own", "another"])
def test_a_message_that_nobody_consumes_any_more_returns_to_its_queue(
    connection: Connection, broker: Broker, by_another: bool
) -> None:
    """By whichever channel kombu returns it."""
    publish(connection, 1)
    got: list[Any] = []
    receiver = consumer(connection, got, "work")
    ask(connection)
    broker.wait_until_fetched()
    receiver.cancel()
    if by_another:
        connection.channel()
        connection.transport.channels.reverse()
    broker.client.config_resetstat()
    connection.drain_events(timeout=5)
    # Once: another worker may have it already.
    assert broker.client.info("commandstats")["cmdstat_hdel"]["calls"] == 1
    assert (broker.queued(), broker.noted(), got) == (1, [], [])


def test_a_channel_that_closes_returns_what_it_has_asked_for(
    connection: Connection, broker: Broker
) -> None:
    publish(connection, 1)
    consumer(connection, [], "work")
    ask(connection)
    broker.wait_until_fetched()
    connection.default_channel.close()
    assert (broker.queued(), broker.noted()) == (1, [])


def test_a_broker_that_forbids_scripts_leaves_all_to_kombu(
    connection: Connection, broker: Broker, url: str, prefix: str
) -> None:
    user = ("narrow", "on", ">secret", "~*", "&*", "+@all", "-lindex")
    broker.client.execute_command("ACL", "SETUSER", *user)
    options = {"global_keyprefix": prefix, "socket_timeout": 5}
    narrow = url.replace("redis://", "redis://narrow:secret@")
    publish(connection, 1, 2)
    with Connection(narrow, transport_options=options) as own:
        noted_at_once(own.default_channel, Mock())
        got: list[Any] = []
        consumer(own, got, "work")
        drain(own, got, 2)
        assert [one.payload for one in got] == [1, 2]
        assert len(broker.noted()) == 2
        for one in got:
            one.ack()
    assert not broker.noted()


@pytest.mark.parametrize("by", ["broker", "worker"])
def test_a_connection_that_ends_before_the_reply_lets_a_worker_look_for_the_message(
    connection: Connection, broker: Broker, by: str
) -> None:
    """Kombu itself closes it if it has been silent for long, and goes on with another one."""
    unanswered = Mock()
    with connection.clone() as own:
        channel = own.default_channel
        noted_at_once(channel, unanswered)
        got: list[Any] = []
        consumer(own, got, "work")
        assert is_idle(own)
        assert not unanswered.called
        publish(connection, 1)
        drain(own, got, 1)
        publish(connection, 2)
        ask(own)
        broker.wait_until_fetched()
        if by == "worker":
            channel.client.connection.disconnect()
            ask(own)
        else:
            channel.client.connection._sock.close()
            with pytest.raises(channel.connection_errors):
                channel.handlers["BRPOP"]()
        ((seconds,),) = (each.args for each in unanswered.call_args_list)
        assert 0 < seconds < 60


def test_a_transport_that_notes_nothing_is_left_as_it_is(url: str) -> None:
    with Connection(url, transport_options={"ack_emulation": False}) as own:
        channel = own.default_channel
        noted_at_once(channel, Mock())
        assert "_brpop_start" not in vars(channel)
    with Connection("memory://") as own:
        noted_at_once(own.default_channel, Mock())
