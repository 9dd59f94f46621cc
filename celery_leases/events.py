"""Events of a leased call, as frozen values for signals, logs and metrics. Times are seconds."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from logging import DEBUG, INFO, WARNING
from typing import ClassVar, Final, Self, TypedDict

from celery_leases.record import Ended, Failure, Outcome, Record, State


class Subject(TypedDict):
    """The call that an event is about."""

    task: str
    key: str
    call_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened to a key; ``call_id`` is Celery's task id."""

    #: Of its log line. ``more`` in the line is computed from several fields.
    level: ClassVar[int]
    line: ClassVar[str]
    task: str
    key: str
    call_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseAcquired(Event):
    """An attempt begins."""

    level, line = DEBUG, "attempt {attempt} begins with fence {fence}"
    fence: int
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseHeld(Event):
    """The key is held by another attempt: of the same call (``same_call``) or of another."""

    level, line = DEBUG, "held by call {holder_call_id} on {holder} for another {remaining:.1f} s"
    holder: str
    holder_call_id: str
    remaining: float
    same_call: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRescheduled(Event):
    """A fresh message of the call was published, which is due in ``delay`` seconds; or
    (``confirmed=False``) the delivery was returned to the broker. The old delivery ends.

    At WARNING if ``unavailable``: a store did not answer or refused. For each cause the first one
    is logged, then at most one a minute.

    What to do: nothing while a call waits for another; for a store run ``leases doctor``.
    """

    level, line = INFO, "rescheduled in {delay:.1f} s: {reason}"
    delay: float
    reason: str
    confirmed: bool = True
    #: A store did not answer, or cannot be used.
    unavailable: bool = False
    #: It was rescheduled before for the same cause, and has waited since; its log line is DEBUG.
    still: bool = False


class Dropped(StrEnum):
    """Why a delivery was superfluous. The value is a stable code; ``words`` say the same."""

    words: str

    def __new__(cls, code: str, words: str) -> Self:
        """A code that is a str, with its words."""
        made = str.__new__(cls, code)
        made._value_, made.words = code, words
        return made

    CALLBACKS_SENT = "callbacks_sent", "its result and callbacks are already sent"
    NO_RESULT = "no_result", "it has ended without a result"
    DONE_BY_OTHER = "done_by_other", "another call has done it"
    HELD_BY_OTHER = "held_by_other", "another call holds the key"
    OUTCOME_KNOWN = "outcome_known", "its outcome is already known"
    RETRIED_SINCE = "retried_since", "a retry of this call has replaced it"
    COOLING = "cooling", "the key is cooling down"
    COPY_WAITS = "copy_waits", "another copy of this call waits already"
    EXPIRED = "expired", "it expired before it began"
    REVOKED = "revoked", "it was revoked while it waited"

    @property
    def saved_a_run(self) -> bool:
        """Whether the work of the delivery is done, or is being done by another delivery."""
        return self in _SAVED_RUNS


