"""The claim of a record in any store: read the row, apply the rule, and write the resulting row by
compare-and-set.

The statement that reads a missing row also inserts it, so a first run costs one statement, as does
a refused claim. An existing row is read without a lock, and taking it over costs a second
statement.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Final, Protocol

from celery_leases.common.values import value_class
from celery_leases.concurrency import os_threads
from celery_leases.errors import ColumnMissing, StoreUnavailable
from celery_leases.protocol import claims
from celery_leases.protocol.claims import ALWAYS, Claim, Question
from celery_leases.protocol.groups import Gate, admits
from celery_leases.protocol.options import DATABASE
from celery_leases.protocol.ports import never_emptied
from celery_leases.protocol.records import ClaimRequest, Record, Refusal, Refused, Won
from celery_leases.stores.availability import Evidence

ROUNDS: Final = 3
"""How often a claim reads again because the row changed before it was written; then the delivery is
rescheduled.
"""


COMPARED: Final = (
    "fence",
    "state",
    "owner",
    "lease_until",
    "ended",
    "resumes",
    "crashes",
    "publish_at",
)
"""The columns that must be unchanged for a row to be replaced.

A claim, an operator, a renewal and an outcome each change one of the first four. The others change
when a call is given up, when an attempt saves its progress, and when a message must be published.
"""


@value_class(frozen=True, slots=True)
class Met:
    """The result of ``insert_or_read``, at the time ``now`` of the store's clock in microseconds.

    ``inserted``: there was no row, and the new one is in its place. ``gate``: the requested gate,
    if it is not open. Without a row and a gate another claim has just inserted a row that this one
    could not see.
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
    """The part of a :class:`~celery_leases.protocol.ports.RecordStore` that claims, for a store
    that can replace a row.
    """

    #: Whether a running row that is itself a lease may be taken over.
    evidence: Evidence

    def claim(
        self,
        claim_request: ClaimRequest,
        lease_store: str,
        *,
        age: Callable[[], float] = never_emptied,
    ) -> Won | Refused:
        """Claim the row; see :class:`~celery_leases.protocol.ports.RecordStore`."""
        return self.claim_at_gate(claim_request, lease_store, None, age=age)[0]

    def claim_at_gate(
        self,
        claim_request: ClaimRequest,
        lease_store: str,
        slots: ProbeSlots | None,
        *,
        age: Callable[[], float] = never_emptied,
    ) -> tuple[Won | Refused, Gate | None]:
        """Claim the row; also returns the gate of the request's group, if *slots* are given and the
        gate is not open.

        A gate that does not let the body start refuses the claim too. At a half-open gate the claim
        takes the probe's slot before it writes the row, and gives the slot back unless it succeeds:
        so at most one body starts there.
        """
        try:
            try:
                return self._rounds(claim_request, lease_store, slots, age)
            except ColumnMissing:
                self.see_columns()
                return self._rounds(claim_request, lease_store, slots, age)
        except StoreUnavailable as error:
            if error.executed is not False:  # a locked row is an answer
                self.evidence.failed(os_threads.boot_clock())
            raise

    @abstractmethod
    def see_columns(self) -> None:
        """Read which columns the rows have, because the tables may have been migrated."""

    @abstractmethod
    def insert_or_read(self, new: Record, group: str | None) -> Met:
        """Insert *new* if its key has no row and the gate of *group*, if given, is open; otherwise
        read both.

        If there is a row, nothing is locked and nothing is written. The times of *new* count from
        the insert. Raises :class:`RecordUnreadable` for a row that cannot be read.
        """

    @abstractmethod
    def swap(self, seen: Record, new: Record) -> bool:
        """Write *new* in place of *seen*, if the ``COMPARED`` columns of the row are unchanged;
        returns whether it was written.
        """

    @abstractmethod
    def await_lock(self, row: Record) -> None:
        """Wait until no transaction has *row* locked, for as long as the store waits for locks.

        Raises :class:`StoreUnavailable` with ``executed=False`` for a row that stays locked: its
        holder's own transaction is open, and the delivery is rescheduled.
        """

    def _rounds(
        self,
        claim_request: ClaimRequest,
        lease_store: str,
        slots: ProbeSlots | None,
        age: Callable[[], float],
    ) -> tuple[Won | Refused, Gate | None]:
        for _ in range(ROUNDS):
            claim, new, met = self._look(
                claim_request, lease_store, claim_request.group if slots is not None else None
            )
            row, gate = met.row, met.gate
            if met.inserted:
                return Won(claims.dated(new, met.now)), gate
            if row is not None and claims.is_ours(row, claim_request):
                return Won(row), gate
            why = claims.decide(row, claim)
            if why is Question.AGE:
                claim = replace(claim, age=age())
                why = claims.decide(row, claim)
            if row is not None and why is Refusal.LAPSED and claim.is_lease:
                self.await_lock(row)
            if why is not None or not admits(gate, claim_request.token):
                break
            if slots is not None and gate is not None and gate.probe is None:
                if not slots.take_probe(gate.group, claim_request.token, claim_request.ttl):
                    continue
                gate = replace(gate, probe=claim_request.token, probe_for=claim_request.ttl)
            if (won := self._written(claim, met)) is not None:
                return Won(won), gate
        if slots is not None and gate is not None and gate.probe == claim_request.token:
            slots.give_back_probe(gate.group, claim_request.token)
        return Refused(row, why if isinstance(why, Refusal) else Refusal.CHANGED, claim.age), gate

    def _look(
        self, claim_request: ClaimRequest, lease_store: str, group: str | None
    ) -> tuple[Claim, Record, Met]:
        sent = os_threads.boot_clock()
        takes_until = self.evidence.takes_until(sent) if lease_store == DATABASE else ALWAYS
        claim = Claim(claim_request, lease_store, takes_until=takes_until)
        new = claims.claimed(None, claim, 0)
        met = self.insert_or_read(new, group)
        self.evidence.answered(sent, os_threads.boot_clock(), met.now)
        return claim, new, met

    def _written(self, claim: Claim, met: Met) -> Record | None:
        """The row as *claim* has written it; ``None`` if it has changed since it was read."""
        if met.row is None:  # the gate has prevented the insert
            again = self.insert_or_read(claims.claimed(None, claim, 0), None)
            return claims.claimed(None, claim, again.now) if again.inserted else None
        new = claims.claimed(met.row, claim, met.now)
        return new if self.swap(met.row, new) else None
