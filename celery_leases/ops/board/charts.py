"""Geometry of the SVG drawings: timelines of attempts and of closings, histograms of run times.

The templates draw the SVG from these numbers and texts, and escape the texts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Final

from celery_leases.ops.formatting import precise
from celery_leases.status import AttemptStatus, ClosingStatus, GroupStatus
from celery_leases.text.durations import in_short

WIDTH: Final = 860
LABEL_WIDTH: Final = 150
ROW_HEIGHT: Final = 22
MIN_BAR_WIDTH: Final = 3.0
BINS: Final = 48
HEIGHT: Final = 120
TICK_MARGIN: Final = 20
"""How far a tick label must be from both ends of the axis."""
MIN_RUN_TIME: Final = 0.001
"""The lowest value, in seconds, on the axis of a histogram."""
Drawing = Mapping[str, Any]
"""The values of a drawing by the names that its template uses."""


def timeline(attempts: Sequence[AttemptStatus], now: datetime) -> Drawing | None:
    """The drawing of *attempts*, the oldest first; ``None`` if there are none."""
    if not attempts:
        return None
    first = attempts[0].started_at
    ends = [_end(attempts, place, now) for place in range(len(attempts))]
    span = max(0.001, *((end - first).total_seconds() for end in ends))
    scale = (WIDTH - LABEL_WIDTH) / span
    bars = [
        {
            "x": round((each.started_at - first).total_seconds() * scale, 2),
            "y": place * ROW_HEIGHT + 4,
            "width": round(max(MIN_BAR_WIDTH, (end - each.started_at).total_seconds() * scale), 2),
            "ended": each.ended,
            "label": f"{each.ended}{f' {in_short(each.runtime)}' if each.runtime is not None else ''}",
            "title": f"{each.started_at:%Y-%m-%d %H:%M:%S} UTC, {each.host}"
            + (f": {each.error}" if each.error else ""),
            "open": each.runtime is None,  # the time of its end is not known
        }
        for place, (each, end) in enumerate(zip(attempts, ends, strict=True))
    ]
    return _rows("bars", bars, first, span)


def _rows(name: str, rows: Sequence[Any], first: datetime, span: float) -> Drawing:
    """A drawing of rows, one below the other, on one time axis."""
    size = {"width": WIDTH, "height": len(rows) * ROW_HEIGHT + 4}
    return size | {name: rows, "first": first, "span": in_short(span)}


def _end(attempts: Sequence[AttemptStatus], place: int, now: datetime) -> datetime:
    """When an attempt ended; if that is not known, when the next one started, or now."""
    each = attempts[place]
    if each.finished_at is not None:
        return each.finished_at
    return (
        attempts[place + 1].started_at if place + 1 < len(attempts) else max(now, each.started_at)
    )


def closings(groups: Sequence[GroupStatus], now: datetime) -> Drawing | None:
    """The drawing of the closings of *groups*; ``None`` if there are none."""
    shown = [group for group in groups if group.closings]
    if not shown:
        return None
    first = min(each.closed_at for group in shown for each in group.closings)
    span = max(1.0, (now - first).total_seconds())
    scale = (WIDTH - LABEL_WIDTH) / span

    def bar(each: ClosingStatus) -> tuple[float, float, str]:
        ends = each.closed_at + timedelta(seconds=each.seconds)
        lasted = min(ends, each.opened_at or ends, max(now, each.closed_at)) - each.closed_at
        began = f"{each.closed_at:%Y-%m-%d %H:%M:%S}"
        opened = f", opened {each.opened_at:%H:%M:%S}" if each.opened_at is not None else ""
        return (
            round((each.closed_at - first).total_seconds() * scale, 2),
            round(max(MIN_BAR_WIDTH, lasted.total_seconds() * scale), 2),
            f"{began} UTC for {in_short(each.seconds)}{opened}: {each.rule or each.reason}",
        )

    rows = [
        (group.group, place * ROW_HEIGHT + 4, [bar(each) for each in reversed(group.closings)])
        for place, group in enumerate(shown)
    ]
    return _rows("rows", rows, first, span)


def histogram(took: Sequence[float], marks: Sequence[tuple[str, str, float | None]]) -> Drawing:
    """The histogram of run times in seconds, with a line for each of *marks*.

    A mark has a kind, a text, and seconds; one without seconds is not drawn.
    """
    given = [(kind, text, at) for kind, text, at in marks if at is not None and at > 0]
    runs = [max(MIN_RUN_TIME, each) for each in took]
    ends = [*runs, *(at for _, _, at in given)] or [1.0]
    low, high = math.log10(min(ends)) - 0.05, math.log10(max(ends)) + 0.05

    def x(seconds: float) -> float:
        place = (math.log10(max(MIN_RUN_TIME, seconds)) - low) / (high - low)
        return round(place * WIDTH, 2)

    counts = [0] * BINS
    for each in runs:
        counts[min(BINS - 1, int((math.log10(each) - low) / (high - low) * BINS))] += 1
    most, wide = max([*counts, 1]), WIDTH / BINS
    bars = [
        (
            round(place * wide, 2),
            round(HEIGHT - count / most * HEIGHT, 2),
            round(wide - 1, 2),
            round(count / most * HEIGHT, 2),
            _title(count, *(10 ** (low + at * (high - low) / BINS) for at in (place, place + 1))),
        )
        for place, count in enumerate(counts)
        if count
    ]
    ticks = [
        (x(10.0**power), precise(10.0**power))
        for power in range(math.ceil(low), math.floor(high) + 1)
        if TICK_MARGIN < x(10.0**power) < WIDTH - TICK_MARGIN
    ]
    lines = [
        {"kind": kind, "text": f"{text} {precise(at)}", "x": x(at)} for kind, text, at in given
    ]
    size = {"width": WIDTH, "height": HEIGHT + 24}
    return size | {"bars": bars, "lines": lines, "ticks": ticks}


def _title(count: int, shortest: float, longest: float) -> str:
    """The tooltip of a bar in a histogram."""
    runs = f"{count:,} run{'s' if count > 1 else ''}"
    return f"{runs}, {precise(shortest)} to {precise(longest)}"
