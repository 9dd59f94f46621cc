"""The rule of the claim: may this key be claimed, and what is its row afterwards? Pure functions of
a row and a claim request.

This is the only copy of the rule. The decisions before the run apply it to a row that was read. A
record store reads the row, applies the rule, and writes the row that :func:`claimed` returns by
compare-and-set.
"""

from __future__ import annotations

from dataclasses import replace
from enum import Enum
from typing import Any, Final, Protocol

from celery_leases.common.texts import storable
from celery_leases.common.values import value_class
from celery_leases.errors import LeaseStoreMismatch
from celery_leases.protocol import history
from celery_leases.protocol.options import DATABASE
from celery_leases.protocol.records import (
    Attempt,
    ClaimRequest,
    Ended,
    PastAttempt,
    Record,
    Refusal,
    State,
)
from celery_leases.protocol.waiting import is_waiting

MICROSECONDS: Final = 1_000_000
ALWAYS: Final = 2**62
"""A time after every other time."""
HOLDER_MAX: Final = 255
"""The longest name of a host and process that is stored."""


class Question(Enum):
    """Values that a claim needs before it can be decided."""

    #: Since when the lease store has its leases.
    AGE = "age"


class Claimant(Protocol):
    """The values of a call that the rule needs; a :class:`~celery_leases.protocol.verdicts.Call`
    and its claim request both have them.
    """

    @property
    def call_id(self) -> str:
        """The call."""
        ...

    @property
    def fingerprint(self) -> str | None:
        """The fingerprint of its arguments; ``None`` if nothing is compared."""
        ...

    @property
    def rerun(self) -> bool:
        """Whether each call of the key is work of its own."""
        ...

    @property
    def retries(self) -> int:
        """How often Celery has retried it."""
        ...

    @property
    def prior(self) -> tuple[str, ...]:
        """The tokens of ended attempts of the call, which may have left the row open."""
        ...

    def is_copy_of(self, fence: int) -> bool:
        """Whether it is a copy of the run under *fence*, or of one before it."""
        ...


@value_class(frozen=True, slots=True)
class Claim:
    """A request for a record, under the lease store of that name, and the known facts about the
    holders of other rows.

    ``age``: seconds since that store was emptied; ``None`` until it is read. A holder needs the ttl
    of its row to write its lease again. ``takeover_until``: until which time of the database's
    clock the row of another attempt may be taken over after its lease has expired. A third of that
    row's ttl is added for the transport of the statement.
    """

    claim_request: ClaimRequest
    lease_store: str
    age: float | None = None
    takeover_until: int = ALWAYS

    @property
    def is_lease(self) -> bool:
        """Whether the claimed row is the lease."""
        return self.lease_store == DATABASE


def refusal(row: Record | None, call: Claimant) -> Refusal | None:
    """Why *row* refuses *call*, as the row was at ``row.now``; ``None`` if it does not.

    It does not cover a running row whose lease is in another store, or has expired: see
    :func:`decide`.
    """
    if row is None or row.expired:
        return None
    ours = row.call_id == call.call_id
    if ours and row.state in (State.FAILED, State.UNCERTAIN):
        return Refusal.FAILED
    if finished_by(call.call_id, row):
        return Refusal.FINISHED
    if ours and row.failure_delivered and call.is_copy_of(row.fence):
        return Refusal.REPORTED
    if (
        ours
        and row.retries > call.retries
        and (row.state is State.RUNNING or row.ended is Ended.RETRIED)
    ):
        return Refusal.SUPERSEDED
    if row.state is State.UNCERTAIN or (row.state is State.FAILED and not call.rerun):
        return Refusal.FAILED
    if not (
        ours or row.failure_delivered or call.rerun or _agree(row.fingerprint, call.fingerprint)
    ):
        return Refusal.REUSED
    if row.state is State.DONE and not call.rerun:
        return Refusal.DONE
    if row.state is State.RUNNING and row.lease_remaining > 0 and row.owner not in call.prior:
        return Refusal.HELD
    return Refusal.NOT_DUE if is_waiting(call.call_id, row) else None


def finished_by(call_id: str, row: Record) -> bool:
    """Whether this call is known to have finished the key."""
    return call_id in row.finished_calls or (row.state is State.DONE and row.call_id == call_id)


def decide(row: Record | None, claim: Claim) -> Refusal | Question | None:
    """Why *claim* may not have *row*, as the row was at ``row.now``; ``None`` if it may. Not for
    the claim's own row.

    A ``Question`` means that a value must be read first, because the claim would take over the
    running row of another attempt. Raises :class:`LeaseStoreMismatch` if another lease store
    decides about the holder of a running row.
    """
    if row is None or row.expired or row.state is not State.RUNNING:
        return refusal(row, claim.claim_request)
    if row.lease_store != claim.lease_store:
        raise LeaseStoreMismatch(
            f"{row.key} is running under the lease store {row.lease_store}, this worker uses {claim.lease_store}; "
            "give all workers of this database one leases_url (or run `leases release` if the other store is retired)",
            row.key,
            claim.lease_store,
            row.lease_store,
        )
    return refusal(row, claim.claim_request) or _kept(row, claim)


