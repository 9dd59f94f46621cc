"""The rule of the claim: whether a call may have a key, and the row of the key afterwards. Pure
functions of a row and a call.

The decisions before the run apply the rule to a row that was read. A record store reads the row,
applies the rule, and writes the row that :func:`claimed` returns by compare-and-set.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, Final

from celery_leases.call import Call
from celery_leases.decide import attempt_history
from celery_leases.decide.answers import Refusal
from celery_leases.decide.waiting import is_waiting
from celery_leases.errors import LeaseStoreMismatch
from celery_leases.keys import same_arguments
from celery_leases.options import DATABASE
from celery_leases.record import EMPTY, Attempt, Emptied, Ended, Record, State

MICROSECONDS: Final = 1_000_000
ALWAYS: Final = 2**62
"""A time after every other time."""


def refusal(row: Record | None, call: Call) -> Refusal | None:
    """Why *row*, as it was at ``row.now``, refuses *call*; ``None`` if it does not.

    For a running row whose lease is in another store, or has expired, see :func:`decide`.
    """
    if row is None or row.expired:
        return None
    ours = row.call_id == call.call_id
    if ours and row.state in (State.FAILED, State.UNCERTAIN):
        return Refusal.FAILED
    if finished_by(call.call_id, row):
        return Refusal.FINISHED
    # A rejected message that comes back from a dead-letter queue may look like a copy: it runs.
    failed = row.ended is Ended.FAILED and row.failure_delivered
    if ours and failed and call.is_copy_of(row.fence):
        return Refusal.REPORTED
    goes_on = row.state is State.RUNNING or row.resumes or row.ended is Ended.RETRIED
    if ours and goes_on and row.retries > call.retries:
        return Refusal.SUPERSEDED
    answered = call.options.latest_runs and covers(row, call)
    over = answered or not call.options.reruns
    if row.state is State.UNCERTAIN or (row.state is State.FAILED and over):
        return Refusal.FAILED
    if answered and row.failure_delivered and not ours:
        return Refusal.REPORTED
    free = ours or row.failure_delivered or call.options.reruns
    if not (free or same_arguments(row.fingerprint, call.key.fingerprint)):
        return Refusal.REUSED
    if row.state is State.DONE and over:
        return Refusal.DONE
    if row.state is State.RUNNING and row.lease_remaining > 0 and row.owner not in call.prior:
        return Refusal.HELD
    return Refusal.NOT_DUE if is_waiting(call.call_id, row) else None


def covers(row: Record, call: Call) -> bool:
    """Whether the last run under ``lease_runs="latest"`` had the arguments of *call* or newer ones.

    The orders of two calls decide. An order and an arrival cannot be compared, so if one of the two
    has no order, their first arrivals decide.
    """
    by_arrival = row.unordered or not call.order
    return 0 < call.order <= row.order or (by_arrival and call.arrived <= row.arrived)


def replaces(row: Record, call: Call) -> bool:
    """Whether the last run of the key was that of another call, which answers *call* because it is
    newer (``lease_runs="latest"``).
    """
    of_other = row.call_id != call.call_id and not finished_by(call.call_id, row)
    return call.options.latest_runs and of_other and covers(row, call)


def has_message_of(row: Record, call_id: str) -> bool:
    """Whether the message in *row* was published, and is that of the call *call_id*."""
    return row.published_at is not None and _message_call(row) == call_id


def queues_another(row: Record) -> bool:
    """Whether the message in *row* is that of another call than the last one that ran, and is
    published or will be.
    """
    queued = row.publish_at is not None or row.published_at is not None
    return queued and _message_call(row) not in (None, row.call_id)


def _message_call(row: Record) -> str | None:
    """The Celery id of the call whose message is in *row*; ``None`` without a readable one."""
    try:
        return str(json.loads(row.message or "")["options"]["task_id"])
    except Exception:  # noqa: BLE001 - somebody has changed it by hand
        return None


def finished_by(call_id: str, row: Record) -> bool:
    """Whether this call is known to have finished the key."""
    return call_id in row.finished_calls or (row.state is State.DONE and row.call_id == call_id)


def decide(
    row: Record | None,
    call: Call,
    lease_store: str,
    *,
    emptied: float = 0.0,
    takeover_until: int = ALWAYS,
) -> Refusal | None:
    """Why *call* may not take *row*, as it was at ``row.now``, under *lease_store*; ``None`` if it
    may. The call does not have the row yet.

    *emptied*: for how many seconds that store has not lost its leases, 0 if that is not known. A
    holder writes its lease again within the ttl of its row. *takeover_until*, by the database's
    clock: until then another attempt's row may be taken over once its lease has expired. A third of
    that row's ttl is added, for the time in which the statement reaches the database. Raises
    :class:`LeaseStoreMismatch` if the row is running under another lease store.
    """
    if row is None or row.expired or row.state is not State.RUNNING:
        return refusal(row, call)
    if row.lease_store != lease_store:
        raise LeaseStoreMismatch(
            f"{row.key} is running under the lease store {row.lease_store}, this worker uses {lease_store}; "
            "give all workers of this database one leases_url (or run `leases release` if the other store is retired)",
            row.key,
            lease_store,
            row.lease_store,
        )
    why = refusal(row, call)
    if why is not None or row.owner in call.prior:
        return why
    if lease_store == DATABASE:
        late = row.now > takeover_until + row.lease_ttl * MICROSECONDS / 3
        return Refusal.LAPSED if late else None
    return Refusal.EMPTIED if emptied < row.lease_ttl else None


def claimed(row: Record | None, call: Call, lease_store: str, now: int) -> Record:
    """The row after the claim of *call*; *row* is the row before, as it was at *now*, microseconds
    by the database's clock.
    """
    ttl, retention = call.options.ttl, call.options.retention or None
    lease_until = now + round(ttl * MICROSECONDS) if lease_store == DATABASE else None
    if row is not None:
        return _taken(row, call, lease_store, now, lease_until)
    return Record(
        stored_key=call.key.stored,
        task=call.task,
        key=call.key.key,
        state=State.RUNNING,
        fence=now,
        owner=call.token,
        call_id=call.call_id,
        holder=call.host,
        attempt=1,
        retries=call.retries,
        lease_store=lease_store,
        lease_ttl=ttl,
        created_at=now,
        started_at=now,
        now=now,
        fingerprint=call.key.fingerprint,
        digests=call.key.digests,
        lease_until=lease_until,
        retention=retention,
        message=call.message,
        order=call.order,
        arrived=call.arrived,
        unordered=call.arrived > 0 and not call.order,
    )


def dated(new: Record, now: int) -> Record:
    """The row *new*, which :func:`claimed` has made for a new key and the time 0, after its insert
    at *now*.

    It changes *new* itself, because a copy would take a tenth of the time of a claim: no other code
    may have a reference to *new*.
    """
    for name in ("fence", "created_at", "started_at", "now"):
        object.__setattr__(new, name, now)
    if new.lease_until is not None:
        object.__setattr__(new, "lease_until", now + new.lease_until)
    return new


def _taken(row: Record, call: Call, lease_store: str, now: int, lease_until: int | None) -> Record:
    for owner in call.prior:
        row = attempt_history.with_end(row, owner, Ended.LOST, call.counted_for) or row
    reruns, same_call = call.options.reruns, row.call_id == call.call_id
    most = call.options.failures.crashes
    # Its retention is over, or each call has a generation of its own (unless ``runs="once"``).
    new_generation = row.expired or (reruns and not same_call)
    # A running row was not closed by its owner, of which nothing was heard since its lease ended:
    # a suspected crash, unless the call knows that attempt.
    running, crashed = row.state is State.RUNNING, False
    ended = None if new_generation else row.ended
    latest = attempt_history.latest_ended(row)
    if running:
        crashed = row.owner not in call.prior
        ended = Ended.ABANDONED if crashed else Ended.LOST
        latest = attempt_history.taken_over(row, ended)
    values: dict[str, Any] = {"history": attempt_history.with_attempt(row, latest)}
    if crashed:
        counted = attempt_history.crashes_counted_for(row, row.call_id, most) if reruns else row
        row = replace(counted, crashes=counted.crashes + 1, crashed_call=row.call_id)
    if (row.other_crashes or {}).get(call.call_id):
        row = attempt_history.crashes_counted_for(row, call.call_id, most)
    values |= EMPTY[Emptied.CLAIM]
    if new_generation:
        values |= EMPTY[Emptied.GENERATION]
    if reruns and not row.expired and row.state in (State.PENDING, State.COOLING, State.RUNNING):
        # The call before has not ended. If calls fail in turn, the key waits longer each time.
        values |= {name: getattr(row, name) for name in ("quick_retries", "cooldowns", "failed_at")}
    if row.expired:
        values |= EMPTY[Emptied.EXPIRED]
    # The fingerprint of a call is that of its first message, even if a retry has other arguments.
    if not same_call or row.fingerprint is None:
        values |= {"fingerprint": call.key.fingerprint, "digests": call.key.digests}
    if row.publish_at is None and call.message is not None:
        values["message"] = call.message
    stands = same_call or row.state is State.DONE
    if has_message_of(row, call.call_id):  # otherwise that call stays queued
        values["published_at"] = None
    if call.arrived or not stands:  # a call of another task that shares the key has none
        values |= {"arrived": call.arrived, "unordered": call.arrived > 0 and not call.order}
    values |= {
        "task": call.task,
        "state": State.RUNNING,
        "fence": max(row.fence + 1, now),
        "owner": call.token,
        "call_id": call.call_id,
        "holder": call.host,
        "attempt": 1 if new_generation else row.attempt + 1,
        "generation": row.generation + new_generation,
        "retries": call.retries,
        "order": call.order or (row.order if stands else 0),
        "crashed_at": now if crashed else None,
        "previous": Attempt(ended, row.failure, row.holder) if ended is not None else None,
        "lease_store": lease_store,
        "lease_ttl": call.options.ttl,
        "lease_until": lease_until,
        "started_at": now,
        "retention": call.options.retention or None,
    }
    return replace(row, **values)
