"""How the board says things: spans, moments, values without secrets."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Final

from celery_leases.board.charts import precise
from celery_leases.common.durations import in_short, in_words
from celery_leases.common.redaction import redact, shortened
from celery_leases.common.texts import printable
from celery_leases.protocol.status import next_try

LONGEST: Final = 20_000


def printed(value: object) -> str:
    """A word in one line; what a terminal or a reading order would obey is escaped."""
    return printable(str(value), 300) if value not in (None, "") else ""


def redacted(value: object) -> str:
    """A text without secrets; its lines stay."""
    return shortened(printable(str(value), LONGEST, keep="\n"), LONGEST) if value else ""


def short(span: float | None) -> str:
    """A span in few characters."""
    return in_short(span) if span is not None else ""


def words(span: float | None) -> str:
    """A span in words."""
    return in_words(span) if span else ""


def moment(when: datetime | None) -> str:
    """A moment in UTC."""
    return f"{when.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC" if when is not None else ""


def ago(when: datetime | None) -> str:
    """How long ago a moment was."""
    return in_short(max(0.0, (datetime.now(UTC) - when).total_seconds())) if when else ""


def as_json(value: Any) -> str:
    """A value as JSON, without secrets and within bounds; what a reading order would obey, or no
    page can have, is escaped.
    """
    if value is None:
        return ""
    text = redact(json.dumps(value, indent=2, default=str, ensure_ascii=False))
    return shortened(printable(text, LONGEST, keep="\n"), LONGEST)


def own_key(stored: str) -> str:
    """The key in a stored key, as people know it."""
    return printed(stored.partition("|")[2] or stored)


def task_of(stored: str) -> str:
    """The namespace in a stored key, by default the name of the task."""
    return printed(stored.removeprefix("t:").partition("|")[0])


FILTERS: Final[Mapping[str, Callable[[Any], str]]] = {
    "printed": printed,
    "redacted": redacted,
    "short": short,
    "words": words,
    "moment": moment,
    "ago": ago,
    "as_json": as_json,
    "next_try": next_try,
    "own_key": own_key,
    "task_of": task_of,
    "precise": lambda span: precise(span) if span is not None else "",
}
