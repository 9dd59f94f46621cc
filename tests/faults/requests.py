"""The requests in what a client sends to Redis, PostgreSQL or RabbitMQ, each with a label."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Final, Protocol

from celery_leases.stores.redis.lease_scripts import Script
from celery_leases.stores.redis.workers import RENEW

SCRIPTS: Final = {
    script.sha: name.lower()
    for module in ("workers", "cooldown_group_scripts", "lease_scripts")
    for name, script in vars(import_module(f"celery_leases.stores.redis.{module}")).items()
    if isinstance(script, Script) and name != "RENEW"
}
"""The name of each script by its SHA-1, but for those that are called again and again."""


@dataclass(frozen=True)
class Request:
    """Some bytes that belong together; *label* is empty if they are no request of a delivery."""

    data: bytes
    label: str = ""


class Reader(Protocol):
    """Reads requests of one connection."""

    def read(self, data: bytes) -> Iterator[Request]:
        """The requests that end in *data*; the rest is kept for the next time."""


class RedisReader:
    """Commands in the protocol of Redis."""

    def __init__(self) -> None:
        self._rest = b""

    def read(self, data: bytes) -> Iterator[Request]:
        """See :class:`Reader`."""
        self._rest += data
        while (found := _redis_command(self._rest)) is not None:
            size, words = found
            whole, self._rest = self._rest[:size], self._rest[size:]
            yield Request(whole, _redis_label(words))


def _redis_command(data: bytes) -> tuple[int, list[bytes]] | None:
    """The length and the words of the first command; ``None`` if it is not complete."""
    end = data.find(b"\r\n")
    if end < 0:
        return None
    words, place = [], end + 2
    for _ in range(int(data[1:end])):
        end = data.find(b"\r\n", place)
        if end < 0:
            return None
        size = int(data[place + 1 : end])
        place = end + 2 + size + 2
        if place > len(data):
            return None
        words.append(data[end + 2 : place - 2])
    return place, words


OF_A_QUEUE: Final = ("LPUSH", "RPUSH")


def _redis_label(words: list[bytes]) -> str:
    name = words[0].decode().upper()
    if name == "EVALSHA":
        return SCRIPTS.get(words[1].decode(), "")
    if name == "EVAL" and words[1] == RENEW.text.encode():
        return "acknowledge" if int(words[11 + int(words[10])]) else ""
    if name == "EVAL":
        return next((label for sha, label in SCRIPTS.items() if _sha(words[1]) == sha), "")
    if name in OF_A_QUEUE and not words[1].endswith(b".pidbox") and b"reply" not in words[1]:
        return "publish"
    if name == "HDEL" and words[1] == b"unacked":
        return "acknowledge"
    if name in ("GET", "SET", "DEL") and b"celery_leases" in words[1]:
        return f"{name} {_kind_of_key(words[1].decode())}"
    return ""


def _sha(text: bytes) -> str:
    return hashlib.sha1(text, usedforsecurity=False).hexdigest()


def _kind_of_key(key: str) -> str:
    return re.sub(r"\{.*", "", key.removeprefix("celery_leases:"))


class PostgresReader:
    """Messages of PostgreSQL's protocol; a request ends with a ``Sync`` or is a simple query."""

    def __init__(self) -> None:
        self._rest = b""
        self._whole = b""
        self._started = False
        self._text = ""
        self._prepared: dict[bytes, str] = {}

    def read(self, data: bytes) -> Iterator[Request]:
        """See :class:`Reader`."""
        self._rest += data
        while (size := self._size()) is not None:
            message, self._rest = self._rest[:size], self._rest[size:]
            self._whole += message
            if not self._started:
                self._started = message[4:8] == b"\0\x03\0\0"
                yield self._request("")
                continue
            kind, body = message[:1], message[5:]
            if kind == b"P":
                name, text, _ = body.split(b"\0", 2)
                self._prepared[name] = self._text = text.decode(errors="replace")
            elif kind == b"B":
                self._text = self._prepared.get(body.split(b"\0")[1], "")
            elif kind == b"Q":
                yield self._request(sql_label(body[:-1].decode(errors="replace")))
            elif kind in (b"S", b"X", b"p"):
                yield self._request(sql_label(self._text) if kind == b"S" else "")

    def _size(self) -> int | None:
        start = 1 if self._started else 0
        if len(self._rest) < start + 4:
            return None
        size = start + int.from_bytes(self._rest[start : start + 4], "big")
        return size if len(self._rest) >= size else None

    def _request(self, label: str) -> Request:
        whole, self._whole, self._text = self._whole, b"", ""
        return Request(whole, label)


def sql_label(text: str) -> str:
    """What a statement does to which table of ours; empty for others."""
    words = text.split()
    if not words:
        return ""
    if words[0].upper() in ("COMMIT", "COMMIT;"):
        return "COMMIT"
    table = re.search(r"\bceler\w+_(records|effects|\w+)\b", text)
    return f"{words[0].upper()} {table[1]}" if table is not None else ""


class AmqpReader:
    """Frames of AMQP 0.9.1."""

    METHODS: Final = {(60, 40): "publish", (60, 80): "acknowledge", (60, 90): "reject"}
    METHODS[60, 120] = "reject"

    def __init__(self) -> None:
        self._rest = b""
        self._whole = b""
        self._label = ""
        self._started = False
        self._missing = 0

    def read(self, data: bytes) -> Iterator[Request]:
        """See :class:`Reader`. A publication is one request with its header and body."""
        self._rest += data
        if not self._started:
            if len(self._rest) < 8:
                return
            first, self._rest, self._started = self._rest[:8], self._rest[8:], True
            yield Request(first)
        while len(self._rest) >= 7:
            size = 8 + int.from_bytes(self._rest[3:7], "big")
            if len(self._rest) < size:
                return
            frame, self._rest = self._rest[:size], self._rest[size:]
            self._whole += frame
            if self._ends_with(frame):
                yield Request(self._whole, self._label)
                self._whole, self._label = b"", ""

    def _ends_with(self, frame: bytes) -> bool:
        kind, body = frame[0], frame[7:-1]
        if kind == 1:
            method = int.from_bytes(body[:2], "big"), int.from_bytes(body[2:4], "big")
            self._label = self.METHODS.get(method, "")
            if self._label == "publish" and (b"pidbox" in body or b"celeryev" in body):
                self._label = ""
            return method != (60, 40)
        if kind == 2:  # the header, with the size of the body
            self._missing = int.from_bytes(body[4:12], "big")
        elif kind == 3:
            self._missing -= len(body)
        return self._missing <= 0


READERS: Final[dict[str, Callable[[], Reader]]] = {
    "redis": RedisReader,
    "postgres": PostgresReader,
    "rabbit": AmqpReader,
}
