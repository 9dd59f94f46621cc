"""The reply to a delivery, independent of any framework, and the marks it leaves beside its key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from celery_leases.errors import LeasesError
from celery_leases.protocol.keys import bounded


@dataclass(frozen=True, slots=True)
class News:
    """The event for monitors of Celery about a call that does not run now: ``what``, and for how
    long.
    """

    what: str
    retry_after: float
    reason: str


@dataclass(frozen=True, slots=True)
class Answer:
    """Celery gets this value as the task's result."""

    value: Any


@dataclass(frozen=True, slots=True)
class Throw:
    """Celery gets this exception, as the body or a decision raised it.

    ``own``: it is the stored failure of this call, and is omitted if Celery already has the call's
    outcome.
    """

    error: BaseException
    own: bool = False
    news: News | None = None


@dataclass(frozen=True, slots=True)
class Again:
    """A fresh message must be published before this delivery ends.

    ``started``: the call has begun, so its message no longer expires. ``met``: the fence of a
    failure of this call that its fresh message waits for. ``prior``: the token of an attempt whose
    row may be open although it did not crash. ``away``: a store did not answer. ``refusal``: the
    error to raise where a call cannot be rescheduled. ``cause``: the error of the body for which
    the call runs again, a retry for Celery; ``unknown``: no rule knows that error. ``retrying``:
    the call has failed before, so Celery knows of its retry. ``held``: another call holds the key.
    """

    delay: float
    reason: str
    started: bool = False
    prior: str | None = None
    away: bool = False
    refusal: LeasesError | None = None
    news: News | None = None
    cause: BaseException | None = None
    unknown: bool = False
    retrying: bool = False
    met: int | None = None
    held: bool = False


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """Celery has, or will have, the result of ``call_id``, which continued as another task ``age``
    seconds ago.

    While Celery has no result, ``again`` applies; ``missing`` is raised if it never will have one.
    """

    call_id: str
    age: float
    again: Again
    missing: LeasesError


@dataclass(frozen=True, slots=True)
class Over:
    """This delivery ends without a result."""

    reason: str


Reply = Answer | Throw | Again | Elsewhere | Over


def callbacks_mark(call_id: str) -> str:
    """The mark that the callbacks of a call have been sent."""
    return bounded(f"callbacks:{call_id}")


def waiter_mark(call_id: str, retries: int, met: int | None = None) -> str:
    """The mark of the latest copy of a call; *retries* counts Celery's retries of the call.

    A fresh message that waits for the failure *met* is not a copy of the earlier ones, and has a
    mark of its own.
    """
    return bounded(f"waiter:{call_id}/{retries}" + (f"/{met}" if met else ""))
