"""What a delivery comes to, in words that know no framework, and the marks it leaves beside its key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


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


@dataclass(frozen=True, slots=True)
class Again:
    """A fresh message must be published before this delivery ends.

    ``started``: the call has begun, so that it may no longer expire. ``prior``: the token of an attempt whose row may
    still stand open, through no crash of it. ``away``: a store did not answer.
    """

    delay: float
    reason: str
    started: bool = False
    prior: str | None = None
    away: bool = False


@dataclass(frozen=True, slots=True)
class Over:
    """This delivery ends without a result."""

    reason: str


Reply = Answer | Throw | Again | Over


def callbacks_mark(call_id: str) -> str:
    """The mark that the callbacks of a call are out."""
    return f"callbacks:{call_id}"


def waiter_mark(call_id: str) -> str:
    """The mark that names the one copy of a call which is to come back."""
    return f"waiter:{call_id}"
