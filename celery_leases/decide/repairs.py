"""The row after an operator, a caller or an outcome has changed it. Pure functions of the row that
was read.

A store reads the row, calls one of these functions, and writes the returned row by compare-and-set.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from celery_leases.decide import attempt_history
from celery_leases.keys import CallKey
from celery_leases.record import Attempt, Ended, Outcome, Record, State

MICROSECONDS: Final = 1_000_000
RETENTION: Final = 7 * 86_400.0
"""Seconds for which a row counts if it has no retention of its own."""


def reset(
    row: Record, *, keep: bool, forgive: bool = False, retention: float | None = None
) -> Record:
    """The row after it is taken from its holder; see
    :class:`~celery_leases.stores.interfaces.RecordStore`.
    """
    values = _released(row, retention) | {"state": State.PENDING, "ended": Ended.RELEASED}
    if forgive or not keep:
        values |= {
            "failures": 0,
            "quick_retries": 0,
            "cooldowns": 0,
            "failed_at": None,
            "crashes": 0,
        }
    if not keep:
        empty = (
            "fingerprint",
            "digests",
            "result",
            "reason",
            "failure",
            "finished_results",
            "finished_at",
            "ended",
        )
        values |= dict.fromkeys(
            (*empty, "progress", "message", "publish_at", "published_at", "previous", "crashed_at")
        )
        values |= {
            "attempt": 0,
            "generation": row.generation + 1,
            "finished_calls": (),
            "call_id": "",
            "holder": "",
        }
        values |= {"history": (), "unrun": False, "traceback": None}
    return replace(row, **values)


def resolved(row: Record, result: str | None, retention: float | None = None) -> Record:
    """The row after an operator has marked its work as done, with *result* as JSON text."""
    values = _released(row, retention) | {"reason": None, "failure": None, "finished_at": row.now}
    return replace(row, state=State.DONE, ended=Ended.RESOLVED, result=result, **values)


def enqueued(
    row: Record | None,
    task: str,
    key: CallKey,
    call_id: str,
    message: str,
    *,
    ttl: float,
    retention: float,
) -> Record:
    """A ``pending`` row with the message of a call, which replaces the expired *row*, if there is
    one.

    Without a *row* its times are 0, and the database adds the time of the insert.
    """
    now, fence_before = (row.now, row.fence) if row is not None else (0, -1)
    return Record(
        stored_key=key.stored,
        task=task,
        key=key.key,
        state=State.PENDING,
        fence=max(fence_before + 1, now),
        owner="",
        call_id=call_id,
        holder="",
        attempt=0,
        generation=row.generation + 1 if row is not None else 0,
        failures=0,
        crashes=0,
        retries=0,
        lease_store="",
        lease_ttl=ttl,
        created_at=now,
        started_at=now,
        now=now,
        fingerprint=key.fingerprint,
        digests=key.digests,
        retention=retention,
        message=message,
    )


def reassigned(
    row: Record,
    task: str,
    key: CallKey,
    call_id: str,
    message: str,
    *,
    new_generation: bool,
    ttl: float,
    retention: float,
) -> Record:
    """*row*, which no outstanding call has, as the row of a call that is being published.

    Its counts stay, except for a *new_generation*, which follows a call that has ended.
    """
    emptied = (
        "ended",
        "failure",
        "retry_at",
        "lease_until",
        "expires_at",
        "published_at",
        "finished_at",
    )
    values: dict[str, Any] = dict.fromkeys(emptied)
    if new_generation:
        values |= {"generation": row.generation + 1, "attempt": 0, "failures": 0, "failed_at": None}
        values |= {"quick_retries": 0, "cooldowns": 0, "result": None, "reason": None}
    return replace(
        row,
        task=task,
        state=State.PENDING,
        fence=max(row.fence + 1, row.now),
        owner="",
        call_id=call_id,
        retries=0,
        resumes=False,
        fingerprint=key.fingerprint,
        digests=key.digests,
        message=message,
        started_at=row.now,
        lease_ttl=ttl,
        retention=retention,
        previous=Attempt(row.ended, row.failure, row.holder)
        if row.ended is not None
        else row.previous,
        history=attempt_history.with_attempt(row, attempt_history.latest_ended(row)),
        unrun=False,
        **values,
    )


def settled(row: Record, outcome: Outcome, now: int) -> Record:
    """The row of a running attempt after *outcome*; *now*: when it is written, in microseconds."""
    finished, wait = outcome.finished, outcome.retry_after or 0.0
    return replace(
        row,
        state=outcome.state,
        ended=outcome.ended,
        retries=outcome.retries,
        attempt=outcome.attempt,
        failures=outcome.failures,
        quick_retries=outcome.quick_retries,
        cooldowns=outcome.cooldowns,
        failed_at=now if outcome.failed else row.failed_at,
        crashes=outcome.crashes,
        crashed_call=outcome.crashed_call,
        traceback=outcome.traceback if outcome.failed else row.traceback,
        unrun=outcome.unrun,
        resumes=outcome.resumes,
        result=outcome.result,
        reason=outcome.reason,
        failure=outcome.failure,
        finished_calls=tuple(finished) if finished is not None else row.finished_calls,
        finished_results=finished if finished is not None else row.finished_results,
        progress=outcome.progress if outcome.progress is not None else row.progress,
        retry_at=now + round(wait * MICROSECONDS) if wait else None,
        expires_at=now + round((outcome.retention + wait) * MICROSECONDS)
        if outcome.retention is not None
        else None,
        finished_at=now,
        lease_until=None,
    )


def _released(row: Record, retention: float | None) -> dict[str, Any]:
    """The changes that take *row* from its owner; it counts for *retention* seconds then."""
    lasts = row.retention or RETENTION if retention is None else retention
    running = row.state is State.RUNNING
    latest = (
        attempt_history.taken_over(row, Ended.RELEASED, row.now)
        if running
        else attempt_history.latest_ended(row)
    )
    return {
        "fence": max(row.fence + 1, row.now),
        "history": attempt_history.with_attempt(row, latest),
        "unrun": True,
        "owner": "",
        "retry_at": None,
        "lease_until": None,
        "expires_at": row.now + round(lasts * MICROSECONDS),
    }
