"""The rule of the claim: whether a key may be claimed, and its row afterwards. Pure functions of a
row and a claim request.

The decisions before the run apply the rule to a row that was read. A record store reads the row,
applies the rule, and writes the row that :func:`claimed` returns by compare-and-set.
"""

from __future__ import annotations

from dataclasses import replace
from enum import Enum
from typing import Any, Final, Protocol

from celery_leases.decide import attempt_history
from celery_leases.decide.waiting import is_waiting
from celery_leases.errors import LeaseStoreMismatch
from celery_leases.keys import Compared, same_arguments
from celery_leases.options import DATABASE
from celery_leases.record import (
    Attempt,
    ClaimRequest,
    Ended,
    PastAttempt,
    Record,
    Refusal,
    State,
)
from celery_leases.text.cleaning import storable
from celery_leases.value_class import value_class

MICROSECONDS: Final = 1_000_000
ALWAYS: Final = 2**62
"""A time after every other time."""
HOLDER_MAX: Final = 255
"""Characters of a stored ``hostname/pid``."""


class Question(Enum):
    """A value that must be read before a claim can be decided."""

    #: Seconds since the lease store was emptied.
    AGE = "age"


class Claimant(Compared, Protocol):
    """The values of a call that the rule needs.

    Both a :class:`~celery_leases.call.Call` and its claim request have them.
    """

    @property
    def call_id(self) -> str:
        """Celery's task id."""
        ...

    @property
    def rerun(self) -> bool:
        """Whether the task has ``lease_on_done="rerun"``: each call of the key runs."""
        ...

    @property
    def retries(self) -> int:
        """How often Celery has retried the call."""
        ...

    @property
    def prior(self) -> tuple[str, ...]:
        """The owner tokens of ended attempts of the call that may have left the row running."""
        ...

    def is_copy_of(self, fence: int) -> bool:
        """Whether the delivery is a copy of the run under *fence*, or of an earlier run."""
        ...


@value_class(frozen=True, slots=True)
class Claim:
    """A claim request under the lease store with the name ``lease_store``.

    ``age``: seconds since that store was emptied, ``None`` until it is read. A holder writes its
    lease again within the ttl of its row. ``takeover_until``, by the database's clock: until then
    another attempt's row may be taken over once its lease has expired. A third of that row's ttl is
    added, for the time in which the statement reaches the database.
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
    if (
        ours
        and row.retries > call.retries
        and (row.state is State.RUNNING or row.ended is Ended.RETRIED)
    ):
        return Refusal.SUPERSEDED
    if row.state is State.UNCERTAIN or (row.state is State.FAILED and not call.rerun):
        return Refusal.FAILED
    if not (ours or row.failure_delivered or call.rerun or same_arguments(row, call)):
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
    """Why *claim* may not take *row*, as it was at ``row.now``; ``None`` if it may. The claim does
    not have the row yet.

    A :class:`Question` names a value to read first, because the claim would take over the running
    row of another attempt. Raises :class:`LeaseStoreMismatch` if the row is running under another
    lease store.
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
    return refusal(row, claim.claim_request) or _refused_takeover(row, claim)


def _refused_takeover(row: Record, claim: Claim) -> Refusal | Question | None:
    """Why *claim* may not take over a running *row* whose lease has expired or is missing in its
    store.
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
    """Whether the request has the row already: its claim was executed, and the reply was lost."""
    return row.is_attempt(State.RUNNING, claim_request.token)


def claimed(row: Record | None, claim: Claim, now: int) -> Record:
    """The row after *claim*; *row* is the row before, *now* microseconds by the database's
    clock.
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


def _taken(row: Record, claim: Claim, now: int, lease_until: int | None) -> Record:
    claim_request = claim.claim_request
    for owner in claim_request.prior:
        row = attempt_history.with_end(row, owner, Ended.LOST) or row
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
    # Its retention is over, or each call has a generation of its own (rerun).
    new_generation = row.expired or (claim_request.rerun and row.call_id != claim_request.call_id)
    # A running row was not closed by its owner, of which nothing was heard since its lease ended:
    # a suspected crash, unless the call knows that attempt.
    crashed = row.state is State.RUNNING and row.owner not in claim_request.prior
    ended = (
        Ended.ABANDONED
        if crashed
        else Ended.LOST
        if row.state is State.RUNNING
        else None
        if new_generation
        else row.ended
    )
    # The fingerprint of a call is that of its first message, even if a retry has other arguments.
    has_fingerprint = row.call_id == claim_request.call_id and row.fingerprint is not None
    if new_generation:
        taken |= {"failures": 0, "quick_retries": 0, "cooldowns": 0, "failed_at": None}
    if row.publish_at is None and claim_request.message is not None:
        taken["message"] = claim_request.message
    return replace(
        row,
        fence=max(row.fence + 1, now),
        attempt=1 if new_generation else row.attempt + 1,
        generation=row.generation + new_generation,
        crashes=_crashes(row, claim_request, crashed=crashed),
        crashed_call=row.call_id if crashed else row.crashed_call,
        crashed_at=now if crashed else None,
        previous=Attempt(ended, row.failure, row.holder) if ended is not None else None,
        fingerprint=row.fingerprint if has_fingerprint else claim_request.fingerprint,
        digests=row.digests if has_fingerprint else claim_request.digests,
        finished_calls=() if row.expired else row.finished_calls,
        history=()
        if row.expired
        else attempt_history.with_attempt(row, _previous_attempt(row, ended)),
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


def _previous_attempt(row: Record, ended: Ended | None) -> PastAttempt | None:
    """The attempt that *row* describes before the claim; *ended*: how a running one ended."""
    running = row.state is State.RUNNING and ended is not None
    return (
        attempt_history.taken_over(row, ended)
        if running and ended is not None
        else attempt_history.latest_ended(row)
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
