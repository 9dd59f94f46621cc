"""The interfaces that the protocol needs from outside: lease stores, record stores, clocks,
observers.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from celery_leases.call import Call
from celery_leases.decide.answers import (
    Acquired,
    BlockedByGate,
    Claimed,
    Cooling,
    Held,
    Holder,
    Renewal,
    RenewalResult,
)
from celery_leases.effect import Begun, Effect, Found, Scope
from celery_leases.errors import StoreUnavailable
from celery_leases.events import Event
from celery_leases.groups.group import Closing, Gate
from celery_leases.groups.history import PastClosing
from celery_leases.record import (
    Ended,
    Outcome,
    Record,
    Refused,
    Won,
)

Answer = Acquired | Held | Cooling | BlockedByGate | Claimed
"""What a lease store answers to a request for a lease."""


def never_emptied() -> float:
    """The age of a lease store that never loses leases."""
    return math.inf


class LeaseStore(ABC):
    """Decides which attempt may run a key now. Every call raises ``StoreUnavailable`` if the store
    fails. Threads and greenlets share one store.

    Only the abstract methods are needed. A store may also be a :class:`MarkStore` and
    :class:`GateStore`; otherwise marks and gates are in the records database.
    """

    #: Written into each row that is claimed under this store, so that two lease stores with one
    #: records database are detected.
    name: str

    @abstractmethod
    def acquire(self, call: Call) -> Answer:
        """Take the lease in one round trip. A lease that the token of the call already holds
        counts as taken.

        If the lease is free, a :class:`GateStore` reads in the same round trip the gate of
        ``call.group``. If the gate is half-open and no attempt probes, the call takes
        the probe's slot for its ttl together with the lease. Raises ``LeaseStoreMismatch`` if the
        holder has its records in another database than the call.
        """

    @abstractmethod
    def renew(self, renewals: Sequence[Renewal]) -> Sequence[RenewalResult | StoreUnavailable]:
        """Renew many leases in one call. There is a result for each lease, which may be the error
        of that lease alone.
        """

    @abstractmethod
    def release(self, stored_key: str, token: str) -> bool:
        """Free the lease if *token* still holds it."""

    @abstractmethod
    def holder(self, stored_key: str) -> Holder | None:
        """The holder of the key; ``None`` while it is cooling down."""

    # -- what a store may do besides ---------------------------------------------------------------

    def held(self, stored_keys: Sequence[str]) -> set[str]:
        """Those of the keys that are held now. Only a hint: leases may change meanwhile."""
        return {key for key in stored_keys if self.holder(key) is not None}

    def age(self, stored_key: str) -> float:
        """Seconds since the store lost its leases, or the part of them that includes this key;
        infinite if it never loses leases.

        The claim calls this before it takes over a running row: a live holder may not have written
        its lease again yet.
        """
        return math.inf

    def may_have_lost_leases(self, stored_key: str, seconds: float) -> bool:
        """Whether the server of this key lost its data within the last *seconds*, or evicts keys
        and has evicted some.
        """
        return False

    def reassert(self, call: Call) -> bool:
        """Write again a lease that the store has lost, unless another attempt holds the key."""
        return False

    def cool(self, stored_key: str, token: str, seconds: float) -> bool:
        """Replace the lease, if *token* still holds it, by a cooldown of *seconds*, which cannot be
        renewed. A store without cooldowns frees the lease: the record has the cooldown too.
        """
        return self.release(stored_key, token)

    def end_cooldown(self, stored_key: str) -> bool:
        """Remove the cooldown of the key, if there is one. The record says whether the key must
        still wait.
        """
        return False

    def bounded(self, timeout: float, longest_wait: float) -> LeaseStore:
        """The same store over a single connection of its own, for the thread that renews leases.

        A call may take *timeout* seconds to connect, and again *timeout* seconds to get its reply.
        It waits for the connection for at most *longest_wait* seconds. A store without connections
        returns itself.
        """
        return self

    def check(self) -> str | None:
        """Check the store before a worker starts; returns warnings, if there are any.

        Raises ``LeaseConfigurationError``, which stops the worker, for an error that does not go
        away by itself, and ``StoreUnavailable``, which is logged, if the store does not answer.
        """
        return None

    def close(self) -> None:  # noqa: B027 - a store without connections has nothing to close
        """Close the connections; the next call opens new ones."""

    # -- the steps of an attempt, which differ if the claimed row is the lease ---------------------

    def begin(self, call: Call) -> Answer:
        """Take the lease before the record is read."""
        return self.acquire(call)

    def claim(
        self, call: Call, records: RecordStore, age: Callable[[], float]
    ) -> Won | Refused | BlockedByGate | Claimed:
        """Claim the record under the lease; see :meth:`RecordStore.claim`."""
        return records.claim(call, self.name, age=age)

    def end(self, stored_key: str, token: str) -> None:
        """Free the lease of an attempt whose row is closed. The result does not matter, because the
        lease expires by itself.
        """
        self.release(stored_key, token)

    def records_of(self, records: RecordStore) -> str:
        """The identity of the records database, for :attr:`Call.database`."""
        return records.identity()


@runtime_checkable
class MarkStore(Protocol):
    """Marks: short values beside a key that expire. They note the latest copy of a call, and that
    callbacks are sent.
    """

    def mark(self, stored_key: str, name: str) -> str | None:
        """The value of a mark; ``None`` if it is absent."""
        ...

    def swap_mark(
        self, stored_key: str, name: str, expected: str | None, value: str, ttl: float
    ) -> bool:
        """Set a mark for *ttl* seconds if it is absent or equals *expected*."""
        ...


@runtime_checkable
class WaiterStore(Protocol):
    """A mark store that finds the marks of a key, for operators."""

    def waiting(self, stored_key: str) -> Sequence[str]:
        """The ids of the calls whose latest copy is marked: they wait. Raises
        ``StoreUnavailable``.
        """
        ...


@runtime_checkable
class GateStore(Protocol):
    """The gates of cooldown groups. Every call raises ``StoreUnavailable`` if the store fails."""

    def gate(self, group: str) -> Gate | None:
        """The gate of *group*; ``None`` if it is open."""
        ...

    def gates(self, limit: int = 1000) -> Iterator[Gate]:
        """All gates that are not open."""
        ...

    def close_gate(self, group: str, closing: Closing, token: str) -> Gate:
        """Close the gate as :func:`celery_leases.groups.group.closed` computes, by
        compare-and-set; returns the gate afterwards.

        If *token* holds the probe's slot, the slot is released.
        """
        ...

    def open_gate(self, group: str, token: str | None = None) -> bool:
        """Open a gate and delete its trips; returns whether that was done. With *token*: only if
        the gate is half-open and *token* holds the probe's slot.
        """
        ...

    def release_probe(self, group: str, token: str) -> bool:
        """Release the probe's slot if *token* holds it; the gate stays half-open."""
        ...


