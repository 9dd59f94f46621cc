"""A lease store in the memory of one process, as another distribution would bring one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
from celery_leases.groups.group import Closing, Gate, admits, closed, gate_retention
from celery_leases.groups.history import PastClosing
from celery_leases.stores.interfaces import LeaseStoreSettings, MarkedLeaseStore


@dataclass
class Lease:
    """A lease until ``until``; a cooldown where ``call`` is ``None``."""

    token: str
    call: Call | None
    until: float


@dataclass
class Memory:
    """What all stores of one URL and prefix share. ``gates`` have the times they were seen and are
    forgotten at.
    """

    lock: threading.RLock = field(default_factory=threading.RLock)
    now: Callable[[], float] = time.monotonic
    began: float = field(default_factory=time.monotonic)
    leases: dict[str, Lease] = field(default_factory=dict)
    marks: dict[tuple[str, str], tuple[str, float]] = field(default_factory=dict)
    bursts: dict[str, tuple[int, int]] = field(default_factory=dict)
    gates: dict[str, tuple[Gate, float, float]] = field(default_factory=dict)


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
        """Take the lease unless it is held, the key is cooling, or its gate is closed."""
        key, token = call.key.stored, call.token
        with self._memory.lock:
            found = self._found(key)
            gate = self.groups.found(call.group) if call.group is not None else None
            if found is not None and found.call is None:
                return Refused(Refusal.COOLING, remaining=found.until - self._memory.now())
            if found is not None and found.token != token:
                holder = self._holder(found)
                if holder.database != call.database:
                    raise LeaseStoreMismatch(f"{key} is held for another database, {holder.host}")
                return Refused(Refusal.HELD, holder)
            if found is None and not admits(gate, token):
                assert gate is not None
                return Refused(Refusal.GATE, gate=gate)
            if gate is not None and (gate.probe == token or found is None):
                probe_for = max(gate.probe_for, call.options.ttl)
                self.groups.note(replace(gate, probe=token, probe_for=probe_for))
            until = self._memory.now() + call.options.ttl
            until = max(until, found.until) if found is not None else until
            self._memory.leases[key] = Lease(token, call, until)
            return Acquired(probe=gate is not None and (gate.probe == token or found is None))

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
        gate = self.groups.found(renewal.probe) if renewal.probe is not None else None
        if gate is not None and gate.probe == renewal.token:
            self.groups.note(replace(gate, probe_for=max(gate.probe_for, renewal.ttl)))
        return RenewalResult.OURS

    def reassert(self, call: Call) -> bool:
        """Set the lease again, unless another owner has the key or it is cooling."""
        with self._memory.lock:
            found = self._found(call.key.stored)
            if found is None:
                until = self._memory.now() + call.options.ttl
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
    """The gates of cooldown groups."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    def history(
        self, groups: Sequence[str] | None = None, limit: int = 1000
    ) -> Mapping[str, Sequence[PastClosing]]:
        """None is stored."""
        return {}

    def get(self, group: str) -> Gate | None:
        """The gate of *group*."""
        with self._memory.lock:
            return self.found(group)

    def all(self, limit: int = 1000) -> Iterator[Gate]:
        """All gates that are not open."""
        with self._memory.lock:
            found = [self.found(group) for group in list(self._memory.gates)]
        return islice((gate for gate in found if gate is not None), limit)

    def close(self, group: str, closing: Closing, token: str) -> Gate:
        """Close the gate as the protocol requires."""
        with self._memory.lock:
            gate = closed(group, self.found(group), closing, token)
            return self.note(gate, gate_retention(gate, closing.policy))

    def open(self, group: str, token: str | None = None) -> bool:
        """Open the gate; with *token* only that of its probe."""
        with self._memory.lock:
            gate = self.found(group)
            if gate is None or (token is not None and not (gate.half_open and gate.probe == token)):
                return False
            del self._memory.gates[group]
            return True

    def release_probe(self, group: str, token: str) -> bool:
        """Free the probe's slot if *token* has it."""
        with self._memory.lock:
            gate = self.found(group)
            if gate is None or gate.probe != token:
                return False
            self.note(replace(gate, probe=None, probe_for=0.0))
            return True

    def found(self, group: str) -> Gate | None:
        """The gate of *group* now."""
        gate, seen, forgotten = self._memory.gates.get(group, (None, 0.0, 0.0))
        now = self._memory.now()
        if gate is None or forgotten <= now:
            return None
        probe_for = max(0.0, gate.probe_for - (now - seen))
        return replace(
            gate,
            closed_for=max(0.0, gate.closed_for - (now - seen)),
            probe=gate.probe if probe_for else None,
            probe_for=probe_for,
        )

    def note(self, gate: Gate, remembered: float | None = None) -> Gate:
        """Store *gate*."""
        now = self._memory.now()
        known = self._memory.gates.get(gate.group)
        forgotten = known[2] if known is not None else 0.0
        if remembered is not None:
            forgotten = max(forgotten, now + remembered)
        self._memory.gates[gate.group] = gate, now, max(forgotten, now + gate.probe_for)
        return gate