_SAVED_RUNS: Final = frozenset(
    (
        *(Dropped.CALLBACKS_SENT, Dropped.NO_RESULT, Dropped.DONE_BY_OTHER),
        *(Dropped.HELD_BY_OTHER, Dropped.OUTCOME_KNOWN),
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallDropped(Event):
    """The delivery was superfluous and ended without a run; ``why`` says more than ``reason``."""

    level, line = INFO, "dropped: {why}"
    reason: Dropped
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultReplayed(Event):
    """The delivery got the saved result of ``first_call_id``; ``replaced``: because that call is
    newer, with ``lease_runs="latest"``.
    """

    level, line = INFO, "{more}answered with the saved result of call {first_call_id}"
    first_call_id: str
    replaced: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRefused(Event):
    """The delivery got an error instead of a run."""

    level, line = INFO, "refused: {error}"
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRenewed(Event):
    """A renewal succeeded, for ``remaining`` seconds.

    ``reasserted``: the store had lost the lease, and the renewal wrote it again. ``late``: how many
    seconds after it was due the renewal was sent; ``None`` if it was not due.
    """

    level, line = DEBUG, "lease renewed for {remaining:.1f} s"
    remaining: float
    reasserted: bool = False
    late: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RenewalFailed(Event):
    """A renewal failed and will be retried; the lease expires in ``remaining`` seconds.

    What to do: look at the lease store, which is slow or does not answer. The body is interrupted
    before the lease ends.
    """

    level, line = WARNING, "lease not renewed, it expires in {remaining:.1f} s: {error}"
    error: str
    remaining: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseLost(Event):
    """The lease is lost: another owner took it, it was not renewed in time, an operator released
    it, or it was held too long.

    The call is rescheduled, unless it was held for its ``time_limit``, or 24 h without one: that is
    a failure with the rule ``time-or-memory-limit``.

    What to do: nothing if it is rare. If not, look for processes that stand still, raise
    ``lease_ttl``, or mend a body that hangs.
    """

    level, line = WARNING, "lease lost: {reason}"
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OutcomeRefused(Event):
    """The outcome of an attempt was refused: a later attempt owns the key (now in ``state``), or
    the row was deleted (``None``).

    ``was_suspected``: the attempt counted as a suspected crash, and does not count any more.

    What to do: nothing if it is rare: the body of an attempt that had lost its lease ran on.
    If not, call ``lease.check()`` in the body, or raise ``lease_ttl``.
    """

    level, line = WARNING, "outcome of fence {fence} refused: {more}"
    fence: int
    state: str | None
    was_suspected: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptSettled(Event):
    """An attempt was closed: ``ended`` says how, ``state`` is the state of the key afterwards.

    ``runtime`` is the run time of the body, ``held`` the time for which the attempt held the key.
    ``retry_after``: how long the key must wait now. ``repeated``: the key was done before in the
    same generation, and its body has run again.
    """

    level, line = INFO, "attempt {attempt} {ended} after {runtime:.3f} s, the key is {state}{more}"
    state: str
    ended: str
    attempt: int
    runtime: float
    failure: Failure | None = None
    reason: str | None = None
    retry_after: float | None = None
    fence: int = 0
    held: float = 0.0
    repeated: bool = False

    @classmethod
    def by(
        cls, subject: Subject, record: Record, outcome: Outcome, runtime: float, held: float
    ) -> Self:
        """The event for *outcome* of the attempt on *record*; *runtime* and *held* are seconds."""
        previous = record.previous
        return cls(
            **subject,
            state=outcome.state.value,
            ended=outcome.ended.value,
            attempt=outcome.attempt,
            runtime=runtime,
            failure=outcome.failure,
            reason=outcome.reason,
            retry_after=outcome.retry_after,
            fence=record.fence,
            held=held,
            repeated=outcome.state is State.DONE
            and previous is not None
            and previous.ended is Ended.RETURNED,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupClosed(Event):
    """A failure closed a cooldown group, which is closed for ``closed_for`` seconds
    now. No key of the group begins until then.

    What to do: nothing after a rate limit; else mend what ``rule`` names, then run ``leases group
    open``.
    """

    level, line = (
        WARNING,
        "cooldown group {group} is closed for {closed_for:.1f} s by rule {rule}: closing {in_a_row} in a row",
    )
    group: str
    closed_for: float
    in_a_row: int
    reason: str
    rule: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOpened(Event):
    """A probe opened its cooldown group."""

    level, line = INFO, "cooldown group {group} is open again"
    group: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CrashSeen(Event):
    """The process of an attempt died without reporting an outcome, as its worker has seen: the
    crash number ``crashes`` in a row.

    What to do: look for the kernel's out-of-memory killer on that host.
    """

    level, line = (
        WARNING,
        "its process died on {host} without reporting an outcome: crash {crashes} in a row",
    )
    crashes: int
    host: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptAbandoned(Event):
    """The lease of the previous attempt ended, nothing was heard of it, and this attempt has taken
    over its key: a suspected crash, the number ``crashes`` in a row.

    What to do: look at that host: its worker died, stood still, or did not reach the lease store.
    """

    level, line = (
        WARNING,
        "the lease of the previous attempt on {host} ended, and nothing was heard of it: suspected crash {crashes}",
    )
    crashes: int
    host: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionStands(Event):
    """The body committed its done record by ``complete()``, and then ended with ``error``.

    What to do: mend the end of the body; the work is done.
    """

    level, line = (
        WARNING,
        "completed with fence {fence}; this stands although the body ended with {error}",
    )
    fence: int
    error: str
