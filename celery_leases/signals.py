"""What happens to leased tasks, as Celery-style signals and one log line each.

Connect a receiver as to any Celery signal; ``sender`` is the task's name, ``event`` one of the frozen values of
:mod:`celery_leases.core.events`::

    @lease_lost.connect
    def tell_somebody(sender, event, **kwargs): ...

A receiver that raises is logged and harms nobody. Receivers of what happens during a run are called in a thread of
their own, under gevent and eventlet in a greenlet; all others in the process and thread of the task.
"""

from __future__ import annotations

import logging
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import partial
from typing import Any, Final

from celery.utils.dispatch import Signal

from celery_leases.core import events
from celery_leases.core.events import Event
from celery_leases.core.redaction import redact
from celery_leases.process import greenlets, native


def _signal(name: str) -> Any:
    return Signal(name=name, providing_args={"event"})


lease_acquired = _signal("lease_acquired")
lease_held = _signal("lease_held")
call_put_back = _signal("call_put_back")
call_dropped = _signal("call_dropped")
call_refused = _signal("call_refused")
result_replayed = _signal("result_replayed")
lease_renewed = _signal("lease_renewed")
renewal_failed = _signal("renewal_failed")
lease_lost = _signal("lease_lost")
outcome_refused = _signal("outcome_refused")
attempt_settled = _signal("attempt_settled")
crash_seen = _signal("crash_seen")
gate_closed = _signal("gate_closed")
gate_opened = _signal("gate_opened")
completion_stands = _signal("completion_stands")


class _Redacting(logging.Filter):
    """Takes secrets out of the tracebacks that are written; handlers that want the exception itself still have it."""

    def filter(self, record: logging.LogRecord) -> bool:
        with suppress(Exception):  # what cannot be formatted here cannot be by a handler either
            if record.exc_info and not record.exc_text:
                record.exc_text = redact(logging.Formatter().formatException(record.exc_info))
        return True


logger = logging.getLogger("celery_leases")
logger.addFilter(_Redacting())

_SIGNALS: Final[dict[type[Event], tuple[Any, int, str]]] = {
    events.LeaseAcquired: (lease_acquired, logging.DEBUG, "attempt {attempt} begins under fence {fence}"),
    events.LeaseHeldElsewhere: (
        lease_held,
        logging.DEBUG,
        "held by call {holder_call_id} on {holder} for another {remaining:.1f} s",
    ),
    events.CallPutBack: (call_put_back, logging.INFO, "put back for {delay:.1f} s: {reason}"),
    events.CallDropped: (call_dropped, logging.INFO, "dropped: {reason}"),
    events.CallRefused: (call_refused, logging.INFO, "refused: {error}"),
    events.ResultReplayed: (result_replayed, logging.INFO, "answered with the saved result of call {first_call_id}"),
    events.LeaseRenewed: (lease_renewed, logging.DEBUG, "lease renewed, it counts for {remaining:.1f} s"),
    events.RenewalFailed: (
        renewal_failed,
        logging.WARNING,
        "lease not renewed, it counts for another {remaining:.1f} s: {error}",
    ),
    events.LeaseGone: (lease_lost, logging.WARNING, "lease lost: {reason}"),
    events.OutcomeRefused: (
        outcome_refused,
        logging.WARNING,
        "outcome of fence {fence} refused: a later attempt owns the key (now {state})",
    ),
    events.AttemptSettled: (
        attempt_settled,
        logging.INFO,
        "attempt {attempt} {ended} after {runtime:.3f} s, the key is {state}{more}",
    ),
    events.CrashSeen: (
        crash_seen,
        logging.WARNING,
        "the attempt before ended without a word on {host}: crash {crashes} in a row",
    ),
    events.GateClosed: (
        gate_closed,
        logging.WARNING,
        "cooldown group {group} is closed for {closed_for:.1f} s by rule {rule}: trip {trips} in a row",
    ),
    events.CompletionStands: (
        completion_stands,
        logging.WARNING,
        "completed under fence {fence}, which stands although the body ended with {error}",
    ),
    events.GateOpened: (gate_opened, logging.INFO, "cooldown group {group} is open again"),
}
_DURING_A_RUN: Final = (events.LeaseRenewed, events.RenewalFailed, events.LeaseGone)


class Announcer:
    """An :class:`~celery_leases.core.ports.Observer` that logs each event and sends its signal.

    The renewing threads are the system's in every pool. What they see is told by a greenlet where there are greenlets:
    the locks of logging, and of whatever a receiver uses, are made for those. A real thread that meets one of them
    there may wait in it for ever, and the whole worker for the thread.
    """

    def __init__(self) -> None:
        self._waiting: deque[Event] = deque(maxlen=10_000)
        self._bell = native.Bell()
        self._started = False
        self._green = native.green()
        self._hub: Callable[[greenlets.Call], None] | None = None

    def observe(self, event: Event) -> None:
        """Log *event* and send its signal; events of the renewing threads are handed on, so that no receiver delays
        a renewal.
        """
        if not isinstance(event, _DURING_A_RUN):
            if self._green and self._hub is None:
                self._hub = greenlets.hub_caller()  # that of a task: a key is acquired before it is renewed
            _tell(event)
        elif self._hub is not None:
            self._hub(partial(greenlets.spawn, partial(_tell, event)))
        else:
            _log(event)
            if _SIGNALS[type(event)][0].receivers:
                self._hand_on(event)

    def _hand_on(self, event: Event) -> None:
        self._waiting.append(event)
        if not self._started:
            self._started = True
            native.start_thread(self._announce)
        self._bell.ring()

    def _announce(self) -> None:
        while True:
            while self._waiting:
                _send(self._waiting.popleft())
            self._bell.wait(None)


def _tell(event: Event) -> None:
    _log(event)
    if _SIGNALS[type(event)][0].receivers:
        _send(event)


def _send(event: Event) -> None:
    signal = _SIGNALS[type(event)][0]
    try:
        signal.send(sender=event.task, event=event)
    except BaseException:  # a receiver may raise SystemExit, and still must not end the task
        with _harmless():
            logger.exception("a receiver of %s raised", signal.name)


def _log(event: Event) -> None:
    """One line, with the event as plain values for handlers that write for machines."""
    signal, level, text = _SIGNALS[type(event)]
    if not logger.isEnabledFor(level):
        return
    with _harmless():
        fields = asdict(event)
        line = f"{event.task}[{event.call_id}] key {event.key}: {text.format(**fields, more=_more(event))}"
        logger.log(level, "%s", line, extra={"lease_event": signal.name, "data": fields})


def _more(event: Event) -> str:
    """For how long the key waits, and what went wrong by which rule."""
    if not isinstance(event, events.AttemptSettled):
        return ""
    wait = f" for {event.retry_after:.1f} s" if event.retry_after else ""
    failure = event.failure
    return f"{wait} by rule {failure.rule}: {failure.type}: {failure.message}" if failure and failure.rule else wait


@contextmanager
def _harmless() -> Iterator[None]:
    """A log handler or filter that raises must not turn a settled outcome into another; told as logging tells it."""
    try:
        yield
    except Exception:  # noqa: BLE001 - whatever a user's handler raises
        if logging.raiseExceptions:
            traceback.print_exc()
