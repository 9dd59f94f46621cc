"""Closes a gate in any store: the rule computes the new gate, which is written by
compare-and-set. What was closed and opened is noted for operators.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final

from celery_leases.errors import StoreUnavailable
from celery_leases.protocol import closings
from celery_leases.protocol.closings import PastClosing
from celery_leases.protocol.groups import Closing, Gate, closed, remembered_for

CLOSE_TRIES: Final = 10
"""How often a compare-and-set is retried when other workers close the same gate concurrently."""
NOTE_TRIES: Final = 10
"""The same for the note of a closing, which is given up then."""

logger = logging.getLogger("celery_leases")


class GateClosing(ABC):
    """A :class:`~celery_leases.protocol.ports.GateStore` that can replace a gate that has not
    changed, and a :class:`~celery_leases.protocol.ports.ClosingStore`.
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
            now = time.time()
            if self._swap_gate(before, after, remembered_for(after, closing.policy), token):
                self._note(group, partial(closings.with_closing, shut=after, now=now))
                return after
        raise StoreUnavailable(
            f"the gate of {group} changed {CLOSE_TRIES} times while it was being closed", False
        )

    def open_gate(self, group: str, token: str | None = None) -> bool:
        """Open a gate and forget its trips. With *token* only a half-open one whose probe's slot
        the token holds.
        """
        opened = self._open_gate(group, token)
        if opened:
            self._note(group, partial(closings.with_opening, now=time.time()))
        return opened

    def past_closings(
        self, groups: Sequence[str] | None = None, limit: int = 1000
    ) -> Mapping[str, Sequence[PastClosing]]:
        """The last closings of *groups*, or of at most *limit* groups that have any; the latest
        first.
        """
        found = self._texts(groups, limit)
        past = {group: closings.load(text) for group, text in found.items()}
        return {group: each for group, each in past.items() if each}

    def _note(
        self, group: str, change: Callable[[Sequence[PastClosing]], Sequence[PastClosing]]
    ) -> None:
        """Change what is remembered of *group*. It is for operators only, so it fails silently."""
        try:
            for _ in range(NOTE_TRIES):
                before = next(iter(self._texts([group], 1).values()), None)
                after = closings.dump(change(closings.load(before)))
                if after == (before or "[]") or self._swap_text(group, before, after):
                    return
        except StoreUnavailable as error:
            logger.debug("the closing of the group %s was not noted: %s", group, error)

    @abstractmethod
    def _texts(self, groups: Sequence[str] | None, limit: int) -> Mapping[str, str]:
        """What :meth:`_swap_text` has written, for those *groups* that have any, or for at most
        *limit* groups.
        """

    @abstractmethod
    def _swap_text(self, group: str, before: str | None, after: str) -> bool:
        """Write *after* for :data:`~celery_leases.protocol.closings.REMEMBERED` seconds if *before*
        is what is there, or nothing is.
        """

    @abstractmethod
    def _open_gate(self, group: str, token: str | None) -> bool:
        """As :meth:`open_gate`, and nothing else."""

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

        Write only if the gate's trips, its state (closed or half-open) and whether *token* is its
        probe are as in *before*, and it is not closed for longer than *after*.
        """
