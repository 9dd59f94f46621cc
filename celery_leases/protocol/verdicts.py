"""The input and output of decisions: a call, the facts about it, and the verdict."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from celery_leases.common.values import value_class
from celery_leases.errors import CoolingDown, LeasesError
from celery_leases.protocol.cooldown_groups import Gate
from celery_leases.protocol.events import Subject
from celery_leases.protocol.interfaces import Holder
from celery_leases.protocol.keys import CallKey
from celery_leases.protocol.options import LONGEST_COUNTDOWN, LeaseOptions
from celery_leases.protocol.records import Record


@value_class(frozen=True, slots=True)
class Call:
    """One delivery of one call: what decisions need to know."""

    task: str
    call_id: str
    key: CallKey
    options: LeaseOptions
    #: The call was delivered before: the message was redelivered, rescheduled, or retried. Then the
    #: record is read before the lease is acquired, which is cheaper.
    repeat: bool = False
    #: Set in a message that was published after an earlier failure of the call: the fence of that
    #: failure, 0 if the record could not be read. ``None`` in a copy of an older message.
    failure_fence: int | None = None
    #: The message carries chain, chord, group or link, which would hang if it was dropped.
    canvas: bool = False
    #: How often the call was rescheduled.
    reschedules: int = 0
    #: The call has begun to run in an earlier delivery.
    started: bool = False
    #: How often Celery has retried the call.
    retries: int = 0
    #: The owner tokens of earlier attempts of the call whose rows may still be running.
    prior: tuple[str, ...] = ()
    #: The owner token of this delivery.
    token: str = ""
    #: The longest countdown after which the broker does not redeliver the message, in seconds.
    longest_countdown: float = LONGEST_COUNTDOWN
    #: When the delivery began, by the local clock. Celery counts the time limits from about then.
    received_at: float = 0.0
    #: The hard time limit of the call in seconds, if it has one.
    time_limit: float | None = None
    #: When the body must have begun at the latest, by the local clock; see
    #: :func:`celery_leases.protocol.deadlines.begin_by`.
    begin_by: float = math.inf
    #: The cooldown group of the call.
    group: str | None = None
    #: The message as a signature in JSON, if the record must store it.
    message: str | None = None
    #: Whether a fresh message can be published; not for an eager call.
    reschedulable: bool = True
    #: While it waits for a held key: this worker begins the call as soon as the key is free.
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
    def digests(self) -> Mapping[str, str] | None:
        """The digest of each compared argument; ``None`` if they are not known."""
        return self.key.digests

    @property
    def rerun(self) -> bool:
        """Whether the task has ``lease_on_done="rerun"``: each call of the key runs."""
        return self.options.rerun

    @property
    def fresh(self) -> bool:
        """Whether the message is not known to be a copy of an earlier run of the call."""
        return not self.repeat or self.failure_fence == 0

    def is_copy_of(self, fence: int) -> bool:
        """Whether the message is a copy of the run under *fence*, or of an earlier run."""
        return not self.fresh and self.failure_fence != fence


@dataclass(frozen=True, slots=True)
class Run:
    """Go on to the next step: acquire the lease, claim the record, or run the body."""


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

    ``first_call_id``: the call whose saved result it is; empty if the body has just returned it.
    """

    value: Any
    first_call_id: str = ""


@dataclass(frozen=True, slots=True)
class Raise:
    """Celery gets this exception.

    ``own``: it is the saved failure of this call. The delivery is dropped instead if Celery already
    has an outcome of the call.
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
    #: The error to raise if the call cannot be rescheduled.
    refusal: LeasesError | None = None
    #: The type of the task event to send, without ``task-``; empty: send none.
    event_type: str = "rescheduled"
    #: The reason in that event; ``None``: ``reason``.
    event_reason: str | None = None
    #: The call has failed before, and Celery shows it in the state RETRY.
    retrying: bool = False
    #: The fence of the failure after which the fresh message is published.
    failure_fence: int | None = None
    #: Another call holds the key.
    held: bool = False
    #: A store did not answer.
    unavailable: bool = False
    #: The owner token of an attempt that did not crash, but may have left its row running.
    prior: str | None = None
    #: The exception of the body, because of which Celery gets a ``Retry``.
    cause: BaseException | None = None
    #: No rule matched that exception.
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
    """Return the result of ``call_id``, which was replaced by another task ``age`` seconds ago.
    Only Celery's result backend has it.

    ``again`` applies while the backend has no result; ``missing`` is raised if it cannot have one.
    """

    call_id: str
    age: float
    again: Reschedule
    missing: LeasesError


@dataclass(frozen=True, slots=True)
class Drop:
    """End this delivery without a result: another message, or an earlier answer, makes it
    superfluous.
    """

    reason: str


Answer = Return | Raise | Reschedule | Follow | Drop
"""How a delivery ends: what Celery gets, and what is published."""

Verdict = Run | Wait | Answer


@value_class(frozen=True, slots=True)
class Facts:
    """What is known before the run: about the record, the lease, the gate, and this delivery."""

    record: Record | None = None
    holder: Holder | None = None
    #: The callbacks of this call have been sent.
    callbacks_sent: bool = False
    #: Seconds for which this delivery has waited in this process (``lease_wait``).
    waited: float = 0.0
    #: A random number in [0, 1) for jitter.
    rand: float = 0.0
    #: The gate of the call's cooldown group, if it blocks.
    gate: Gate | None = None
    #: The wall clock, in seconds since the epoch: for display only.
    wall_time: float = 0.0
