"""What can happen to a leased call, as frozen values for signals, logs and metrics. Times are seconds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self, TypedDict

from celery_leases.core.records import Failure, Outcome


class Subject(TypedDict):
    """Whom an event is about."""

    task: str
    key: str
    call_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something happened to a key; ``call_id`` is Celery's task id."""

    task: str
    key: str
    call_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseAcquired(Event):
    """An attempt begins."""

    fence: int
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseHeldElsewhere(Event):
    """The key is held: by another copy of the same call, or by another call."""

    holder: str
    holder_call_id: str
    remaining: float
    same_call: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CallPutBack(Event):
    """A fresh message of the call was published, or (``confirmed=False``) the old one given back to the broker."""

    delay: float
    reason: str
    confirmed: bool = True
    #: A store did not answer, or refused.
    unavailable: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CallDropped(Event):
    """The delivery was superfluous and ended without a run."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultReplayed(Event):
    """The delivery got the saved result of ``first_call_id``."""

    first_call_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRefused(Event):
    """The delivery got an error instead of a run."""

    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRenewed(Event):
    """A renewal succeeded; ``reasserted`` when the store had forgotten the lease."""

    remaining: float
    reasserted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RenewalFailed(Event):
    """A renewal failed and will be tried again; the lease still counts for ``remaining`` seconds."""

    error: str
    remaining: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseGone(Event):
    """The lease is lost: taken by another owner, not renewed in time, forgotten by the store, or held too long."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OutcomeRefused(Event):
    """What an attempt said about its outcome was not accepted: a later attempt owns the key, or the row is gone."""

    fence: int
    state: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptSettled(Event):
    """An attempt was closed; ``state`` is where the key stands now, ``runtime`` how long the body took.

    ``retry_after``: how long the key waits now; ``failure`` says by which rule.
    """

    state: str
    ended: str
    attempt: int
    runtime: float
    failure: Failure | None = None
    reason: str | None = None
    retry_after: float | None = None

    @classmethod
    def by(cls, subject: Subject, outcome: Outcome, runtime: float) -> Self:
        """That *outcome* was written after a body of *runtime* seconds."""
        return cls(
            **subject,
            state=outcome.state.value,
            ended=outcome.ended.value,
            attempt=outcome.attempt,
            runtime=runtime,
            failure=outcome.failure,
            reason=outcome.reason,
            retry_after=outcome.retry_after,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GateClosed(Event):
    """A failure closed the gate of a cooldown group, or kept it closed, for another ``closed_for`` seconds."""

    group: str
    closed_for: float
    trips: int
    reason: str
    rule: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GateOpened(Event):
    """A probe found the dependency back: the gate of its cooldown group is open."""

    group: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CrashSeen(Event):
    """The attempt before this one never ended in our hands: its process died."""

    crashes: int
    host: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionStands(Event):
    """The body committed its done record by ``complete()``, and ended in another way than by returning."""

    fence: int
    error: str
