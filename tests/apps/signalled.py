"""The leased tasks with receivers: one writes everything down, one raises, one wants the process to
end.
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


app.finalize()  # before that, Celery would connect a receiver of one task after those that come later
signals.attempt_settled.connect(
    _of_one_task, sender=work
)  # one that wants the process to end comes last
for each in ALL:
    each.connect(_write_down, weak=False)
    each.connect(_raise, weak=False)
    each.connect(_exit, weak=False)


class _Lines(logging.Handler):
    """Writes down what each log line carries for machines."""

    def emit(self, record):
        """Write one line down."""
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
    """A handler that does not keep logging's own rule never to raise."""

    def emit(self, record):
        """Raise, for the calls that ask for it."""
        if "broken-log" in record.getMessage():
            raise TypeError("a broken log handler")


logging.getLogger("celery_leases").addHandler(_Lines())
logging.getLogger("celery_leases").addHandler(_Broken())
