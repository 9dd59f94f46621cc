"""Stores in memory under a clock that stands still: every step is noted, may be told to fail, and
may be waited for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from celery_leases.errors import StoreUnavailable
from celery_leases.protocol.events import Event
from celery_leases.protocol.groups import Closing, Gate, admits, closed
from celery_leases.protocol.options import DATABASE
from celery_leases.protocol.ports import (
    Acquired,
    Claimed,
    Cooling,
    Held,
    Holder,
    Renewal,
    RenewalResult,
    Shut,
)
from celery_leases.protocol.records import ClaimRequest, Refused, State, Won
from tests.unit.fake_records import FakeRecords, StillClock

T = TypeVar("T")


class Journal(list[str]):
    """The steps of all stores in their order, by name."""

    def __init__(self) -> None:
        super().__init__()
        self._away: dict[str, tuple[int, bool]] = {}
        self._before: dict[str, Callable[[], object]] = {}

    def away(self, *names: str, times: int = 10**9, done: bool = False) -> None:
        """Let steps fail so many times; *done*: they are carried out, and only the reply is
        lost.
        """
        self._away |= dict.fromkeys(names, (times, done))

    def before(self, name: str, what: Callable[[], object]) -> None:
        """Do something just before the next step of that name: what another worker does
        meanwhile.
        """
        self._before[name] = what

    def step(self, name: str, do: Callable[[], T]) -> T:
        """Take one step."""
        self._before.pop(name, lambda: None)()
        self.append(name)
        times, done = self._away.get(name, (0, False))
        if not times:
            return do()
        self._away[name] = (times - 1, done)
        if done:
            do()
        raise StoreUnavailable(f"{name} is away", done)


class Seen(list[Event]):
    """All that was observed."""

    def hears(self, kind: type[Event]) -> bool:
        """Always."""
        return True

    def observe(self, event: Event) -> None:
        """Remember."""
        self.append(event)

    def of(self, kind: type[Event]) -> list[Event]:
        """The events of one kind."""
        return [event for event in self if isinstance(event, kind)]


@dataclass
class Lasting:
    """A lease, or with no bid a cooldown, and until when."""

    token: str
    claim_request: ClaimRequest | None
    until: float


@dataclass
class FakeStores:
    """Leases, marks and gates. ``in_records``: the claimed row is the lease, as with one database
    for everything.
    """

    clock: StillClock
    records: FakeRecords
    journal: Journal
    in_records: bool = False
    leases: dict[str, Lasting] = field(default_factory=dict)
    marks: dict[tuple[str, str], str] = field(default_factory=dict)
    known: dict[str, Gate] = field(default_factory=dict)
    #: When the gates were noted, as their times are spans.
    noted: dict[str, float] = field(default_factory=dict)
    #: When the store came up empty, if it did.
    born: float | None = None

    def __post_init__(self) -> None:
        self.name = DATABASE if self.in_records else "fake"
        self.records.gate = self._gate

    # -- leases ------------------------------------------------------------------------------------

    def acquire(self, claim_request: ClaimRequest) -> Acquired | Held | Cooling | Shut | Claimed:
        """Take the lease, unless it is held, cooling, or behind a gate."""
        if self.in_records:
            return self._claim(claim_request)
        return self.journal.step("acquire", lambda: self._acquire(claim_request))

    def _claim(self, claim_request: ClaimRequest) -> Shut | Claimed:
        answer, gate = self.records.claim_at_gate(claim_request, self.name, self)
        if isinstance(answer, Refused) and not admits(gate, claim_request.token):
            assert gate is not None
            return Shut(gate, answer.record, looked=True)
        return Claimed(
            answer,
            probe=isinstance(answer, Won)
            and gate is not None
            and gate.probe == claim_request.token,
        )

    def _acquire(self, claim_request: ClaimRequest) -> Acquired | Held | Cooling | Shut:
        found = self._found(claim_request.stored_key)
        if found is not None and found.claim_request is None:
            return Cooling(found.until - self.clock.now())
        if (
            found is not None
            and found.claim_request is not None
            and found.token != claim_request.token
        ):
            holder = Holder(
                found.token,
                found.claim_request.call_id,
                found.claim_request.holder,
                found.claim_request.ttl,
                found.until - self.clock.now(),
            )
            return Held(holder)
        gate = self._gate(claim_request.group) if claim_request.group is not None else None
        if gate is not None and not admits(gate, claim_request.token):
            return Shut(gate)
        self.leases[claim_request.stored_key] = Lasting(
            claim_request.token, claim_request, self.clock.now() + claim_request.ttl
        )
        return Acquired(self._take_slot(claim_request, gate))

    def age(self, stored_key: str) -> float:
        """How long ago it came up empty, if it did."""
        return self.journal.step(
            "age", lambda: self.clock.now() - self.born if self.born is not None else math.inf
        )

    def renew(self, renewals: Sequence[Renewal]) -> list[RenewalResult]:
        """Not by these tests."""
        return [RenewalResult.OURS for _ in renewals]

    def reassert(self, claim_request: ClaimRequest) -> bool:
        """Not by these tests."""
        return False

    def release(self, stored_key: str, token: str) -> bool:
        """Free the lease if it is still the token's."""
        return self.journal.step("release", lambda: self._release(stored_key, token))

    def _release(self, stored_key: str, token: str) -> bool:
        found = self._found(stored_key)
        ours = found is not None and found.claim_request is not None and found.token == token
        if ours:
            del self.leases[stored_key]
        return ours

    def cool(self, stored_key: str, token: str, seconds: float) -> bool:
        """Turn the token's lease into a cooldown."""
        return self.journal.step("cool", lambda: self._cool(stored_key, token, seconds))

    def _cool(self, stored_key: str, token: str, seconds: float) -> bool:
        if self.in_records:
            return True
        found = self._found(stored_key)
        if found is None or found.claim_request is None or found.token != token:
            return False
        self.leases[stored_key] = Lasting(token, None, self.clock.now() + seconds)
        return True

    def end_cooldown(self, stored_key: str) -> bool:
        """Free a key that cools."""
        return self.journal.step("end_cooldown", lambda: self._end_cooldown(stored_key))

    def _end_cooldown(self, stored_key: str) -> bool:
        found = self._found(stored_key)
        cools = found is not None and found.claim_request is None
        if cools:
            del self.leases[stored_key]
        return cools

    def _found(self, stored_key: str) -> Lasting | None:
        found = self.leases.get(stored_key)
        return found if found is not None and found.until > self.clock.now() else None

    # -- marks -------------------------------------------------------------------------------------

    def mark(self, stored_key: str, name: str) -> str | None:
        """Read a mark."""
        return self.marks.get((stored_key, name))

    # -- gates -------------------------------------------------------------------------------------

    def gate(self, group: str) -> Gate | None:
        """The gate as it is now."""
        return self._gate(group)

    def close_gate(self, group: str, closing: Closing, token: str) -> Gate:
        """Close it as the core says."""
        return self.journal.step(
            "close_gate", lambda: self._note(closed(group, self._gate(group), closing, token))
        )

    def open_gate(self, group: str, token: str | None = None) -> bool:
        """Open it, or let its probe do so."""
        return self.journal.step("open_gate", lambda: self._open(group, token))

    def _open(self, group: str, token: str | None) -> bool:
        gate = self._gate(group)
        may = gate is not None and (token is None or (gate.half_open and gate.probe == token))
        if may:
            del self.known[group]
        return may

    def take_probe(self, group: str, token: str, ttl: float) -> bool:
        """Take the probe's slot of a half-open gate."""
        return self.journal.step("take_probe", lambda: self._take_probe(group, token, ttl))

    def _take_probe(self, group: str, token: str, ttl: float) -> bool:
        gate = self._gate(group)
        if gate is None or not admits(gate, token):
            return False
        self._note(replace(gate, probe=token, probe_for=ttl))
        return True

    def give_back_probe(self, group: str, token: str) -> bool:
        """Free the probe's slot."""
        return self.journal.step("give_back_probe", lambda: self._give_back(group, token))

    def _give_back(self, group: str, token: str) -> bool:
        gate = self._gate(group)
        ours = gate is not None and gate.probe == token
        if gate is not None and ours:
            self._note(replace(gate, probe=None, probe_for=0.0))
        return ours

    def _gate(self, group: str) -> Gate | None:
        gate = self.known.get(group)
        if gate is None:
            return None
        passed = self.clock.now() - self.noted[group]
        probing = max(0.0, gate.probe_for - passed)
        return replace(
            gate,
            closed_for=max(0.0, gate.closed_for - passed),
            probe=gate.probe if probing else None,
            probe_for=probing,
        )

    def _note(self, gate: Gate) -> Gate:
        self.known[gate.group], self.noted[gate.group] = gate, self.clock.now()
        return gate

    def _take_slot(self, claim_request: ClaimRequest, gate: Gate | None) -> bool:
        if gate is not None:
            self._note(replace(gate, probe=claim_request.token, probe_for=claim_request.ttl))
        return gate is not None

    def running(self, stored_key: str) -> bool:
        """Whether somebody holds the key."""
        row = self.records.row(stored_key)
        if self.in_records:
            return row is not None and row.state is State.RUNNING and row.lease_remaining > 0
        found = self._found(stored_key)
        return found is not None and found.claim_request is not None
