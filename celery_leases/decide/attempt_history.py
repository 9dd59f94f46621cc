"""The history of a record: how its last attempts ended. Pure.

The columns of a row describe the latest attempt, the history has the attempts before. A claim moves
the attempt of the columns into the history. So a first success writes no history, and no attempt is
in both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from celery_leases.decide.endings import ExitCause
from celery_leases.failures.actions import Reason
from celery_leases.record import Attempt, Ended, PastAttempt, Record, State

HISTORY_MAX: Final = 9
"""Attempts in a history, at most: with the attempt in the columns they are ten."""
ERROR_MAX: Final = 160
"""Characters of an error in a history, at most."""
CRASHED_CALLS_MAX: Final = 16
"""How many other calls that have crashed a record of a task whose calls all run counts."""
_UNCOUNTED: Final = (
    Ended.LOST,
    Ended.INTERRUPTED,
    Ended.SNOOZED,
    Ended.WAITING,
    Ended.RELEASED,
)
"""After these the next crash is still one in a row."""
_NO_CRASH: Final = (ExitCause.REVOKED.value, ExitCause.ERROR.value)
"""An attempt that Celery has terminated for these reasons has not crashed."""


def latest_ended(row: Record) -> PastAttempt | None:
    """The attempt that the columns of *row* describe, if it has ended; otherwise ``None``."""
    if row.state is State.RUNNING or row.ended is None or row.unrun or row.finished_at is None:
        return None
    return _attempt(row, row.ended, row.finished_at)


def taken_over(row: Record, ended: Ended, at: int | None = None) -> PastAttempt:
    """The attempt of a running *row* that another attempt takes over; *at*: when it ended, if
    known.
    """
    attempt = _attempt(row, ended, at)
    return replace(attempt, owner=row.owner) if ended is Ended.ABANDONED else attempt


def crashes_in_a_row(row: Record) -> Sequence[PastAttempt]:
    """The crashes of *row*, known and suspected, since its last attempt that ended otherwise, the
    latest first; only those that the history still has.
    """
    found = []
    for attempt in reversed(timeline(row)):
        if attempt.ended is Ended.TERMINATED and attempt.error in _NO_CRASH:
            continue
        if attempt.ended in (Ended.CRASHED, Ended.ABANDONED, Ended.TERMINATED):
            found.append(attempt)
        elif attempt.ended not in _UNCOUNTED:
            break
    return found[: row.crashes + sum((row.other_crashes or {}).values())]


def crashes_counted_for(row: Record, call_id: str, most: int) -> Record:
    """*row* with the crashes of the call *call_id* in ``crashes``: unless ``lease_runs="once"``,
    each call has its own, and ends after *most*, whatever other calls do meanwhile.

    If too many calls have crashed, a new one takes the place and the count of the one with the
    fewest. So they all end, also if the calls of a key crash in turn.
    """
    if row.crashed_call in (None, call_id):
        return row
    counts = {**(row.other_crashes or {}), str(row.crashed_call): row.crashes}
    others = {each: n for each, n in counts.items() if n and each not in row.finished_calls}
    crashes = others.pop(call_id, 0)
    if not crashes and len(others) > CRASHED_CALLS_MAX:
        fewest = min(others, key=others.__getitem__)
        if others[fewest] < most:
            crashes = others.pop(fewest)
        else:  # those have ended, and are forgotten as soon as their callers know it
            others.popitem()
    return replace(row, crashes=crashes, crashed_call=call_id, other_crashes=others or None)


def with_end(
    row: Record, owner: str, ended: Ended, counted_for: str | None = None
) -> Record | None:
    """*row* after the abandoned attempt with the token *owner* is known to have *ended*; ``None``
    if the history has no such attempt.

    ``CRASHED`` and ``TERMINATED`` confirm its crash, any other end takes the crash back: from the
    crashes of the call *counted_for*, or from those of the key. If the key has failed for good
    because of that crash, it may run again.
    """
    past = next((each for each in row.history if each.owner == owner), None)
    if past is None:
        return None
    known = replace(past, ended=ended, owner=None)
    changes: dict[str, Any] = {
        "history": tuple(known if each is past else each for each in row.history)
    }
    known_crash = ended in (Ended.CRASHED, Ended.TERMINATED)
    if past is row.history[-1]:
        if row.previous is not None and row.previous.ended is Ended.ABANDONED:
            changes["previous"] = replace(row.previous, ended=ended)
        if not known_crash:
            changes["crashed_at"] = None
    if known_crash:
        return replace(row, **changes)
    if counted_for is None:
        counts = past in crashes_in_a_row(row)
    else:  # the history does not say which attempts were those of the call
        if (others := row.other_crashes or {}).get(counted_for):
            others = {**others, counted_for: others[counted_for] - 1}
            return replace(row, **changes, other_crashes=others)
        counts = row.crashes > 0 and row.crashed_call == counted_for
    if not counts:
        return replace(row, **changes)
    changes["crashes"] = row.crashes - 1
    if row.state is State.FAILED and row.reason == Reason.CRASH_LOOP:
        changes |= {"state": State.PENDING, "failure": None, "reason": None}
        changes["ended"] = ended if row.ended is Ended.ABANDONED else row.ended
        changes["finished_calls"] = tuple(
            call_id for call_id in row.finished_calls if call_id != row.call_id
        )
    return replace(row, **changes)


def has_suspicions(row: Record) -> bool:
    """Whether an abandoned attempt in the history of *row* may still write how it ended."""
    return any(each.owner is not None for each in row.history)


def with_known_ends(record: Record, now: Record | None) -> Record:
    """The *record* of a running attempt with what abandoned attempts have written since into its
    row, which is *now* that: an outcome without it would count their crashes again.
    """
    if now is None or not now.is_attempt(State.RUNNING, record.owner, record.fence):
        return record
    return replace(
        record,
        crashes=now.crashes,
        other_crashes=now.other_crashes,
        crashed_at=now.crashed_at,
        previous=now.previous,
        history=now.history,
    )


def only_suspected(row: Record, most: int) -> bool:
    """Whether no crash in a row of *row* is known, so that its process may live each time. If they
    are three times as many as the *most* that count, lost leases do not explain them.
    """
    known = any(each.ended is not Ended.ABANDONED for each in crashes_in_a_row(row))
    return not known and row.crashes < 3 * most


def crashes_in_words(row: Record, crashes: int, *, one_known: bool = False) -> str:
    """What *crashes* in a row mean; *one_known*: the attempt that *row* describes has crashed."""
    ended = {each.ended for each in crashes_in_a_row(row)}
    if Ended.ABANDONED not in ended:
        return f"its process died {crashes} times in a row"
    if not one_known and len(ended) == 1:
        return f"its lease ended {crashes} times in a row and nothing was heard of its process"
    return f"its process died, or its lease ended and nothing was heard of it, {crashes} times in a row"


def with_attempt(row: Record, latest: PastAttempt | None) -> tuple[PastAttempt, ...]:
    """The history of *row* with *latest* added, if it is not ``None``."""
    return (*row.history, latest)[-HISTORY_MAX:] if latest is not None else row.history


def with_attempt_aside(row: Record) -> Record:
    """*row* with its latest attempt in the history alone, because the columns are about to say how
    its call ends without an attempt.
    """
    latest = latest_ended(row)
    if latest is None:
        return row
    previous = Attempt(latest.ended, row.failure, row.holder)
    return replace(row, history=with_attempt(row, latest), previous=previous, unrun=True)


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
        why = row.reason if ended is Ended.TERMINATED else None
        return PastAttempt(row.started_at, at, ended, row.holder, why)
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
        attempt.owner,
    ]
    while values[-1] is None:
        del values[-1]
    return values


def _read(value: Any) -> PastAttempt:
    started, runtime, ended, host, error, rule, owner = [*value, None, None, None][:7]
    if type(started) is not int or not (runtime is None or type(runtime) is int):
        raise TypeError("not the times of an attempt")
    if (
        not isinstance(host, str)
        or not isinstance(error, str | None)
        or not isinstance(rule, str | None)
        or not isinstance(owner, str | None)
    ):
        raise TypeError("not the texts of an attempt")
    finished = started + runtime if runtime is not None else None
    return PastAttempt(started, finished, Ended(ended), host, error, rule, owner)
