"""What a lease store answers. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from celery_leases.groups.group import Gate
from celery_leases.record import Record, Refused, Won
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


@value_class(frozen=True, slots=True)
class Acquired:
    """The attempt has the lease; the record must still be claimed.

    ``probe``: the attempt also has the probe's slot of the group's gate.
    """

    probe: bool = False


@dataclass(frozen=True, slots=True)
class Held:
    """Another attempt holds the lease."""

    holder: Holder


@dataclass(frozen=True, slots=True)
class Cooling:
    """An attempt failed, and the key cools down for another ``remaining`` seconds."""

    remaining: float


@dataclass(frozen=True, slots=True)
class BlockedByGate:
    """The gate of the call's group blocks; neither lease nor slot was taken.

    ``record_read``: the store has also read the record of the key: ``record``, or ``None``.
    """

    gate: Gate
    record: Record | None = None
    record_read: bool = False


@dataclass(frozen=True, slots=True)
class Claimed:
    """The answer of a lease store whose claimed row is the lease: lease and claim in one.

    ``probe``: the attempt also has the probe's slot of the group's gate.
    """

    claim: Won | Refused
    probe: bool = False


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

    ``probe``: the cooldown group whose probe's slot the same token holds. The slot is renewed too,
    and does not affect the result. ``guarded``: a transaction of the body may have locked the row.
    A store whose row is the lease does not wait for that lock, and may answer
    :attr:`RenewalResult.LOCKED`.
    """

    stored_key: str
    token: str
    ttl: float
    probe: str | None = None
    guarded: bool = False
