"""What the inside asks of the outside: lease stores, record stores, clocks, and somebody who listens."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from celery_leases.core.effects import Begun, Effect, Found, Scope
from celery_leases.core.errors import StoreUnavailable
from celery_leases.core.events import Event
from celery_leases.core.gates import Closing, Gate
from celery_leases.core.records import Bid, Outcome, Record, Refused, Won


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds a lease: ``remaining`` seconds by the store's clock; ``host`` is ``hostname/pid``.

    ``database`` is the identity of the holder's records database; empty where the lease store does not say.
    """

    token: str
    call_id: str
    host: str
    ttl: float
    remaining: float
    database: str = ""


@dataclass(frozen=True, slots=True)
class Acquired:
    """The lease is ours; the record must still be claimed. ``probe``: so is the probe's slot of the group's gate."""

    probe: bool = False


@dataclass(frozen=True, slots=True)
class Held:
    """Somebody else holds the lease."""

    holder: Holder


@dataclass(frozen=True, slots=True)
class Cooling:
    """Nobody runs it: an attempt failed and left the key cooling for another ``remaining`` seconds."""

    remaining: float


@dataclass(frozen=True, slots=True)
class Shut:
    """The gate of the bid's group lets no body start now; nothing was taken.

    ``looked``: the store has seen the record of the key too, which is ``record``.
    """

    gate: Gate
    record: Record | None = None
    looked: bool = False


@dataclass(frozen=True, slots=True)
class Claimed:
    """Lease and claim in one: where the claimed row is the lease, this is its answer.

    ``probe``: the claim was won together with the probe's slot of the group's gate.
    """

    claim: Won | Refused
    probe: bool = False


class Kept(Enum):
    """What became of one lease in a renewal. ``LOCKED``: not renewed, but ours, and nobody can take it meanwhile."""

    OURS = "ours"
    LOCKED = "locked"
    OTHER = "other"
    MISSING = "missing"


@dataclass(frozen=True, slots=True)
class Renewal:
    """One lease to renew, for *ttl* seconds from now; a longer remaining time is never cut.

    ``probe``: the cooldown group whose probe's slot the same token holds, to be renewed along with it; what becomes
    of the slot does not change the result for the lease. ``guarded``: a transaction of the body's own may have the
    record's row locked; where the row is the lease it is not waited for, and the answer may be :attr:`Kept.LOCKED`.
    """

    stored_key: str
    token: str
    ttl: float
    probe: str | None = None
    guarded: bool = False


def never_emptied() -> float:
    """The age of a lease store that loses no leases."""
    return math.inf


class LeaseStore(Protocol):
    """Says who may try the work of a key right now. Every call raises ``StoreUnavailable`` when the store fails."""

    #: Written into the rows claimed under it, so that two stores over one records database are noticed.
    name: str
    #: Whether the claimed row is the lease, so that acquiring claims and settling releases.
    in_records: bool

    def acquire(self, bid: Bid) -> Acquired | Held | Cooling | Shut | Claimed:
        """Take the lease in one round trip; a lease found under the bid's own token counts as taken.

        The gate of ``bid.group`` is looked at by the same trip, once the lease is known to be free. Where it is
        half-open and nobody probes, the bid takes the probe's slot for its ttl together with the lease.
        Raises ``LeaseStoreMismatch`` where the holder has its records in another database than the bidder.
        """
        ...

    def age(self, stored_key: str) -> float:
        """Seconds since the store came up without the leases of before, as far as it holds that of this key.

        A holder of before may not have asserted its lease again yet, so the claim asks before it takes a running row.
        """
        ...

    def renew(self, renewals: Sequence[Renewal]) -> Sequence[Kept | StoreUnavailable]:
        """Renew many leases in one call, with a result for each, which may be the error of that lease alone."""
        ...

    def reassert(self, bid: Bid) -> bool:
        """Set a lease again that the store forgot, unless somebody else holds the key now."""
        ...

    def release(self, stored_key: str, token: str) -> bool:
        """Free the lease if *token* still holds it."""
        ...

    def cool(self, stored_key: str, token: str, seconds: float) -> bool:
        """Turn the lease that *token* still holds into a cooldown of so many seconds, which no renewal matches."""
        ...

    def end_cooldown(self, stored_key: str) -> bool:
        """Free the key if it is cooling; the record says whether it really is."""
        ...

    def holder(self, stored_key: str) -> Holder | None:
        """Who holds the key; nobody does while it is cooling."""
        ...

    def held(self, stored_keys: Sequence[str]) -> set[str]:
        """Those of the keys that somebody holds now; a hint, which may be out of date when it is read."""
        ...

    def close(self) -> None:
        """Let the connections go; the next call would open new ones."""
        ...

    def holders(self, limit: int = 1000) -> Iterator[tuple[str, Holder]]:
        """The live leases, as pairs of stored key and holder."""
        ...


class MarkStore(Protocol):
    """Short notes beside a key that end by themselves: waiters, and callbacks that are out."""

    def mark(self, stored_key: str, name: str) -> str | None:
        """Read a mark."""
        ...

    def swap_mark(self, stored_key: str, name: str, expected: str | None, value: str, ttl: float) -> bool:
        """Set a mark for *ttl* seconds if it is absent or equals *expected*."""
        ...