class MarkedLeaseStore(LeaseStore, MarkStore, GateStore):
    """A lease store that also stores marks and gates, as attempts and operators use it."""


@runtime_checkable
class ClosingStore(Protocol):
    """A gate store that also stores when gates were closed. Workers do not read that."""

    def past_closings(
        self, groups: Sequence[str] | None = None, limit: int = 1000
    ) -> Mapping[str, Sequence[PastClosing]]:
        """The last closings by group, the latest first: of *groups*, or of at most *limit* groups.

        Groups without closings are left out. If no groups are given, a long name may be shortened.
        Raises ``StoreUnavailable``.
        """
        ...


@dataclass(frozen=True, slots=True)
class LeaseStoreSettings:
    """How to open a lease store.

    ``url`` is ``leases_url`` and ``options`` is ``leases_transport_options``; both may contain
    passwords. ``prefix`` separates the keys of several applications. ``timeout``: seconds that a
    call may take to connect, and again to get its reply. The store opens at most ``connections``
    connections; a call waits for a free one for at most ``longest_wait`` seconds.
    """

    url: str = field(repr=False)
    prefix: str
    timeout: float
    connections: int
    longest_wait: float
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)


class RecordStore(Protocol):
    """One durable row per key. Every call raises ``StoreUnavailable`` if the database fails."""

    def claim(
        self,
        call: Call,
        lease_store: str,
        *,
        age: Callable[[], float] = never_emptied,
    ) -> Won | Refused:
        """Claim the row, if :mod:`celery_leases.decide.claim` allows it. Idempotent.

        A refused claim writes nothing. *age* returns the seconds since the lease store was emptied;
        it is called only before the running row of another attempt is taken over, and its errors
        are raised. Raises :class:`LeaseStoreMismatch` if the key runs under another lease store,
        :class:`KeyUnusable` if the database refuses a value of the call, and
        :class:`RecordUnreadable` for a row that cannot be read, which is not changed.
        """
        ...

    def read(self, stored_key: str) -> Record | None:
        """The row, or ``None``."""
        ...

    def identity(self) -> str:
        """A short random text that identifies this database under any URL; it never changes."""
        ...

    def settle(self, record: Record, outcome: Outcome) -> bool:
        """Write the outcome, if the row is still running under the record's fence and owner;
        returns whether it was written.
        """
        ...

    def note_end(self, stored_key: str, owner: str, ended: Ended) -> Record | None:
        """Write how an abandoned attempt with the token *owner* has ended, into the row of a later
        attempt: :func:`celery_leases.decide.attempt_history.with_end`.

        Returns the row afterwards, or ``None`` if it does not have that attempt.
        """
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
        """Take the row from its holder: it gets a new fence, is ``pending``, and does not wait.

        With *keep* it keeps its counts and history, and *forgive* sets failures, crashes, quick
        retries and cooldowns to 0. Without *keep* it becomes an empty row of the next generation.
        It counts as absent after *retention* seconds; the default is its own retention, or 7 days.
        With *seen*, the row is only changed if it still has that fence and state. Returns the row
        afterwards, or ``None`` if no row was changed.
        """
        ...

    def purge(self, limit: int) -> int:
        """Delete at most *limit* rows whose retention is over; returns their number."""
        ...

    def purge_in_turn(self, limit: int, every: float) -> bool:
        """Purge a batch, unless another process has purged this database within the last *every*
        seconds; returns whether there may be more rows to purge.
        """
        ...


