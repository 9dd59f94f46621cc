"""The durable record of one key: its states, its row, and what one attempt may write into it.

Times inside a record are whole microseconds since the epoch by the *database's* clock; spans are seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

MAY_HAVE_BEEN_EXECUTED: Final = "the call may have been executed"
"""What people are told of an ambiguous failure."""


class State(StrEnum):
    """Where the work of a key stands."""

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
    """An error as it is remembered: the class's dotted name and the redacted, truncated message, never the object.

    ``rule`` is the row that decided, ``reason`` its stable code. ``group``: the cooldown group it was a failure of.
    ``ambiguous``: what was called may have been carried out. ``operator``: waiting alone does not mend it.
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
        """The error as it is told to others than the caller it was raised to: its class, its message, and its doubt."""
        kind = "" if self.type.rpartition(".")[2] == "PermanentFailure" else self.type
        said = ": ".join(part for part in (kind, self.message) if part)
        return f"{said} ({MAY_HAVE_BEEN_EXECUTED})" if self.ambiguous else said


@dataclass(frozen=True, slots=True)
class Attempt:
    """How an earlier attempt ended, with its error and the host and process it ran in."""

    ended: Ended
    error: Failure | None = None
    host: str | None = None


@dataclass(frozen=True, slots=True)
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
    #: Counted failures in a row: those that bring the key nearer to ``lease_max_failures``.
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
    #: Seconds for which the task that claimed it last keeps what is done; ``None`` where that is not known.
    retention: float | None = None
    #: Quick retries since the last cooldown, and cooldowns in a row, which make the next one longer.
    quick_retries: int = 0
    cooldowns: int = 0
    #: When the last of these failures was.
    failed_at: int | None = None
    #: The call that ended last comes back by itself once ``retry_at`` is over.
    resumes: bool = False
    #: The call's message as a signature in JSON, where it is kept; and when it may be published, if it still is to be.
    message: str | None = None
    publish_at: int | None = None
    #: When a message of it was published last, by whoever publishes what is kept.
    published_at: int | None = None
    #: JSON text of the last saved progress, see :mod:`celery_leases.core.progress`.
    progress: str | None = None
    finished_calls: tuple[str, ...] = ()
    finished_results: Mapping[str, str | None] | None = None
    #: What of the row cannot be read, and what to do. Only where an operator looks; elsewhere it is an error.
    unreadable: str | None = None

    @property
    def waits(self) -> float:
        """Seconds until ``retry_at``; 0 when nothing is to be waited for."""
        return max(0.0, (self.retry_at - self.now) / 1e6) if self.retry_at is not None else 0.0

    @property
    def lease_remaining(self) -> float:
        """Seconds the lease in this row lasts; 0 where the lease is kept elsewhere or has ended."""
        return max(0.0, (self.lease_until - self.now) / 1e6) if self.lease_until is not None else 0.0

    @property
    def forgotten(self) -> bool:
        """Whether an operator has made it as good as new, and nobody has called it since."""
        return self.state is State.PENDING and self.ended is None and not self.call_id and self.message is None

    @property
    def expired(self) -> bool:
        """Whether its retention is over, so that it counts as absent."""
        return self.expires_at is not None and self.expires_at <= self.now

    @property
    def told(self) -> bool:
        """Whether the call that ended last has failed and does not come back: its caller knows."""
        return self.ended is Ended.FAILED and not self.resumes and self.state in (State.PENDING, State.COOLING)

    @property
    def just_crashed(self) -> bool:
        """Whether the claim that returned this row counted the attempt before it as a crash."""
        return self.crashed_at is not None and self.crashed_at == self.started_at


@dataclass(frozen=True, slots=True)
class Bid:
    """What one attempt asks for: the lease and the claim of a key under its own token."""

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
    #: The identity of the records database, where the lease is kept elsewhere.
    database: str = ""
    #: The tokens of earlier attempts of this call whose row may stand open through our own fault: no crashes.
    prior: tuple[str, ...] = ()
    #: How often Celery has retried the call.
    retries: int = 0
    #: The delivery is a copy of an earlier one, not a fresh message that happens to have its id.
    repeat: bool = False
    #: The fence of the failure that a fresh message waits for: what is no copy of that run may still be run.
    met: int | None = None
    #: The cooldown group whose gate must let the body start.
    group: str | None = None
    #: The call's message as a signature in JSON, if it is to be kept.
    message: str | None = None
    #: The task's, in seconds.
    retention: float | None = None

    def knows(self, failure: int) -> bool:
        """Whether it is made for a copy of the run under the fence *failure*, or of one before it."""
        return self.repeat and self.met != failure


@dataclass(frozen=True, slots=True)
class Won:
    """The row is ours: running under our token."""

    record: Record


class Refusal(StrEnum):
    """Why a key may not be claimed; see :func:`celery_leases.core.claims.refusal`."""

    #: This very call has finished the key.
    FINISHED = "finished"
    #: The key has failed for good, or waits for an operator.
    FAILED = "failed"
    #: This call has failed, its caller has seen the failure, and this delivery is a copy of that one.
    REPORTED = "reported"
    #: A later retry of this call has the row.
    SUPERSEDED = "superseded"
    #: The key stands for a call with other arguments.
    REUSED = "reused"
    #: Another call has done it.
    DONE = "done"
    #: Another attempt holds the key under a lease that lasts.
    HELD = "held"
    #: ``retry_at`` is in the future.
    EARLY = "early"
    #: The lease store has lost its leases, and the holder may be about to assert its own again.
    EMPTIED = "emptied"
    #: The lease has ended, but its holder may have had no chance to renew it or to write its outcome.
    LAPSED = "lapsed"
    #: The row changed between each look and the write that followed it.
    CHANGED = "changed"


@dataclass(frozen=True, slots=True)
class Refused:
    """The row was left as it is, for the reason *why*; ``None``: there was no row to see.

    ``age``: seconds since the lease store came up empty, if that was asked.
    """

    record: Record | None
    why: Refusal
    age: float | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What closes an attempt. Written only while the row is running under the attempt's fence and token.

    ``attempt``, ``failures``, ``crashes``, ``quick_retries`` and ``cooldowns`` are the counts the row has afterwards;
    ``failed`` notes the moment as that of the last failure. ``retry_after`` and ``retention`` are seconds from the
    moment of writing: until the row may run again, and until it counts as absent.
    """

    state: State
    ended: Ended
    attempt: int
    failures: int
    crashes: int
    #: ``None``: for as long as no operator has looked.
    retention: float | None
    retries: int = 0
    retry_after: float | None = None
    result: str | None = None
    reason: str | None = None
    failure: Failure | None = None
    quick_retries: int = 0
    cooldowns: int = 0
    failed: bool = False
    #: The call comes back by itself.
    resumes: bool = False
    #: Progress to be saved along; ``None`` leaves what is saved.
    progress: str | None = None
    #: The calls finished under this key with their results (``""``: it has none), newest last; ``None``: none are kept.
    finished: Mapping[str, str | None] | None = None
    #: The call of the last crash that was counted.
    crashed_call: str | None = None
