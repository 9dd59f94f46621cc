"""Closing a gate in any store: the core says what it becomes, and it is written by compare-and-set."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Final

from celery_leases.core.errors import StoreUnavailable
from celery_leases.core.gates import Closing, Gate, closed, remembered_for

CLOSE_TRIES: Final = 10
"""Others who close a gate at the same time make each try again that would close it for longer: few do, soon none."""


class GateClosing(ABC):
    """A :class:`~celery_leases.core.ports.GateStore` that can swap a gate, for one that it has not changed from."""

    def close_gate(self, group: str, closing: Closing, token: str) -> Gate:
        """Close the gate; see :class:`~celery_leases.core.ports.GateStore`."""
        for _ in range(CLOSE_TRIES):
            before = self.gate(group)
            after = closed(group, before, closing, token)
            if before is not None and after.closed_for == before.closed_for:  # it stands for long enough
                if before.probe == token:
                    self.give_back_probe(group, token)
                return after
            if self._swap_gate(before, after, remembered_for(after, closing.policy), token):
                return after
        raise StoreUnavailable(f"the gate of {group} changed {CLOSE_TRIES} times while it was being closed", False)

    @abstractmethod
    def gate(self, group: str) -> Gate | None:
        """The gate of *group*; ``None`` when it is open."""

    @abstractmethod
    def give_back_probe(self, group: str, token: str) -> bool:
        """Free the probe's slot if *token* holds it; the gate stays half-open."""

    @abstractmethod
    def _swap_gate(self, before: Gate | None, after: Gate, remembered: float, token: str) -> bool:
        """Write *after*, to be forgotten in *remembered* seconds or later, and free the slot if *token* holds it.

        Only if the gate still has the trips of *before*, is closed if that was, has *token* as its probe if that had,
        and is not closed for longer than *after* by now.
        """
