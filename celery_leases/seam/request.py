"""The worker's main process: an owner token for each delivery, and the last services to a pool child that has died."""

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

from celery_leases.core.errors import LeaseConfigurationError
from celery_leases.core.outcomes import Death
from celery_leases.interruption.by_greenlet import Kill, kill_of
from celery_leases.process import native
from celery_leases.seam import apps, undertaker
from celery_leases.seam.held_calls import Line, held_calls
from celery_leases.seam.pin import HEADER, OURS, TOKEN, WATCHED, WOKEN, arrived, call_id_of, owner_of, retries_of
from celery_leases.seam.putback import KeyIsHeld
from celery_leases.seam.routes import ORIGIN, origin_of
from celery_leases.seam.undertaker import Deceased
from celery_leases.signals import logger

_OURS = "celery_leases.seam.request:LeaseRequest"
_EMBEDDED = frozenset({"callbacks", "errbacks", "chain", "chord"})
"""What Celery puts into the third part of a body; in the child it becomes attributes of the request, after headers."""

_BEGINNING = len(OURS)
_GREEN = native.green()
"""Whether the worker has greenlets: only its main process has use for this module, and has patched all by now."""

_DEATHS = ((WorkerLostError, Death.KILLED), (TimeLimitExceeded, Death.TIME_LIMIT), (ByRevoke, Death.REVOKED))


class LeaseRequest(Request):
    """A Celery request that carries the owner token of the attempt it may become.

    The token is made here, not in the child, so that the process that outlives a killed child knows whose lease it was.
    """

    #: The calls it waits with, if its key is held.
    line: Line | None = None
    #: Until when it waits at most, by the monotonic clock.
    waits_until = 0.0
    _scheduled: Any = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # All headers become attributes of the request in the child: those that only this process sets are not taken
        # from a message. An eager call would run on stores of its own.
        carried = self._request_dict
        for name in [name for name in carried if name[:_BEGINNING] == OURS and name != HEADER]:
            del carried[name]
        carried["is_eager"] = False
        carried["retries"] = retries_of(carried.get("retries"), self.name, self.id)
        self._strip_embedded()
        token = carried[TOKEN] = os.urandom(16).hex()
        carried[ORIGIN] = origin_of(self._message, apps.worker_here())
        self._children: list[int] = []
        self._kill = kill_of(token) if _GREEN else None
        events = self._eventer
        # Without -E the dispatcher sends events of workers only; Flower may switch it at any time.
        carried[WATCHED] = bool(events and events.enabled and (not events.groups or "task" in events.groups))
        if held_calls.wakes(getattr(apps.worker_here(), "consumer", None)):
            carried[WOKEN] = True
        if held_calls.lines or HEADER in carried:
            held_calls.receive(self)

    @property
    def _eta_timer_entry(self) -> Any:
        """What Celery's timer begins this request by."""
        return self._scheduled

    @_eta_timer_entry.setter
    def _eta_timer_entry(self, scheduled: Any) -> None:
        self._scheduled = scheduled
        if scheduled is not None and self.line is not None:
            held_calls.scheduled(self)

    def scheduled_again(self, scheduled: Any) -> None:
        """It waits on in Celery's timer."""
        self._scheduled = scheduled

    def _strip_embedded(self) -> None:
        """Take from the third part of the body what Celery does not put there: it would replace what is set here.

        The child is given the body as it is read here then, without a content type.
        """
        args, kwargs, embed = self._payload
        if not embed or not isinstance(embed, Mapping) or embed.keys() <= _EMBEDDED:
            return
        strange = sorted(str(name)[:50] for name in embed.keys() - _EMBEDDED)
        logger.warning("%s[%s]: the body of its message has %s, which are ignored", self._type, self.id, strange[:10])
        self._body = (args, kwargs, {name: value for name, value in embed.items() if name in _EMBEDDED})
        self._content_type = self._content_encoding = None

    def maybe_expire(self) -> Any:
        """Leave the expiry of a copy to the child, which can see whether the call has begun.

        Expiring a copy would revoke the call while it runs: both have one id.
        """
        if self.delivery_info.get("redelivered") or HEADER in self._request_dict:
            return None
        return super().maybe_expire()

    def revoked(self) -> bool:
        """Whether the call is not to run; the record of one that was waiting does not say any more that it comes back.

        A copy that waits does not expire, so whatever ends it here is a revoke.
        """
        before = self._already_revoked
        revoked = bool(super().revoked())
        if revoked:
            held_calls.ended(self)
        if revoked and not before and HEADER in self._request_dict:
            undertaker.call_off(self._deceased(Death.REVOKED, 0))
        return revoked

    def terminate(self, pool: Any, signal: Any = None) -> Any:
        """Kill the body, as a revoke asks for; in a greenlet nothing but the body."""
        return super().terminate(pool if self._kill is None else _BodiesOnly(self._kill), signal)

    def cancel(self, pool: Any, *args: Any, **kwargs: Any) -> Any:
        """Kill the body, as a cold shutdown does; in a greenlet nothing but the body."""
        return super().cancel(pool if self._kill is None else _BodiesOnly(self._kill), *args, **kwargs)

    def on_accepted(self, pid: int, time_accepted: float) -> Any:
        """Have the end of the child noticed at once that has taken the delivery."""
        self._children.append(pid)
        undertaker.watch(pid)
        return super().on_accepted(pid, time_accepted)

    def on_failure(self, exc_info: Any, send_failed_event: bool = True, return_ok: bool = False) -> Any:
        """Free the key of a child that is gone before its message goes back to the broker."""
        error = exc_info.exception
        error = error.exc if isinstance(error, ExceptionWithTraceback) else error
        death = next((death for kind, death in _DEATHS if isinstance(error, kind)), None)
        if death is not None:
            for pid in self._children:
                undertaker.bury(self._deceased(death, pid))
        try:
            return super().on_failure(exc_info, send_failed_event, return_ok)
        finally:
            if isinstance(error, KeyIsHeld):
                held_calls.put_back(self, error)
            else:
                held_calls.ended(self)

    def on_timeout(self, soft: bool, timeout: float) -> Any:
        """In some pools nothing else is told of a hard time limit."""
        try:
            return super().on_timeout(soft, timeout)
        finally:
            if not soft:
                held_calls.ended(self)

    def _deceased(self, death: Death, pid: int) -> Deceased:
        told = self._request_dict
        call_id = call_id_of(self.id, told.get("replaced_task_nesting"))
        header, owner = arrived(told, self.task.name, call_id), owner_of(told[TOKEN], pid)
        return Deceased(self.task, call_id, owner, header, self._args, self._kwargs, told["retries"], pid, death)


def request_class(task: Any) -> type[Request]:
    """The request class of a leased *task*: ours, before any other that its classes name.

    Ours comes first, as it frees the key of a child that has died. Raises :class:`LeaseConfigurationError` for what is
    no subclass of Celery's.
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
            "celery.worker.request.Request, or of celery_leases.seam.request.LeaseRequest"
        )
    return found if issubclass(found, LeaseRequest) else type(found.__name__, (LeaseRequest, found), {})


@dataclass(frozen=True, slots=True)
class _BodiesOnly:
    """Stands for a pool of greenlets whose jobs are killed."""

    kill: Kill

    def terminate_job(self, pid: int, signal: Any = None) -> None:
        """Kill the body of the job."""
        self.kill.ask()
