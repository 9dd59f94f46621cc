"""The claim of a record in any store: read the row, ask the core, and write the row that it gives by compare-and-set.

A row that is absent is inserted by the statement that looks for it, so that a first run costs one statement, and so
does a claim that is refused. A row that is there is read without a lock, and costs a second statement to take over.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, Protocol

from celery_leases.core import claims
from celery_leases.core.claims import ALWAYS, Claim, Question
from celery_leases.core.errors import ColumnMissing, StoreUnavailable
from celery_leases.core.gates import Gate, admits
from celery_leases.core.options import DATABASE
from celery_leases.core.ports import never_emptied
from celery_leases.core.records import Bid, Record, Refusal, Refused, Won
from celery_leases.process import native
from celery_leases.stores.evidence import Evidence

ROUNDS: Final = 3
"""How often a claim looks again because the row changed before it was written; then the delivery is put back."""


COMPARED: Final = ("fence", "state", "owner", "lease_until", "ended", "resumes", "crashes", "publish_at")
"""What must be as it was seen for a row to be swapped.

A claim, an operator, a renewal and an outcome each change one of the first four. The others change when a call is given
up, when an attempt saves its progress, and when a message is to be published.
"""


@dataclass(frozen=True, slots=True)
class Met:
    """What ``insert_or_read`` found, at the moment ``now`` of the store's clock in microseconds.

    ``inserted``: there was no row, and the new one is in its place. ``gate``: the one that was asked about, if it is
    not open. Without a row and a gate another claim has just inserted a row that this one could not see.
    """

    now: int
    inserted: bool = False
    row: Record | None = None
    gate: Gate | None = None


class ProbeSlots(Protocol):
    """The probe's slots of half-open gates."""

    def take_probe(self, group: str, token: str, ttl: float) -> bool:
        """Take the slot for *ttl* seconds, unless another has it or the gate is not half-open."""
        ...

    def give_back_probe(self, group: str, token: str) -> bool:
        """Free the slot if *token* holds it."""
        ...


class Claiming(ABC):
    """The part of a :class:`~celery_leases.core.ports.RecordStore` that claims, for one that can swap a row."""

    #: Whether a running row may be taken over that is a lease itself.
    evidence: Evidence

    def claim(self, bid: Bid, lease_store: str, *, age: Callable[[], float] = never_emptied) -> Won | Refused:
        """Make the row ours; see :class:`~celery_leases.core.ports.RecordStore`."""
        return self.claim_at_gate(bid, lease_store, None, age=age)[0]

    def claim_at_gate(
        self, bid: Bid, lease_store: str, slots: ProbeSlots | None, *, age: Callable[[], float] = never_emptied
    ) -> tuple[Won | Refused, Gate | None]:
        """The same, and the gate of the bid's group, if *slots* are given and it is not open.

        A gate that does not let the body start refuses the claim too. At a half-open gate the claim takes the probe's
        slot before it writes the row, and gives the slot back unless it wins: so at most one body starts there.
        """
        try:
            try:
                return self._rounds(bid, lease_store, slots, age)
            except ColumnMissing:
                self.see_columns()
                return self._rounds(bid, lease_store, slots, age)
        except StoreUnavailable as error:
            if error.executed is not False:  # a row that is locked is an answer
                self.evidence.failed(native.boot_clock())
            raise

    @abstractmethod
    def see_columns(self) -> None:
        """Look which columns the rows have, as somebody may have migrated them."""

    @abstractmethod
    def insert_or_read(self, new: Record, group: str | None) -> Met:
        """Insert *new* if its key has no row and the gate of *group*, if one is given, is open; else read both.

        Nothing is locked and nothing is written where there is a row. The moments of *new* are counted from the moment
        of the insert. Raises :class:`RecordUnreadable` for a row that cannot be read.
        """

    @abstractmethod
    def swap(self, seen: Record, new: Record) -> bool:
        """Write *new* in the place of *seen*, if the row still has what is ``COMPARED``; whether it was written."""

    @abstractmethod
    def await_lock(self, row: Record) -> None:
        """Wait until no transaction has *row* locked, for as long as the store waits for locks.

        Raises :class:`StoreUnavailable` with ``executed=False`` for a row that stays locked: its holder's own
        transaction is open, and the delivery is put back.
        """

    def _rounds(
        self, bid: Bid, lease_store: str, slots: ProbeSlots | None, age: Callable[[], float]
    ) -> tuple[Won | Refused, Gate | None]:
        for _ in range(ROUNDS):
            claim, met = self._look(bid, lease_store, bid.group if slots is not None else None)
            row, gate = met.row, met.gate
            if met.inserted:
                return Won(claims.claimed(None, claim, met.now)), gate
            if row is not None and claims.is_ours(row, bid):
                return Won(row), gate
            why = claims.decide(row, claim)
            if why is Question.AGE:
                claim = replace(claim, age=age())
                why = claims.decide(row, claim)
            if row is not None and why is Refusal.LAPSED and claim.is_lease:
                self.await_lock(row)
            if why is not None or not admits(gate, bid.token):
                break
            if slots is not None and gate is not None and gate.probe is None:
                if not slots.take_probe(gate.group, bid.token, bid.ttl):
                    continue
                gate = replace(gate, probe=bid.token, probe_for=bid.ttl)
            if (won := self._written(claim, met)) is not None:
                return Won(won), gate
        if slots is not None and gate is not None and gate.probe == bid.token:
            slots.give_back_probe(gate.group, bid.token)
        return Refused(row, why if isinstance(why, Refusal) else Refusal.CHANGED, claim.age), gate

    def _look(self, bid: Bid, lease_store: str, group: str | None) -> tuple[Claim, Met]:
        sent = native.boot_clock()
        takes_until = self.evidence.takes_until(sent) if lease_store == DATABASE else ALWAYS
        claim = Claim(bid, lease_store, takes_until=takes_until)
        met = self.insert_or_read(claims.claimed(None, claim, 0), group)
        self.evidence.answered(sent, native.boot_clock(), met.now)
        return claim, met

    def _written(self, claim: Claim, met: Met) -> Record | None:
        """The row as *claim* has written it; ``None`` if it has changed since it was met."""
        if met.row is None:  # the gate has kept it from being inserted
            again = self.insert_or_read(claims.claimed(None, claim, 0), None)
            return claims.claimed(None, claim, again.now) if again.inserted else None
        new = claims.claimed(met.row, claim, met.now)
        return new if self.swap(met.row, new) else None
