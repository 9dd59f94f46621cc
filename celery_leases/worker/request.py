"""Celery's request in the worker's main process: makes the owner token of each delivery, and learns
how Celery ends it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, assert_never

from billiard.einfo import ExceptionWithTraceback
from celery import Task
from celery.exceptions import Reject, Retry, TimeLimitExceeded, WorkerLostError
from celery.exceptions import Terminated as ByRevoke
from celery.worker import state
from celery.worker.request import Request
from kombu.utils.imports import symbol_by_name

from celery_leases.concurrency import os_threads
from celery_leases.deadlines import begin_by
from celery_leases.decide.endings import ExitCause
from celery_leases.errors import LeaseConfigurationError
from celery_leases.results import failure_of
from celery_leases.text.notices import logger
from celery_leases.worker import child_exit, database_watch, processes, takeover
from celery_leases.worker.app_settings import longest_countdown
from celery_leases.worker.arrivals import arrivals
from celery_leases.worker.child_exit import EndedDelivery
from celery_leases.worker.headers import (
    ARRIVED,
    CAME,
    ENDED_UNDER,
    HEADER,
    LIMITS,
    ORDER,
    OURS,
    TASK_EVENTS,
    TOKEN,
    WOKEN,
    Header,
    call_id_of,
    new_token,
    owner_of,
    read_header,
    retries_of,
)
from celery_leases.worker.interrupts import BodyKill, body_kill_of
from celery_leases.worker.publisher import GroupIsFull, KeyIsHeld
from celery_leases.worker.routes import ORIGIN, origin_of
from celery_leases.worker.waiting_calls import KeyWaiters, waiting_calls
from celery_leases.worker.waiting_log import AGAIN, leave_out_arrival

_OURS = "celery_leases.worker.request:LeaseRequest"
_EMBEDDED = frozenset({"callbacks", "errbacks", "chain", "chord"})
"""The fields that Celery writes into the third part of a message body. In the child they become
attributes of the request and replace headers of the same name.
"""

_GREEN = os_threads.uses_greenlets()
"""Whether the worker runs its tasks in greenlets. Only the main process uses this module, after
it has patched ``threading``.
"""

_EXIT_CAUSES = (
    (WorkerLostError, ExitCause.KILLED),
    (TimeLimitExceeded, ExitCause.TIME_LIMIT),
    (ByRevoke, ExitCause.REVOKED),
)


class LeaseRequest(Request):
    """A Celery request with the owner token of its attempt.

    The token is made here and not in the child, so that after the death of a child the main process
    knows the owner of the lease.
    """

    #: The waiting calls of its key, if this request belongs to them.
    waiters: KeyWaiters | None = None
    #: Until when it waits at most, by the boot clock.
    waits_until = 0.0
    _scheduled: Any = None
    _eta: Any
    #: It has expired. The record shows that by itself.
    _expired = False
    #: Celery reports a cold shutdown like a revoke.
    _killed_by_revoke = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # All headers become attributes of the request in the child. Those that only this process
        # may set are removed. is_eager would make the call use stores in memory.
        carried = self._request_dict
        if OURS in "".join(carried):  # rare, and much quicker than a look at each name
            for name in [name for name in carried if name.startswith(OURS)]:
                if name not in (HEADER, ORDER):
                    del carried[name]
        carried["is_eager"] = False
        carried["retries"] = retries_of(carried.get("retries"), self.name, self.id)
        self._strip_embedded()
        if takeover.current is not None:
            takeover.current.received(self._message)
        token = carried[TOKEN] = new_token()
        worker = processes.current_worker()
        carried[ORIGIN] = origin_of(self._message, worker)
        limits = self._time_limits_for(worker)
        if limits is not None:
            carried[LIMITS] = limits
        if self._eta is not None:
            self._wait_in_hops()
        self._children: list[int] = []
        self._kill = body_kill_of(token) if _GREEN else None
        events = self._eventer
        # Without -E the dispatcher sends only events of workers. Flower may switch that at any
        # time.
        carried[TASK_EVENTS] = bool(
            events and events.enabled and (not events.groups or "task" in events.groups)
        )
        if waiting_calls.begins_early(getattr(worker, "consumer", None)):
            carried[WOKEN] = True
        if HEADER in carried:
            self._leave_out_arrival(carried[HEADER])
        latest = self._task.lease_options.latest_runs
        if latest:
            carried[ARRIVED], carried[CAME] = arrivals.order(self._app), os_threads.boot_clock()
        if waiting_calls.by_key or HEADER in carried or latest:
            waiting_calls.received(self)
        if limits is not None and (HEADER in carried or self.delivery_info.get("redelivered")):
            database_watch.watch(self._app, begin_by(0.0, *limits))

    def _wait_in_hops(self) -> None:
        """Shorten a countdown that is longer than the broker leaves a message with a worker. Then
        the child publishes a copy, which waits for the rest.

        Otherwise the broker would deliver the waiting message again and again, and this process
        would hold each delivery until the countdown is over.
        """
        latest = self._app.now() + timedelta(seconds=longest_countdown(self._app))
        carried, due = self._request_dict, self._eta
        if due <= latest:
            return
        call_id = call_id_of(self.id, carried.get("replaced_task_nesting"))
        header = read_header(carried, self.task.name, call_id)
        if header is None and HEADER in carried:
            return
        header = replace(header or Header(self.task.name, call_id), due=due.timestamp())
        carried[HEADER] = header.written()
        self._eta = latest

    def _leave_out_arrival(self, header: Any) -> None:
        """Leave out the log line about the arrival of a copy whose call waits on."""
        if isinstance(header, Mapping) and str(header.get("cause", "")).startswith(AGAIN):
            leave_out_arrival(self.id)

    @property
    def _eta_timer_entry(self) -> Any:
        """The function that Celery's timer calls to begin this request."""
        return self._scheduled

    @_eta_timer_entry.setter
    def _eta_timer_entry(self, scheduled: Any) -> None:
        self._scheduled = scheduled
        if scheduled is not None and self.waiters is not None:
            waiting_calls.scheduled(self)

    def scheduled_again(self, scheduled: Any) -> None:
        """Note the new timer entry of a request that continues to wait."""
        self._scheduled = scheduled

    def _time_limits_for(self, worker: Any) -> tuple[float | None, float | None] | None:
        """The hard and the soft time limit that Celery applies, if any: of the message, of the
        task, which ``celery control time_limit`` may have changed in this process only, or of the
        *worker*.
        """
        task, of_message = self._task, self.time_limits
        hard, soft = task.time_limit, task.soft_time_limit
        if worker is not None:
            hard, soft = hard or worker.time_limit, soft or worker.soft_time_limit
        if of_message is not Request.time_limits and len(of_message) == 2:
            hard, soft = _seconds(of_message[0]) or hard, _seconds(of_message[1]) or soft
        return (hard, soft) if hard or soft else None

    def _strip_embedded(self) -> None:
        """Remove fields from the third part of the body that Celery does not write there, because
        they would replace fields that are set here.

        The child then gets the body as this process has decoded it, without a content type.
        """
        args, kwargs, embed = self._payload
        if not embed or not isinstance(embed, Mapping) or embed.keys() <= _EMBEDDED:
            return
        strange = sorted(str(name)[:50] for name in embed.keys() - _EMBEDDED)
        logger.warning(
            "%s[%s]: the message body has %s, which are ignored",
            self._type,
            self.id,
            strange[:10],
            code="header-ignored",
        )
        self._body = (
            args,
            kwargs,
            {name: value for name, value in embed.items() if name in _EMBEDDED},
        )
        self._content_type = self._content_encoding = None

    def maybe_expire(self) -> Any:
        """Leave the expiry of a copy to the child, which can read whether the call has begun.

        Copy and call have the same id, so expiring the copy here would revoke the running call. For
        the same reason Celery must not take the id of a message that has expired for revoked.
        """
        if self.delivery_info.get("redelivered") or HEADER in self._request_dict:
            return None
        known = self.id in state.revoked
        self._expired = bool(super().maybe_expire())
        if self._expired and not known:
            state.revoked.discard(self.id)
        return self._expired

    def revoked(self) -> bool:
        """Whether the call was revoked. If it waited, write into its record that it does not run
        again.

        A waiting copy does not expire here, so only a revoke can end it.
        """
        before = self._already_revoked
        revoked = bool(super().revoked())
        if revoked:
            waiting_calls.ended(self)
        options = self.task.lease_options
        queued = options.queues_once and not self._expired
        returned = HEADER in self._request_dict or self.delivery_info.get("redelivered")
        if revoked and not before and (queued or options.latest_runs or returned):
            child_exit.close_ended(self._ended(ExitCause.REVOKED, 0))
        return revoked

    def terminate(self, pool: Any, signal: Any = None) -> Any:
        """Kill the body for a revoke; in a greenlet only the body."""
        self._killed_by_revoke = True
        return super().terminate(pool if self._kill is None else _BodiesOnly(self._kill), signal)

    def cancel(self, pool: Any, *args: Any, **kwargs: Any) -> Any:
        """Kill the body for a cold shutdown; in a greenlet only the body."""
        return super().cancel(
            pool if self._kill is None else _BodiesOnly(self._kill), *args, **kwargs
        )

    def on_accepted(self, pid: int, time_accepted: float) -> Any:
        """Make the pool notice at once if the child with this delivery dies."""
        self._children.append(pid)
        child_exit.watch(pid)
        return super().on_accepted(pid, time_accepted)

    def on_failure(
        self, exc_info: Any, send_failed_event: bool = True, return_ok: bool = False
    ) -> Any:
        """Free the key of a dead child before its message is returned to the broker, and close a
        call that has failed outside of its lease.
        """
        error = exc_info.exception
        error = error.exc if isinstance(error, ExceptionWithTraceback) else error
        cause = next((cause for kind, cause in _EXIT_CAUSES if isinstance(error, kind)), None)
        if cause is ExitCause.REVOKED and not self._killed_by_revoke:
            cause = ExitCause.STOPPED
        if cause is not None:
            for pid in self._children:
                child_exit.close_dead(self._ended(cause, pid))
        elif getattr(error, ENDED_UNDER, None) != self._request_dict[TOKEN] and _is_final(error):
            child_exit.close_ended(self._ended(ExitCause.ERROR, 0, error))
        try:
            return super().on_failure(exc_info, send_failed_event, return_ok)
        finally:
            if isinstance(error, KeyIsHeld | GroupIsFull):
                waiting_calls.rescheduled(self, error)
            else:
                waiting_calls.ended(self)

    def on_timeout(self, soft: bool, timeout: float) -> Any:
        """In pools of greenlets, only this method is called for a hard time limit."""
        if not soft and os.getpid() in self._children:
            child_exit.close_ended(self._ended(ExitCause.TIME_LIMIT, os.getpid()))
        try:
            return super().on_timeout(soft, timeout)
        finally:
            if not soft:
                waiting_calls.ended(self)

    def _ended(
        self, cause: ExitCause, pid: int, error: BaseException | None = None
    ) -> EndedDelivery:
        fields = self._request_dict
        call_id = call_id_of(self.id, fields.get("replaced_task_nesting"))
        header, owner = read_header(fields, self.task.name, call_id), owner_of(fields[TOKEN], pid)
        return EndedDelivery(
            self.task,
            call_id,
            owner,
            header,
            self._args,
            self._kwargs,
            fields["retries"],
            pid,
            cause,
            self._is_final(cause),
            failure_of(error) if error is not None else None,
            fields,
        )

    def _is_final(self, cause: ExitCause) -> bool:
        """Whether Celery has a final state for the call, and does not return its message."""
        task = self.task
        match cause:
            case ExitCause.STOPPED:
                return False
            case ExitCause.KILLED:
                return not (task.acks_late and task.reject_on_worker_lost)
            case ExitCause.TIME_LIMIT:
                older = getattr(task, "acks_on_failure_or_timeout", True)  # before Celery 5.7
                return bool(not task.acks_late or getattr(task, "acks_on_timeout", older))
            case ExitCause.REVOKED | ExitCause.ERROR:
                return True
            case _ as never:
                assert_never(never)


