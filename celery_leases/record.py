"""The durable record of one key: its states, its row, and the outcome of an attempt.

Times in a record are whole microseconds since the epoch by the *database's* clock; durations are
seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from celery_leases.value_class import value_class

MAY_HAVE_BEEN_EXECUTED: Final = "the call may have been executed"
"""What messages say about an ambiguous failure."""


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
    #: Its process died.
    CRASHED = "crashed"
    #: Its lease ended, nothing was heard of it, and another attempt took its row over: a suspected
    #: crash.
    ABANDONED = "abandoned"
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


CALLER_HAS_FAILURE: Final = (Ended.FAILED, Ended.REJECTED, Ended.RETRIED)
"""How the last call of a key ended that does not run again by itself, and that has not done its
work: it failed, its message was rejected, or its body raised a ``Retry`` of which there is no
message.
"""


@dataclass(frozen=True, slots=True)
class Failure:
    """A stored exception: the dotted name of its class, and its message, cut and without secrets.

    ``rule`` is the rule that decided, ``reason`` a stable code. ``group``: the cooldown group that
    failed. ``ambiguous``: the call may have been executed. ``operator``: waiting does not help, a
    person must act.
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
        """The failure as other callers get it: class, message, and whether it is ambiguous."""
        kind = "" if self.type.rpartition(".")[2] == "PermanentFailure" else self.type
        text = ": ".join(part for part in (kind, self.message) if part)
        return f"{text} ({MAY_HAVE_BEEN_EXECUTED})" if self.ambiguous else text


@dataclass(frozen=True, slots=True)
class Attempt:
    """How the previous attempt ended, with its error, and its ``hostname/pid`` as ``host``."""

    ended: Ended
    error: Failure | None = None
    host: str | None = None


@dataclass(frozen=True, slots=True)
class PastAttempt:
    """An ended attempt in the history of its record; see
    :mod:`celery_leases.decide.attempt_history`.

    ``finished_at`` is ``None`` if the attempt reported no outcome: its process died, or another
    attempt took its row. ``error`` is the class and the beginning of the message, ``rule`` the rule
    that decided. ``owner``: the token of an abandoned attempt, until it is known how it ended.
    """

    started_at: int
    finished_at: int | None
    ended: Ended
    host: str
    error: str | None = None
    rule: str | None = None
    owner: str | None = None


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
    #: Consecutive failures, compared with ``Failures.failures``.
    failures: int
    #: Consecutive crashes, known and suspected, compared with ``Failures.crashes``.
    crashes: int
    #: How often Celery had retried the call of the last claim.
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
    #: The retention, in seconds, of the task of the last claim; ``None`` if unknown.
    retention: float | None = None
    #: Quick retries since the last cooldown.
    quick_retries: int = 0
    #: Consecutive cooldowns, which make the next one longer.
    cooldowns: int = 0
    #: The time of the last failure.
    failed_at: int | None = None
    #: The call of the last attempt runs again by itself after ``retry_at``.
    resumes: bool = False
    #: The message of the call as a signature in JSON, if it is stored.
    message: str | None = None
    #: From when on the stored message must be published; ``None`` if it need not be.
    publish_at: int | None = None
    #: When a stored message was last published.
    published_at: int | None = None
    #: JSON text of the saved progress, see :mod:`celery_leases.progress`.
    progress: str | None = None
    #: With ``lease_runs="each"``: the last finished calls, the latest last.
    finished_calls: tuple[str, ...] = ()
    #: The results of finished calls as JSON text, by call.
    finished_results: Mapping[str, str | None] | None = None
    #: The attempts before the one in the columns, the latest last.
    history: tuple[PastAttempt, ...] = ()
    #: The columns describe no attempt of their own: the body of the last claim did not begin, or an
    #: operator has changed the row since.
    unrun: bool = False
    #: The traceback of the last failure, shortened and without secrets.
    traceback: str | None = None
    #: Which column cannot be read, and what to do. Set only if an operator reads the row; otherwise
    #: such a row raises an error.
    unreadable: str | None = None

    def is_attempt(self, state: State, owner: str, fence: int | None = None) -> bool:
        """Whether the row is in *state* and belongs to the attempt with the token *owner*, and with
        *fence* if it is given.
        """
        return self.state == state and self.owner == owner and fence in (None, self.fence)

    @property
    def waits(self) -> float:
        """Seconds until ``retry_at``; 0 if it is over, or not set."""
        return max(0.0, (self.retry_at - self.now) / 1e6) if self.retry_at is not None else 0.0

    @property
    def lease_remaining(self) -> float:
        """Seconds until the lease in this row expires; 0 if it has expired, or is in another
        store.
        """
        return (
            max(0.0, (self.lease_until - self.now) / 1e6) if self.lease_until is not None else 0.0
        )

    @property
    def forgotten(self) -> bool:
        """Whether an operator has reset the row, and no call has been made since."""
        return (
            self.state is State.PENDING
            and self.ended is None
            and not self.call_id
            and self.message is None
        )

    @property
    def queued(self) -> bool:
        """Whether the row was written for a call that is or will be published, and has not
        begun.
        """
        return self.state is State.PENDING and self.ended is None and bool(self.call_id)

    @property
    def expired(self) -> bool:
        """Whether its retention is over: the row counts as absent."""
        return self.expires_at is not None and self.expires_at <= self.now

    @property
    def failure_delivered(self) -> bool:
        """Whether the call of the last attempt failed and does not run again by itself: its caller
        has the failure.
        """
        return (
            self.ended in CALLER_HAS_FAILURE
            and not self.resumes
            and self.state in (State.PENDING, State.COOLING)
        )

    @property
    def just_crashed(self) -> bool:
        """Whether the claim that returned this row counted the previous attempt as a suspected
        crash.
        """
        return self.crashed_at is not None and self.crashed_at == self.started_at


