"""What an operator, a caller and an outcome make of a record. Pure functions of the row as it was read.

A store reads the row, asks one of them, and writes the row that it gives by compare-and-set.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from celery_leases.core.keys import CallKey
from celery_leases.core.records import Ended, Outcome, Record, State

MICROSECONDS: Final = 1_000_000
RETENTION: Final = 7 * 86_400.0
"""Seconds for which a row counts whose task has not said how long."""


def reset(row: Record, *, keep: bool, forgive: bool = False, retention: float | None = None) -> Record:
    """The row as it is taken from whoever has it; see :class:`~celery_leases.core.ports.RecordStore`."""
    values = _taken_away(row, retention) | {"state": State.PENDING, "ended": Ended.RELEASED}
    if forgive or not keep:
        values |= {"failures": 0, "quick_retries": 0, "cooldowns": 0, "failed_at": None, "crashes": 0}
    if not keep:
        empty = ("fingerprint", "digests", "result", "reason", "failure", "finished_results", "finished_at", "ended")
        values |= dict.fromkeys((*empty, "progress", "message", "publish_at", "published_at", "previous", "crashed_at"))
        values |= {"attempt": 0, "generation": row.generation + 1, "finished_calls": (), "call_id": "", "holder": ""}
    return replace(row, **values)


def resolved(row: Record, result: str | None, retention: float | None = None) -> Record:
    """The row as an operator says that its work is done, with the JSON text *result*."""
    values = _taken_away(row, retention) | {"reason": None, "failure": None, "finished_at": row.now}
    return replace(row, state=State.DONE, ended=Ended.RESOLVED, result=result, **values)


def enqueued(
    row: Record | None, task: str, key: CallKey, call_id: str, message: str, *, ttl: float, retention: float
) -> Record:
    """A ``pending`` record with the message of a call; *row* is the expired one in its place, if there is one.

    Without a *row* its moments are 0: the store counts them from the moment of the insert.
    """
    now, before = (row.now, row.fence) if row is not None else (0, -1)
    return Record(
        stored_key=key.stored,
        task=task,
        key=key.key,
        state=State.PENDING,
        fence=max(before + 1, now),
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


def settled(row: Record, outcome: Outcome, now: int) -> Record:
    """The row of a running attempt after *outcome* was written at *now*, in microseconds."""
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
        resumes=outcome.resumes,
        result=outcome.result,
        reason=outcome.reason,
        failure=outcome.failure,
        finished_calls=tuple(finished) if finished is not None else row.finished_calls,
        finished_results=finished if finished is not None else row.finished_results,
        progress=outcome.progress if outcome.progress is not None else row.progress,
        retry_at=now + round(wait * MICROSECONDS) if wait else None,
        expires_at=now + round((outcome.retention + wait) * MICROSECONDS) if outcome.retention is not None else None,
        finished_at=now,
        lease_until=None,
    )


def _taken_away(row: Record, retention: float | None) -> dict[str, Any]:
    """What takes a row from its owner, and how long it counts then."""
    keep = row.retention or RETENTION if retention is None else retention
    return {
        "fence": max(row.fence + 1, row.now),
        "owner": "",
        "retry_at": None,
        "lease_until": None,
        "expires_at": row.now + round(keep * MICROSECONDS),
    }
