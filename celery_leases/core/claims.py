"""The rule of the claim: may this key be claimed, and what is its row afterwards? Pure functions of a row and a bid.

This is the only copy of the rule. The decisions before the run ask it about a row that was read. A record store reads
the row, asks it, and writes the row that :func:`claimed` gives by compare-and-set.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Final, Protocol

from celery_leases.core.errors import LeaseStoreMismatch
from celery_leases.core.options import DATABASE
from celery_leases.core.records import Attempt, Bid, Ended, Record, Refusal, State
from celery_leases.core.texts import storable
from celery_leases.core.waiting import still_waits

MICROSECONDS: Final = 1_000_000
ALWAYS: Final = 2**62
"""A moment after every other one."""
HOLDER_MAX: Final = 255
"""The longest name of a host and process that is stored."""


class Question(Enum):
    """What must be known before a claim is decided."""

    #: Since when the lease store has its leases.
    AGE = "age"


class Claimant(Protocol):
    """What the rule asks about a call: a :class:`~celery_leases.core.verdicts.Call` and a bid of it both have it."""

    @property
    def call_id(self) -> str:
        """The call."""
        ...

    @property
    def fingerprint(self) -> str | None:
        """What its arguments are compared by; ``None`` compares nothing."""
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
        """The tokens of earlier attempts of the call that have ended, and may have left the row open."""
        ...

    def knows(self, failure: int) -> bool:
        """Whether it is a copy of the run under the fence *failure*, or of one before it."""
        ...


@dataclass(frozen=True, slots=True)
class Claim:
    """A bid for a record, under the lease store of that name, and what is known of the holders of other rows.

    ``age``: seconds since that store came up empty; ``None`` until that is asked. A holder needs the ttl of its row to
    assert its lease again.
    ``takes_until``: until which moment of the database's clock the row of another attempt may be taken over, whose
    lease has ended. A third of that row's ttl is allowed on top, for the way of the statement.
    """

    bid: Bid
    lease_store: str
    age: float | None = None
    takes_until: int = ALWAYS

    @property
    def is_lease(self) -> bool:
        """Whether the claimed row is the lease."""
        return self.lease_store == DATABASE


def refusal(row: Record | None, call: Claimant) -> Refusal | None:
    """Why *row* keeps *call* out, as the row was at ``row.now``; ``None`` if it does not.

    It says nothing of a running row whose lease is in another store, or has ended: see :func:`decide`.
    """
    if row is None or row.expired:
        return None
    ours = row.call_id == call.call_id
    if ours and row.state in (State.FAILED, State.UNCERTAIN):
        return Refusal.FAILED
    if finished_by(call.call_id, row):
        return Refusal.FINISHED
    if ours and row.told and call.knows(row.fence):
        return Refusal.REPORTED
    if ours and row.retries > call.retries and (row.state is State.RUNNING or row.ended is Ended.RETRIED):
        return Refusal.SUPERSEDED
    if row.state is State.UNCERTAIN or (row.state is State.FAILED and not call.rerun):
        return Refusal.FAILED
    if not (ours or row.told or call.rerun or _agree(row.fingerprint, call.fingerprint)):
        return Refusal.REUSED
    if row.state is State.DONE and not call.rerun:
        return Refusal.DONE
    if row.state is State.RUNNING and row.lease_remaining > 0 and row.owner not in call.prior:
        return Refusal.HELD
    return Refusal.EARLY if still_waits(call.call_id, row) else None


def finished_by(call_id: str, row: Record) -> bool:
    """Whether this very call is known to have finished the key."""
    return call_id in row.finished_calls or (row.state is State.DONE and row.call_id == call_id)


def decide(row: Record | None, claim: Claim) -> Refusal | Question | None:
    """Why *claim* may not have *row*, as the row was at ``row.now``; ``None`` if it may. Not for a row of its own.

    A question is to be answered first: the claim would take over the running row of another attempt. Raises
    :class:`LeaseStoreMismatch` where another lease store says whether the holder of a running row lives.
    """
    if row is None or row.expired or row.state is not State.RUNNING:
        return refusal(row, claim.bid)
    if row.lease_store != claim.lease_store:
        raise LeaseStoreMismatch(
            f"{row.key} is running under the lease store {row.lease_store}, this worker uses {claim.lease_store}; "
            "give all workers of this database one leases_url (or, if the other is retired: leases release)",
            row.key,
            claim.lease_store,
            row.lease_store,
        )
    return refusal(row, claim.bid) or _kept(row, claim)


def _kept(row: Record, claim: Claim) -> Refusal | Question | None:
    """Why a running *row*, whose lease has ended or is in no store any more, is left to its holder all the same."""
    if row.owner in claim.bid.prior:
        return None
    if claim.is_lease:
        return Refusal.LAPSED if row.now > claim.takes_until + row.lease_ttl * MICROSECONDS / 3 else None
    if claim.age is None:
        return Question.AGE
    return Refusal.EMPTIED if claim.age < row.lease_ttl else None


def is_ours(row: Record, bid: Bid) -> bool:
    """Whether the bid has the row already: an earlier try was carried out, and its reply was lost."""
    return row.state is State.RUNNING and row.owner == bid.token


def claimed(row: Record | None, claim: Claim, now: int) -> Record:
    """The row after *claim* has won it at *now*, by the database's clock in microseconds; *row* is what it was."""
    bid = claim.bid
    taken: dict[str, Any] = {
        "task": bid.task,
        "state": State.RUNNING,
        "owner": bid.token,
        "call_id": bid.call_id,
        "holder": storable(bid.holder, HOLDER_MAX),
        "retries": bid.retries,
        "lease_store": claim.lease_store,
        "lease_ttl": bid.ttl,
        "lease_until": now + round(bid.ttl * MICROSECONDS) if claim.is_lease else None,
        "started_at": now,
        "retention": bid.retention or None,
        "now": now,
    }
    if row is not None:
        return _taken(row, bid, taken)
    return Record(
        stored_key=bid.stored_key,
        key=bid.key,
        fence=now,
        attempt=1,
        generation=0,
        failures=0,
        crashes=0,
        created_at=now,
        fingerprint=bid.fingerprint,
        digests=bid.digests,
        message=bid.message,
        **taken,
    )


