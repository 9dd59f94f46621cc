"""Translates the exception of a body into an ending, see
:mod:`celery_leases.decide.endings`; and notes that a body has published its call again.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Final

from billiard.process import current_process
from celery import signals
from celery._state import get_current_task
from celery.exceptions import (
    Ignore,
    Reject,
    Retry,
    SoftTimeLimitExceeded,
)
from celery.states import EXCEPTION_STATES
from celery.utils.time import maybe_iso8601
from celery.worker import state as worker_state

from celery_leases.attempt.held_lease import HELD_TOO_LONG, NOT_EXTENDED, HeldLease
from celery_leases.attempt.process import Process
from celery_leases.call import Call
from celery_leases.concurrency import greenlets
from celery_leases.decide.endings import (
    ControlFlow,
    Ending,
    Interrupted,
    Lost,
    Raised,
    Snoozed,
    Terminated,
)
from celery_leases.errors import LeaseLost, RecordUnreadable, Snooze
from celery_leases.failures.actions import Reason, RuleMatch, permanent
from celery_leases.keys import call_key
from celery_leases.record import Ended, Failure
from celery_leases.results import MESSAGE_MAX, failure_of
from celery_leases.text.redaction import message_of
from celery_leases.worker.headers import HEADER, state_of
from celery_leases.worker.interrupts import EarlySoftTimeLimit, InterruptGuard
from celery_leases.worker.tracebacks import traceback_of

UNREADABLE_PAUSE: Final = 15.0
"""The reschedule delay, in seconds, of a call with an unreadable effect, which an operator must
repair.
"""

_WRONG_ARGUMENTS: Final = RuleMatch(
    "request-refused",
    permanent(),
    Reason.REFUSED,
    why="the arguments do not fit the signature of the task",
)


@dataclass(frozen=True, slots=True)
class ExceptionTranslator:
    """Translates the exception that ended the body of *call*."""

    task: Any
    request: Any
    interrupt_guard: InterruptGuard
    call: Call
    held_lease: HeldLease
    process: Process

    def ending_of(self, error: BaseException, elapsed: float) -> Ending:
        """The ending of a body that raised *error* *elapsed* seconds after its delivery began."""
        match error:
            case LeaseLost() if limit := _time_limit(self.held_lease.lost) or _time_limit(
                error.reason
            ):
                return self._held_too_long(error, limit)
            case LeaseLost():
                return Lost(error.reason or "the body raised it")
            case Snooze():
                return Snoozed(error, error.delay, error.reason)
            case EarlySoftTimeLimit():
                return Lost("the soft time limit fired before the body began")
            case Retry():
                # Its message is not published: Celery runs an eager retry itself, and any other is
                # one that retry() has not made.
                again = self.request.is_eager and error.sig is not None
                failure = None if again else failure_of(error)
                return ControlFlow(error, runs_again=again, failure=failure)
            case Reject() if error.requeue:
                return ControlFlow(error, runs_again=True, ended=Ended.REJECTED)
            case Reject():
                return self.rejected(error)
            case Ignore():
                reported = state_of(self.request).reported
                if reported not in EXCEPTION_STATES:
                    return ControlFlow(error, runs_again=False, ended=Ended.IGNORED)
                failure = Failure(
                    failure_of(error).type, f"the body has set the state of its call to {reported}"
                )
                return ControlFlow(error, runs_again=False, ended=Ended.FAILED, failure=failure)
            case NotImplementedError() if "does not implement kill_job" in str(error):
                # In the solo pool, a cold shutdown ends the body with this error.
                return Lost("the worker was stopped")
            case Exception():
                return self._raised(error)
            case _:
                return self._killed_or_stopped(error, elapsed)

    def ending_after(self, goes_on: Retry | Ignore) -> ControlFlow:
        """The ending of a body whose call goes on in another message, which is published."""
        state = state_of(self.request)
        if isinstance(goes_on, Retry):
            delay = self._retry_delay(goes_on)
            return ControlFlow(goes_on, True, delay, retries=state.published_retries)
        # If the replacement continues with the same key, the key must be free for it.
        return ControlFlow(goes_on, self._same_key(state.replacement), ended=Ended.REPLACED)

    def rejected(self, error: Reject) -> ControlFlow:
        """The ending of a body whose message is rejected for good."""
        failure = failure_of(error)
        return ControlFlow(error, runs_again=False, ended=Ended.REJECTED, failure=failure)

    def ending_of_returned(self, value: Any) -> Ending:
        """The ending of a body that has returned the ``Retry`` of an eager call, or a coroutine or
        generator.
        """
        if isinstance(value, Retry):
            return self.ending_of(value, 0.0)
        return self._raised(
            TypeError(
                f"the body returned a {type(value).__name__}, so nothing of it has run; write a body that "
                "runs it to its end, as with asyncio.run() or list(), and returns the result"
            )
        )

    def _held_too_long(self, error: BaseException, reason: str) -> Ending:
        """The ending of a body that held its lease for too long: it fails as after a time limit.
        If it were rescheduled, it would only hold the lease for as long again.
        """
        limit = SoftTimeLimitExceeded(reason)
        limit.__cause__ = error
        return self._classified(limit, traceback_of(error))

    def _raised(self, error: BaseException) -> Ending:
        if limit := _time_limit(self.held_lease.lost):
            return self._held_too_long(error, limit)
        if self.held_lease.lost:
            return Lost(self.held_lease.lost)
        if isinstance(error, RecordUnreadable) and self.call.reschedulable:
            return Snoozed(error, UNREADABLE_PAUSE, str(error))
        if isinstance(error, TypeError) and not self._arguments_fit():
            return Raised(error, failure_of(error), _WRONG_ARGUMENTS, traceback_of(error))
        return self._classified(error, traceback_of(error))

    def _classified(self, error: BaseException, traceback: str | None) -> Raised:
        matched = self.call.options.failures.classifier.classify(
            error, self.process.wall_time(), time.monotonic
        )
        return Raised(error, failure_of(error), matched, traceback)

    def _arguments_fit(self) -> bool:
        """Whether the body can be called with the arguments of the message."""
        signature = self.task.lease_signature
        try:
            (signature.called or signature).bind(
                *(self.request.args or ()), **(self.request.kwargs or {})
            )
        except TypeError:
            return False
        return True

    def _killed_or_stopped(self, error: BaseException, elapsed: float) -> Ending:
        limit = self.call.time_limit
        if limit and elapsed >= limit - max(0.5, limit / 10):
            return Terminated(error, "hard time limit")
        killed = greenlets.kills_greenlet(error)
        if killed and self.interrupt_guard.stopping and self.request.id not in worker_state.revoked:
            # Pools of greenlets acknowledge the messages of killed bodies, so the call must be
            # rescheduled.
            return Lost("the worker was stopped")
        if (killed or isinstance(error, SystemExit | KeyboardInterrupt)) and self._is_stopped():
            return Interrupted(error)
        eager = self.request.is_eager
        if isinstance(error, SystemExit) and (eager or in_pool_child()):
            return Terminated(error, "the body ended its process")
        if eager and (killed or isinstance(error, KeyboardInterrupt)):
            return Interrupted(error)  # the caller of an eager call ends
        # A cancelled coroutine, a timeout of gevent, an exception of the user, or one that only
        # looks like the end of a worker.
        ending = self._raised(error)
        if isinstance(ending, Raised) and not eager:
            # Celery would take the exception itself for the end of its process: it would deliver
            # the message again, or, in pools of threads and greenlets, never acknowledge it.
            return replace(ending, error=as_exception(error, "the body"))
        return ending

    def _is_stopped(self) -> bool:
        """Whether the worker is stopping, or the body was revoked."""
        stops = (worker_state.should_stop, worker_state.should_terminate)
        return self.interrupt_guard.stopping or any(stop not in (None, False) for stop in stops)

    def _retry_delay(self, retry: Retry) -> float | None:
        if self.request.is_eager or retry.when is None:
            return None
        if isinstance(retry.when, datetime):
            when = retry.when if retry.when.tzinfo else retry.when.replace(tzinfo=UTC)
            return max(0.0, when.timestamp() - self.process.wall_time())
        return float(retry.when)

    def _same_key(self, signature: Any) -> bool:
        if signature.get("task") != self.task.name or self.task.lease_options.key is None:
            return False
        args, kwargs = signature.get("args") or (), signature.get("kwargs") or {}
        try:
            key = call_key(
                self.task.name,
                self.task.lease_options,
                self.task.lease_signature,
                "",
                args,
                kwargs,
                self.request.headers,
            )
        except BaseException:  # noqa: BLE001 - the task's own lease_key may raise anything
            return False
        return key.stored == self.call.key.stored


def in_pool_child() -> bool:
    """Whether this process is a child of a pool, and not the main process of a worker."""
    return bool(current_process()._name != "MainProcess")  # noqa: SLF001 - as Celery asks


def as_exception(error: BaseException, what: str) -> Exception:
    """*error*, which *what* raised, as an ``Exception``, which Celery can report."""
    raised = RuntimeError(f"{what} raised {type(error).__name__}: {message_of(error, MESSAGE_MAX)}")
    raised.__cause__ = error
    return raised


def _time_limit(reason: str | None) -> str | None:
    """*reason*, if it says that the body held its lease for too long."""
    return reason if reason in (HELD_TOO_LONG, NOT_EXTENDED) else None


# -- a body that publishes its own call ------------------------------------------------------------


def _publisher_of_itself(sender: str, headers: Any) -> Any:
    """The request of the running body, if it publishes a message of its own call."""
    task = get_current_task()
    if task is None or task.name != sender or not hasattr(task, "lease_options"):
        return None
    request = task.request
    if request.called_directly or request.is_eager or headers.get("id") != request.id:
        return None
    # The message of replace() has the same id, and is another call.
    same = (headers.get("replaced_task_nesting") or 0) == (request.replaced_task_nesting or 0)
    return request if same else None


def _before_publish(sender: str, headers: Any, **_: Any) -> None:
    """Give a message with which a body publishes its call again the header of the call, so that it
    is no duplicate of the running delivery.
    """
    request = _publisher_of_itself(sender, headers)
    if request is not None and (ours := (request.headers or {}).get(HEADER)) is not None:
        headers.setdefault(HEADER, ours)


def _after_publish(sender: str, headers: Any, **_: Any) -> None:
    """Note that a body has published its call again: the attempt is closed as retried."""
    request = _publisher_of_itself(sender, headers)
    if request is not None and (state := state_of(request)).goes_on is None:
        when = maybe_iso8601(headers.get("eta"))
        state.goes_on = Retry("the body has published its call again", when=when)
        state.published_retries = headers.get("retries") or 0


signals.before_task_publish.connect(_before_publish, weak=False)
signals.after_task_publish.connect(_after_publish, weak=False)