def _kept(row: Record, claim: Claim) -> Refusal | Question | None:
    """Why a running *row*, whose lease has expired or is missing in the store, is still left to its
    holder.
    """
    if row.owner in claim.claim_request.prior:
        return None
    if claim.is_lease:
        return (
            Refusal.LAPSED
            if row.now > claim.takeover_until + row.lease_ttl * MICROSECONDS / 3
            else None
        )
    if claim.age is None:
        return Question.AGE
    return Refusal.EMPTIED if claim.age < row.lease_ttl else None


def is_ours(row: Record, claim_request: ClaimRequest) -> bool:
    """Whether the request has the row already: an earlier try was executed, and its reply
    was lost.
    """
    return row.is_attempt(State.RUNNING, claim_request.token)


def claimed(row: Record | None, claim: Claim, now: int) -> Record:
    """The row after *claim* has taken it at *now*, by the database's clock in microseconds; *row*
    is the row before.
    """
    claim_request = claim.claim_request
    lease_until = now + round(claim_request.ttl * MICROSECONDS) if claim.is_lease else None
    if row is not None:
        return _taken(row, claim, now, lease_until)
    return Record(
        stored_key=claim_request.stored_key,
        task=claim_request.task,
        key=claim_request.key,
        state=State.RUNNING,
        fence=now,
        owner=claim_request.token,
        call_id=claim_request.call_id,
        holder=storable(claim_request.holder, HOLDER_MAX),
        attempt=1,
        generation=0,
        failures=0,
        crashes=0,
        retries=claim_request.retries,
        lease_store=claim.lease_store,
        lease_ttl=claim_request.ttl,
        created_at=now,
        started_at=now,
        now=now,
        fingerprint=claim_request.fingerprint,
        digests=claim_request.digests,
        lease_until=lease_until,
        retention=claim_request.retention or None,
        message=claim_request.message,
    )


def dated(new: Record, now: int) -> Record:
    """The row *new* of a fresh key, which :func:`claimed` made for the time 0, after its insert at
    *now*.

    It changes *new* itself, because to make it again would take a tenth of a claim's time; nothing
    else may have *new*.
    """
    for name in ("fence", "created_at", "started_at", "now"):
        object.__setattr__(new, name, now)
    if new.lease_until is not None:
        object.__setattr__(new, "lease_until", now + new.lease_until)
    return new


def _taken(row: Record, claim: Claim, now: int, lease_until: int | None) -> Record:
    claim_request = claim.claim_request
    taken: dict[str, Any] = {
        "task": claim_request.task,
        "state": State.RUNNING,
        "owner": claim_request.token,
        "call_id": claim_request.call_id,
        "holder": storable(claim_request.holder, HOLDER_MAX),
        "retries": claim_request.retries,
        "lease_store": claim.lease_store,
        "lease_ttl": claim_request.ttl,
        "lease_until": lease_until,
        "started_at": now,
        "retention": claim_request.retention or None,
        "now": now,
    }
    # Its retention is over, or this call begins a generation of its own.
    anew = row.expired or (claim_request.rerun and row.call_id != claim_request.call_id)
    # Its owner never closed it, and is not known to have left it open.
    crashed = row.state is State.RUNNING and row.owner not in claim_request.prior
    ended = (
        Ended.CRASHED
        if crashed
        else Ended.LOST
        if row.state is State.RUNNING
        else None
        if anew
        else row.ended
    )
    # A call keeps its first content, whatever arguments a retry of it has.
    keeps = row.call_id == claim_request.call_id and row.fingerprint is not None
    if anew:
        taken |= {"failures": 0, "quick_retries": 0, "cooldowns": 0, "failed_at": None}
    if row.publish_at is None and claim_request.message is not None:
        taken["message"] = claim_request.message
    return replace(
        row,
        fence=max(row.fence + 1, now),
        attempt=1 if anew else row.attempt + 1,
        generation=row.generation + anew,
        crashes=_crashes(row, claim_request, crashed=crashed),
        crashed_call=row.call_id if crashed else row.crashed_call,
        crashed_at=now if crashed else None,
        previous=Attempt(ended, row.failure, row.holder) if ended is not None else None,
        fingerprint=row.fingerprint if keeps else claim_request.fingerprint,
        digests=row.digests if keeps else claim_request.digests,
        finished_calls=() if row.expired else row.finished_calls,
        history=() if row.expired else history.with_attempt(row, _before(row, ended)),
        traceback=None if row.expired else row.traceback,
        unrun=False,
        ended=None,
        failure=None,
        result=None,
        reason=None,
        retry_at=None,
        finished_at=None,
        expires_at=None,
        **taken,
    )


def _before(row: Record, ended: Ended | None) -> PastAttempt | None:
    """The attempt that the claim finds in *row*; a running one has *ended* as given."""
    running = row.state is State.RUNNING and ended is not None
    return (
        history.taken_over(row, ended)
        if running and ended is not None
        else history.latest_ended(row)
    )


def _crashes(row: Record, claim_request: ClaimRequest, *, crashed: bool) -> int:
    """Crashes in a row. With on_done="rerun" they belong to one call."""
    if row.expired or not crashed:
        return 0 if row.expired else row.crashes
    return (
        1
        if claim_request.rerun and row.crashed_call not in (None, row.call_id)
        else row.crashes + 1
    )


def _agree(ours: str | None, theirs: str | None) -> bool:
    return ours is None or theirs is None or ours == theirs
