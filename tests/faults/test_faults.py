"""The proxies see each request once, cut where they must, and a cut breaks no promise."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from celery_leases.stores.redis.lease_scripts import RELEASE
from celery_leases.stores.redis.workers import RENEW
from tests.faults.__main__ import summed
from tests.faults.playing import COMBINATIONS, Trial
from tests.faults.proxy import NumberingProxy, Point, Wire
from tests.faults.requests import AmqpReader, PostgresReader, Reader, RedisReader
from tests.support.servers import RedisServer


def labels(reader: Reader, data: bytes, size: int) -> list[str]:
    """The labels of what is read in pieces of *size*; nothing may be lost."""
    found = []
    for start in range(0, len(data), size):
        found += list(reader.read(data[start : start + size]))
    assert b"".join(each.data for each in found) == data
    return [each.label for each in found if each.label]


def command(*words: str) -> bytes:
    parts = "".join(f"${len(word)}\r\n{word}\r\n" for word in words)
    return f"*{len(words)}\r\n{parts}".encode()


def message(kind: bytes, body: bytes) -> bytes:
    return kind + (len(body) + 4).to_bytes(4, "big") + body


def frame(kind: int, body: bytes) -> bytes:
    return bytes([kind, 0, 1]) + len(body).to_bytes(4, "big") + body + b"\xce"


def method(of: int, number: int, rest: bytes = b"") -> bytes:
    return frame(1, of.to_bytes(2, "big") + number.to_bytes(2, "big") + rest)


def content(*bodies: bytes) -> bytes:
    size = sum(map(len, bodies))
    head = frame(2, (60).to_bytes(2, "big") + b"\0\0" + size.to_bytes(8, "big") + b"\0\0")
    return head + b"".join(frame(3, body) for body in bodies)


UPDATE = b"UPDATE celery_leases_records SET state = $1"
STREAMS: dict[str, tuple[Callable[[], Reader], bytes, list[str]]] = {
    "redis": (
        RedisReader,
        command("PING")
        + command("EVALSHA", RELEASE.sha, "1", "celery_leases:lease:a")
        + command("EVAL", RELEASE.text, "1", "celery_leases:lease:a")
        + command("LPUSH", "queue", "...")
        + command("LPUSH", "worker.reply.celery.pidbox", "...")
        + command("HDEL", "unacked", "1")
        + command("EVAL", RENEW.text, *"4wmui", "name", *"112", "added", "task", "0", "ended")
        + command("EVAL", RENEW.text, *"4wmui", "name", *"112", "added", "task", "1", "ended"),
        ["release", "release", "publish", "acknowledge", "acknowledge"],
    ),
    "postgres": (
        PostgresReader,
        (8).to_bytes(4, "big")
        + (80877103).to_bytes(4, "big")
        + (9).to_bytes(4, "big")
        + b"\0\x03\0\0\0"
        + message(b"p", b"secret\0")
        + message(b"Q", b"BEGIN\0")
        + message(b"P", b"one\0" + UPDATE + b"\0\0\0")
        + message(b"B", b"\0one\0...")
        + message(b"E", b"\0\0\0\0\0")
        + message(b"S", b"")
        + message(b"B", b"\0one\0...")
        + message(b"S", b"")
        + message(b"Q", b"COMMIT\0"),
        ["UPDATE records", "UPDATE records", "COMMIT"],
    ),
    "rabbit": (
        AmqpReader,
        b"AMQP\0\0\x09\x01"
        + method(10, 11)
        + method(60, 40, b"\0\0\0\x05queue\0")
        + content(b"one", b"two")
        + method(60, 40, b"\0\0\x0ereply.celery.pidbox\0")
        + content(b"three")
        + method(60, 40, b"\0\0\0\x05queue\0")
        + content()
        + frame(8, b"")
        + method(60, 80, b"\0" * 9),
        ["publish", "publish", "acknowledge"],
    ),
}


@pytest.mark.parametrize("size", [1, 7, 100_000])
@pytest.mark.parametrize("name", STREAMS)
def test_each_request_of_a_delivery_has_its_label(name: str, size: int) -> None:
    reader, data, expected = STREAMS[name]
    assert labels(reader(), data, size) == expected


@pytest.mark.parametrize("before", [True, False])
def test_a_connection_is_cut_before_or_after_one_request(
    leases_redis: RedisServer, before: bool
) -> None:
    wire, name = Wire(), f"faults-{before}"
    with (
        NumberingProxy(wire, "broker", "redis", leases_redis.port) as proxy,
        redis.Redis(port=proxy.port, retry=Retry(NoBackoff(), 0)) as through,
        redis.Redis.from_url(leases_redis.url) as direct,
    ):
        through.lpush(name, "not counted")
        wire.begin(Point("broker", "publish", 2, before))
        through.lpush(name, "first")
        with pytest.raises(redis.ConnectionError):
            through.lpush(name, "second")
        assert wire.was_cut.wait(10)
        through.lpush(name, "third")
        assert [str(each) for each in wire.seen] == [
            "after broker: publish",
            "after broker: publish, 2",
            "after broker: publish, 3",
        ]
        expected = [b"third", *([] if before else [b"second"]), b"first", b"not counted"]
        assert direct.lrange(name, 0, -1) == expected


def test_a_row_sums_the_trials_of_a_scenario() -> None:
    point = Point("records", "COMMIT", 1)
    trials = [
        Trial("replay", point, True, 0.51, 0.0),
        Trial("replay", point, False, 2.0, 1.26, ["two runs"]),
        Trial("replay", point, True, 1.0, 0.0, lost=True),
    ]
    assert summed(trials) == {
        "replay": {
            "trials": 3,
            "cut": 2,
            "lost by kombu": 1,
            "violations": 1,
            "longest overlap": 1.26,
            "longest": 2.0,
        }
    }


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("combination", COMBINATIONS)
def test_a_cut_breaks_no_promise(combination: str) -> None:
    """Each third cut; ``make faults`` plays all of them."""
    argv = [sys.executable, "-m", "tests.faults", "--on", combination, "--every", "3"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
