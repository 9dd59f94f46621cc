"""What a body has told Celery: translates its exception into an ending, see
:mod:`celery_leases.decide.endings`, and notes that it has published its call again.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

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

from celery_leases.attempt.held_lease import HELD_TOO_LONG, NOT_EXTENDED, BodyState, HeldLease
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
from celery_leases.worker.headers import HEADER
from celery_leases.worker.interrupts import EarlySoftTimeLimit
from celery_leases.worker.tracebacks import traceback_of

if TYPE_CHECKING:
    from celery_leases.worker.rescheduling import Rescheduling

BODY_STATE: Final = "celery_leases_body_state"
"""The field of the request with the state of its body."""

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


def body_state_of(request: Any) -> BodyState:
    """The state of the body that runs or ran for *request*, or an empty one, which the request
    keeps. A message can set an attribute of that name, but not one of this type.
    """
    state = request.__dict__.get(BODY_STATE)
    if type(state) is not BodyState:
        state = request.__dict__[BODY_STATE] = BodyState()
    return state


def ending_of(
    delivery: Rescheduling, call: Call, held_lease: HeldLease, error: BaseException, elapsed: float
) -> Ending:
    """The ending of the body of *call*, which raised *error* *elapsed* seconds after its delivery
    began.
    """
    match error:
        case LeaseLost() if limit := _time_limit(held_lease.lost) or _time_limit(error.reason):
            return _held_too_long(delivery, call, error, limit)
        case LeaseLost():
            return Lost(error.reason or "the body raised it")
        case Snooze():
            return Snoozed(error, error.delay, error.reason)
        case EarlySoftTimeLimit():
            return Lost("the soft time limit fired before the body began")
        case Retry():
            # Its message is not published: Celery runs an eager retry itself, and any other is
            # one that retry() has not made.
            again = delivery.request.is_eager and error.sig is not None
            failure = None if again else failure_of(error)
            return ControlFlow(error, runs_again=again, failure=failure)
        case Reject() if error.requeue:
            return ControlFlow(error, runs_again=True, ended=Ended.REJECTED)
        case Reject():
            return rejected(error)
        case Ignore():
            reported = held_lease.body_state.reported
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
            return _raised(delivery, call, held_lease, error)
        case _:
            return _killed_or_stopped(delivery, call, held_lease, error, elapsed)


def ending_after(delivery: Rescheduling, call: Call, state: BodyState) -> ControlFlow:
    """The ending of a body whose call goes on in another message, which is published."""
    goes_on: Retry | Ignore = state.goes_on
    if isinstance(goes_on, Retry):
        delay = _retry_delay(delivery, goes_on)
        return ControlFlow(goes_on, True, delay, retries=state.published_retries)
    # If the replacement continues with the same key, the key must be free for it.
    return ControlFlow(goes_on, _same_key(delivery, call, state.replacement), ended=Ended.REPLACED)


def rejected(error: Reject) -> ControlFlow:
    """The ending of a body whose message is rejected for good."""
    failure = failure_of(error)
    return ControlFlow(error, runs_again=False, ended=Ended.REJECTED, failure=failure)


def ending_of_returned(
    delivery: Rescheduling, call: Call, held_lease: HeldLease, value: Any
) -> Ending:
    """The ending of a body that has returned the ``Retry`` of an eager call, or a coroutine or
    generator.
    """
    if isinstance(value, Retry):
        return ending_of(delivery, call, held_lease, value, 0.0)
    return _raised(
        delivery,
        call,
        held_lease,
        TypeError(
            f"the body returned a {type(value).__name__}, so nothing of it has run; write a body that "
            "runs it to its end, as with asyncio.run() or list(), and returns the result"
        ),
    )


def _held_too_long(delivery: Rescheduling, call: Call, error: BaseException, reason: str) -> Ending:
    """The ending of a body that held its lease for too long: it fails as after a time limit.
    If it were rescheduled, it would only hold the lease for as long again.
    """
    limit = SoftTimeLimitExceeded(reason)
    limit.__cause__ = error
    return _classified(delivery, call, limit, traceback_of(error))


def _raised(
    delivery: Rescheduling, call: Call, held_lease: HeldLease, error: BaseException
) -> Ending:
    if limit := _time_limit(held_lease.lost):
        return _held_too_long(delivery, call, error, limit)
    if held_lease.lost:
        return Lost(held_lease.lost)
    if isinstance(error, RecordUnreadable) and call.reschedulable:
        return Snoozed(error, UNREADABLE_PAUSE, str(error))
    if isinstance(error, TypeError) and not _arguments_fit(delivery.task, delivery.request):
        return Raised(error, failure_of(error), _WRONG_ARGUMENTS, traceback_of(error))
    return _classified(delivery, call, error, traceback_of(error))


def _classified(
    delivery: Rescheduling, call: Call, error: BaseException, traceback: str | None
) -> Raised:
    matched = call.options.failures.classifier.classify(
        error, delivery.process.wall_time(), delivery.process.clock.now
    )
    return Raised(error, failure_of(error), matched, traceback)


def _arguments_fit(task: Any, request: Any) -> bool:
    """Whether the body can be called with the arguments of the message."""
    signature = task.lease_signature
    try:
        (signature.called or signature).bind(*(request.args or ()), **(request.kwargs or {}))
    except TypeError:
        return False
    return True


def _killed_or_stopped(
    delivery: Rescheduling, call: Call, held_lease: HeldLease, error: BaseException, elapsed: float
) -> Ending:
    limit = call.time_limit
    if limit and elapsed >= limit - max(0.5, limit / 10):
        return Terminated(error, "hard time limit")
    killed = greenlets.kills_greenlet(error)
    if (
        killed
        and delivery.interrupt_guard.stopping
        and delivery.request.id not in worker_state.revoked
    ):
        # Pools of greenlets acknowledge the messages of killed bodies, so the call must be
        # rescheduled.
        return Lost("the worker was stopped")
    if (killed or isinstance(error, SystemExit | KeyboardInterrupt)) and _is_stopped(delivery):
        return Interrupted(error)
    eager = delivery.request.is_eager
    if isinstance(error, SystemExit) and (eager or in_pool_child()):
        return Terminated(error, "the body ended its process")
    if eager and (killed or isinstance(error, KeyboardInterrupt)):
        return Interrupted(error)  # the caller of an eager call ends
    # A cancelled coroutine, a timeout of gevent, an exception of the user, or one that only
    # looks like the end of a worker.
    ending = _raised(delivery, call, held_lease, error)
    if isinstance(ending, Raised) and not eager:
        # Celery would take the exception itself for the end of its process: it would deliver
        # the message again, or, in pools of threads and greenlets, never acknowledge it.
        return replace(ending, error=as_exception(error, "the body"))
    return ending


def _is_stopped(delivery: Rescheduling) -> bool:
    """Whether the worker is stopping, or the body was revoked."""
    stops = (worker_state.should_stop, worker_state.should_terminate)
    return delivery.interrupt_guard.stopping or any(stop not in (None, False) for stop in stops)


def _retry_delay(delivery: Rescheduling, retry: Retry) -> float | None:
    if delivery.request.is_eager or retry.when is None:
        return None
    if isinstance(retry.when, datetime):
        when = retry.when if retry.when.tzinfo else retry.when.replace(tzinfo=UTC)
        return max(0.0, when.timestamp() - delivery.process.wall_time())
    return float(retry.when)


def _same_key(delivery: Rescheduling, call: Call, signature: Any) -> bool:
    if signature.get("task") != delivery.task.name or delivery.task.lease_options.key is None:
        return False
    args, kwargs = signature.get("args") or (), signature.get("kwargs") or {}
    try:
        key = call_key(
            delivery.task.name,
            delivery.task.lease_options,
            delivery.task.lease_signature,
            "",
            args,
            kwargs,
            delivery.request.headers,
        )
    except BaseException:  # noqa: BLE001 - the task's own lease_key may raise anything
        return False
    return key.stored == call.key.stored


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
    if request is not None and (state := body_state_of(request)).goes_on is None:
        when = maybe_iso8601(headers.get("eta"))
        state.goes_on = Retry("the body has published its call again", when=when)
        state.published_retries = headers.get("retries") or 0


signals.before_task_publish.connect(_before_publish, weak=False)
signals.after_task_publish.connect(_after_publish, weak=False)
