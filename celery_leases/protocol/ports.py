"""The interfaces between the protocol and the outside: lease stores, record stores, clocks,
observers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol, runtime_checkable

from celery_leases.common.values import value_class
from celery_leases.errors import StoreUnavailable
from celery_leases.protocol.closings import PastClosing
from celery_leases.protocol.effects import Begun, Effect, Found, Scope
from celery_leases.protocol.events import Event
from celery_leases.protocol.groups import Closing, Gate
from celery_leases.protocol.records import ClaimRequest, Outcome, Record, Refused, Won


@dataclass(frozen=True, slots=True)
class Holder:
    """The holder of a lease: ``remaining`` seconds by the store's clock; ``host`` is
    ``hostname/pid``.

    ``database`` is the identity of the holder's records database; empty if the lease store does not
    have it.
    """

    token: str
    call_id: str
    host: str
    ttl: float
    remaining: float
    database: str = ""


@value_class(frozen=True, slots=True)
class Acquired:
    """The attempt has the lease; the record must still be claimed. ``probe``: it also has the
    probe's slot of the group's gate.
    """

    probe: bool = False


@dataclass(frozen=True, slots=True)
class Held:
    """Another attempt holds the lease."""

    holder: Holder


@dataclass(frozen=True, slots=True)
class Cooling:
    """No attempt holds the lease: an attempt failed, and the key cools down for another
    ``remaining`` seconds.
    """

    remaining: float


@dataclass(frozen=True, slots=True)
class BlockedByGate:
    """The gate of the claim request's group lets no body start now; nothing was taken.

    ``record_read``: the store has also read the record of the key, which is ``record``.
    """

    gate: Gate
    record: Record | None = None
    record_read: bool = False


@dataclass(frozen=True, slots=True)
class Claimed:
    """Lease and claim in one: the answer of a store whose claimed row is the lease.

    ``probe``: the claim also took the probe's slot of the group's gate.
    """

    claim: Won | Refused
    probe: bool = False


class RenewalResult(Enum):
    """The result of a renewal for one lease. ``LOCKED``: not renewed, but the body's own
    transaction holds the row, so no other attempt can take it meanwhile.
    """

    OURS = "ours"
    LOCKED = "locked"
    OTHER = "other"
    MISSING = "missing"


@dataclass(frozen=True, slots=True)
class Renewal:
    """One lease to renew, for *ttl* seconds from now; a longer remaining time is never cut.

    ``probe``: the cooldown group whose probe's slot the same token holds, to be renewed along with
    it; what becomes of the slot does not change the result for the lease. ``guarded``: a
    transaction of the body's own may have the record's row locked; where the row is the lease it is
    not waited for, and the answer may be :attr:`RenewalResult.LOCKED`.
    """

    stored_key: str
    token: str
    ttl: float
    probe: str | None = None
    guarded: bool = False


def never_emptied() -> float:
    """The age of a lease store that never loses leases."""
    return math.inf


class LeaseStore(Protocol):
    """Decides who may run a key now. Every call raises ``StoreUnavailable`` when the store
    fails.
    """

    #: Written into the rows claimed under it, so that two stores over one records database are
    #: detected.
    name: str
    #: Whether the claimed row is the lease, so that acquiring claims and settling releases.
    in_records: bool

    def acquire(
        self, claim_request: ClaimRequest
    ) -> Acquired | Held | Cooling | BlockedByGate | Claimed:
        """Take the lease in one round trip; a lease with the request's own token counts as taken.

        The same round trip reads the gate of ``claim_request.group`` once the lease is known to be
        free. If the gate is half-open and no attempt probes, the request takes the probe's slot for
        its ttl together with the lease. Raises ``LeaseStoreMismatch`` if the holder has its records
        in another database than the request.
        """
        ...

    def age(self, stored_key: str) -> float:
        """Seconds since the store started without its earlier leases, as far as the lease of this
        key is concerned.

        An earlier holder may not have written its lease again yet, so the claim calls this before
        it takes a running row.
        """
        ...

    def renew(self, renewals: Sequence[Renewal]) -> Sequence[RenewalResult | StoreUnavailable]:
        """Renew many leases in one call, with a result for each; a result may be an error of that
        lease alone.
        """
        ...

    def reassert(self, claim_request: ClaimRequest) -> bool:
        """Write a lease again that the store lost, unless another attempt holds the key now."""
        ...

    def release(self, stored_key: str, token: str) -> bool:
        """Free the lease if *token* still holds it."""
        ...

    def cool(self, stored_key: str, token: str, seconds: float) -> bool:
        """Replace the lease that *token* still holds by a cooldown of that many seconds, which no
        renewal matches.
        """
        ...

    def end_cooldown(self, stored_key: str) -> bool:
        """Free the key if it is cooling down; the record decides whether it really is."""
        ...

    def holder(self, stored_key: str) -> Holder | None:
        """The holder of the key; ``None`` while it is cooling down."""
        ...

    def held(self, stored_keys: Sequence[str]) -> set[str]:
        """The keys that are held now; a hint, which may be out of date when it is read."""
        ...

    def close(self) -> None:
        """Close the connections; the next call opens new ones."""
        ...


class MarkStore(Protocol):
    """Short notes beside a key that expire by themselves: waiting copies, and callbacks already
    sent.
    """

    def mark(self, stored_key: str, name: str) -> str | None:
        """Read a mark."""
        ...

    def swap_mark(
        self, stored_key: str, name: str, expected: str | None, value: str, ttl: float
    ) -> bool:
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
        """Close the gate as :func:`celery_leases.protocol.groups.closed` says, by compare-and-set;
        returns the gate afterwards.

        A probe's slot held by *token* is given back.
        """
        ...

    def open_gate(self, group: str, token: str | None = None) -> bool:
        """Open a gate and forget its trips. With *token*: only a half-open one whose probe's slot
        *token* holds.
        """
        ...

    def release_probe(self, group: str, token: str) -> bool:
        """Free the probe's slot if *token* holds it; the gate stays half-open."""
        ...


