"""The durable record of one key: its states, its row, and what one attempt may write into it.

Times inside a record are whole microseconds since the epoch by the *database's* clock; spans are
seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from celery_leases.common.values import value_class

MAY_HAVE_BEEN_EXECUTED: Final = "the call may have been executed"
"""The text about an ambiguous failure."""


class State(StrEnum):
    """The state of a key's work."""

    PENDING = "pending"
    RUNNING = "running"
    DONE = "done"
    COOLING = "cooling"
    FAILED = "failed"
    UNCERTAIN = "uncertain"


class Ended(StrEnum):
    """How an attempt ended."""

    RETURNED = "returned"
    FAILED = "failed"
    CRASHED = "crashed"
    TERMINATED = "terminated"
    LOST = "lost"
    INTERRUPTED = "interrupted"
    RETRIED = "retried"
    REJECTED = "rejected"
    SNOOZED = "snoozed"
    IGNORED = "ignored"
    REPLACED = "replaced"
    RELEASED = "released"
    RESOLVED = "resolved"
    WAITING = "waiting"


@dataclass(frozen=True, slots=True)
class Failure:
    """A stored error: the class's dotted name and the redacted, truncated message, never the
    object.

    ``rule`` is the rule that decided, ``reason`` its stable code. ``group``: the cooldown group
    that failed. ``ambiguous``: the request may have been executed. ``operator``: waiting alone does
    not help.
    """

    type: str
    message: str
    rule: str | None = None
    reason: str | None = None
    group: str | None = None
    ambiguous: bool = False
    operator: bool = False

    @property
    def text(self) -> str:
        """The error as other callers get it: its class, its message, and whether it is
        ambiguous.
        """
        kind = "" if self.type.rpartition(".")[2] == "PermanentFailure" else self.type
        said = ": ".join(part for part in (kind, self.message) if part)
        return f"{said} ({MAY_HAVE_BEEN_EXECUTED})" if self.ambiguous else said


@dataclass(frozen=True, slots=True)
class Attempt:
    """How an earlier attempt ended, with its error, host and process."""

    ended: Ended
    error: Failure | None = None
    host: str | None = None


@dataclass(frozen=True, slots=True)
class PastAttempt:
    """An ended attempt, as the history of its record stores it; see
    :mod:`celery_leases.protocol.history`.

    Times are as in a record. ``finished_at`` is ``None`` if the process died, or lost its row,
    without reporting an outcome. ``error`` is the class and the beginning of the message, ``rule``
    the rule that decided.
    """

    started_at: int
    finished_at: int | None
    ended: Ended
    host: str
    error: str | None = None
    rule: str | None = None


@value_class(frozen=True, slots=True)
class Record:
    """One row of ``celery_leases_records``, as it was at ``now``."""

    stored_key: str
    task: str
    key: str
    state: State
    fence: int
    owner: str
    call_id: str
    holder: str
    attempt: int
    generation: int
    #: Counted failures in a row, compared with ``lease_max_failures``.
    failures: int
    crashes: int
    #: How often Celery had retried the call that claimed it last.
    retries: int
    lease_store: str
    lease_ttl: float
    created_at: int
    started_at: int
    now: int
    fingerprint: str | None = None
    digests: Mapping[str, str] | None = None
    lease_until: int | None = None
    retry_at: int | None = None
    result: str | None = None
    reason: str | None = None
    ended: Ended | None = None
    failure: Failure | None = None
    previous: Attempt | None = None
    crashed_at: int | None = None
    crashed_call: str | None = None
    finished_at: int | None = None
    expires_at: int | None = None
    #: The retention, in seconds, of the task that claimed it last; ``None`` if unknown.
    retention: float | None = None
    #: Quick retries since the last cooldown, and cooldowns in a row, which make the next one
    #: longer.
    quick_retries: int = 0
    cooldowns: int = 0
    #: When the last of these failures was.
    failed_at: int | None = None
    #: The call that ended last runs again by itself once ``retry_at`` is over.
    resumes: bool = False
    #: The call's message as a signature in JSON, if it is stored; and when it may be published, if
    #: it is still due.
    message: str | None = None
    publish_at: int | None = None
    #: When a stored message was last published.
    published_at: int | None = None
    #: JSON text of the last saved progress, see :mod:`celery_leases.protocol.progress`.
    progress: str | None = None
    finished_calls: tuple[str, ...] = ()
    finished_results: Mapping[str, str | None] | None = None
    #: The attempts before the one in the columns, the latest last.
    history: tuple[PastAttempt, ...] = ()
    #: The columns describe no attempt that is not in the history: the last claim was given back
    #: before the body began, or an operator has changed the row since.
    unrun: bool = False
    #: The traceback of the last failure, without secrets and shortened.
    traceback: str | None = None
    #: Which part of the row cannot be read, and what to do. Only where operators read rows;
    #: elsewhere it is an error.
    unreadable: str | None = None

    def is_attempt(self, state: State, owner: str, fence: int | None = None) -> bool:
        """Whether the row is in *state* under the attempt with the token *owner*, and with *fence*
        if given.
        """
        return self.state == state and self.owner == owner and fence in (None, self.fence)

    @property
    def waits(self) -> float:
        """Seconds until ``retry_at``; 0 when there is nothing to wait for."""
        return max(0.0, (self.retry_at - self.now) / 1e6) if self.retry_at is not None else 0.0

    @property
    def lease_remaining(self) -> float:
        """The rest of the lease in this row, in seconds; 0 if the lease is in another store or has
        expired.
        """
        return (
            max(0.0, (self.lease_until - self.now) / 1e6) if self.lease_until is not None else 0.0
        )

    @property
    def forgotten(self) -> bool:
        """Whether an operator has reset it, and no call has been made since."""
        return (
            self.state is State.PENDING
            and self.ended is None
            and not self.call_id
            and self.message is None
        )

    @property
    def queued(self) -> bool:
        """Whether it was written for a call that is or will be published, and has not begun."""
        return self.state is State.PENDING and self.ended is None and bool(self.call_id)

    @property
    def expired(self) -> bool:
        """Whether its retention is over, so that it counts as absent."""
        return self.expires_at is not None and self.expires_at <= self.now

    @property
    def failure_delivered(self) -> bool:
        """Whether the call that ended last has failed and does not run again, so that its caller
        has the failure.
        """
        return (
            self.ended is Ended.FAILED
            and not self.resumes
            and self.state in (State.PENDING, State.COOLING)
        )

    @property
    def just_crashed(self) -> bool:
        """Whether the claim that returned this row counted the previous attempt as a crash."""
        return self.crashed_at is not None and self.crashed_at == self.started_at


