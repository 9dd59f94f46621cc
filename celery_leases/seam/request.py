"""The worker's main process: an owner token for each delivery, and the last services to a pool child that has died."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from billiard.einfo import ExceptionWithTraceback
from celery.exceptions import Terminated as ByRevoke
from celery.exceptions import TimeLimitExceeded, WorkerLostError
from celery.worker.request import Request

from celery_leases.core.outcomes import Death
from celery_leases.interruption.by_greenlet import Kill, kill_of
from celery_leases.process import native
from celery_leases.seam import undertaker
from celery_leases.seam.pin import HEADER, TOKEN, WATCHED, call_id_of, owner_of, pinned
from celery_leases.seam.undertaker import Deceased

_DEATHS = ((WorkerLostError, Death.KILLED), (TimeLimitExceeded, Death.TIME_LIMIT), (ByRevoke, Death.REVOKED))


class LeaseRequest(Request):
    """A Celery request that carries the owner token of the attempt it may become.

    The token is made here, not in the child, so that the process that outlives a killed child knows whose lease it was.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._request_dict[TOKEN] = uuid4().hex
        self._children: list[int] = []
        self._kill = kill_of(self._request_dict[TOKEN]) if native.green() else None
        events = self._eventer
        # Without -E the dispatcher sends events of workers only; Flower may switch it at any time.
        self._request_dict[WATCHED] = bool(events and events.enabled and (not events.groups or "task" in events.groups))

    def maybe_expire(self) -> Any:
        """Leave the expiry of a copy to the child, which can see whether the call has begun.

        Expiring a copy would revoke the call while it runs: both have one id.
        """
        if self.delivery_info.get("redelivered") or HEADER in self._request_dict:
            return None
        return super().maybe_expire()

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
        return super().on_failure(exc_info, send_failed_event, return_ok)

    def _deceased(self, death: Death, pid: int) -> Deceased:
        told = self._request_dict
        call_id = call_id_of(self.id, told.get("replaced_task_nesting"))
        pin = pinned(told, self.task.name, call_id)
        return Deceased(self.task, call_id, owner_of(told[TOKEN], pid), pin, self._args, self._kwargs, pid, death)


@dataclass(frozen=True, slots=True)
class _BodiesOnly:
    """Stands for a pool of greenlets whose jobs are killed."""

    kill: Kill

    def terminate_job(self, pid: int, signal: Any = None) -> None:
        """Kill the body of the job."""
        self.kill.ask()
