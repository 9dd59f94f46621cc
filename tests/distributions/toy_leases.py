"""A lease store in the memory of one process, as another distribution would bring one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from celery_leases.call import Call
from celery_leases.decide.answers import (
    Acquired,
    Holder,
    Refusal,
    Refused,
    Renewal,
    RenewalResult,
)
from celery_leases.decide.latest import Burst
from celery_leases.errors import LeaseStoreMismatch
from celery_leases.groups.group import ClosedGroup, Closing, stored_group
from celery_leases.groups.history import PastClosing
from celery_leases.groups.slots import (
    NO_SLOTS,
    NOTHING,
    Ask,
    Room,
    Slots,
    Taken,
    close,
    opened,
    room,
    take,
    with_place,
    with_slot,
    without_slot,
)
from celery_leases.stores.interfaces import LeaseStoreSettings, MarkedLeaseStore


@dataclass
class Lease:
    """A lease until ``until``; a cooldown where ``call`` is ``None``."""

    token: str
    call: Call | None
    until: float


@dataclass
class Memory:
    """What all stores of one URL and prefix share."""

    lock: threading.RLock = field(default_factory=threading.RLock)
    now: Callable[[], float] = time.monotonic
    began: float = field(default_factory=time.monotonic)
    leases: dict[str, Lease] = field(default_factory=dict)
    marks: dict[tuple[str, str], tuple[str, float]] = field(default_factory=dict)
    bursts: dict[str, tuple[int, int]] = field(default_factory=dict)
    groups: dict[str, Slots] = field(default_factory=dict)


_memories: dict[tuple[str, str], Memory] = {}


def open_store(settings: LeaseStoreSettings) -> ToyLeaseStore:
    """The store of ``toy://name``; all of one name and prefix are one."""
    memory = _memories.setdefault((settings.url, settings.prefix), Memory())
    return ToyLeaseStore(memory, f"{settings.url}/{settings.prefix}")


class ToyLeaseStore(MarkedLeaseStore):
    """Leases and marks."""

    groups: ToyGroups

    def __init__(self, memory: Memory, name: str) -> None:
        self.name = name
        self.groups = ToyGroups(memory)
        self._memory = memory

    def check(self) -> str | None:
        """What there is to warn of."""
        return f"the lease store {self.name} is in the memory of this process"

    # -- leases ------------------------------------------------------------------------------------

    def acquire(self, call: Call) -> Acquired | Refused:
        """Take the lease unless it is held, the key is cooling, or its group is closed."""
        key, token = call.key.stored, call.token
        with self._memory.lock:
            found = self._found(key)
            if found is not None and found.call is None:
                return Refused(Refusal.COOLING, remaining=found.until - self._memory.now())
            if found is not None and found.token != token:
                holder = self._holder(found)
                if holder.database != call.database:
                    raise LeaseStoreMismatch(f"{key} is held for another database, {holder.host}")
                return Refused(Refusal.HELD, holder)
            taken = self.groups.taken(call, ours=found is not None)
            if isinstance(taken, ClosedGroup):
                return Refused(Refusal.CLOSED, closed_group=taken)
            if isinstance(taken, Room):
                return Refused(Refusal.FULL, room=taken)
            until = self._memory.now() + call.options.ttl
            until = max(until, found.until) if found is not None else until
            self._memory.leases[key] = Lease(token, call, until)
            return Acquired(probe=taken.probe, starts_in=taken.starts_in)

    def age(self, stored_key: str) -> float:
        """Seconds since the memory was made."""
        return self._memory.now() - self._memory.began

    def renew(self, renewals: Sequence[Renewal]) -> list[RenewalResult]:
        """Renew each by itself."""
        with self._memory.lock:
            return [self._renew(renewal) for renewal in renewals]

    def _renew(self, renewal: Renewal) -> RenewalResult:
        found = self._found(renewal.stored_key)
        if found is None:
            return RenewalResult.MISSING
        if found.call is None or found.token != renewal.token:
            return RenewalResult.OTHER
        found.until = max(found.until, self._memory.now() + renewal.ttl)
        if renewal.slot is not None:
            group, limit = renewal.slot
            slots, now = self.groups.found(group)
            self.groups.note(group, with_slot(slots, renewal.token, renewal.ttl, limit, now))
        return RenewalResult.OURS

    def reassert(self, call: Call, ttl: float) -> bool:
        """Set the lease again, unless another owner has the key or it is cooling."""
        with self._memory.lock:
            found = self._found(call.key.stored)
            if found is None:
                until = self._memory.now() + ttl
                lease = Lease(call.token, call, until)
                self._memory.leases[call.key.stored] = lease
                return True
            return found.call is not None and found.token == call.token

    def release(self, stored_key: str, token: str) -> bool:
        """Free the lease if it is *token*'s."""
        with self._memory.lock:
            if self._owned(stored_key, token) is None:
                return False
            del self._memory.leases[stored_key]
            return True

    def cool(self, stored_key: str, token: str, seconds: float) -> bool:
        """Turn the lease into a cooldown; a cooldown of the same token counts as done."""
        with self._memory.lock:
            found = self._found(stored_key)
            if found is not None and found.call is None:
                return found.token == token
            if self._owned(stored_key, token) is None:
                return False
            self._memory.leases[stored_key] = Lease(token, None, self._memory.now() + seconds)
            return True

    def end_cooldown(self, stored_key: str) -> bool:
        """Free the key if it cools."""
        with self._memory.lock:
            found = self._found(stored_key)
            if found is None or found.call is not None:
                return False
            del self._memory.leases[stored_key]
            return True

    def holder(self, stored_key: str) -> Holder | None:
        """Who has the key."""
        with self._memory.lock:
            found = self._found(stored_key)
            return self._holder(found) if found is not None and found.call is not None else None

    def _owned(self, stored_key: str, token: str) -> Lease | None:
        found = self._found(stored_key)
        ours = found is not None and found.call is not None and found.token == token
        return found if ours else None

    def _found(self, stored_key: str) -> Lease | None:
        found = self._memory.leases.get(stored_key)
        return found if found is not None and found.until > self._memory.now() else None

    # -- marks -------------------------------------------------------------------------------------

    def mark(self, stored_key: str, name: str) -> str | None:
        """Read a mark."""
        value, until = self._memory.marks.get((stored_key, name), ("", 0.0))
        return value if until > self._memory.now() else None

    def swap_mark(
        self, stored_key: str, name: str, expected: str | None, value: str, ttl: float
    ) -> bool:
        """Set a mark if it is absent, as expected, or what it is to be."""
        with self._memory.lock:
            if self.mark(stored_key, name) not in (None, expected, value):
                return False
            self._memory.marks[stored_key, name] = value, self._memory.now() + ttl
            return True

    def new_order(self, stored_key: str) -> int:
        """By the clock of the process."""
        with self._memory.lock:
            newest, first = self._memory.bursts.get(stored_key, (0, 0))
            newest = max(round(self._memory.now() * 1e6), newest + 1)
            self._memory.bursts[stored_key] = newest, first or newest
            return newest

    def note_order(self, stored_key: str, order: int, missing: int = 0) -> None:
        """Unless a newer one is noted."""
        with self._memory.lock:
            newest, first = self._memory.bursts.get(stored_key, (0, 0))
            if order > newest or newest == missing:
                self._memory.bursts[stored_key] = order, first or order

    def burst(self, stored_key: str) -> Burst:
        """As it was noted."""
        now = round(self._memory.now() * 1e6)
        return Burst(now, *self._memory.bursts.get(stored_key, (0, 0)))

    def end_burst(self, stored_key: str, order: int) -> None:
        """A run begins."""
        with self._memory.lock:
            if (noted := self._memory.bursts.get(stored_key)) is not None:
                now = round(self._memory.now() * 1e6)
                self._memory.bursts[stored_key] = noted[0], now if noted[0] > order else 0

    def _holder(self, lease: Lease) -> Holder:
        call = lease.call
        assert call is not None
        return Holder(
            lease.token,
            call.call_id,
            call.host,
            call.options.ttl,
            lease.until - self._memory.now(),
            call.database,
        )


