"""The conditions by which operators select records: one table for programs, commands and pages."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta, tzinfo
from typing import Any, Final, NamedTuple

from celery_leases.errors import LeaseConfigurationError, LeaseMisuse
from celery_leases.record_filters import KNOWN_STATES, RecordFilter
from celery_leases.text.durations import moment, seconds


class Condition(NamedTuple):
    """A field of :class:`~celery_leases.record_filters.RecordFilter` that an operator may
    enter, its kind (``states``, ``text``, ``time`` or ``flag``), and its option of a command.
    """

    name: str
    kind: str
    option: str
    help: str


CONDITIONS: Final = (
    Condition("states", "states", "--state", "Only keys in this state; may be repeated."),
    Condition("task", "text", "--task", "Only keys of this task."),
    Condition(
        *("group", "text", "--group"),
        "Only keys whose last failure belongs to this cooldown group.",
    ),
    Condition("prefix", "text", "--key", "Only keys that start with this text."),
    Condition(
        *("since", "time", "--since"),
        "Only keys whose latest attempt started at this time or later: 2026-04-01T03:00, or 12h for 12 hours ago.",
    ),
    Condition(
        *("until", "time", "--until"),
        "Only keys whose latest attempt started before this time, written as for --since.",
    ),
    Condition(
        *("reason", "text", "--reason"),
        "Only keys with this reason, as `leases list` shows it: rate_limited, lease_ended.",
    ),
    Condition(
        *("crashed", "flag", "--crashed"),
        "Only keys with crashes, known or suspected, in the latest attempts.",
    ),
)
"""All conditions, in the order of a command's help."""
NAMES: Final = tuple(each.name for each in CONDITIONS)


def filter_of(given: Mapping[str, Any], zone: tzinfo | None = None) -> RecordFilter:
    """The filter with all *given* conditions; empty ones are left out.

    A time is a datetime, a duration before now, or text in ISO 8601, in *zone* if it has none.
    Raises :class:`~celery_leases.errors.LeaseMisuse` for an unknown condition or state, and
    :class:`~celery_leases.errors.LeaseConfigurationError` for a time that cannot be read.
    """
    if unknown := set(given).difference(NAMES):
        raise LeaseMisuse(f"{min(unknown)} is no condition: write {', '.join(NAMES)}")
    found: dict[str, Any] = {name: value for name, value in given.items() if value}
    states = found.get("states", ())
    if isinstance(states, str) or not set(KNOWN_STATES).issuperset(states):
        raise LeaseMisuse(f"states={states!r}: give a list of {', '.join(sorted(KNOWN_STATES))}")
    times = {
        name: _microseconds(name, found[name], zone) for name in ("since", "until") if name in found
    }
    found |= times | {"states": tuple(states), "crashed": "crashed" in found}
    return RecordFilter(**found)


def _microseconds(name: str, given: Any, zone: tzinfo | None) -> int:
    """A time in microseconds since the epoch."""
    try:
        if isinstance(given, datetime):
            when = given
        elif isinstance(given, str):
            when = moment(given, zone)
        else:
            when = datetime.now(UTC) - timedelta(seconds=seconds(given, zero=True))
    except LeaseConfigurationError as error:
        raise LeaseConfigurationError(f"{name}={error}") from None
    return max(0, round(when.timestamp() * 1e6))
