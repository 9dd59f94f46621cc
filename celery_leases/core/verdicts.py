"""What decisions look at, and what they can say: a call, the facts known of it, and the verdicts."""

from __future__ import annotations

from dataclasses import dataclass

from celery_leases.core.errors import LeasesError, PermanentFailure
from celery_leases.core.events import Subject
from celery_leases.core.gates import Gate
from celery_leases.core.keys import CallKey
from celery_leases.core.options import LeaseOptions
from celery_leases.core.ports import Holder
from celery_leases.core.records import Record

LONGEST_HOP = 600.0


@dataclass(frozen=True, slots=True)
class Call:
    """One delivery of one call, as far as decisions look at it."""

    task: str
    call_id: str
    key: CallKey
    options: LeaseOptions
    #: It was delivered before: redelivered by the broker, put back, or retried. Reading the record first is cheaper.
    repeat: bool = False
    #: A fresh message of a call that may have failed before: the fence of the failure that it waits for, 0 while no
    #: record has been read. A copy of a delivery whose failure was told has ``None``.
    met: int | None = None
    #: It carries chain, chord, group or link, which a dropped delivery would leave hanging.
    canvas: bool = False
    #: How often this call was put back before.
    tries: int = 0
    #: It has begun to run before.
    started: bool = False
    #: How often Celery has retried it.
    retries: int = 0
    #: The tokens of earlier attempts of this call which we may have left open.
    prior: tuple[str, ...] = ()
    #: The owner token made for this delivery.
    token: str = ""
    #: The longest countdown the broker can be trusted with, in seconds.
    longest_hop: float = LONGEST_HOP
    #: The hard time limit of this call in seconds, if it has one.
    time_limit: float | None = None
    #: The cooldown group it belongs to.
    group: str | None = None
    #: Its message as a signature in JSON, if the record is to keep it.
    message: str | None = None
    #: It can be put back; an eager call cannot.
    comes_back: bool = True
    #: Where it waits for a held key, it is begun as soon as the key is free.
    woken: bool = False

    @property
    def subject(self) -> Subject:
        """Whom an event of this call is about."""
        return {"task": self.task, "key": self.key.shown, "call_id": self.call_id}

    @property
    def fingerprint(self) -> str | None:
        """What its arguments are compared by; ``None`` compares nothing."""
        return self.key.fingerprint

    @property
    def rerun(self) -> bool:
        """Whether each call of the key is work of its own."""
        return self.options.rerun

    @property
    def fresh(self) -> bool:
        """Whether nothing is known of a run of this call that this message would be a copy of."""
        return not self.repeat or self.met == 0

    def knows(self, failure: int) -> bool:
        """Whether it is a copy of the run under the fence *failure*, or of one before it."""
        return not self.fresh and self.met != failure


@dataclass(frozen=True, slots=True)
class Run:
    """Go on: acquire, claim, or run the body, whichever is next."""


@dataclass(frozen=True, slots=True)
class Replay:
    """Answer with the saved result (JSON text; ``None``: it has none), first returned to ``first_call_id``."""

    result: str | None
    first_call_id: str


@dataclass(frozen=True, slots=True)
class Follow:
    """Answer with what Celery has of ``call_id``, which went on as another task; look again in ``delay`` seconds.

    ``age``: seconds since then. ``missing`` is raised where Celery has nothing and never will.
    """

    call_id: str
    age: float
    delay: float
    missing: LeasesError


@dataclass(frozen=True, slots=True)
class PutBack:
    """Publish a fresh message that comes in ``delay`` seconds, then end this delivery."""

    delay: float
    reason: str
    #: The call is known to have begun.
    started: bool = False
    #: What is raised where a call cannot be put back.
    refusal: LeasesError | None = None
    #: What those who watch are told the call is; empty where another copy of it speaks for it.
    what: str = "put-back"
    #: The call has failed before, and comes back for that: Celery knows of its retry.
    retrying: bool = False
    #: The fence of the failure of this call that its fresh message waits for.
    met: int | None = None
    #: Another call holds the key.
    held: bool = False


@dataclass(frozen=True, slots=True)
class Wait:
    """Try again in this process after ``delay`` seconds."""

    delay: float


@dataclass(frozen=True, slots=True)
class Drop:
    """End this delivery without a result; another message or an earlier answer stands for it."""

    reason: str


@dataclass(frozen=True, slots=True)
class Refuse:
    """Raise ``error`` to the caller; ``own``: unless Celery knows the outcome of this very call already."""

    error: LeasesError
    own: bool = False


@dataclass(frozen=True, slots=True)
class StandBack:
    """Give the claimed attempt back and wait ``delay`` seconds: the key has crashed repeatedly."""

    delay: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Close the claimed attempt as failed for good, and raise ``error`` to the caller."""

    error: PermanentFailure


Verdict = Run | Replay | Follow | PutBack | Wait | Drop | Refuse | StandBack | GiveUp


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known before the run: of the lease, of the record, and of this delivery's past."""

    record: Record | None = None
    holder: Holder | None = None
    #: The record was claimed by this delivery.
    claimed: bool = False
    #: The callbacks of this very call are known to have been sent, whoever finished the work.
    callbacks_out: bool = False
    #: Seconds this delivery has been waiting in this process (``lease_wait``).
    waited: float = 0.0
    #: A random number in [0, 1) for jitter.
    chance: float = 0.0
    #: The gate of the call's cooldown group, if it lets no body start now.
    gate: Gate | None = None
    #: The wall clock, in seconds since the epoch: only ever shown to people.
    today: float = 0.0