@value_class(frozen=True, slots=True)
class Won:
    """The row is claimed: running under the attempt's token."""

    record: Record


class Refusal(StrEnum):
    """Why a key may not be claimed; see :func:`celery_leases.decide.claim.refusal`."""

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
    #: Another call has finished the key.
    DONE = "done"
    #: Another attempt holds the key, and its lease has not expired.
    HELD = "held"
    #: ``retry_at`` is in the future.
    NOT_DUE = "not_due"
    #: The lease store has lost its leases, and the holder may still write its own again.
    EMPTIED = "emptied"
    #: The lease has expired, but the database may not have answered its holder, which may still
    #: renew it or write its outcome.
    LAPSED = "lapsed"
    #: The row was changed by another process between each read and the write after it.
    CHANGED = "changed"


@dataclass(frozen=True, slots=True)
class Refused:
    """The claim was refused because of ``why``, and ``record`` (``None``: no row) was not changed.

    ``age``: seconds since the lease store was emptied, if that was read.
    """

    record: Record | None
    why: Refusal
    age: float | None = None


@value_class(frozen=True, slots=True)
class Outcome:
    """The outcome of an attempt, written only while the row is running under its fence and token.

    ``attempt``, ``failures``, ``crashes``, ``quick_retries`` and ``cooldowns`` are the counts of
    the row afterwards. ``failed``: the time of writing is that of the last failure. ``retry_after``
    and ``retention`` are seconds from the time of writing: until the key may run again, and until
    the row counts as absent.
    """

    state: State
    ended: Ended
    attempt: int
    failures: int
    crashes: int
    #: ``None``: the row counts until an operator has decided.
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
    #: Progress to save with the outcome; ``None`` leaves the saved progress unchanged.
    progress: str | None = None
    #: The finished calls of the key with their results as JSON text, the latest last. ``""``: the
    #: call has no result, ``None``: its result is not stored. ``None`` unless each call runs.
    finished: Mapping[str, str | None] | None = None
    #: The call of the last counted crash.
    crashed_call: str | None = None
    #: The traceback of the failure.
    traceback: str | None = None
    #: The body did not begin.
    unrun: bool = False
