"""Events of leased tasks, as Celery-style signals and one log line each.

Connect a receiver as to any Celery signal; ``sender`` is the task, ``event`` one of the frozen
values of :mod:`celery_leases.events`::

    @lease_lost.connect
    def alert(sender, event, **kwargs): ...

An exception of a receiver is logged and does not affect the task. Receivers of ``lease_renewed``,
``renewal_failed`` and ``lease_lost`` are called in a thread of their own, or in a greenlet under
gevent and eventlet; all others in the thread of the task.
"""

from __future__ import annotations

import logging
import re
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from dataclasses import fields as dataclass_fields
from functools import partial
from operator import attrgetter
from typing import Any, Final

from celery.utils.dispatch import Signal

from celery_leases import events
from celery_leases.concurrency import greenlets, os_threads
from celery_leases.events import Event
from celery_leases.record import MAY_HAVE_BEEN_EXECUTED
from celery_leases.text.cleaning import SHOWN, printable
from celery_leases.text.notices import logger
from celery_leases.text.redaction import shortened
from celery_leases.tracing import SDK, annotate_span, recording_span


def _name(kind: type[Event]) -> str:
    return re.sub("(?<!^)(?=[A-Z])", "_", kind.__name__).lower()


SIGNALS: Final[dict[type[Event], Any]] = {
    kind: Signal(name=_name(kind), providing_args={"event"})
    for kind in vars(events).values()
    if isinstance(kind, type) and issubclass(kind, Event) and kind is not Event
}
"""The signal of each event, which has its name."""
lease_acquired = SIGNALS[events.LeaseAcquired]
lease_held = SIGNALS[events.LeaseHeld]
call_rescheduled = SIGNALS[events.CallRescheduled]
call_dropped = SIGNALS[events.CallDropped]
call_refused = SIGNALS[events.CallRefused]
result_replayed = SIGNALS[events.ResultReplayed]
lease_renewed = SIGNALS[events.LeaseRenewed]
renewal_failed = SIGNALS[events.RenewalFailed]
lease_lost = SIGNALS[events.LeaseLost]
outcome_refused = SIGNALS[events.OutcomeRefused]
attempt_settled = SIGNALS[events.AttemptSettled]
crash_seen = SIGNALS[events.CrashSeen]
attempt_abandoned = SIGNALS[events.AttemptAbandoned]
group_closed = SIGNALS[events.GroupClosed]
completion_stands = SIGNALS[events.CompletionStands]
group_opened = SIGNALS[events.GroupOpened]


LINE_MAX: Final = 5_000
"""Characters of a log line, at most."""
TRACEBACK_MAX: Final = 30_000
"""Characters of a traceback in the log, at most."""


