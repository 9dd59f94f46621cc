"""One delivery of one call: what decisions need to know. Pure."""

from __future__ import annotations

import math

from celery_leases.events import Subject
from celery_leases.groups.slots import Ask
from celery_leases.keys import CallKey
from celery_leases.options import LONGEST_COUNTDOWN, LeaseOptions
from celery_leases.value_class import value_class


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
    #: ``hostname/pid`` of the process that runs it.
    host: str = ""
    #: The identity of the records database, if the lease is in another store.
    database: str = ""
    #: The longest countdown after which the broker does not redeliver the message, in seconds.
    longest_countdown: float = LONGEST_COUNTDOWN
    #: When the delivery began, by the local clock. Celery counts the time limits from about then.
    received_at: float = 0.0
    #: The hard time limit of the call in seconds, if it has one.
    time_limit: float | None = None
    #: When the body must have begun at the latest, by the local clock; see
    #: :func:`celery_leases.deadlines.begin_by`.
    begin_by: float = math.inf
    #: The group of the call, and what it asks of it if that has a limit or a rate.
    group: str | None = None
    ask: Ask | None = None
    #: The message as a signature in JSON, if the record must store it.
    message: str | None = None
    #: Whether a fresh message can be published; not for an eager call.
    reschedulable: bool = True
    #: With ``lease_runs="latest"``: calls of a key that are published later have a higher order. 0
    #: if its publisher has given it none.
    order: int = 0
    #: When its message first arrived at a worker, as a time of the lease store; 0 if that is not
    #: known yet. It is compared if one of two calls has no order.
    arrived: int = 0
    #: For how long it has waited for a newer call that has not begun, in seconds; 0 if it has not
    #: begun to wait. It counts its time in workers, and the countdowns of copies that waited at the
    #: broker, but not the time for which its message was in the queue.
    waited_for_newer: float = 0.0
    #: While it waits for a held key: this worker begins the call as soon as the key is free.
    starts_when_free: bool = False

    @property
    def subject(self) -> Subject:
        """The call that an event is about."""
        return {"task": self.task, "key": self.key.shown, "call_id": self.call_id}

    @property
    def counted_for(self) -> str | None:
        """The call whose crashes are counted; ``None`` if those of all calls of the key are counted
        together (``lease_runs="once"``).
        """
        return self.call_id if self.options.reruns else None

    @property
    def fresh(self) -> bool:
        """Whether the message is not known to be a copy of an earlier run of the call."""
        return not self.repeat or self.failure_fence == 0

    def is_copy_of(self, fence: int) -> bool:
        """Whether the message is a copy of the run under *fence*, or of an earlier run."""
        return not self.fresh and self.failure_fence != fence