@runtime_checkable
class ClosingStore(Protocol):
    """A gate store that remembers when gates were closed. No worker needs that."""

    def past_closings(
        self, groups: Sequence[str] | None = None, limit: int = 1000
    ) -> Mapping[str, Sequence[PastClosing]]:
        """The last closings of *groups*, or of at most *limit* groups that have any; the latest
        first. Groups without any are left out. Raises ``StoreUnavailable``.

        A long name may be shortened where the groups are not given.
        """
        ...


@dataclass(frozen=True, slots=True)
class LeaseStoreSettings:
    """How to open a lease store.

    ``url`` is ``leases_url`` and ``options`` is ``leases_transport_options``; both may contain
    passwords. ``prefix`` keeps the keys of several applications apart. ``timeout`` is the number of
    seconds that a call may take to connect, and again to be answered. The store opens at most
    ``connections`` connections; a call waits for a free one for ``longest_wait`` seconds.
    """

    url: str = field(repr=False)
    prefix: str
    timeout: float
    connections: int
    longest_wait: float
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)


class SeparateLeaseStore(LeaseStore, MarkStore, GateStore, Protocol):
    """All that a separate lease store does for an application.

    ``in_records`` is ``False``. Threads and greenlets share one store.
    """

    def bounded(self, timeout: float, longest_wait: float) -> SeparateLeaseStore:
        """The same store over one connection of its own, each call of which ends within *timeout*
        seconds to connect and *timeout* seconds to be answered.

        A call waits for that connection for *longest_wait* seconds. The thread that renews leases
        uses it. A store without connections returns itself.
        """
        ...

    def check(self) -> str | None:
        """Call the store once before a worker starts; returns warnings, if any.

        Raises ``LeaseConfigurationError`` for an error that will not pass, which stops the worker,
        and ``StoreUnavailable`` when the store does not answer, which is logged.
        """
        ...


