"""The input and output of decisions: the facts about a call, and the verdict on its delivery."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from celery_leases.decide.answers import Holder
from celery_leases.errors import CoolingDown, LeasesError
from celery_leases.events import Dropped
from celery_leases.groups.group import ClosedGroup
from celery_leases.groups.slots import Room
from celery_leases.record import Record
from celery_leases.value_class import value_class


@dataclass(frozen=True, slots=True)
class Run:
    """Go on to the next step: acquire the lease, claim the record, or run the body."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Try again in this process after ``delay`` seconds: another call reads the record, or the
    holder of an expired lease may still write its outcome.
    """

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
    """Celery gets this value as the task's result, and sends the callbacks of this delivery.

    ``first_call_id``: the call whose saved result it is; empty if the body has just returned it.
    """

    value: Any
    first_call_id: str = ""


@dataclass(frozen=True, slots=True)
class Raise:
    """Celery gets this exception; an attempt that was claimed is closed as ``failed`` first.

    ``own``: it is the saved failure of this call. The delivery is dropped instead if Celery already
    has an outcome of the call.
    """

    error: BaseException
    own: bool = False
    task_event: TaskEvent | None = None


@dataclass(frozen=True, slots=True)
class Reschedule:
    """Publish a fresh message that is due in ``delay`` seconds, then end this delivery; an attempt
    that was claimed is given back first.
    """

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
    #: The group is full, and the call waits for its turn since then, in milliseconds by the clock
    #: of the store.
    full_since: float | None = None
    #: Another call is newer and runs instead; see :attr:`Call.waited_for_newer`.
    waited_for_newer: float = 0.0
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

    reason: Dropped
    #: What to say instead of the words of the reason.
    words: str | None = None

    @property
    def why(self) -> str:
        """The reason in words."""
        return self.words or self.reason.words


Verdict = Run | Wait | Return | Raise | Reschedule | Follow | Drop
"""What a delivery does next: it goes on, waits, or ends in one of five ways."""


@value_class(frozen=True, slots=True)
class Facts:
    """What is known before the run: about the record, the lease, the group, and this delivery."""

    record: Record | None = None
    holder: Holder | None = None
    #: The callbacks of this call have been sent.
    callbacks_sent: bool = False
    #: A random number in [0, 1) for jitter.
    rand: float = 0.0
    #: The group of the call, if it blocks.
    closed_group: ClosedGroup | None = None
    #: The room of that group, if the group is full.
    room: Room | None = None
    #: The wall clock, in seconds since the epoch: for display only.
    wall_time: float = 0.0