class _Redaction(logging.Filter):
    """Removes secrets from log lines and tracebacks of ``celery_leases``, cuts them, and escapes
    control characters.

    Handlers still get the exception itself. Lines of events are redacted before.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        if hasattr(record, "lease_event"):
            return True
        with suppress(Exception):  # the handlers cannot format the record either
            message = record.getMessage()
            if (line := printable(shortened(message, LINE_MAX), LINE_MAX)) != message:
                record.msg, record.args = "%s", (line,)
            if record.exc_info and not record.exc_text:
                traceback_ = shortened(
                    logging.Formatter().formatException(record.exc_info), TRACEBACK_MAX
                )
                record.exc_text = printable(traceback_, None, keep="\n\t")
        return True


logger.logger.addFilter(_Redaction())

_FIELDS: Final = {
    kind: (names := tuple(field.name for field in dataclass_fields(kind)), attrgetter(*names))
    for kind in SIGNALS
}
_SUBJECT: Final = "{task}[{call_id}] key {key}: "
_NUMBERS: Final = re.compile(r"\d+")
_CAUSES_KEPT: Final = 100
_DURING_A_RUN: Final = (events.LeaseRenewed, events.RenewalFailed, events.LeaseLost)


class Announcer:
    """An :class:`~celery_leases.stores.interfaces.Observer` that logs each event and sends its
    signal.

    Renewals run in system threads in every pool. Under gevent and eventlet their events are handled
    in a greenlet, because the locks of logging and of receivers are made for greenlets: a system
    thread that waits for such a lock may wait for ever, and block the whole worker.

    *tasks* are the tasks of the app by name, which are the senders of the signals. For another task
    the sender is its name.
    """

    def __init__(self, tasks: Mapping[str, Any] | None = None) -> None:
        self._tasks: Mapping[str, Any] = {} if tasks is None else tasks
        self._queued: deque[Event] = deque(maxlen=10_000)
        self._wakeup = os_threads.Wakeup()
        self._started = False
        self._green = os_threads.uses_greenlets()
        self._hub: Callable[[greenlets.Call], None] | None = None

    def observe(self, event: Event) -> None:
        """Log *event* and send its signal. Events of renewals are queued, so that no receiver
        delays a renewal.
        """
        if not isinstance(event, _DURING_A_RUN):
            self._find_hub()
            if SDK in sys.modules:
                annotate_span(event)
            self._log_and_send(event)
        elif self._hub is not None:
            self._hub(partial(greenlets.spawn, partial(self._log_and_send, event)))
        else:
            _log(event)
            if SIGNALS[type(event)].receivers:
                self._queue(event)

    def wants(self, kind: type[Event]) -> bool:
        """Whether an event of that type has a receiver, its log line is enabled, or a span
        records.
        """
        if self._green and kind not in _DURING_A_RUN:
            self._find_hub()
        if SIGNALS[kind].receivers or logger.isEnabledFor(kind.level):
            return True
        may_record = SDK in sys.modules and kind not in _DURING_A_RUN
        return may_record and recording_span() is not None

    def _find_hub(self) -> None:
        """Store the hub of the calling task, for the events of renewals, which come later."""
        if self._green and self._hub is None:
            self._hub = greenlets.hub_scheduler()

    def _queue(self, event: Event) -> None:
        self._queued.append(event)
        if not self._started:
            self._started = True
            os_threads.start_thread(self._send_queued)
        self._wakeup.notify()

    def _send_queued(self) -> None:
        while True:
            while self._queued:
                self._send(self._queued.popleft())
            self._wakeup.wait(None)

    def _log_and_send(self, event: Event) -> None:
        _log(event)
        if SIGNALS[type(event)].receivers:
            self._send(event)

    def _send(self, event: Event) -> None:
        signal = SIGNALS[type(event)]
        try:
            signal.send(sender=self._tasks.get(event.task, event.task), event=event)
        except BaseException:  # noqa: BLE001 - a receiver may even raise SystemExit, and must not end the task
            with _harmless():
                logger.exception("a receiver of %s raised", signal.name, code="receiver-raised")


class _Outages:
    """Limits warnings about reschedules: one per cause and *pause* seconds."""

    def __init__(self, pause: float = 60.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._pause = pause
        self._clock = clock
        self._seen: dict[str, tuple[float, int]] = {}

    def due(self, reason: str) -> int | None:
        """How many reschedules there were since the last warning, if a warning is due; otherwise
        ``None``.
        """
        # Ports, process ids and times make no other cause.
        cause = _NUMBERS.sub("#", reason)
        now = self._clock()
        last, count = self._seen.get(cause, (None, 0))
        if last is not None and now - last < self._pause:
            self._seen[cause] = (last, count + 1)
            return None
        if len(self._seen) >= _CAUSES_KEPT:
            self._seen.clear()
        self._seen[cause] = (now, 0)
        return count


_outages = _Outages()


def _log(event: Event) -> None:
    """Log one line, with the event as plain values for structured logs."""
    level, text = event.level, event.line
    if isinstance(event, events.CallRescheduled) and event.still:
        level = logging.DEBUG
    if (
        isinstance(event, events.CallRescheduled)
        and event.unavailable
        and (since := _outages.due(event.reason)) is not None
    ):
        level, text = (
            logging.WARNING,
            text + (f" ({since} more since the last such warning)" if since else ""),
        )
    if (
        isinstance(event, events.AttemptSettled)
        and event.failure is not None
        and event.failure.ambiguous
    ):
        level = logging.WARNING
    if not logger.isEnabledFor(level):
        return
    try:
        fields = _plain(event)
        line = _line(f"{_SUBJECT}{text}", {**fields, "more": _more(event)})
        logger.log(
            level, "%s", line, extra={"lease_event": SIGNALS[type(event)].name, "data": fields}
        )
    except Exception:  # noqa: BLE001 - as in _harmless
        _report_logging_error()


def _line(template: str, fields: Mapping[str, Any]) -> str:
    if not any(name in template for name in ("{error}", "{reason}", "{why}")):
        line = template.format_map(fields)
        if len(line) <= SHOWN and line.isprintable():
            return line  # then each field is short and printable too
    shown = {
        name: _shown(name, value) if isinstance(value, str) else value
        for name, value in fields.items()
    }
    return printable(template.format_map(shown), LINE_MAX)


def _plain(event: Event) -> dict[str, Any]:
    """The fields of *event* as plain values."""
    names, values = _FIELDS[type(event)]
    plain = dict(zip(names, values(event), strict=True))
    if plain.get("failure") is not None:
        plain["failure"] = asdict(plain["failure"])
    return plain


def _shown(name: str, value: str) -> str:
    if name == "more":
        return value
    return shortened(value, LINE_MAX) if name in ("error", "reason", "why") else printable(value)


def _more(event: Event) -> str:
    """The part of a log line that is computed from several fields: how long the key waits and by
    which rule, what happened to the record, or that a newer call runs instead.
    """
    if isinstance(event, events.ResultReplayed):
        return "replaced by a newer call, " if event.replaced else ""
    if isinstance(event, events.OutcomeRefused):
        if event.state is None:
            return "the record was deleted (by an operator, or because its retention was over)"
        back = "; its suspected crash does not count any more" if event.was_suspected else ""
        return f"a later attempt owns the key (now {event.state}){back}"
    if not isinstance(event, events.AttemptSettled):
        return ""
    wait = f" for {event.retry_after:.1f} s" if event.retry_after else ""
    failure = event.failure
    if failure is None or not failure.rule:
        return wait
    doubt = f", {MAY_HAVE_BEEN_EXECUTED}" if failure.ambiguous else ""
    return f"{wait} by rule {failure.rule}{doubt}: {failure.type}: {printable(failure.message, LINE_MAX)}"


@contextmanager
def _harmless() -> Iterator[None]:
    """Report an error of a log handler or filter as logging does, so that it does not affect the
    task.
    """
    try:
        yield
    except Exception:  # noqa: BLE001 - a handler of the user may raise anything
        _report_logging_error()


def _report_logging_error() -> None:
    if logging.raiseExceptions:
        traceback.print_exc()
