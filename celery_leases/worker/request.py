"""The worker's main process: an owner token for each delivery, and the cleanup after a pool child
that has died.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from billiard.einfo import ExceptionWithTraceback
from celery import Task
from celery.exceptions import Terminated as ByRevoke
from celery.exceptions import TimeLimitExceeded, WorkerLostError
from celery.worker.request import Request
from kombu.utils.imports import symbol_by_name

from celery_leases.concurrency import os_threads
from celery_leases.errors import LeaseConfigurationError
from celery_leases.protocol.settlement import ExitCause
from celery_leases.signals import logger
from celery_leases.worker import app_components, child_exit
from celery_leases.worker.child_exit import DeadChild
from celery_leases.worker.headers import (
    HEADER,
    OURS,
    TOKEN,
    WATCHED,
    WOKEN,
    arrived,
    call_id_of,
    owner_of,
    retries_of,
)
from celery_leases.worker.pools.greenlets import Kill, kill_of
from celery_leases.worker.reschedule import KeyIsHeld
from celery_leases.worker.return_routes import ORIGIN, origin_of
from celery_leases.worker.waiting_calls import Line, held_calls

_OURS = "celery_leases.worker.request:LeaseRequest"
_EMBEDDED = frozenset({"callbacks", "errbacks", "chain", "chord"})
"""What Celery puts into the third part of a body; in the child it becomes attributes of the
request, after headers.
"""

_BEGINNING = len(OURS)
_GREEN = os_threads.green()
"""Whether the worker has greenlets: only its main process has use for this module, and has patched
all by now.
"""

_EXIT_CAUSES = (
    (WorkerLostError, ExitCause.KILLED),
    (TimeLimitExceeded, ExitCause.TIME_LIMIT),
    (ByRevoke, ExitCause.REVOKED),
)


class LeaseRequest(Request):
    """A Celery request with the owner token of its attempt.

    The token is made here, not in the child, so that the process that survives a killed child knows
    the owner of the lease.
    """

    #: The calls it waits with, if its key is held.
    line: Line | None = None
    #: Until when it waits at most, by the monotonic clock.
    waits_until = 0.0
    _scheduled: Any = None
    #: Whether it has expired; its record says so by itself.
    _over = False
    #: Celery reports a cold shutdown like a revoke.
    _killed_by_revoke = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # All headers become attributes of the request in the child: those that only this process
        # sets are not taken from a message. An eager call would run on stores of its own.
        carried = self._request_dict
        for name in [name for name in carried if name[:_BEGINNING] == OURS and name != HEADER]:
            del carried[name]
        carried["is_eager"] = False
        carried["retries"] = retries_of(carried.get("retries"), self.name, self.id)
        self._strip_embedded()
        token = carried[TOKEN] = os.urandom(16).hex()
        carried[ORIGIN] = origin_of(self._message, app_components.worker_here())
        self._children: list[int] = []
        self._kill = kill_of(token) if _GREEN else None
        events = self._eventer
        # Without -E the dispatcher sends events of workers only; Flower may switch it at any time.
        carried[WATCHED] = bool(
            events and events.enabled and (not events.groups or "task" in events.groups)
        )
        if held_calls.wakes(getattr(app_components.worker_here(), "consumer", None)):
            carried[WOKEN] = True
        if held_calls.lines or HEADER in carried:
            held_calls.receive(self)

    @property
    def _eta_timer_entry(self) -> Any:
        """The function that Celery's timer calls to begin this request."""
        return self._scheduled

    @_eta_timer_entry.setter
    def _eta_timer_entry(self, scheduled: Any) -> None:
        self._scheduled = scheduled
        if scheduled is not None and self.line is not None:
            held_calls.scheduled(self)

    def scheduled_again(self, scheduled: Any) -> None:
        """It continues to wait in Celery's timer."""
        self._scheduled = scheduled

    def _strip_embedded(self) -> None:
        """Remove fields from the third part of the body that Celery does not put there: they would
        replace fields set here.

        The child then gets the body as it was read here, without a content type.
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
        )
        self._body = (
            args,
            kwargs,
            {name: value for name, value in embed.items() if name in _EMBEDDED},
        )
        self._content_type = self._content_encoding = None

    def maybe_expire(self) -> Any:
        """Leave the expiry of a copy to the child, which can see whether the call has begun.

        Expiring a copy would revoke the call while it runs: both have one id.
        """
        if self.delivery_info.get("redelivered") or HEADER in self._request_dict:
            return None
        self._over = bool(super().maybe_expire())
        return self._over

    def revoked(self) -> bool:
        """Whether the call must not run; the record of a revoked waiting call no longer says that
        it runs again.

        A waiting copy does not expire, so only a revoke can end it here.
        """
        before = self._already_revoked
        revoked = bool(super().revoked())
        if revoked:
            held_calls.ended(self)
        queued = self.task.lease_options.queues_once and not self._over
        if revoked and not before and (queued or HEADER in self._request_dict):
            child_exit.call_off(self._dead_child(ExitCause.REVOKED, 0))
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
        """Make the pool notice the end of the child with this delivery at once."""
        self._children.append(pid)
        child_exit.watch(pid)
        return super().on_accepted(pid, time_accepted)

    def on_failure(
        self, exc_info: Any, send_failed_event: bool = True, return_ok: bool = False
    ) -> Any:
        """Free the key of a dead child before its message is returned to the broker."""
        error = exc_info.exception
        error = error.exc if isinstance(error, ExceptionWithTraceback) else error
        cause = next((cause for kind, cause in _EXIT_CAUSES if isinstance(error, kind)), None)
        if cause is ExitCause.REVOKED and not self._killed_by_revoke:
            cause = ExitCause.STOPPED
        if cause is not None:
            for pid in self._children:
                child_exit.close_dead(self._dead_child(cause, pid))
        try:
            return super().on_failure(exc_info, send_failed_event, return_ok)
        finally:
            if isinstance(error, KeyIsHeld):
                held_calls.reschedule(self, error)
            else:
                held_calls.ended(self)

    def on_timeout(self, soft: bool, timeout: float) -> Any:
        """In some pools only this method learns of a hard time limit."""
        try:
            return super().on_timeout(soft, timeout)
        finally:
            if not soft:
                held_calls.ended(self)

    def _dead_child(self, cause: ExitCause, pid: int) -> DeadChild:
        fields = self._request_dict
        call_id = call_id_of(self.id, fields.get("replaced_task_nesting"))
        header, owner = arrived(fields, self.task.name, call_id), owner_of(fields[TOKEN], pid)
        return DeadChild(
            self.task,
            call_id,
            owner,
            header,
            self._args,
            self._kwargs,
            fields["retries"],
            pid,
            cause,
        )


def request_class(task: Any) -> type[Request]:
    """The request class of a leased *task*: that of celery_leases, before any other that its
    classes name.

    It is first because it frees the key of a dead child. Raises :class:`LeaseConfigurationError`
    for a class that is not a subclass of Celery's.
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
    """Replaces a pool of greenlets whose jobs are killed."""

    kill: Kill

    def terminate_job(self, pid: int, signal: Any = None) -> None:
        """Kill the body of the job."""
        self.kill.ask()
