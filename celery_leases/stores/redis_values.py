"""How leases and gates are written down in Redis: the names of their keys, and their values."""

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

from celery_leases.core.gates import Gate
from celery_leases.core.ports import Holder
from celery_leases.core.records import Bid
from celery_leases.stores.gate_values import gate_from, gate_name, why
from celery_leases.stores.lua import COOLING

VERSION: Final = 1
_TOKEN: Final = re.compile(rf"(?!{COOLING})\S+").fullmatch
_quoted: Final = json.encoder.encode_basestring_ascii
ENDLESS: Final = 60.0
"""Seconds to report for a lease key without a TTL, which only somebody else can have made: look again then."""


class Keys:
    """The names below one prefix. All keys of a task key, and of a gate, share a Redis Cluster hash tag.

    *clustered*: so do a lease and its epoch, of which there is one for each slot.
    """

    def __init__(self, prefix: str, *, clustered: bool = False) -> None:
        self.prefix = prefix
        self._clustered = clustered
        literally = re.sub(r"([\\*?\[\]])", r"\\\1", prefix)
        #: For ``SCAN``: every lease, and with it whatever looks like one.
        self.every_lease = literally + ":{*}:lease"
        #: The same for gates that are not open.
        self.every_gate = literally + ":{gate:*}:trips"

    def lease(self, stored_key: str) -> str:
        """The key of a lease."""
        return f"{self.prefix}:{{{stored_key}}}:lease"

    def epoch(self, stored_key: str) -> str:
        """The key that says since when the server of a lease remembers."""
        if not self._clustered:
            return f"{self.prefix}:epoch"
        return f"{self.prefix}:epoch:{{{_tags()[key_slot(self.lease(stored_key).encode())]}}}"

    def mark(self, stored_key: str, name: str) -> str:
        """The key of a mark; braces in *name* are escaped, or it could be the lease of another stored key."""
        return f"{self.prefix}:{{{stored_key}}}:mark:{_escaped(name)}"

    def gate(self, group: str) -> tuple[str, str, str]:
        """The keys of a gate: its trips, whether it is closed, its probe's slot."""
        stem = f"{self.prefix}:{{gate:{_escaped(gate_name(group))}}}"
        return f"{stem}:trips", f"{stem}:closed", f"{stem}:probe"

    def group(self, trips: str) -> str:
        """The group of the gate whose trips are kept under the key *trips*."""
        return unquote(trips[len(f"{self.prefix}:{{gate:") : -len("}:trips")])

    def stored_key(self, lease: str) -> str:
        """The stored key whose lease key is *lease*."""
        return lease[len(self.prefix) + 2 : -len("}:lease")]


@cache
def _tags() -> dict[int, int]:
    """A hash tag for each slot of a Redis Cluster."""
    tags: dict[int, int] = {}
    for number in count():
        tags.setdefault(key_slot(str(number).encode()), number)
        if len(tags) == REDIS_CLUSTER_HASH_SLOTS:
            return tags
    raise AssertionError("unreachable: every slot has its numbers")


def _escaped(name: str) -> str:
    return name.replace("%", "%25").replace("{", "%7B").replace("}", "%7D")


def milliseconds(seconds: float) -> int:
    """As Redis counts TTLs: rounded up, as a lease must not end before its holder believes it does."""
    return max(1, math.ceil(seconds * 1000))


def begin(token: str) -> str:
    """What the value of a lease held by *token* begins with; raises ValueError for a token with blanks."""
    if not _TOKEN(token):
        raise ValueError(f"an owner token must be a word without blanks that is no cooldown's, not {token!r}")
    return f"{token} "


def value_of(bid: Bid) -> str:
    """The value of the lease *bid* asks for."""
    host, call, database = _quoted(bid.holder), _quoted(bid.call_id), _quoted(bid.database)
    return f'{bid.token} {{"v":{VERSION},"ttl":{bid.ttl!r},"host":{host},"call":{call},"db":{database}}}'


def holder_of(value: Any, milliseconds_left: int) -> Holder:
    """The holder named in *value*; one without ``call_id`` and ``host`` where it is not of our making."""
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
    """Seconds from the answer of ``PTTL`` for a key that exists."""
    return milliseconds_left / 1000 if milliseconds_left >= 0 else ENDLESS


def tally_of(gate: Gate) -> str:
    """The value that stands for the trips of *gate*: their number, a blank, and why it closed."""
    return f"{gate.trips} {why(gate)}"


def gate_of(group: str, seen: Sequence[Any]) -> Gate:
    """The gate of *group* from what a script has seen of it."""
    tally, closed_for, slot, left = seen
    text = as_text(tally)
    trips = re.match("[1-9][0-9]*", text)
    probe = (as_text(slot).partition(" ")[0], left / 1000) if slot else None
    return gate_from(group, int(trips[0]) if trips else 1, closed_for / 1000, text.partition(" ")[2], probe)


def as_text(reply: Any) -> str:
    """A reply of a client that may decode replies or not."""
    return reply.decode(errors="replace") if isinstance(reply, bytes) else str(reply)