@value_class(frozen=True, slots=True)
class ClaimRequest:
    """The request of one attempt: the lease and the claim of a key under its own token."""

    stored_key: str
    task: str
    key: str
    token: str
    call_id: str
    ttl: float
    holder: str
    fingerprint: str | None = None
    digests: Mapping[str, str] | None = None
    rerun: bool = False
    #: The identity of the records database, if the lease is in another store.
    database: str = ""
    #: The tokens of earlier attempts of this call whose row may be open although they did not
    #: crash.
    prior: tuple[str, ...] = ()
    #: How often Celery has retried the call.
    retries: int = 0
    #: The delivery is a copy of an earlier one, not a fresh message that happens to have its id.
    repeat: bool = False
    #: The fence of the failure that a fresh message waits for; a message that is not a copy of that
    #: run may still run.
    failure_fence: int | None = None
    #: The cooldown group whose gate must let the body start.
    group: str | None = None
    #: The call's message as a signature in JSON, if it must be stored.
    message: str | None = None
    #: The retention of the task, in seconds.
    retention: float | None = None

    def is_copy_of(self, fence: int) -> bool:
        """Whether it belongs to a copy of the run under *fence*, or of an
        earlier run.
        """
        return self.repeat and self.failure_fence != fence


@value_class(frozen=True, slots=True)
class Won:
    """The row is claimed: running under the attempt's token."""

    record: Record


class Refusal(StrEnum):
    """Why a key may not be claimed; see :func:`celery_leases.protocol.claims.refusal`."""

    #: This call has finished the key.
    FINISHED = "finished"
    #: The key has failed for good, or waits for an operator.
    FAILED = "failed"
    #: This call has failed, its caller has the failure, and this delivery is a copy.
    REPORTED = "reported"
    #: A later retry of this call has the row.
    SUPERSEDED = "superseded"
    #: The key belongs to a call with other arguments.
    REUSED = "reused"
    #: Another call has done it.
    DONE = "done"
    #: Another attempt holds the key under a lease that lasts.
    HELD = "held"
    #: ``retry_at`` is in the future.
    NOT_DUE = "not_due"
    #: The lease store has lost its leases, and the holder may be about to write its own again.
    EMPTIED = "emptied"
    #: The lease has expired, but its holder may have had no chance to renew it or to write its
    #: outcome.
    LAPSED = "lapsed"
    #: The row changed between each read and the write after it.
    CHANGED = "changed"


@dataclass(frozen=True, slots=True)
class Refused:
    """The row was not changed, for the reason *why*; ``None``: there was no row.

    ``age``: seconds since the lease store was emptied, if that was read.
    """

    record: Record | None
    why: Refusal
    age: float | None = None


@value_class(frozen=True, slots=True)
class Outcome:
    """What closes an attempt. Written only while the row is running under the attempt's fence and
    token.

    ``attempt``, ``failures``, ``crashes``, ``quick_retries`` and ``cooldowns`` are the counts the
    row has afterwards; ``failed`` notes the moment as that of the last failure. ``retry_after`` and
    ``retention`` are seconds from the moment of writing: until the row may run again, and until it
    counts as absent.
    """

    state: State
    ended: Ended
    attempt: int
    failures: int
    crashes: int
    #: ``None``: until an operator has decided.
    retention: float | None
    retries: int = 0
    retry_after: float | None = None
    result: str | None = None
    reason: str | None = None
    failure: Failure | None = None
    quick_retries: int = 0
    cooldowns: int = 0
    failed: bool = False
    #: The call runs again by itself.
    resumes: bool = False
    #: Progress to be saved with it; ``None`` leaves the saved progress unchanged.
    progress: str | None = None
    #: The calls finished under this key with their results (``""``: none), newest last; ``None``:
    #: none are stored.
    finished: Mapping[str, str | None] | None = None
    #: The call of the last counted crash.
    crashed_call: str | None = None
    #: The traceback of the failure.
    traceback: str | None = None
    #: The body has not begun.
    unrun: bool = False
