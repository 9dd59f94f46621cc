"""The row after an operator, a caller or an outcome has changed it. Pure functions of the row that
was read.

A store reads the row, calls one of these functions, and writes the returned row by compare-and-set.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

from celery_leases.decide import attempt_history
from celery_leases.keys import CallKey
from celery_leases.record import (
    EMPTY,
    RETENTION,
    SETTLED,
    Attempt,
    Emptied,
    Ended,
    Outcome,
    Record,
    State,
)

MICROSECONDS: Final = 1_000_000


def reset(
    row: Record, *, keep: bool, forgive: bool = False, retention: float | None = None
) -> Record:
    """The row after it is taken from its holder; see
    :meth:`celery_leases.stores.sql.records.SqlRecordStore.reset`.
    """
    values = _released(row, retention) | {"state": State.PENDING, "ended": Ended.RELEASED}
    if forgive:
        values |= EMPTY[Emptied.FORGIVE]
    if not keep:
        values |= EMPTY[Emptied.FORGET] | {"generation": row.generation + 1}
    return replace(row, **values)


def resolved(row: Record, result: str | None, retention: float | None = None) -> Record:
    """The row after an operator has marked its work as done, with *result* as JSON text."""
    values = _released(row, retention) | {"reason": None, "failure": None, "finished_at": row.now}
    return replace(row, state=State.DONE, ended=Ended.RESOLVED, result=result, **values)


@dataclass(frozen=True, slots=True)
class NewCall:
    """A call of *task* that is published together with its record, which stores its *message*;
    *ttl* and *retention* are those of the task.
    """

    task: str
    key: CallKey
    call_id: str
    message: str
    ttl: float
    retention: float


def enqueued(row: Record | None, call: NewCall) -> Record:
    """A ``pending`` row with the message of *call*, which replaces the expired *row*, if there is
    one.

    Without a *row* its times are 0, and the database adds the time of the insert.
    """
    now = row.now if row is not None else 0
    return Record(
        stored_key=call.key.stored,
        task=call.task,
        key=call.key.key,
        state=State.PENDING,
        fence=max(row.fence + 1, now) if row is not None else 0,
        call_id=call.call_id,
        generation=row.generation + 1 if row is not None else 0,
        lease_ttl=call.ttl,
        created_at=now,
        started_at=now,
        now=now,
        fingerprint=call.key.fingerprint,
        digests=call.key.digests,
        retention=call.retention,
        message=call.message,
    )


def reassigned(row: Record, call: NewCall, *, new_generation: bool) -> Record:
    """*row*, which no outstanding call has, as the row of *call*.

    Its counts stay, except for a *new_generation*, which follows a call that has ended.
    """
    values = dict(EMPTY[Emptied.QUEUE])
    if new_generation:
        values |= EMPTY[Emptied.GENERATION] | {"generation": row.generation + 1}
    if row.ended is not None:
        values["previous"] = Attempt(row.ended, row.failure, row.holder)
    values |= {
        "task": call.task,
        "state": State.PENDING,
        "fence": max(row.fence + 1, row.now),
        "call_id": call.call_id,
        "fingerprint": call.key.fingerprint,
        "digests": call.key.digests,
        "message": call.message,
        "started_at": row.now,
        "lease_ttl": call.ttl,
        "retention": call.retention,
        "history": attempt_history.with_attempt(row, attempt_history.latest_ended(row)),
    }
    return replace(row, **values)


def settled(row: Record, outcome: Outcome, now: int) -> Record:
    """The row of a running attempt after *outcome*; *now*: when it is written, in microseconds."""
    wait, values = outcome.retry_after or 0.0, {name: getattr(outcome, name) for name in SETTLED}
    if outcome.failed:
        values |= {"failed_at": now, "traceback": outcome.traceback}
    if outcome.finished is not None:
        values |= {
            "finished_calls": tuple(outcome.finished),
            "finished_results": outcome.finished,
        }
    if outcome.progress is not None:
        values["progress"] = outcome.progress
    lasts = outcome.retention
    values |= {
        "retry_at": now + round(wait * MICROSECONDS) if wait else None,
        "expires_at": now + round((lasts + wait) * MICROSECONDS) if lasts is not None else None,
        "finished_at": now,
        "lease_until": None,
    }
    return replace(row, **values)


def _released(row: Record, retention: float | None) -> dict[str, Any]:
    """The changes that take *row* from its owner; it counts for *retention* seconds then."""
    lasts = retention if retention is not None else row.retention or RETENTION
    running = row.state is State.RUNNING
    latest = (
        attempt_history.taken_over(row, Ended.RELEASED, row.now)
        if running
        else attempt_history.latest_ended(row)
    )
    return {
        **EMPTY[Emptied.RELEASE],
        "fence": max(row.fence + 1, row.now),
        "history": attempt_history.with_attempt(row, latest),
        "unrun": True,
        "expires_at": row.now + round(lasts * MICROSECONDS),
    }
