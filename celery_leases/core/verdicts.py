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

    @property
    def subject(self) -> Subject:
        """Whom an event of this call is about."""
        return {"task": self.task, "key": self.key.key, "call_id": self.call_id}


@dataclass(frozen=True, slots=True)
class Run:
    """Go on: acquire, claim, or run the body, whichever is next."""


@dataclass(frozen=True, slots=True)
class Replay:
    """Answer with the saved result (JSON text; ``None``: it has none), first returned to ``first_call_id``."""

    result: str | None
    first_call_id: str


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


Verdict = Run | Replay | PutBack | Wait | Drop | Refuse | StandBack | GiveUp


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known before the run: of the lease, of the record, and of this delivery's past."""

    record: Record | None = None
    holder: Holder | None = None
    #: The record was claimed by this delivery.
    claimed: bool = False
    #: The callbacks of this very call are known to have been sent, whoever finished the work.
    callbacks_out: bool = False
    #: Seconds this delivery has been waiting in this process (``lease_on_held="wait"``).
    waited: float = 0.0
    #: A random number in [0, 1) for jitter.
    chance: float = 0.0
    #: The gate of the call's cooldown group, if it lets no body start now.
    gate: Gate | None = None
    #: The wall clock, in seconds since the epoch: only ever shown to people.
    today: float = 0.0