def _is_final(error: BaseException) -> bool:
    """Whether a call that raised *error* outside of its lease does not run again by itself."""
    return not isinstance(error, Retry | SystemExit | KeyboardInterrupt | MemoryError) and not (
        isinstance(error, Reject) and error.requeue
    )


def _seconds(limit: Any) -> float | None:
    """A time limit of a message; ``None`` if it is no number."""
    return limit if isinstance(limit, int | float) else None


def request_class(task: Any) -> type[Request]:
    """The request class of a leased *task*: :class:`LeaseRequest`, combined with the ``Request``
    that the task's classes name, if any.

    Raises :class:`LeaseConfigurationError` if that is not a subclass of Celery's request.
    """
    named = (vars(base)["Request"] for base in type(task).__mro__ if "Request" in vars(base))
    other: Any = next((named for named in named if named not in (_OURS, Task.Request)), _OURS)
    try:
        found = symbol_by_name(other)
    except (ImportError, AttributeError, ValueError) as error:
        found = error
    if not (isinstance(found, type) and issubclass(found, Request)):
        raise LeaseConfigurationError(
            f"task {task.name}: Request={other!r} is not usable ({found!r}); write a subclass of "
            "celery.worker.request.Request, or of celery_leases.worker.request.LeaseRequest"
        )
    return (
        found
        if issubclass(found, LeaseRequest)
        else type(found.__name__, (LeaseRequest, found), {})
    )


@dataclass(frozen=True, slots=True)
class _BodiesOnly:
    """Stands for a pool of greenlets when Celery kills a job: kills only the body."""

    kill: BodyKill

    def terminate_job(self, pid: int, signal: Any = None) -> None:
        """Kill the body."""
        self.kill.request()