def _taken(row: Record, bid: Bid, taken: dict[str, Any]) -> Record:
    now = taken["now"]
    # Its retention is over, or this call begins a generation of its own.
    anew = row.expired or (bid.rerun and row.call_id != bid.call_id)
    # Its owner never closed it, and did not leave it open with our knowledge.
    crashed = row.state is State.RUNNING and row.owner not in bid.prior
    ended = Ended.CRASHED if crashed else Ended.LOST if row.state is State.RUNNING else None if anew else row.ended
    # A call keeps the content it came with, whatever arguments a retry of it brings.
    keeps = row.call_id == bid.call_id and row.fingerprint is not None
    if anew:
        taken |= {"failures": 0, "quick_retries": 0, "cooldowns": 0, "failed_at": None}
    if row.publish_at is None and bid.message is not None:
        taken["message"] = bid.message
    return replace(
        row,
        fence=max(row.fence + 1, now),
        attempt=1 if anew else row.attempt + 1,
        generation=row.generation + anew,
        crashes=_crashes(row, bid, crashed=crashed),
        crashed_call=row.call_id if crashed else row.crashed_call,
        crashed_at=now if crashed else None,
        previous=Attempt(ended, row.failure, row.holder) if ended is not None else None,
        fingerprint=row.fingerprint if keeps else bid.fingerprint,
        digests=row.digests if keeps else bid.digests,
        finished_calls=() if row.expired else row.finished_calls,
        ended=None,
        failure=None,
        result=None,
        reason=None,
        retry_at=None,
        finished_at=None,
        expires_at=None,
        **taken,
    )


def _crashes(row: Record, bid: Bid, *, crashed: bool) -> int:
    """Crashes in a row. Under ``rerun`` they are those of one call."""
    if row.expired or not crashed:
        return 0 if row.expired else row.crashes
    return 1 if bid.rerun and row.crashed_call not in (None, row.call_id) else row.crashes + 1


def _agree(ours: str | None, theirs: str | None) -> bool:
    return ours is None or theirs is None or ours == theirs
