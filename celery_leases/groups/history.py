"""The last closings of a group: when, for how long, by which rule, and when it was opened. Pure.

They are shown to operators; no decision reads them. A store writes them as one text beside the
group whenever it closes or opens the group.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from celery_leases.groups.group import ClosedGroup

CLOSINGS_MAX: Final = 20
"""How many closings of a group are stored."""
LATEST_TIME: Final = 253_000_000_000.0
"""Seconds since the epoch, in the year 9987: a later time cannot be read."""
RETENTION: Final = 30 * 86_400.0
"""Seconds after the last closing for which the closings are stored."""


@dataclass(frozen=True, slots=True)
class PastClosing:
    """The group was closed at ``closed_at`` until ``until``, the ``in_a_row``-th time in a row.

    ``opened_at``: when a probe or an operator opened it; ``None`` if neither did, or if that is not
    known. Times are seconds since the epoch, by the clock of the process that closed it.
    """

    closed_at: float
    until: float
    in_a_row: int
    reason: str
    rule: str | None = None
    opened_at: float | None = None


def with_closing(
    past: Sequence[PastClosing], closed_group: ClosedGroup, now: float
) -> list[PastClosing]:
    """*past*, the latest first, with a closing at *now*, after which the group is *closed_group*.

    Closings counted as one are one entry: bodies that fail together may note theirs in any order.
    """
    closing = PastClosing(
        now,
        now + closed_group.closed_for,
        closed_group.in_a_row,
        closed_group.reason,
        closed_group.rule,
    )
    if not past or not _is_same_trip(past[0], closing):
        return [closing, *past][:CLOSINGS_MAX]
    longest = max(past[0], closing, key=lambda each: each.until)
    return [replace(longest, closed_at=min(past[0].closed_at, now)), *past[1:]]


def _is_same_trip(latest: PastClosing, closing: PastClosing) -> bool:
    """Whether *closing* extends *latest*: the group was still closed, and was not counted."""
    over = latest.opened_at is not None or latest.until <= closing.closed_at
    return not over and latest.in_a_row == closing.in_a_row


def with_opening(past: Sequence[PastClosing], now: float) -> list[PastClosing]:
    """*past* with the group opened at *now*."""
    if not past or past[0].opened_at is not None:
        return [*past]
    return [replace(past[0], opened_at=now), *past[1:]]


def dump(past: Sequence[PastClosing]) -> str:
    """The closings as JSON, on one line."""
    return json.dumps(
        [
            [
                round(each.closed_at, 3),
                round(each.until, 3),
                each.in_a_row,
                each.reason,
                each.rule,
                round(each.opened_at, 3) if each.opened_at is not None else None,
            ]
            for each in past
        ],
        separators=(",", ":"),
    )


def load(text: str | None) -> list[PastClosing]:
    """The closings that :func:`dump` has written; none if the text cannot be read."""
    try:
        return [_closing(*each) for each in json.loads(text or "[]")]
    except (ValueError, TypeError, OverflowError, RecursionError):
        return []


def _closing(
    closed_at: Any, until: Any, in_a_row: Any, reason: Any, rule: Any, opened_at: Any, *_: Any
) -> PastClosing:
    """One closing; fields that a later release has added at the end are ignored."""
    return PastClosing(
        _time(closed_at),
        _time(until),
        int(in_a_row),
        str(reason),
        str(rule) if rule is not None else None,
        _time(opened_at) if opened_at is not None else None,
    )


def _time(value: Any) -> float:
    if not 0 <= float(value) < LATEST_TIME:
        raise ValueError(f"{value!r} is no time")
    return float(value)
