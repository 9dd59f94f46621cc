"""Durations: read from numbers, text and timedeltas, and written in words."""

from __future__ import annotations

import math
import re
from datetime import UTC, datetime, timedelta, tzinfo
from typing import Final

from celery_leases.text.base_errors import LeaseConfigurationError

Duration = float | str | timedelta
"""A duration in options and arguments: a number of seconds, text such as ``"5m"``, or a
timedelta.
"""

LONGEST: Final = 10 * 365 * 86_400.0
"""Ten years in seconds. A longer duration is a mistake, and may overflow a timestamp."""

UNITS: Final = {
    "d": 86_400.0,
    "h": 3_600.0,
    "m": 60.0,
    "s": 1.0,
    "ms": 1e-3,
    "us": 1e-6,
    "µs": 1e-6,
    "ns": 1e-9,
}
"""Seconds per unit: the units of Go's durations, which HTTP headers use too, and days."""

ROUNDED_OFF: Final = 5.0
"""Seconds that :func:`in_words` leaves out above a minute, such as jitter."""

_NUMBER: Final = re.compile(r"\d{1,18}(?:\.\d{0,18})?|\.\d{1,18}", re.ASCII)
_PART: Final = re.compile(rf"({_NUMBER.pattern})(ms|us|µs|ns|d|h|m|s)", re.ASCII)


def seconds(value: object, what: str = "a duration", *, zero: bool = False) -> float:
    """The seconds of a duration: a number, a timedelta, or text such as ``"1h30m"``, ``"250ms"``,
    ``"300"``.

    It must be above 0 (or 0, with *zero*) and below ten years. Another value raises
    :class:`LeaseConfigurationError`, in which the value is called *what*.
    """
    span = _span(value)
    if span is None or not (0 < span < LONGEST or (zero and span == 0)):
        least = "0 or more seconds" if zero else "seconds above 0"
        raise LeaseConfigurationError(
            f"{what}={value!r} is not usable; write {least} (below ten years) as a number, "
            'as text such as "30s", "5m" or "1h30m", or as a timedelta'
        )
    return span


def parsed(text: str) -> float | None:
    """The seconds of a text such as ``"6m0s"``, ``"12ms"`` or ``"300"``; ``None`` for another
    text.
    """
    text = text.strip()
    if _NUMBER.fullmatch(text):
        return float(text)
    total, position = 0.0, 0
    while part := _PART.match(text, position):
        total += float(part[1]) * UNITS[part[2]]
        position = part.end()
    return total if text and position == len(text) else None


def moment(text: str, zone: tzinfo | None = None) -> datetime:
    """The time that *text* names, aware: one in ISO 8601, or a span before now such as ``"12h"``.

    A time without a zone is in *zone*, by default that of this machine. Raises
    :class:`LeaseConfigurationError` for any other text, also for a number without a unit: it could
    be a duration or a date.
    """
    bare = text.strip().isdigit()
    span = None if bare else parsed(text)
    try:
        found = datetime.fromisoformat(text) if span is None and not bare else None
    except ValueError:
        found = None
    try:
        if span is not None:
            return datetime.now(UTC) - timedelta(seconds=span)
        if found is not None:
            zoned = found if found.tzinfo or zone is None else found.replace(tzinfo=zone)
            return zoned.astimezone(UTC)
    except (ValueError, OverflowError):
        raise LeaseConfigurationError(f"{text!r} is too far away") from None
    raise LeaseConfigurationError(
        f"{text!r} is not a time: write a time such as 2026-04-01T03:00, or 12h for 12 hours ago"
    )


def in_words(span: float) -> str:
    """*span* seconds in words, rounded up: ``"45 seconds"``, ``"5 minutes"``, ``"2 hours"``.

    A wait of five minutes and a little jitter is ``"5 minutes"``: see :data:`ROUNDED_OFF`.
    """
    for unit, size in (("hour", 3600), ("minute", 60)):
        if span - ROUNDED_OFF > size:
            return _counted(math.ceil((span - ROUNDED_OFF) / size), unit)
    return _counted(max(1, math.ceil(span)), "second")


def in_short(span: float) -> str:
    """*span* seconds in few characters, for a table: ``"0.3s"``, ``"45s"``, ``"12m"``, ``"3h"``,
    ``"2d"``.
    """
    for unit, size in (("d", 86_400), ("h", 3600), ("m", 60)):
        if span >= 2 * size:
            return f"{int(span // size)}{unit}"
    return f"{span:.0f}s" if span >= 9.95 else f"{span:.1f}s"


def _counted(count: int, unit: str) -> str:
    return f"{count} {unit}{'s' if count > 1 else ''}"


def _span(value: object) -> float | None:
    if isinstance(value, str):
        return parsed(value)
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return None