class RecordStore(Protocol):
    """One durable row per key. Every call raises ``StoreUnavailable`` when the database fails."""

    def claim(
        self,
        claim_request: ClaimRequest,
        lease_store: str,
        *,
        age: Callable[[], float] = never_emptied,
    ) -> Won | Refused:
        """Claim the row, if :mod:`celery_leases.protocol.claims` allows it. Repeating it does no
        harm.

        A refused claim writes nothing. *age* returns the seconds since the lease store was emptied.
        It is called only before the running row of another attempt is taken over, and its errors
        are raised. Raises :class:`LeaseStoreMismatch` when the key runs under another lease store,
        :class:`KeyUnusable` when the database refuses a value of the request, and
        :class:`RecordUnreadable` for a row that cannot be read, which is left unchanged.
        """
        ...

    def read(self, stored_key: str) -> Record | None:
        """The row, or ``None``."""
        ...

    def identity(self) -> str:
        """A short random word that identifies this database, whatever its URL; it never changes."""
        ...

    def settle(self, record: Record, outcome: Outcome) -> bool:
        """Write the outcome if the row is still running under the record's fence and owner."""
        ...

    def search(
        self, *, states: Sequence[str] = (), task: str | None = None, limit: int = 100
    ) -> list[Record]:
        """Rows, the latest start first."""
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
        """Take the row from its holder: a new fence, ``pending``, no wait.

        *keep* keeps its counts and history, *forgive* sets failures, crashes, quick retries and
        cooldowns to 0; without *keep* it becomes an empty row of the next generation. Either way it
        counts as absent after *retention* seconds, by default its own, or 7 days if it has none.
        With *seen* the row is taken only if its fence and state are still those. Returns the row
        afterwards, ``None`` if none was taken.
        """
        ...

    def purge(self, limit: int) -> int:
        """Delete at most *limit* rows whose retention is over; returns their number."""
        ...

    def purge_in_turn(self, limit: int, every: float) -> bool:
        """Purge a batch, unless a process of this database has finished purging within *every*
        seconds.

        Returns whether there may be more.
        """
        ...


class EffectStore(Protocol):
    """Effects and progress of running attempts. Every call raises ``StoreUnavailable`` when the
    database fails.
    """

    def begin(
        self,
        record: Record,
        name: str,
        idempotency_key: str,
        scope: Scope,
        taken: int | None = None,
    ) -> Begun | Found | None:
        """Commit the intent of an effect under the record's fence, in one statement that locks and
        checks the record.

        An effect that was begun before in its *scope* is ``Found`` and unchanged, unless it is
        still *sent* under the fence *taken*: then its intent is taken over. ``None``: the attempt
        no longer owns the record.
        """
        ...

    def is_running(self, record: Record) -> bool:
        """Whether the row is still running under the record's fence and owner."""
        ...

    def finish(self, effect: Effect, result: str | None, reference: str | None) -> bool:
        """Write the reply, if the intent still has the effect's fence, whoever holds the lease by
        now.
        """
        ...

    def withdraw(self, effect: Effect) -> bool:
        """Delete the intent: the call was not made, or certainly not executed."""
        ...

    def forget_sent(self, record: Record) -> int:
        """Delete the intents without a reply of all attempts up to that of *record*, because an
        operator says that the effects have not happened; returns their number. Intents of later
        attempts, and of other calls with a scope of their own, stay.
        """
        ...

    def of_key(self, record: Record) -> Sequence[Effect]:
        """All effects of the record's generation and of its call, in the order of their intents."""
        ...

    def save_progress(self, record: Record, progress: str) -> bool:
        """Save the progress if the attempt still owns the row; earlier crashes no longer count as
        in a row.
        """
        ...

    def clear_crashes(self, record: Record) -> None:
        """Earlier crashes no longer count as in a row, if the attempt still owns the row."""
        ...


class Clock(Protocol):
    """The local clock for all deadlines: it never steps, and includes the time when the machine is
    suspended.
    """

    def now(self) -> float:
        """Seconds since a fixed point."""
        ...

    def sleep(self, seconds: float) -> None:
        """Sleep."""
        ...


class Observer(Protocol):
    """Receives events. It must not raise, and must not block for long."""

    def observe(self, event: Event) -> None:
        """Handle *event*."""
        ...

    def wants(self, kind: type[Event]) -> bool:
        """Whether an event of that type would be logged at its usual level, or sent; otherwise the
        event is not made.

        Called in the process and thread that would observe such an event.
        """
        ...
