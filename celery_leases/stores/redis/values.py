"""The names and values of the keys of leases and groups in Redis."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from functools import cache
from itertools import count
from typing import Any, Final
from urllib.parse import unquote

from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot

from celery_leases.call import Call
from celery_leases.decide.answers import Holder
from celery_leases.groups.group import stored_group
from celery_leases.groups.slots import Ask, Room, Slots, load
from celery_leases.stores.redis.lease_scripts import COOLING

VERSION: Final = 1
_TOKEN: Final = re.compile(rf"(?!{COOLING})\S+").fullmatch
_quoted: Final = json.encoder.encode_basestring_ascii
ENDLESS: Final = 60.0
"""The remaining seconds to report for a lease key without a TTL, which another program wrote. The
key is read again after that time.
"""


class Keys:
    """The names of keys, which begin with *prefix*. All keys of a task key share a Redis Cluster
    hash tag, and so do all keys of a group.

    *clustered*: there is one epoch key for each slot, so that a lease and its epoch share a slot.
    """

    def __init__(self, prefix: str, *, clustered: bool = False) -> None:
        self.prefix = prefix
        self._clustered = clustered
        literally = _literally(prefix)
        #: A pattern for ``SCAN`` that matches every lease.
        self.lease_pattern = literally + ":{*}:lease"
        #: The same for the slots of every group.
        self.slots_pattern = literally + ":{group:*}:slots"
        #: The same for the history of every group.
        self.history_pattern = literally + ":{group:*}:past"

    def lease(self, stored_key: str) -> str:
        """The key of a lease."""
        return f"{self.prefix}:{{{stored_key}}}:lease"

    def epoch(self, stored_key: str) -> str:
        """The key that exists for as long as the server of a lease has had its data."""
        if not self._clustered:
            return f"{self.prefix}:epoch"
        return f"{self.prefix}:epoch:{{{_tags()[key_slot(self.lease(stored_key).encode())]}}}"

    def mark(self, stored_key: str, name: str) -> str:
        """The key of a mark. Braces in *name* are escaped, so that no mark has the name of a lease
        of another stored key.
        """
        return f"{self.prefix}:{{{stored_key}}}:mark:{_escaped(name)}"

    def marks_pattern(self, stored_key: str) -> str:
        """A pattern for ``SCAN`` that matches every mark of a key."""
        return f"{_literally(self.mark(stored_key, ''))}*"

    def mark_name(self, key: str) -> str:
        """The name of the mark with this key."""
        return unquote(key[key.rindex("}:mark:") + len("}:mark:") :])

    def slots(self, group: str) -> str:
        """The key of a group's slots."""
        return f"{self.prefix}:{{group:{_escaped(stored_group(group))}}}:slots"

    def past(self, group: str) -> str:
        """The key of a group's history."""
        return f"{self.prefix}:{{group:{_escaped(stored_group(group))}}}:past"

    def group(self, key: str) -> str:
        """The name of the group that *key* belongs to."""
        return unquote(key[len(f"{self.prefix}:{{group:") : key.rindex("}:")])


@cache
def _tags() -> dict[int, int]:
    """A hash tag for each slot of a Redis Cluster."""
    tags: dict[int, int] = {}
    for number in count():
        tags.setdefault(key_slot(str(number).encode()), number)
        if len(tags) == REDIS_CLUSTER_HASH_SLOTS:
            return tags
    raise AssertionError("unreachable: each slot has numbers")


def _literally(text: str) -> str:
    """*text* in a pattern for ``SCAN``."""
    return re.sub(r"([\\*?\[\]])", r"\\\1", text)


def _escaped(name: str) -> str:
    return name.replace("%", "%25").replace("{", "%7B").replace("}", "%7D")


def milliseconds(seconds: float) -> int:
    """A TTL for Redis in milliseconds. It is rounded up, because a lease must not end before its
    holder's deadline.
    """
    return max(1, math.ceil(seconds * 1000))


def token_prefix(token: str) -> str:
    """The token and the space with which the value of a lease begins; raises ValueError for a token
    with whitespace.
    """
    if not _TOKEN(token):
        raise ValueError(
            f"an owner token must not contain whitespace, and must not begin with {COOLING!r}; got {token!r}"
        )
    return f"{token} "


def value_of(call: Call) -> str:
    """The value of the lease for *call*."""
    host, call_id, database = map(_quoted, (call.host, call.call_id, call.database))
    return (
        f'{call.token} {{"v":{VERSION},"ttl":{call.options.ttl!r},"host":{host},'
        f'"call":{call_id},"db":{database}}}'
    )


def holder_of(value: Any, milliseconds_left: int) -> Holder:
    """The holder in *value*, the value of a lease. If celery_leases did not write it, ``call_id``
    and ``host`` are empty.
    """
    token, _, text = as_text(value).partition(" ")
    try:
        data = json.loads(text)
    except ValueError:
        data = None
    if not isinstance(data, dict):
        data = {}
    ttl = data.get("ttl")
    return Holder(
        token,
        str(data.get("call") or ""),
        str(data.get("host") or ""),
        float(ttl) if isinstance(ttl, int | float) else 0.0,
        remaining(milliseconds_left),
        str(data.get("db") or ""),
    )


def remaining(milliseconds_left: int) -> float:
    """The remaining seconds, from the reply of ``PTTL`` for an existing key."""
    return milliseconds_left / 1000 if milliseconds_left >= 0 else ENDLESS


def ask_values(ask: Ask) -> tuple[int, float, float, str]:
    """What a call asks of its group, as arguments of a script."""
    return ask.limit, ask.pause, ask.since, ask.worker


def room_of(reply: Sequence[Any]) -> Room:
    """The room from the result of the Lua function ``room_in``."""
    places, wait, running, limit, now = reply
    return Room(places, float(as_text(wait)) / 1000, running, limit, now)


def slots_of(reply: Sequence[Any]) -> tuple[Slots, float]:
    """The slots that still count, and the time of their server, from their text and that time."""
    text, now = reply[0], float(reply[1])
    return load(as_text(text) if text else None).at(now), now


def as_text(reply: Any) -> str:
    """The text of a reply. It is already decoded if the client decodes replies."""
    return reply.decode(errors="replace") if isinstance(reply, bytes) else str(reply)
