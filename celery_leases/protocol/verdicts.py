"""The input and output of decisions: a call, the facts about it, and how its delivery ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from celery_leases.common.values import value_class
from celery_leases.errors import CoolingDown, LeasesError
from celery_leases.protocol.events import Subject
from celery_leases.protocol.groups import Gate
from celery_leases.protocol.keys import CallKey
from celery_leases.protocol.options import LONGEST_COUNTDOWN, LeaseOptions
from celery_leases.protocol.ports import Holder
from celery_leases.protocol.records import Record


@value_class(frozen=True, slots=True)
class Call:
    """One delivery of one call, as far as decisions need it."""

    task: str
    call_id: str
    key: CallKey
    options: LeaseOptions
    #: It was delivered before: redelivered by the broker, rescheduled, or retried. Reading the
    #: record first is cheaper.
    repeat: bool = False
    #: A fresh message of a call that may have failed before: the fence of the failure that it waits
    #: for, 0 while no record has been read. A copy of a delivery whose caller has the failure has
    #: ``None``.
    failure_fence: int | None = None
    #: It carries chain, chord, group or link, which a dropped delivery would leave hanging.
    canvas: bool = False
    #: How often this call was rescheduled before.
    reschedules: int = 0
    #: It has begun to run before.
    started: bool = False
    #: How often Celery has retried it.
    retries: int = 0
    #: The tokens of earlier attempts of this call that may still be open.
    prior: tuple[str, ...] = ()
    #: The owner token made for this delivery.
    token: str = ""
    #: The longest countdown before the broker might redeliver the message, in seconds.
    longest_countdown: float = LONGEST_COUNTDOWN
    #: The hard time limit of this call in seconds, if it has one.
    time_limit: float | None = None
    #: The cooldown group it belongs to.
    group: str | None = None
    #: Its message as a signature in JSON, if the record must store it.
    message: str | None = None
    #: It can be rescheduled; an eager call cannot.
    reschedulable: bool = True
    #: If it waits for a held key, it begins as soon as the key is free.
    starts_when_free: bool = False

    @property
    def subject(self) -> Subject:
        """The call that an event is about."""
        return {"task": self.task, "key": self.key.shown, "call_id": self.call_id}

    @property
    def fingerprint(self) -> str | None:
        """The fingerprint of its arguments; ``None`` if nothing is compared."""
        return self.key.fingerprint

    @property
    def rerun(self) -> bool:
        """Whether each call of the key is work of its own."""
        return self.options.rerun

    @property
    def fresh(self) -> bool:
        """Whether no run of this call is known of which this message would be a copy."""
        return not self.repeat or self.failure_fence == 0

    def is_copy_of(self, fence: int) -> bool:
        """Whether it is a copy of the run under *fence*, or of one before it."""
        return not self.fresh and self.failure_fence != fence


@dataclass(frozen=True, slots=True)
class Run:
    """Continue: acquire, claim, or run the body, whichever is next."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Try again in this process after ``delay`` seconds."""

    delay: float


@dataclass(frozen=True, slots=True)
class TaskEvent:
    """A Celery task event about a call that does not run now: ``task-<type>``, shown by Flower.

    The call is due again in ``retry_after`` seconds.
    """

    type: str
    retry_after: float
    reason: str


@value_class(frozen=True, slots=True)
class Return:
    """Celery gets this value as the task's result.

    ``first_call_id``: the call that returned it first; empty: the body of this delivery did.
    """

    value: Any
    first_call_id: str = ""


@dataclass(frozen=True, slots=True)
class Raise:
    """Celery gets this exception.

    ``own``: it is the stored failure of this call, and is omitted if Celery already has the call's
    outcome.
    """

    error: BaseException
    own: bool = False
    task_event: TaskEvent | None = None


@dataclass(frozen=True, slots=True)
class Reschedule:
    """Publish a fresh message that is due in ``delay`` seconds, then end this delivery."""

    delay: float
    reason: str
    #: The call has begun, so its message no longer expires.
    started: bool = False
    #: The error to raise where a call cannot be rescheduled.
    refusal: LeasesError | None = None
    #: The type of the task event to send, without ``task-``; empty: send none.
    event_type: str = "rescheduled"
    #: The reason in that event; ``None``: ``reason``.
    event_reason: str | None = None
    #: The call has failed before and runs again for that reason: Celery knows of its retry.
    retrying: bool = False
    #: The fence of the failure of this call that its fresh message waits for.
    failure_fence: int | None = None
    #: Another call holds the key.
    held: bool = False
    #: A store did not answer.
    unavailable: bool = False
    #: The token of an attempt whose row may be open although it did not crash.
    prior: str | None = None
    #: The error of the body for which the call runs again, a retry for Celery.
    cause: BaseException | None = None
    #: No rule knows that error.
    unknown: bool = False

    @property
    def task_event(self) -> TaskEvent | None:
        """The task event to send, if any.

        A key that cools down may wait longer than one countdown lasts; the event has the whole
        wait.
        """
        if not self.event_type:
            return None
        refusal = self.refusal
        wait = refusal.retry_after if isinstance(refusal, CoolingDown) else self.delay
        return TaskEvent(self.event_type, wait, self.event_reason or self.reason)


@dataclass(frozen=True, slots=True)
class Follow:
    """Celery has, or will have, the result of ``call_id``, which continued as another task ``age``
    seconds ago.

    While Celery has no result, ``again`` applies; ``missing`` is raised if it never will have one.
    """

    call_id: str
    age: float
    again: Reschedule
    missing: LeasesError


@dataclass(frozen=True, slots=True)
class Drop:
    """End this delivery without a result; another message or an earlier answer replaces it."""

    reason: str


Answer = Return | Raise | Reschedule | Follow | Drop
"""How a delivery ends: what Celery gets, and what is published."""

Verdict = Run | Wait | Answer


@value_class(frozen=True, slots=True)
class Facts:
    """The facts before the run: of the lease, of the record, and of this delivery's past."""

    record: Record | None = None
    holder: Holder | None = None
    #: The callbacks of this call are known to have been sent, whichever call finished the work.
    callbacks_sent: bool = False
    #: Seconds this delivery has been waiting in this process (``lease_wait``).
    waited: float = 0.0
    #: A random number in [0, 1) for jitter.
    rand: float = 0.0
    #: The gate of the call's cooldown group, if it lets no body start now.
    gate: Gate | None = None
    #: The wall clock, in seconds since the epoch: for display only.
    wall_time: float = 0.0
