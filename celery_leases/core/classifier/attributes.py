"""Reading attributes of objects nobody knows: never raises, and believes only the types it asks for."""

from __future__ import annotations

import math
from collections.abc import Iterable
from datetime import timedelta
from itertools import islice
from typing import Any

from celery_leases.core.durations import parsed

MEMBERS = 300
"""As many members of a foreign collection are looked at."""


def attribute(thing: object, name: str) -> Any:
    """The attribute, or ``None`` when it is missing or raises."""
    try:
        return getattr(thing, name, None)
    except Exception:  # noqa: BLE001 - a property may raise anything
        return None


def own(thing: object, name: str) -> Any:
    """What the instance itself holds under *name*, so that no property is run; else ``None``."""
    held = attribute(thing, "__dict__")
    return held.get(name) if type(held) is dict else None


def called(thing: object, name: str) -> Any:
    """What the method returns without arguments, or ``None`` when there is none or it raises."""
    method = attribute(thing, name)
    try:
        return method() if callable(method) else None
    except Exception:  # noqa: BLE001 - it is not ours
        return None


def members(thing: object) -> list[Any]:
    """The first members of a collection; none when it cannot be iterated."""
    try:
        return (
            list(islice(thing, MEMBERS)) if isinstance(thing, Iterable) and not isinstance(thing, str | bytes) else []
        )
    except Exception:  # noqa: BLE001 - it is not ours
        return []


def whole(value: object) -> int | None:
    """*value* as a plain int, if it is one (an enum of ints is) and not a bool."""
    return int(value) if isinstance(value, int) and not isinstance(value, bool) else None


def word(value: object) -> str | None:
    """*value* as a plain str, if it is one with something in it."""
    return str.__str__(value) or None if isinstance(value, str) else None


def span(value: object) -> float | None:
    """Seconds above 0: a number, a timedelta, or text such as ``"20"`` or ``"1.5s"``."""
    if isinstance(value, timedelta):
        found: float | None = value.total_seconds()
    elif isinstance(value, str):
        found = parsed(value)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        found = float(value) if abs(value) < 1e15 else None
    else:
        return None
    return found if found is not None and 0 < found < math.inf else None
