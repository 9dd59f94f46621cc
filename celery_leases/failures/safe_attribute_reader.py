"""Reads attributes of unknown objects: each once, without raising, and with conversion to the
expected types.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from datetime import timedelta
from itertools import islice
from typing import Any, Final

from celery_leases.text.durations import parsed

MEMBERS = 300
"""Members of an unknown collection that are read, at most."""


READING_TIME: Final = 1.0
"""Seconds after which no further attribute is read."""


class Reader:
    """Reads the attributes of one error: each once, and none after :data:`READING_TIME`.

    An attribute that raises counts as ``None``, even if it raises ``SystemExit`` or
    ``KeyboardInterrupt``. These cannot be an interrupt of the task: an error is read after its body
    has ended, and ``LeaseLost``, the soft time limit and SIGTERM are deferred until the outcome is
    written. The time of a single attribute is not limited. *clock* returns seconds; without it
    there is no limit.
    """

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        self._clock = clock
        self._until = clock() + READING_TIME if clock is not None else math.inf
        # The object is stored too, so that its id cannot be used for another object.
        self._seen: dict[tuple[int, str], tuple[object, Any]] = {}

    @property
    def timed_out(self) -> bool:
        """Whether :data:`READING_TIME` is over: no further attribute is read."""
        return self._clock is not None and self._clock() >= self._until

    def attribute(self, thing: object, name: str) -> Any:
        """The attribute; ``None`` if it is missing or raises."""
        return self._once(thing, name, lambda: getattr(thing, name, None))

    def instance_attribute(self, thing: object, name: str) -> Any:
        """The value of *name* in the instance's ``__dict__``, so that no property runs; otherwise
        ``None``.
        """
        held = self.attribute(thing, "__dict__")
        return held.get(name) if type(held) is dict else None

    def method_result(self, thing: object, name: str) -> Any:
        """The result of the method without arguments; ``None`` if it is missing or raises."""
        method = self.attribute(thing, name)
        return self._once(thing, f"{name}()", lambda: method() if callable(method) else None)

    def _once(self, thing: object, name: str, read: Callable[[], Any]) -> Any:
        known = self._seen.get((id(thing), name))
        if known is not None:
            return known[1]
        if self.timed_out:
            return None
        try:
            value = read()
        except BaseException:  # noqa: BLE001 - a property may raise anything
            value = None
        self._seen[id(thing), name] = thing, value
        return value


def members(thing: object) -> list[Any]:
    """The first members of a collection; none if it cannot be iterated."""
    try:
        return (
            list(islice(thing, MEMBERS))
            if isinstance(thing, Iterable) and not isinstance(thing, str | bytes)
            else []
        )
    except BaseException:  # noqa: BLE001 - an unknown collection may raise anything
        return []


def as_int(value: object) -> int | None:
    """*value* as a plain int, if it is an int (or an IntEnum) and no bool; otherwise ``None``."""
    return int(value) if isinstance(value, int) and not isinstance(value, bool) else None


def as_text(value: object) -> str | None:
    """*value* as a plain str, if it is a str and not empty; otherwise ``None``."""
    return str.__str__(value) or None if isinstance(value, str) else None


def as_seconds(value: object) -> float | None:
    """*value* in seconds, if it is above 0: a number, a timedelta, or text such as ``"20"`` or
    ``"1.5s"``; otherwise ``None``.
    """
    if isinstance(value, timedelta):
        found: float | None = value.total_seconds()
    elif isinstance(value, str):
        found = parsed(value)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        found = float(value) if abs(value) < 1e15 else None
    else:
        return None
    return found if found is not None and 0 < found < math.inf else None
