"""Closes a gate in any store: the rule computes the new gate, which is written by
compare-and-set.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Final

from celery_leases.errors import StoreUnavailable
from celery_leases.protocol.groups import Closing, Gate, closed, remembered_for

CLOSE_TRIES: Final = 10
"""How often a compare-and-set is retried when other workers close the same gate concurrently."""


class GateClosing(ABC):
    """A :class:`~celery_leases.protocol.ports.GateStore` that can replace a gate that has not
    changed.
    """

    def close_gate(self, group: str, closing: Closing, token: str) -> Gate:
        """Close the gate; see :class:`~celery_leases.protocol.ports.GateStore`."""
        for _ in range(CLOSE_TRIES):
            before = self.gate(group)
            after = closed(group, before, closing, token)
            if (
                before is not None and after.closed_for == before.closed_for
            ):  # it is closed for long enough
                if before.probe == token:
                    self.give_back_probe(group, token)
                return after
            if self._swap_gate(before, after, remembered_for(after, closing.policy), token):
                return after
        raise StoreUnavailable(
            f"the gate of {group} changed {CLOSE_TRIES} times while it was being closed", False
        )

    @abstractmethod
    def gate(self, group: str) -> Gate | None:
        """The gate of *group*; ``None`` when it is open."""

    @abstractmethod
    def give_back_probe(self, group: str, token: str) -> bool:
        """Free the probe's slot if *token* holds it; the gate stays half-open."""

    @abstractmethod
    def _swap_gate(self, before: Gate | None, after: Gate, remembered: float, token: str) -> bool:
        """Write *after*, to be deleted in *remembered* seconds or later, and free the slot if
        *token* holds it.

        Only if the gate still has the trips of *before*, is closed if that was closed, has *token*
        as its probe if that had, and is not closed for longer than *after* by now.
        """
