"""What a delivery comes to, in words that know no framework, and the marks it leaves beside its key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from celery_leases.core.errors import LeasesError
from celery_leases.core.keys import bounded


@dataclass(frozen=True, slots=True)
class News:
    """What those who watch Celery's events are told of a call that does not run now: ``what``, and for how long."""

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

    ``own``: it is what is remembered of this very call, and is not wanted where Celery knows its outcome already.
    """

    error: BaseException
    own: bool = False
    news: News | None = None


@dataclass(frozen=True, slots=True)
class Again:
    """A fresh message must be published before this delivery ends.

    ``started``: the call has begun, so that it may no longer expire. ``met``: the fence of a failure of this call that
    its fresh message waits for. ``prior``: the token of an attempt whose row may
    still stand open, through no crash of it. ``away``: a store did not answer. ``refusal``: what is raised
    instead where nothing can come back. ``cause``: the error of the body that comes back, which is a retry for Celery;
    ``unknown``: no rule knows that error. ``retrying``: the call has failed before, so that Celery knows of its retry.
    ``held``: another call holds the key.
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
    """Celery has, or will have, the result of ``call_id``, which went on as another task ``age`` seconds ago.

    Where it has none yet, ``again`` is to be done; ``missing`` is raised where it never will.
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
    """The mark that the callbacks of a call are out."""
    return bounded(f"callbacks:{call_id}")


def waiter_mark(call_id: str, retries: int, met: int | None = None) -> str:
    """The mark that names the latest copy of a call, retried so many times by Celery, which is to come back.

    A fresh message that waits for the failure *met* is no copy of those before it, and has a mark of its own.
    """
    return bounded(f"waiter:{call_id}/{retries}" + (f"/{met}" if met else ""))
