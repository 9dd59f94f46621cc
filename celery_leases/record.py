"""The durable record of one key: its states, its row, and the outcome of an attempt.

Times in a record are whole microseconds since the epoch by the *database's* clock; durations are
seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import Flag, StrEnum, auto
from typing import Any, Final

from celery_leases.groups.group import Closing
from celery_leases.value_class import value_class

MAY_HAVE_BEEN_EXECUTED: Final = "the call may have been executed"
"""What messages say about an ambiguous failure."""


class State(StrEnum):
    """The state of a key's work."""

    #: It waits: for a worker, a retry, or another attempt.
    PENDING = "pending"
    #: An attempt has the key.
    RUNNING = "running"
    #: The work is done, and later calls get its result.
    DONE = "done"
    #: A failure lets the key wait until its time.
    COOLING = "cooling"
    #: The work has failed for good; ``leases retry`` lets it run again.
    FAILED = "failed"
    #: It is unknown whether an effect has happened; an operator must decide: ``leases resolve``.
    UNCERTAIN = "uncertain"


class Ended(StrEnum):
    """How an attempt ended."""

    #: The body returned.
    RETURNED = "returned"
    #: The body raised, and the rules classified the exception.
    FAILED = "failed"
    #: Its process died without reporting an outcome, and its worker saw that.
    CRASHED = "crashed"
    #: Its lease ended, nothing was heard of it, and another attempt took its key over: a suspected
    #: crash.
    ABANDONED = "abandoned"
    #: The hard time limit, or the body ended its process. Counts as a crash.
    TERMINATED = "terminated"
    #: It no longer held its lease. Does not count as an attempt.
    LOST = "lost"
    #: A shutdown or a revoke. Does not count as an attempt.
    INTERRUPTED = "interrupted"
    #: ``self.retry()``, or ``autoretry_for``.
    RETRIED = "retried"
    #: The body raised ``Reject``. With ``requeue=False`` the call has failed, and the next one
    #: runs.
    REJECTED = "rejected"
    #: The body raised ``Snooze``. Does not count as an attempt.
    SNOOZED = "snoozed"
    #: The body raised ``Ignore``.
    IGNORED = "ignored"
    #: The task called ``replace()``: the replacement continues the call, and the key is free.
    REPLACED = "replaced"
    #: An operator took the key from its holder, or let it run again.
    RELEASED = "released"
    #: An operator entered the outcome.
    RESOLVED = "resolved"
    #: No attempt has run yet; the call was rescheduled.
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
    attempt took its row. ``error`` is the class and the beginning of the message, or why Celery has
    terminated the attempt; ``rule`` is the rule that decided. ``owner``: the token of an abandoned
    attempt, until it is known how it ended.
    """

    started_at: int
    finished_at: int | None
    ended: Ended
    host: str
    error: str | None = None
    rule: str | None = None
    owner: str | None = None


TTL: Final = 15.0
RETENTION: Final = 7 * 86_400.0
"""A record without these fields has these seconds. They are part of the stored form, and do not
change when the defaults of the options do.
"""


class Emptied(Flag):
    """A change of a row that sets fields to their defaults."""

    #: A call claims the row.
    CLAIM = auto()
    #: The row begins a generation: its retention is over, or each call of the key has its own.
    GENERATION = auto()
    #: A call claims a row whose retention is over.
    EXPIRED = auto()
    #: Another call is published under the key.
    QUEUE = auto()
    #: An operator takes the row from its holder.
    RELEASE = auto()
    #: An operator sets the counts to 0.
    FORGIVE = auto()
    #: An operator empties the row.
    FORGET = auto()


_CLAIM, _FORGET, _QUEUE, _RELEASE = Emptied.CLAIM, Emptied.FORGET, Emptied.QUEUE, Emptied.RELEASE
_COUNTS: Final = Emptied.GENERATION | Emptied.FORGIVE | Emptied.FORGET
_NEVER: Final = Emptied(0)


def column(by: Emptied, name: str | None = None) -> Mapping[str, Any]:
    """A field in a column with its *name*, or another one; *by*: what sets it to its default."""
    return {"by": by, "column": name}


def details(name: str, by: Emptied = _NEVER, *, needed: bool = True) -> Mapping[str, Any]:
    """A field in the row's JSON document, under *name*; *by*: what sets it to its default.

    A document without it has the default. If it is not *needed*, decisions can be made without a
    value that cannot be read.
    """
    return {"by": by, "details": name, "needed": needed}


@value_class(frozen=True, slots=True)
class Record:
    """One row of ``celery_leases_records``, as it was at ``now``.

    This is the only list of the fields: what a claim, an operator and an outcome change, the JSON
    document and the columns follow from it. A new field of the document is one line here. A new
    column is also in :mod:`celery_leases.stores.sql.schema` and in the models of Django.
    """

    stored_key: str
    task: str
    key: str
    state: State
    fence: int
    created_at: int
    started_at: int
    now: int
    owner: str = field(default="", metadata=column(_RELEASE | _QUEUE))
    call_id: str = field(default="", metadata=column(_FORGET))
    holder: str = field(default="", metadata=column(_FORGET))
    attempt: int = field(default=0, metadata=column(Emptied.GENERATION | _FORGET))
    generation: int = field(default=0, metadata=details("generation"))
    #: Consecutive failures, compared with ``Failures.failures``.
    failures: int = field(default=0, metadata=details("failures", _COUNTS))
    #: Consecutive crashes, known and suspected, compared with ``Failures.crashes``.
    crashes: int = field(
        default=0, metadata=column(Emptied.EXPIRED | Emptied.FORGIVE | Emptied.FORGET)
    )
    #: With ``lease_runs="latest"``: the highest order of the calls whose work is in the row.
    order: int = field(default=0, metadata=details("order", _FORGET))
    #: Then also: when the call of the last claim arrived, and whether it has no order.
    arrived: int = field(default=0, metadata=details("arrived", _FORGET))
    unordered: bool = field(default=False, metadata=details("unordered", _FORGET))
    #: How often Celery had retried the call of the last claim.
    retries: int = field(default=0, metadata=details("retries", _QUEUE))
    lease_store: str = ""
    lease_ttl: float = field(default=TTL, metadata=details("ttl"))
    fingerprint: str | None = field(default=None, metadata=details("print", _FORGET))
    digests: Mapping[str, str] | None = field(default=None, metadata=details("args", _FORGET))
    lease_until: int | None = field(default=None, metadata=column(_RELEASE | _QUEUE))
    retry_at: int | None = field(default=None, metadata=column(_CLAIM | _RELEASE | _QUEUE))
    result: str | None = field(default=None, metadata=column(_CLAIM | Emptied.GENERATION | _FORGET))
    reason: str | None = field(default=None, metadata=column(_CLAIM | Emptied.GENERATION | _FORGET))
    ended: Ended | None = field(default=None, metadata=column(_CLAIM | _QUEUE | _FORGET))
    failure: Failure | None = field(
        default=None, metadata=column(_CLAIM | _QUEUE | _FORGET, "error")
    )
    previous: Attempt | None = field(
        default=None, metadata=details("before", _FORGET, needed=False)
    )
    crashed_at: int | None = field(default=None, metadata=details("crashed_at", _FORGET))
    crashed_call: str | None = field(default=None, metadata=details("crashed_call"))
    #: Unless ``lease_runs="once"``: the consecutive crashes of other calls, the latest last.
    other_crashes: Mapping[str, int] | None = field(
        default=None,
        metadata=details("other_crashes", Emptied.EXPIRED | Emptied.FORGIVE | Emptied.FORGET),
    )
    finished_at: int | None = field(default=None, metadata=column(_CLAIM | _QUEUE | _FORGET))
    expires_at: int | None = field(default=None, metadata=column(_CLAIM | _QUEUE))
    #: The retention, in seconds, of the task of the last claim; ``None`` if unknown.
    retention: float | None = field(default=RETENTION, metadata=details("keep"))
    #: Quick retries since the last cooldown.
    quick_retries: int = field(default=0, metadata=details("quick", _COUNTS))
    #: Consecutive cooldowns, which make the next one longer.
    cooldowns: int = field(default=0, metadata=details("cooldowns", _COUNTS))
    #: The time of the last failure.
    failed_at: int | None = field(default=None, metadata=details("failed_at", _COUNTS))
    #: The call of the last attempt runs again by itself after ``retry_at``.
    resumes: bool = field(default=False, metadata=column(_QUEUE))
    #: The message of the call as a signature in JSON, if it is stored.
    message: str | None = field(default=None, metadata=column(_FORGET))
    #: From when on the stored message must be published; ``None`` if it need not be.
    publish_at: int | None = field(default=None, metadata=column(_FORGET))
    #: When a stored message was last published.
    published_at: int | None = field(default=None, metadata=column(_FORGET | _QUEUE))
    #: JSON text of the saved progress, see :mod:`celery_leases.progress`.
    progress: str | None = field(default=None, metadata=column(_FORGET))
    #: Unless ``lease_runs="once"``: the last finished calls, the latest last.
    finished_calls: tuple[str, ...] = field(
        default=(), metadata=details("finished", Emptied.EXPIRED | _FORGET)
    )
    #: The results of finished calls as JSON text, by call.
    finished_results: Mapping[str, str | None] | None = field(
        default=None, metadata=details("results", _FORGET)
    )
    #: The columns describe no attempt of their own: the body of the last claim did not begin, or an
    #: operator has changed the row since, or the call has ended without another attempt.
    unrun: bool = field(
        default=False, metadata=details("unrun", _CLAIM | _QUEUE | _FORGET, needed=False)
    )
    #: The attempts before the one in the columns, the latest last.
    history: tuple[PastAttempt, ...] = field(
        default=(), metadata=details("past", Emptied.EXPIRED | _FORGET, needed=False)
    )
    #: The traceback of the last failure, shortened and without secrets.
    traceback: str | None = field(
        default=None, metadata=details("trace", Emptied.EXPIRED | _FORGET, needed=False)
    )
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
    #: The crashes of other calls.
    other_crashes: Mapping[str, int] | None = None
    #: The traceback of the failure.
    traceback: str | None = None
    #: It is not that of an attempt whose body has begun.
    unrun: bool = False
    #: Close the failure's group in this way before the outcome is written: the group may
    #: set a longer wait.
    closing: Closing | None = None


FIELDS: Final = {each.name: each for each in fields(Record)}

EMPTY: Final[Mapping[Emptied, dict[str, Any]]] = {
    change: {
        name: each.default
        for name, each in FIELDS.items()
        if change in each.metadata.get("by", _NEVER)
    }
    for change in Emptied
}
"""The fields that each change sets to their defaults."""
SETTLED: Final = tuple(
    each.name
    for each in fields(Outcome)
    if each.name in FIELDS and each.name not in ("retention", "progress", "traceback")
)
"""The fields of an outcome that the row has afterwards as they are."""