class ToyGroups:
    """The state of groups."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    def taken(self, call: Call, *, ours: bool) -> Taken | Room | ClosedGroup:
        """What *call* gets of its group; *ours*: it has its lease already."""
        if call.group is None:
            return Taken(NO_SLOTS, 0.0)
        slots, now = self.found(call.group)
        if ours and call.ask is None and call.token not in slots.held:
            return Taken(slots, 0.0)
        ask = call.ask or NOTHING
        answer = take(call.group, slots, ask, call.token, call.options.ttl, now)
        if isinstance(answer, Taken):
            self.note(call.group, answer.slots)
        return answer

    def history(
        self, groups: Sequence[str] | None = None, limit: int = 1000
    ) -> Mapping[str, Sequence[PastClosing]]:
        """None is stored."""
        return {}

    def get(self, group: str) -> ClosedGroup | None:
        """*group*."""
        with self._memory.lock:
            slots, now = self.found(group)
            return slots.closed_group(group, now)

    def all(self, limit: int = 1000) -> Iterator[ClosedGroup]:
        """All groups that are not open."""
        found = (self.get(group) for group in list(self._memory.groups))
        return islice((closed_group for closed_group in found if closed_group is not None), limit)

    def close(self, group: str, closing: Closing, token: str) -> ClosedGroup:
        """Close the group as the protocol requires."""
        with self._memory.lock:
            slots, now = self.found(group)
            slots = close(slots, closing, token, now)
            self.note(group, slots)
            closed_group = slots.closed_group(group, now)
            assert closed_group is not None
            return closed_group

    def open(self, group: str, token: str | None = None) -> bool:
        """Open the group; with *token* only that of its probe."""
        with self._memory.lock:
            slots, now = self.found(group)
            new = opened(slots, token, now)
            if new is not None:
                self.note(group, new)
            return new is not None

    def slots(
        self, groups: Sequence[str] | None = None, limit: int = 1000
    ) -> Mapping[str, tuple[Slots, float]]:
        """Of these groups, or of all that have any."""
        with self._memory.lock:
            names = groups if groups is not None else list(self._memory.groups)
            found = {name: self.found(name) for name in names}
        counts = (item for item in found.items() if groups or item[1][0].expires_at > item[1][1])
        return dict(islice(counts, limit))

    def room(self, asked: Mapping[str, Ask]) -> Mapping[str, Room]:
        """The room of each group."""
        rooms = {}
        with self._memory.lock:
            for group, ask in asked.items():
                slots, now = self.found(group)
                self.note(group, with_place(slots, ask, now))
                rooms[group] = room(slots, ask, now)
        return rooms

    def release_slot(self, group: str, token: str) -> None:
        """Free the slot of *token*."""
        with self._memory.lock:
            slots, _ = self.found(group)
            self.note(group, without_slot(slots, token))

    def found(self, group: str) -> tuple[Slots, float]:
        """The slots of *group*, and the time in milliseconds."""
        now = self._memory.now() * 1000
        return self._memory.groups.get(stored_group(group), NO_SLOTS).at(now), now

    def note(self, group: str, slots: Slots) -> None:
        """Store the slots of *group*."""
        self._memory.groups[stored_group(group)] = slots