class GateStore(Protocol):
    """The gates of cooldown groups. Every call raises ``StoreUnavailable`` when the store fails."""

    def gate(self, group: str) -> Gate | None:
        """The gate of *group*; ``None`` when it is open."""
        ...

    def gates(self, limit: int = 1000) -> Iterator[Gate]:
        """All gates that are not open."""
        ...

    def close_gate(self, group: str, closing: Closing, token: str) -> Gate:
        """Close the gate as :func:`celery_leases.core.gates.closed` says, by compare-and-set; the gate as it is then.

        A probe's slot held by *token* is given back.
        """
        ...

    def open_gate(self, group: str, token: str | None = None) -> bool:
        """Open a gate and forget its trips. With *token* only a half-open one whose probe's slot the token holds."""
        ...

    def give_back_probe(self, group: str, token: str) -> bool:
        """Free the probe's slot if *token* holds it; the gate stays half-open."""
        ...


class RecordStore(Protocol):
    """One durable row per key. Every call raises ``StoreUnavailable`` when the database fails."""

    def claim(self, bid: Bid, lease_store: str, *, age: Callable[[], float] = never_emptied) -> Won | Refused:
        """Make the row ours, if :mod:`celery_leases.core.claims` says that it may be. Repeating it is harmless.

        A refused claim writes nothing. *age* gives the seconds since the lease store came up empty. It is called only
        before the running row of another attempt is taken over, and what it raises is raised. Raises
        :class:`LeaseStoreMismatch` when the key runs under another lease store, :class:`KeyUnusable` when the database
        refuses a value of the bid, and :class:`RecordUnreadable` for a row that cannot be read and stays as it is.
        """
        ...

    def read(self, stored_key: str) -> Record | None:
        """The row, if there is one."""
        ...

    def identity(self) -> str:
        """A short random word that names this database, whatever URL it is reached by; the same for ever."""
        ...

    def settle(self, record: Record, outcome: Outcome) -> bool:
        """Write the outcome if the row is still running under the record's fence and owner."""
        ...

    def search(self, *, states: Sequence[str] = (), task: str | None = None, limit: int = 100) -> list[Record]:
        """Rows, the latest started first."""
        ...

    def reset(
        self,
        stored_key: str,
        *,
        keep: bool,
        forgive: bool = False,
        retention: float | None = None,
        seen: Record | None = None,
    ) -> Record | None:
        """Take the row away from whoever has it: a new fence, ``pending``, nothing to wait for.

        *keep* keeps its counts and history, *forgive* sets failures, crashes, quick retries and cooldowns to 0;
        without *keep* it becomes an empty row of the next generation. Either way it counts as absent after
        *retention* seconds, by default its own, or 7 days where it has none. With *seen* it is taken only if its fence
        and state are still those. Returns the row as it is afterwards, ``None`` if none was taken.
        """
        ...

    def purge(self, limit: int) -> int:
        """Delete at most *limit* rows whose retention is over; how many were deleted."""
        ...

    def purge_in_turn(self, limit: int, every: float) -> bool:
        """Purge a batch, unless a process of this database has come to an end of it within *every* seconds.

        Whether there may be more: ask again.
        """
        ...


class EffectStore(Protocol):
    """Effects and progress of running attempts. Every call raises ``StoreUnavailable`` when the database fails."""

    def begin(
        self, record: Record, name: str, idempotency_key: str, scope: Scope, taken: int | None = None
    ) -> Begun | Found | None:
        """Commit the intent of an effect under the record's fence, in one statement that locks and checks the record.

        An effect that was begun before in its *scope* is ``Found`` and left as it is, unless it is still *sent* under
        the fence *taken*: then its intent is taken over. ``None``: the record is not the attempt's any more.
        """
        ...

    def is_running(self, record: Record) -> bool:
        """Whether the row is still running under the record's fence and owner."""
        ...

    def finish(self, effect: Effect, result: str | None, reference: str | None) -> bool:
        """Note the reply, if the intent still carries the effect's fence, whoever holds the lease by now."""
        ...

    def withdraw(self, effect: Effect) -> bool:
        """Take the intent back: the call was not made, or certainly not carried out."""
        ...

    def forget_sent(self, record: Record) -> int:
        """Take back the intents without a reply of all attempts up to that of *record*, as an operator says that they
        have not happened; how many. A later attempt's stay, and those of other calls with a scope of their own.
        """
        ...

    def of_key(self, record: Record) -> Sequence[Effect]:
        """All effects of the record's generation and of its call, in the order in which they were sent."""
        ...

    def save_progress(self, record: Record, progress: str) -> bool:
        """Save the progress if the row is still the attempt's; crashes before it are not in a row any more."""
        ...

    def clear_crashes(self, record: Record) -> None:
        """Crashes before this are not in a row any more, if the row is still the attempt's."""
        ...


class Clock(Protocol):
    """The local clock all deadlines are counted on: it never steps, and runs on while the machine sleeps."""

    def now(self) -> float:
        """Seconds since some fixed point."""
        ...

    def sleep(self, seconds: float) -> None:
        """Wait."""
        ...


class Observer(Protocol):
    """Is told what happened. It must not raise, and must not block for long."""

    def observe(self, event: Event) -> None:
        """Take note of *event*."""
        ...

    def hears(self, kind: type[Event]) -> bool:
        """Whether an event of that type would be logged at its usual level, or sent; else it is not made.

        Asked in the process and thread in which such an event is observed.
        """
        ...
