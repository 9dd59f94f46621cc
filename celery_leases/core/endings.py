"""How the body of one attempt ended, in words that know no framework."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from celery_leases.core.records import Ended, Failure
from celery_leases.core.rulings import Classification


@dataclass(frozen=True, slots=True)
class Returned:
    """A value. ``result`` is its JSON text; ``missing`` says why there is none."""

    value: Any
    result: str | None
    missing: str | None = None


@dataclass(frozen=True, slots=True)
class Raised:
    """An exception, and what the rules say of it."""

    error: BaseException
    failure: Failure
    judgement: Classification


@dataclass(frozen=True, slots=True)
class Snoozed:
    """The body asked to run again after ``delay`` seconds as if it had not run."""

    error: BaseException
    delay: float
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Lost:
    """The attempt no longer held its lease."""

    reason: str


@dataclass(frozen=True, slots=True)
class Interrupted:
    """A shutdown or a revoke took the process away from the body."""

    error: BaseException


@dataclass(frozen=True, slots=True)
class Terminated:
    """The hard time limit hit, or the body asked for the process to exit."""

    error: BaseException
    reason: str


@dataclass(frozen=True, slots=True)
class Passed:
    """The framework's own control flow: it runs ``again`` after ``delay`` seconds, or is over without a result."""

    error: BaseException
    again: bool
    delay: float | None = None
    ended: Ended = Ended.RETRIED


Ending = Returned | Raised | Snoozed | Lost | Interrupted | Terminated | Passed
