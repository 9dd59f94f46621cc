"""Closes a gate in any store: compute the new gate and write it by compare-and-set. Each closing
and opening is remembered for operators.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final

from celery_leases.errors import StoreUnavailable
from celery_leases.groups import history as cooldown_group_history
from celery_leases.groups.group import Closing, Gate, closed, gate_retention
from celery_leases.groups.history import PastClosing

CLOSE_TRIES: Final = 10
"""How often a compare-and-set is retried when other workers close the same gate concurrently."""
HISTORY_TRIES: Final = 10
"""The same for the history of a gate. Afterwards the closing is not remembered."""

logger = logging.getLogger("celery_leases")


class GateClosing(ABC):
    """A :class:`~celery_leases.stores.interfaces.GateStore` and
    :class:`~celery_leases.stores.interfaces.ClosingStore` that can replace a gate by
    compare-and-set.
    """

    def close_gate(self, group: str, closing: Closing, token: str) -> Gate:
        """Close the gate; see :class:`~celery_leases.stores.interfaces.GateStore`."""
        for _ in range(CLOSE_TRIES):
            before = self.gate(group)
            after = closed(group, before, closing, token)
            if before is not None and after.closed_for == before.closed_for:  # closed long enough
                if before.probe == token:
                    self.release_probe(group, token)
                return after
            now = time.time()
            if self._swap_gate(before, after, gate_retention(after, closing.policy), token):
                self._remember(
                    group, partial(cooldown_group_history.with_closing, gate=after, now=now)
                )
                return after
        raise StoreUnavailable(
            f"the gate of {group} changed {CLOSE_TRIES} times while it was being closed", False
        )

    def open_gate(self, group: str, token: str | None = None) -> bool:
        """Open a gate and reset its trips. With *token*, open only a half-open gate whose probe
        slot *token* holds.
        """
        opened = self._open_gate(group, token)
        if opened:
            self._remember(group, partial(cooldown_group_history.with_opening, now=time.time()))
        return opened

    def past_closings(
        self, groups: Sequence[str] | None = None, limit: int = 1000
    ) -> Mapping[str, Sequence[PastClosing]]:
        """The last closings of each of *groups*, or of at most *limit* groups that have any; the
        latest closing first.
        """
        found = self._read_histories(groups, limit)
        past = {group: cooldown_group_history.load(text) for group, text in found.items()}
        return {group: each for group, each in past.items() if each}

    def _remember(
        self, group: str, change: Callable[[Sequence[PastClosing]], Sequence[PastClosing]]
    ) -> None:
        """Change the history of *group*. Only operators read it, so an error is logged at DEBUG."""
        try:
            for _ in range(HISTORY_TRIES):
                before = next(iter(self._read_histories([group], 1).values()), None)
                after = cooldown_group_history.dump(change(cooldown_group_history.load(before)))
                if after == (before or "[]") or self._swap_history(group, before, after):
                    return
        except StoreUnavailable as error:
            logger.debug("the history of the group %s was not written: %s", group, error)

    @abstractmethod
    def _read_histories(self, groups: Sequence[str] | None, limit: int) -> Mapping[str, str]:
        """What :meth:`_swap_text` has written, for those *groups* that have any, or for at most
        *limit* groups.
        """

    @abstractmethod
    def _swap_history(self, group: str, before: str | None, after: str) -> bool:
        """Write *after* if the stored text equals *before*, or if no text is stored; returns
        whether it was written. The text expires after
        :data:`~celery_leases.groups.history.RETENTION` seconds.
        """

    @abstractmethod
    def _open_gate(self, group: str, token: str | None) -> bool:
        """As :meth:`open_gate`, without the history."""

    @abstractmethod
    def gate(self, group: str) -> Gate | None:
        """The gate of *group*; ``None`` when it is open."""

    @abstractmethod
    def release_probe(self, group: str, token: str) -> bool:
        """Free the probe slot if *token* holds it; the gate stays half-open."""

    @abstractmethod
    def _swap_gate(self, before: Gate | None, after: Gate, remembered: float, token: str) -> bool:
        """Write *after*, which expires after at least *remembered* seconds, and free the probe
        slot if *token* holds it.

        Writes only if three values are still those of *before*: the trips, the state (closed or
        half-open), and whether *token* holds the slot. Does not write over a gate that is closed
        for longer than *after*.
        """
