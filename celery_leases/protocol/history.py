"""The history of a record: how its last attempts ended. Pure.

The columns of a row describe one attempt, the latest; the history has the attempts before. A claim
moves the attempt of the columns into the history, so a first success writes no history, and an
attempt is never in both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from celery_leases.protocol.records import Ended, PastAttempt, Record, State

KEPT: Final = 9
"""The most attempts in the history: ten, together with the one in the columns."""
ERROR_MAX: Final = 160
"""The most characters of an error in the history."""


def latest_ended(row: Record) -> PastAttempt | None:
    """The ended attempt that the columns of *row* describe; ``None`` if they describe none, or a
    running one.
    """
    if row.state is State.RUNNING or row.ended is None or row.unrun or row.finished_at is None:
        return None
    return _attempt(row, row.ended, row.finished_at)


def taken_over(row: Record, ended: Ended, at: int | None = None) -> PastAttempt:
    """The attempt of a running *row* whose key another attempt takes, ended as given; *at*: when,
    if known.
    """
    return _attempt(row, ended, at)


def with_attempt(row: Record, latest: PastAttempt | None) -> tuple[PastAttempt, ...]:
    """The history of *row* with its *latest* attempt."""
    return (*row.history, latest)[-KEPT:] if latest is not None else row.history


def timeline(row: Record) -> Sequence[PastAttempt]:
    """All attempts of *row* that have ended, the oldest first."""
    latest = latest_ended(row)
    return row.history if latest is None else (*row.history, latest)


def dump(history: Sequence[PastAttempt]) -> list[list[Any]]:
    """*history* as a JSON document has it: a list for each attempt, with times in microseconds."""
    return [_written(each) for each in history]


def load(said: Any) -> tuple[PastAttempt, ...]:
    """The history that :func:`dump` has written; raises an error of any kind for anything else."""
    if not isinstance(said, list):
        raise TypeError(f"{type(said).__name__}, not a list")
    return tuple(map(_read, said))


def _attempt(row: Record, ended: Ended, at: int | None) -> PastAttempt:
    failure = row.failure
    if failure is None:
        return PastAttempt(row.started_at, at, ended, row.holder)
    said = ": ".join(part for part in (failure.type, failure.message) if part)
    cut = said if len(said) <= ERROR_MAX else f"{said[: ERROR_MAX - 1]}…"
    return PastAttempt(row.started_at, at, ended, row.holder, cut, failure.rule)


def _written(attempt: PastAttempt) -> list[Any]:
    took = attempt.finished_at - attempt.started_at if attempt.finished_at is not None else None
    values = [
        attempt.started_at,
        took,
        attempt.ended.value,
        attempt.host,
        attempt.error,
        attempt.rule,
    ]
    while values[-1] is None:
        del values[-1]
    return values


def _read(said: Any) -> PastAttempt:
    started, took, ended, host, error, rule = [*said, None, None][:6]
    if type(started) is not int or not (took is None or type(took) is int):
        raise TypeError("not the moments of an attempt")
    if (
        not isinstance(host, str)
        or not isinstance(error, str | None)
        or not isinstance(rule, str | None)
    ):
        raise TypeError("not the texts of an attempt")
    return PastAttempt(
        started, started + took if took is not None else None, Ended(ended), host, error, rule
    )
