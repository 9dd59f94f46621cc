"""The history of a record: how its last attempts ended. Pure.

The columns of a row describe the latest attempt, the history has the attempts before. A claim moves
the attempt of the columns into the history. So a first success writes no history, and no attempt is
in both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from celery_leases.protocol.records import Ended, PastAttempt, Record, State

HISTORY_MAX: Final = 9
"""Attempts in a history, at most: with the attempt in the columns they are ten."""
ERROR_MAX: Final = 160
"""Characters of an error in a history, at most."""


def latest_ended(row: Record) -> PastAttempt | None:
    """The attempt that the columns of *row* describe, if it has ended; otherwise ``None``."""
    if row.state is State.RUNNING or row.ended is None or row.unrun or row.finished_at is None:
        return None
    return _attempt(row, row.ended, row.finished_at)


def taken_over(row: Record, ended: Ended, at: int | None = None) -> PastAttempt:
    """The attempt of a running *row* that another attempt takes over; *at*: when it ended, if
    known.
    """
    return _attempt(row, ended, at)


def with_attempt(row: Record, latest: PastAttempt | None) -> tuple[PastAttempt, ...]:
    """The history of *row* with *latest* added, if it is not ``None``."""
    return (*row.history, latest)[-HISTORY_MAX:] if latest is not None else row.history


def timeline(row: Record) -> Sequence[PastAttempt]:
    """All ended attempts of *row*, the oldest first."""
    latest = latest_ended(row)
    return row.history if latest is None else (*row.history, latest)


def dump(history: Sequence[PastAttempt]) -> list[list[Any]]:
    """*history* for a JSON document: a list for each attempt, with times in microseconds."""
    return [_written(each) for each in history]


def load(value: Any) -> tuple[PastAttempt, ...]:
    """The history that :func:`dump` has written; raises any exception for another value."""
    if not isinstance(value, list):
        raise TypeError(f"{type(value).__name__}, not a list")
    return tuple(map(_read, value))


def _attempt(row: Record, ended: Ended, at: int | None) -> PastAttempt:
    failure = row.failure
    if failure is None:
        return PastAttempt(row.started_at, at, ended, row.holder)
    text = ": ".join(part for part in (failure.type, failure.message) if part)
    error = text if len(text) <= ERROR_MAX else f"{text[: ERROR_MAX - 1]}…"
    return PastAttempt(row.started_at, at, ended, row.holder, error, failure.rule)


def _written(attempt: PastAttempt) -> list[Any]:
    runtime = attempt.finished_at - attempt.started_at if attempt.finished_at is not None else None
    values = [
        attempt.started_at,
        runtime,
        attempt.ended.value,
        attempt.host,
        attempt.error,
        attempt.rule,
    ]
    while values[-1] is None:
        del values[-1]
    return values


def _read(value: Any) -> PastAttempt:
    started, runtime, ended, host, error, rule = [*value, None, None][:6]
    if type(started) is not int or not (runtime is None or type(runtime) is int):
        raise TypeError("not the times of an attempt")
    if (
        not isinstance(host, str)
        or not isinstance(error, str | None)
        or not isinstance(rule, str | None)
    ):
        raise TypeError("not the texts of an attempt")
    return PastAttempt(
        started, started + runtime if runtime is not None else None, Ended(ended), host, error, rule
    )
