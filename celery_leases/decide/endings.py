"""How the body of one attempt ended, in terms that do not depend on Celery."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from celery_leases.failures.actions import RuleMatch
from celery_leases.record import Ended, Failure
from celery_leases.value_class import value_class


class ExitCause(Enum):
    """Why Celery ended a delivery; the value is the reason in logs and records."""

    KILLED = "its process died"
    TIME_LIMIT = "hard time limit"
    REVOKED = "revoked"
    STOPPED = "cold shutdown"
    #: In ``before_start``, for example, or in Celery itself.
    ERROR = "an error outside of its body"


@value_class(frozen=True, slots=True)
class Returned:
    """The body returned ``value``. ``result`` is its JSON text, or ``missing`` says why there is
    none.
    """

    value: Any
    result: str | None
    missing: str | None = None


@dataclass(frozen=True, slots=True)
class Raised:
    """The body raised ``error``; ``failure`` and ``traceback`` are the forms that the record
    stores.
    """

    error: BaseException
    failure: Failure
    matched: RuleMatch
    traceback: str | None = None


@dataclass(frozen=True, slots=True)
class Snoozed:
    """The body raised ``Snooze``: run again after ``delay`` seconds, and count no attempt."""

    error: BaseException
    delay: float
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Lost:
    """The attempt lost its lease, or had to stop for another ``reason`` outside the task."""

    reason: str


@dataclass(frozen=True, slots=True)
class Interrupted:
    """A shutdown or a revoke interrupted the body."""

    error: BaseException


@dataclass(frozen=True, slots=True)
class Terminated:
    """The hard time limit was reached, or the body raised ``SystemExit``."""

    error: BaseException
    reason: str


@dataclass(frozen=True, slots=True)
class ControlFlow:
    """The body raised one of Celery's control-flow exceptions, such as ``Retry`` or ``Ignore``, or
    has retried, replaced or published its call, whatever it did afterwards.

    Celery gets the exception. The call runs again after ``delay`` seconds (``runs_again``), with
    the number ``retries`` in its message (by default one more after a retry). Otherwise it has
    failed, as ``ended`` and ``failure`` say, or ends without a result.
    """

    error: BaseException
    runs_again: bool
    delay: float | None = None
    ended: Ended = Ended.RETRIED
    retries: int | None = None
    failure: Failure | None = None


Ending = Returned | Raised | Snoozed | Lost | Interrupted | Terminated | ControlFlow


def error_text(ending: Ending) -> str:
    """The error in *ending*, in words; empty if the body returned."""
    match ending:
        case Raised(_, failure):
            return f"{failure.type}: {failure.message}"
        case Lost(reason):
            return f"the lease was lost: {reason}"
        case Returned():
            return ""
        case _:
            return type(ending.error).__name__