class EffectStore(Protocol):
    """Effects and progress of running attempts. Every call raises ``StoreUnavailable`` if the
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
        """Commit the intent of an effect with the record's fence, in one statement that locks and
        checks the record.

        An effect that was begun before in its *scope* is ``Found`` and not changed, unless it is
        still *sent* with the fence *taken*: then this attempt takes over its intent. ``None``: the
        attempt no longer owns the record.
        """
        ...

    def is_running(self, record: Record) -> bool:
        """Whether the row is still running under the record's fence and owner."""
        ...

    def finish(self, effect: Effect, result: str | None, reference: str | None) -> bool:
        """Write the reply, if the intent still has the effect's fence, even if another attempt
        holds the lease now.
        """
        ...

    def withdraw(self, effect: Effect) -> bool:
        """Delete the intent: the call was not made, or certainly not executed."""
        ...

    def forget_sent(self, record: Record) -> int:
        """Delete the intents without a reply of all attempts up to that of *record*: an operator
        has found that these effects have not happened. Returns how many were deleted.

        Intents of later attempts, and those in the scope of another call, stay.
        """
        ...

    def of_key(self, record: Record) -> Sequence[Effect]:
        """All effects of the record's generation and call, in the order of their intents."""
        ...

    def save_progress(self, record: Record, progress: str) -> bool:
        """Save the progress and reset the count of crashes, if the attempt still owns the row;
        returns whether it does.
        """
        ...

    def clear_crashes(self, record: Record) -> None:
        """Reset the count of crashes, if the attempt still owns the row."""
        ...


class Clock(Protocol):
    """The local clock for all deadlines: it never steps, and also counts time in which the machine
    is suspended.
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
        """Whether the observer uses events of that type; otherwise they are not created.

        Called in the process and thread in which such an event would be observed.
        """
        ...
