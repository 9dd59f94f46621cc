"""The last closings of a gate: when, for how long, by which rule, and when it opened again. Pure.

They are for operators: no decision reads them. A store keeps them as one text beside the gate,
written where a gate is closed or opened, and nowhere else.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from celery_leases.protocol.groups import Gate

KEPT: Final = 20
"""So many closings of a group are remembered."""
LATEST: Final = 253_000_000_000.0
"""No time is later than this, in the year 9987."""
REMEMBERED: Final = 30 * 86_400.0
"""Seconds after the last closing for which they are."""


@dataclass(frozen=True, slots=True)
class PastClosing:
    """A gate was closed at ``closed_at`` until ``until``, for the ``trips``-th time in a row.

    ``opened_at``: when a probe or an operator opened it again, ``None`` if that did not happen or
    is not known. Times are seconds since the epoch, by the clock of the process that closed it.
    """

    closed_at: float
    until: float
    trips: int
    reason: str
    rule: str | None = None
    opened_at: float | None = None


def with_closing(past: Sequence[PastClosing], shut: Gate, now: float) -> list[PastClosing]:
    """*past*, the latest first, once the gate was closed at *now* and is as *shut*.

    A closing of the same trip as the standing one is part of it. Bodies that fail together are
    noted in any order, and are one closing then.
    """
    closing = PastClosing(now, now + shut.closed_for, shut.trips, shut.reason, shut.rule)
    if not past or not _stands(past[0], closing):
        return [closing, *past][:KEPT]
    longest = max(past[0], closing, key=lambda each: each.until)
    return [replace(longest, closed_at=min(past[0].closed_at, now)), *past[1:]]


def _stands(latest: PastClosing, closing: PastClosing) -> bool:
    """Whether the gate was still shut by *latest* when it was closed once more."""
    over = latest.opened_at is not None or latest.until <= closing.closed_at
    return not over and latest.trips == closing.trips


def with_opening(past: Sequence[PastClosing], now: float) -> list[PastClosing]:
    """*past* once the gate was opened at *now*."""
    if not past or past[0].opened_at is not None:
        return [*past]
    return [replace(past[0], opened_at=now), *past[1:]]


def dump(past: Sequence[PastClosing]) -> str:
    """As JSON, on one line."""
    return json.dumps(
        [
            [
                round(each.closed_at, 3),
                round(each.until, 3),
                each.trips,
                each.reason,
                each.rule,
                round(each.opened_at, 3) if each.opened_at is not None else None,
            ]
            for each in past
        ],
        separators=(",", ":"),
    )


def load(text: str | None) -> list[PastClosing]:
    """What :func:`dump` has given; nothing where it cannot be read."""
    try:
        return [_closing(*each) for each in json.loads(text or "[]")]
    except (ValueError, TypeError, OverflowError, RecursionError):
        return []


def _closing(
    closed_at: Any, until: Any, trips: Any, reason: Any, rule: Any, opened_at: Any, *_: Any
) -> PastClosing:
    """One of them; what a later release writes behind it is left out."""
    return PastClosing(
        _time(closed_at),
        _time(until),
        int(trips),
        str(reason),
        str(rule) if rule is not None else None,
        _time(opened_at) if opened_at is not None else None,
    )


def _time(said: Any) -> float:
    if not 0 <= float(said) < LATEST:
        raise ValueError(f"{said!r} is no time")
    return float(said)
