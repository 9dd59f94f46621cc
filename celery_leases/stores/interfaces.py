"""The interfaces of what is exchangeable: lease stores, clocks, observers."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from celery_leases.call import Call
from celery_leases.decide.answers import (
    Acquired,
    Holder,
    Refused,
    Renewal,
    RenewalResult,
)
from celery_leases.decide.latest import Burst
from celery_leases.errors import StoreUnavailable
from celery_leases.events import Event
from celery_leases.groups.group import ClosedGroup, Closing
from celery_leases.groups.history import PastClosing
from celery_leases.groups.slots import Ask, Room, Slots


class LeaseStore(ABC):
    """Decides which attempt may run a key now. Every call raises ``StoreUnavailable`` if the store
    fails. Threads and greenlets share one store.

    Only the abstract methods are needed. A store may also be a :class:`MarkStore` and have
    ``groups``; otherwise marks and groups are in the records database.
    """

    #: Written into each row that is claimed under this store, so that two lease stores with one
    #: records database are detected.
    name: str
    #: The groups, if the store has any.
    groups: GroupStore | None = None
    #: Whether the claimed row is the lease. Then an attempt does not acquire and end it besides.
    in_records: bool = False
    #: The groups, if they are in the records database: then the claim reads them.
    row_groups: Any = None

    @abstractmethod
    def acquire(self, call: Call) -> Acquired | Refused:
        """Take the lease in one round trip. A lease that the token of the call already holds
        counts as taken.

        Otherwise it is refused: ``HELD`` with the holder, ``COOLING``, ``CLOSED`` with the group,
        or ``FULL`` with the room of its group.
        If the lease is free, a store with ``groups`` reads in the same round trip the state of
        ``call.group``, and takes a slot of it, or the turn by its rate, as
        :func:`celery_leases.groups.slots.take` says. Raises ``LeaseStoreMismatch`` if the
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

    def reassert(self, call: Call, ttl: float) -> bool:
        """Write again a lease that the store has lost, for *ttl* seconds, unless another attempt
        holds the key.
        """
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

    def share_trips(self, running: Callable[[], int]) -> None:  # noqa: B027 - a store may have no connections
        """Let threads or greenlets of this process that call the store at the same moment share
        round trips; the more, the more calls are *running*. Each still gets its own answer or
        error.
        """

    def end(self, stored_key: str, token: str) -> None:
        """Free the lease of an attempt whose row is closed. The result does not matter, because the
        lease expires by itself.
        """
        self.release(stored_key, token)


@runtime_checkable
class MarkStore(Protocol):
    """Marks: short values beside a key that expire. They note the latest copy of a call, that
    callbacks are sent, and with ``lease_runs="latest"`` the newest call.
    """

    def mark(self, stored_key: str, name: str) -> str | None:
        """The value of a mark; ``None`` if it is absent."""
        ...

    def swap_mark(
        self, stored_key: str, name: str, expected: str | None, value: str, ttl: float
    ) -> bool:
        """Set a mark for *ttl* seconds if it is absent or equals *expected*."""
        ...

    def new_order(self, stored_key: str) -> int:
        """The order of a new call of a key, which is its newest call now; one round trip.

        It is the time of the store in microseconds, and greater than that of each earlier call.
        """
        ...

    def note_order(self, stored_key: str, order: int, missing: int = 0) -> None:
        """Note a call with that *order*, unless a newer one is noted than the *missing* one."""
        ...

    def burst(self, stored_key: str) -> Burst:
        """The newest call of a key, and the first one since :meth:`end_burst`."""
        ...

    def end_burst(self, stored_key: str, order: int) -> None:
        """Note that a run of the call with that *order* begins: the next call is the first of a new
        burst. If a newer call is noted, its burst begins now.
        """
        ...


@runtime_checkable
class WaiterStore(Protocol):
    """A mark store that finds the marks of a key, for operators."""

    def waiting(self, stored_key: str) -> Sequence[str]:
        """The ids of the calls whose latest copy is marked: they wait. Raises
        ``StoreUnavailable``.
        """
        ...


class GroupStore(Protocol):
    """The state of groups. Every call raises ``StoreUnavailable`` if the store fails."""

    def get(self, group: str) -> ClosedGroup | None:
        """*group*; ``None`` if it is open."""
        ...

    def all(self, limit: int = 1000) -> Iterator[ClosedGroup]:
        """At most *limit* groups that are not open."""
        ...

    def close(self, group: str, closing: Closing, token: str) -> ClosedGroup:
        """Close the group as :func:`celery_leases.groups.slots.close` computes, by
        compare-and-set; returns the group afterwards. The slot of *token* is freed.
        """
        ...

    def open(self, group: str, token: str | None = None) -> bool:
        """Open a group and delete how often it closed in a row; returns whether that was done. With
        *token*: only if the group is due for a probe and *token* is the probe. The slot of *token*
        is freed.
        """
        ...

    def history(
        self, groups: Sequence[str] | None = None, limit: int = 1000
    ) -> Mapping[str, Sequence[PastClosing]]:
        """The last closings by group, the latest first: of *groups*, or of at most *limit* groups.

        Only operators read them, and a store may have none. Groups without closings are left out.
        If no groups are given, a long name may be shortened.
        """
        ...

    def slots(
        self, groups: Sequence[str] | None = None, limit: int = 1000
    ) -> Mapping[str, tuple[Slots, float]]:
        """The slots by group, and the time of the store in milliseconds: of *groups*, or of at most
        *limit* groups that have any. If no groups are given, a long name may be shortened.
        """
        ...

    def room(self, asked: Mapping[str, Ask]) -> Mapping[str, Room]:
        """The room of each group, for a worker with waiting calls. The worker takes its place in
        the waiting list, or leaves it if ``since`` is 0; a worker without a name takes none.
        """
        ...

    def release_slot(self, group: str, token: str) -> None:
        """Free the slot of *token*. The result does not matter, because a slot expires by
        itself.
        """
        ...


class MarkedLeaseStore(LeaseStore, MarkStore):
    """A lease store that also stores marks and groups, as attempts and operators use it."""

    groups: GroupStore


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
