"""What stores answer to the request of a key. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, StrEnum

from celery_leases.groups.group import ClosedGroup
from celery_leases.groups.slots import Room
from celery_leases.record import Record
from celery_leases.value_class import value_class


@dataclass(frozen=True, slots=True)
class Holder:
    """The holder of a lease, which expires in ``remaining`` seconds; ``host`` is ``hostname/pid``.

    ``database`` is the identity of the holder's records database; empty if the lease store does not
    store it.
    """

    token: str
    call_id: str
    host: str
    ttl: float
    remaining: float
    database: str = ""


class Refusal(StrEnum):
    """Why a key may not be claimed; see :func:`celery_leases.decide.claim.refusal`."""

    #: This call has finished the key.
    FINISHED = "finished"
    #: The key has failed for good, or waits for an operator.
    FAILED = "failed"
    #: This call has failed, its caller has the failure, and this delivery is a copy.
    REPORTED = "reported"
    #: A later retry of this call has the row.
    SUPERSEDED = "superseded"
    #: The key belongs to a call with other arguments.
    REUSED = "reused"
    #: Another call has finished the key.
    DONE = "done"
    #: Another attempt holds the key, and its lease has not expired.
    HELD = "held"
    #: ``retry_at`` is in the future.
    NOT_DUE = "not_due"
    #: The lease store has lost its leases, and the holder may still write its own again.
    EMPTIED = "emptied"
    #: The lease has expired, but the database may not have answered its holder, which may still
    #: renew it or write its outcome.
    LAPSED = "lapsed"
    #: The row was changed by another process between each read and the write after it.
    CHANGED = "changed"
    #: The lease store has a cooldown of the key.
    COOLING = "cooling"
    #: The group of the call blocks. Neither lease nor slot was taken.
    CLOSED = "closed"
    #: As many bodies of the call's group run as its limit allows, or its rate lets none begin yet,
    #: or it is the turn of earlier calls.
    FULL = "full"


@value_class(frozen=True, slots=True)
class Acquired:
    """The attempt has the lease, or the row. ``record``: the claimed row; ``None`` from a lease
    store outside the records, under which it must still be claimed.

    ``probe``: the attempt also has the only slot of its group, whose limit is one. ``starts_in``:
    the body must not begin sooner than in so many seconds, because of the rate of its group.
    """

    record: Record | None = None
    probe: bool = False
    starts_in: float = 0.0


@value_class(frozen=True, slots=True)
class Refused:
    """The attempt has neither lease nor row, because of ``why``, and nothing was changed.

    ``holder``: who has the lease. ``closed_group``: the group that blocks. ``room``: that of the
    group that is full. ``remaining``: the seconds of the cooldown. ``record``: the row, if it was
    read and there is one. ``emptied``: the seconds since the lease store was emptied, if they were
    read.
    """

    why: Refusal
    holder: Holder | None = None
    closed_group: ClosedGroup | None = None
    remaining: float = 0.0
    record: Record | None = None
    emptied: float = 0.0
    room: Room | None = None


class RenewalResult(Enum):
    """The result of a renewal for one lease.

    ``OURS``: renewed. ``LOCKED``: not renewed, but the body's own transaction has locked the row,
    so no other attempt can take it meanwhile. ``OTHER``: another attempt holds the key.
    ``MISSING``: there is no lease.
    """

    OURS = "ours"
    LOCKED = "locked"
    OTHER = "other"
    MISSING = "missing"


@dataclass(frozen=True, slots=True)
class Renewal:
    """One lease to renew, for ``ttl`` seconds from now; a longer remaining time is not cut.

    ``slot``: the group of which the same token holds a slot, and the limit of the attempt, 0
    without one. It is renewed too, and written again if the store has lost it; if that
    fails, the result is the error. ``guarded``: a transaction of the body may have locked the row.
    A store whose row is the lease does not wait for that lock, and may answer
    :attr:`RenewalResult.LOCKED`.
    """

    stored_key: str
    token: str
    ttl: float
    guarded: bool = False
    slot: tuple[str, int] | None = None
