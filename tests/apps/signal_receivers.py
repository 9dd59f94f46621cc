"""The leased tasks with three signal receivers: one writes all events to the journal, one raises an
exception, and one raises ``SystemExit``.
"""

import dataclasses
import logging

from celery_leases import signals
from tests.apps.leased import app, note, work

__all__ = ["app"]

ALL = (
    signals.lease_acquired,
    signals.lease_held,
    signals.call_rescheduled,
    signals.call_dropped,
    signals.call_refused,
    signals.result_replayed,
    signals.lease_renewed,
    signals.renewal_failed,
    signals.lease_lost,
    signals.outcome_refused,
    signals.attempt_settled,
    signals.crash_seen,
    signals.attempt_abandoned,
)


def _write_down(signal, sender, event, **_):
    try:
        event.key = "changed"
        frozen = False
    except (dataclasses.FrozenInstanceError, TypeError):
        frozen = True
    note(
        "signal",
        signal=signal.name,
        sender=sender.name,
        frozen=frozen,
        type=type(event).__name__,
        event=dataclasses.asdict(event),
    )


def _raise(sender, **_):
    raise ValueError(f"a broken receiver of {sender}")


def _exit(sender, **_):
    raise SystemExit(f"a receiver of {sender} that wants out")


def _of_one_task(sender, event, **_):
    note("settled", task=sender.name, name=event.key)


app.finalize()  # Celery connects a receiver of one task late, so it is connected first
signals.attempt_settled.connect(
    _of_one_task, sender=work
)  # the receiver that raises SystemExit is the last one
for each in ALL:
    each.connect(_write_down, weak=False)
    each.connect(_raise, weak=False)
    each.connect(_exit, weak=False)


class _Lines(logging.Handler):
    """Writes the structured data of each log record to the journal."""

    def emit(self, record):
        event = getattr(record, "lease_event", None)
        if event is not None:
            data = record.data
            note(
                "line",
                event=event,
                level=record.levelname,
                id=data["call_id"],
                data=data,
                text=record.getMessage(),
            )


class _Broken(logging.Handler):
    """A log handler that raises, although handlers must not."""

    def emit(self, record):
        """Raise for calls whose name requests it."""
        if "broken-log" in record.getMessage():
            raise TypeError("a broken log handler")


logging.getLogger("celery_leases").addHandler(_Lines())
logging.getLogger("celery_leases").addHandler(_Broken())
