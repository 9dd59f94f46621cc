"""Texts of values for pages: durations, times, and values without secrets."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Final

from celery_leases.status import next_try
from celery_leases.text.cleaning import printable
from celery_leases.text.durations import in_short, in_words
from celery_leases.text.redaction import redact, shortened

MAX_LENGTH: Final = 20_000


def printed(value: object) -> str:
    """A value on one line; control characters and bidirectional controls are escaped."""
    return printable(str(value), 300) if value not in (None, "") else ""


def redacted(value: object) -> str:
    """A text without secrets; its line breaks stay."""
    return shortened(printable(str(value), MAX_LENGTH, keep="\n"), MAX_LENGTH) if value else ""


def short(span: float | None) -> str:
    """A duration in few characters."""
    return in_short(span) if span is not None else ""


def words(span: float | None) -> str:
    """A duration in words."""
    return in_words(span) if span else ""


def moment(when: datetime | None) -> str:
    """A time in UTC."""
    return f"{when.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC" if when is not None else ""


def ago(when: datetime | None) -> str:
    """How long ago a time was."""
    return in_short(max(0.0, (datetime.now(UTC) - when).total_seconds())) if when else ""


def as_json(value: Any) -> str:
    """A value as JSON, shortened and without secrets.

    Bidirectional controls and characters that HTML cannot contain are escaped.
    """
    if value is None:
        return ""
    text = redact(json.dumps(value, indent=2, default=str, ensure_ascii=False))
    return shortened(printable(text, MAX_LENGTH, keep="\n"), MAX_LENGTH)


def fact(value: object) -> str:
    """A time, a duration, or a text without secrets."""
    if isinstance(value, datetime):
        return moment(value)
    return short(value) if isinstance(value, float) else redacted(value)


def precise(span: Any) -> str:
    """*span* seconds as text, with milliseconds if it is short."""
    if span < 0.0995:
        return f"{1000 * span:.3g}ms"
    return f"{span:.3g}s" if span < 120 else in_short(span)


FILTERS: Final[Mapping[str, Callable[[Any], str]]] = {
    "printed": printed,
    "redacted": redacted,
    "short": short,
    "words": words,
    "moment": moment,
    "fact": fact,
    "ago": ago,
    "as_json": as_json,
    "next_try": next_try,
    "precise": lambda span: precise(span) if span is not None else "",
}
