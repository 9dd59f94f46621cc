"""Claims a record in any store: read the row, decide, and write the new row by compare-and-set.

The first statement reads the row, or inserts a new one if there is none. So a first run costs one
statement, and so does a refused claim. An existing row is read without a lock; taking it over costs
a second statement.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Final, Protocol

from celery_leases.call import Call
from celery_leases.concurrency import os_threads
from celery_leases.decide import claim as claim_rules
from celery_leases.decide.claim import ALWAYS
from celery_leases.errors import KeyUnusable, StoreUnavailable
from celery_leases.groups.group import Gate, admits
from celery_leases.options import DATABASE
from celery_leases.record import Record, Refusal, Refused, State, Won
from celery_leases.stores.availability import Availability
from celery_leases.stores.interfaces import never_emptied
from celery_leases.value_class import value_class

logger = logging.getLogger("celery_leases")

CLAIM_TRIES: Final = 3
"""How often a claim is tried while other processes change the row between reading and writing.
Afterwards the delivery is rescheduled.
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
"""The columns that a compare-and-set compares: a row is replaced only if they are unchanged.

A claim, an operator, a renewal and an outcome each change one of the first four columns. The others
change when a call is given up, when an attempt saves its progress, and when a message becomes due.
"""


@value_class(frozen=True, slots=True)
class InsertOrReadResult:
    """The result of ``insert_or_read`` at ``now``, the time of the store's clock in microseconds.

    ``inserted``: there was no row, and the new one was inserted. ``row``: the existing row.
    ``gate``: the gate that was asked for, if it is not open. If there is none of the three, another
    claim has inserted a row that this statement could not see yet.
    """

    now: int
    inserted: bool = False
    row: Record | None = None
    gate: Gate | None = None


class ProbeSlots(Protocol):
    """The probe slots of half-open gates: each can be held by one token."""

    def take_probe(self, group: str, token: str, ttl: float) -> bool:
        """Take the slot for *ttl* seconds; ``False`` if another token holds it, or the gate is not
        half-open.
        """
        ...

    def release_probe(self, group: str, token: str) -> bool:
        """Free the slot if *token* holds it."""
        ...


class Claiming(ABC):
    """The claims of a :class:`~celery_leases.stores.interfaces.RecordStore` that can replace a
    row by compare-and-set.
    """

    #: Decides whether an expired row that is itself the lease may be taken over.
    availability: Availability

    def claim(
        self,
        call: Call,
        lease_store: str,
        *,
        age: Callable[[], float] = never_emptied,
    ) -> Won | Refused:
        """Claim the row; see :class:`~celery_leases.stores.interfaces.RecordStore`."""
        return self.claim_at_gate(call, lease_store, None, age=age)[0]

    def claim_at_gate(
        self,
        call: Call,
        lease_store: str,
        slots: ProbeSlots | None,
        *,
        age: Callable[[], float] = never_emptied,
    ) -> tuple[Won | Refused, Gate | None]:
        """Claim the row; also returns the gate of the call's group if *slots* are given and the
        gate is not open.

        The claim is also refused if the gate does not let the body start. At a half-open gate the
        claim takes the probe slot before it writes the row, and gives the slot back if the claim
        fails. So at most one body starts at a half-open gate.
        """
        try:
            return self._try_claim(call, lease_store, slots, age)
        except KeyUnusable as error:
            if call.message is None:
                raise
            # The message is only for a rescue, and may be what the database refuses.
            won = self._try_claim(replace(call, message=None), lease_store, slots, age)
            logger.warning(
                "%s: the call could not be stored, so it cannot be rescued: %s",
                call.key.key,
                error,
            )
            return won
        except StoreUnavailable as error:
            if error.executed is not False:  # a locked row shows that the database is available
                self.availability.failed(os_threads.boot_clock())
            raise

    @abstractmethod
    def insert_or_read(self, new: Record, group: str | None) -> InsertOrReadResult:
        """Insert *new* if its key has no row and the gate of *group*, if given, is open; otherwise
        read the row and the gate.

        An existing row is neither locked nor written. The times of *new* are relative to the
        insert. Raises :class:`RecordUnreadable` for a row that cannot be read.
        """

    @abstractmethod
    def swap(self, seen: Record, new: Record) -> bool:
        """Replace *seen* by *new* if the ``COMPARED`` columns of the row are unchanged; returns
        whether the row was replaced.
        """

    @abstractmethod
    def await_lock(self, row: Record) -> None:
        """Wait until no transaction locks *row*, for as long as the store waits for locks.

        Raises :class:`StoreUnavailable` with ``executed=False`` if the row stays locked: the
        holder's transaction is still open, and the delivery is rescheduled.
        """

    def _try_claim(
        self,
        call: Call,
        lease_store: str,
        slots: ProbeSlots | None,
        age: Callable[[], float],
    ) -> tuple[Won | Refused, Gate | None]:
        is_lease, emptied = lease_store == DATABASE, 0.0
        for _ in range(CLAIM_TRIES):
            sent = os_threads.boot_clock()
            until = self.availability.takeover_until(sent) if is_lease else ALWAYS
            new = claim_rules.claimed(None, call, lease_store, 0)
            found = self.insert_or_read(new, call.group if slots is not None else None)
            self.availability.answered(sent, os_threads.boot_clock(), found.now)
            row, gate = found.row, found.gate
            if found.inserted:
                return Won(claim_rules.dated(new, found.now)), gate
            if row is not None and row.is_attempt(State.RUNNING, call.token):
                return Won(row), gate
            why = claim_rules.decide(row, call, lease_store, takeover_until=until)
            if why is Refusal.EMPTIED:
                emptied = age()
                why = claim_rules.decide(row, call, lease_store, emptied=emptied)
            if row is not None and why is Refusal.LAPSED:
                self.await_lock(row)
            if why is not None or not admits(gate, call.token):
                break
            if slots is not None and gate is not None and gate.probe is None:
                if not slots.take_probe(gate.group, call.token, call.options.ttl):
                    continue
                gate = replace(gate, probe=call.token, probe_for=call.options.ttl)
            if (won := self._write(call, lease_store, found)) is not None:
                return Won(won), gate
        if slots is not None and gate is not None and gate.probe == call.token:
            slots.release_probe(gate.group, call.token)
        return Refused(row, why or Refusal.CHANGED, emptied), gate

    def _write(self, call: Call, lease_store: str, found: InsertOrReadResult) -> Record | None:
        """The row that the claim has written; ``None`` if the row has changed since it was read."""
        if found.row is None:  # the gate prevented the insert
            again = self.insert_or_read(claim_rules.claimed(None, call, lease_store, 0), None)
            return (
                claim_rules.claimed(None, call, lease_store, again.now) if again.inserted else None
            )
        new = claim_rules.claimed(found.row, call, lease_store, found.now)
        return new if self.swap(found.row, new) else None
