"""How the body of one attempt ended, independent of any framework."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from celery_leases.common.values import value_class
from celery_leases.failures.actions import Classification
from celery_leases.protocol.records import Ended, Failure


@value_class(frozen=True, slots=True)
class Returned:
    """A value. ``result`` is its JSON text; ``missing`` says why there is none."""

    value: Any
    result: str | None
    missing: str | None = None


@dataclass(frozen=True, slots=True)
class Raised:
    """An exception, its classification by the rules, and its traceback as the record stores it."""

    error: BaseException
    failure: Failure
    classification: Classification
    traceback: str | None = None


@dataclass(frozen=True, slots=True)
class Snoozed:
    """The body asked to run again after ``delay`` seconds, and does not count as an attempt."""

    error: BaseException
    delay: float
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Lost:
    """The attempt no longer held its lease."""

    reason: str


@dataclass(frozen=True, slots=True)
class Interrupted:
    """A shutdown or a revoke ended the body."""

    error: BaseException


@dataclass(frozen=True, slots=True)
class Terminated:
    """The hard time limit was reached, or the body asked the process to exit."""

    error: BaseException
    reason: str


@dataclass(frozen=True, slots=True)
class ControlFlow:
    """The framework's own control flow: the task runs ``again`` after ``delay`` seconds, or ends
    without a result.
    """

    error: BaseException
    runs_again: bool
    delay: float | None = None
    ended: Ended = Ended.RETRIED


Ending = Returned | Raised | Snoozed | Lost | Interrupted | Terminated | ControlFlow
