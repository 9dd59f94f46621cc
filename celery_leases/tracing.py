"""Sets attributes of a leased call on OpenTelemetry's current span; it creates no spans.

OpenTelemetry is not imported here: a process that has not imported it has no recording span.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

from celery_leases import events
from celery_leases.text.cleaning import printable

TRACING: Final = "opentelemetry.trace"
SDK: Final = "opentelemetry.sdk.trace"
"""A process has a recording span only if it has imported this. The API alone is not enough:
redis-py imports it.
"""
PREFIX: Final = "celery_leases."
"""The prefix of each attribute name."""


def recording_span() -> Any:
    """The current span, if there is one that records."""
    trace = sys.modules.get(TRACING)
    if trace is None:
        return None
    with suppress(Exception):
        span = trace.get_current_span()
        if span.is_recording():
            return span
    return None


def annotate_span(event: events.Event) -> None:
    """Set the attributes of *event* on the current span; errors are ignored."""
    span = recording_span()
    if span is None:
        return
    with suppress(Exception):
        if attributes := attributes_of(event):
            span.set_attributes(attributes)


def attributes_of(event: events.Event) -> dict[str, Any]:
    """The attributes for an event, without those that are ``None``. They contain no text of an
    exception.
    """
    values = _values(event)
    attributes = {PREFIX + name: value for name, value in values.items() if value is not None}
    return {f"{PREFIX}key": printable(event.key), **attributes} if attributes else {}


def _values(event: events.Event) -> Mapping[str, Any]:
    match event:
        case events.LeaseAcquired():
            return {"attempt": event.attempt, "fence": event.fence}
        case events.CrashSeen() | events.AttemptAbandoned():
            return {"crashes": event.crashes}
        case events.ResultReplayed():
            return {"outcome": "replayed", "replayed_call": event.first_call_id}
        case events.CallRescheduled():
            return {"outcome": "rescheduled", "retry_after": event.delay}
        case events.CallDropped():
            return {"outcome": "dropped"}
        case events.CallRefused():
            return {"outcome": "refused"}
        case events.OutcomeRefused():
            return {"outcome": "outcome_refused"}
        case events.AttemptSettled():
            return {
                "outcome": event.state,
                "ended": event.ended,
                "retry_after": event.retry_after,
                **_failure(event),
            }
    return {}


def _failure(event: events.AttemptSettled) -> Mapping[str, Any]:
    failure = event.failure
    if failure is None:
        return {}
    return {
        "rule": failure.rule,
        "reason": failure.reason,
        "group": failure.group,
        "may_have_been_executed": True if failure.ambiguous else None,
    }
