"""How a lease is written down in Redis: the names of its keys, and its value."""

from __future__ import annotations

import json
import math
import re
from typing import Any, Final

from celery_leases.core.ports import Holder
from celery_leases.core.records import Bid
from celery_leases.stores.lua import COOLING

VERSION: Final = 1
ENDLESS: Final = 60.0
"""Seconds to report for a lease key without a TTL, which only somebody else can have made: look again then."""


class Keys:
    """The names below one prefix. All keys of a task key share a Redis Cluster hash tag."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.epoch = f"{prefix}:epoch"
        #: For ``SCAN``: every lease, and with it whatever looks like one.
        self.every_lease = re.sub(r"([\\*?\[\]])", r"\\\1", prefix) + ":{*}:lease"

    def lease(self, stored_key: str) -> str:
        """The key of a lease."""
        return f"{self.prefix}:{{{stored_key}}}:lease"

    def mark(self, stored_key: str, name: str) -> str:
        """The key of a mark; braces in *name* are escaped, or it could be the lease of another stored key."""
        escaped = name.replace("%", "%25").replace("}", "%7D")
        return f"{self.prefix}:{{{stored_key}}}:mark:{escaped}"

    def stored_key(self, lease: str) -> str:
        """The stored key whose lease key is *lease*."""
        return lease[len(self.prefix) + 2 : -len("}:lease")]


def milliseconds(seconds: float) -> int:
    """As Redis counts TTLs: rounded up, as a lease must not end before its holder believes it does."""
    return max(1, math.ceil(seconds * 1000))


def begin(token: str) -> str:
    """What the value of a lease held by *token* begins with; raises ValueError for a token with blanks."""
    if not token or any(letter.isspace() for letter in token) or token.startswith(COOLING):
        raise ValueError(f"an owner token must be a word without blanks that is no cooldown's, not {token!r}")
    return f"{token} "


def value_of(bid: Bid) -> str:
    """The value of the lease *bid* asks for."""
    data = {"v": VERSION, "ttl": bid.ttl, "host": bid.holder, "call": bid.call_id}
    return begin(bid.token) + json.dumps(data, separators=(",", ":"))


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
    )


def remaining(milliseconds_left: int) -> float:
    """Seconds from the answer of ``PTTL`` for a key that exists."""
    return milliseconds_left / 1000 if milliseconds_left >= 0 else ENDLESS


def as_text(reply: Any) -> str:
    """A reply of a client that may decode replies or not."""
    return reply.decode(errors="replace") if isinstance(reply, bytes) else str(reply)
