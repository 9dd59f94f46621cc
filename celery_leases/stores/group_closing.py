"""Closes a gate in any store: compute the new gate and write it by compare-and-set, together with
its history for operators.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Final

from celery_leases.errors import StoreUnavailable
from celery_leases.groups.group import Closing, Gate, closed, gate_retention
from celery_leases.groups.history import PastClosing, dump, load, with_closing, with_opening

CLOSE_TRIES: Final = 10
"""How often a compare-and-set is retried when other workers close the same gate concurrently."""


class ClosingGroups(ABC):
    """A :class:`~celery_leases.stores.interfaces.GroupStore` that can replace a gate by
    compare-and-set.
    """

    def close(self, group: str, closing: Closing, token: str) -> Gate:
        """Close the gate; see :class:`~celery_leases.stores.interfaces.GroupStore`."""
        for _ in range(CLOSE_TRIES):
            before, past = self._read(group)
            after = closed(group, before, closing, token)
            if before is not None and after.closed_for == before.closed_for:  # closed long enough
                if before.probe == token:
                    self.release_probe(group, token)
                return after
            noted = dump(with_closing(load(past), after, time.time()))
            if self._swap(before, after, gate_retention(after, closing.policy), token, noted):
                return after
        raise StoreUnavailable(
            f"the gate of {group} changed {CLOSE_TRIES} times while it was being closed", False
        )

    def open(self, group: str, token: str | None = None) -> bool:
        """Open a gate and reset its trips. With *token*, open only a half-open gate whose probe
        slot *token* holds.
        """
        before, past = self._read(group)
        if before is None or (token is not None and not before.is_probed_by(token)):
            return False
        noted = dump(with_opening(load(past), time.time()))
        return self._open(group, token, noted)

    def history(
        self, groups: Sequence[str] | None = None, limit: int = 1000
    ) -> Mapping[str, Sequence[PastClosing]]:
        """The last closings of each of *groups*, or of at most *limit* groups that have any; the
        latest closing first.
        """
        found = self._read_histories(groups, limit) if groups is None or groups else {}
        past = {group: load(text) for group, text in found.items()}
        return {group: each for group, each in past.items() if each}

    def get(self, group: str) -> Gate | None:
        """The gate of *group*; ``None`` when it is open."""
        return self._read(group)[0]

    @abstractmethod
    def release_probe(self, group: str, token: str) -> bool:
        """Free the probe slot if *token* holds it; the gate stays half-open."""

    @abstractmethod
    def _read(self, group: str) -> tuple[Gate | None, str | None]:
        """The gate of *group*, ``None`` when it is open, and the text of its history."""

    @abstractmethod
    def _read_histories(self, groups: Sequence[str] | None, limit: int) -> Mapping[str, str]:
        """The texts of the histories of those *groups* that have any, or of at most *limit* groups.

        A history is stored for :data:`~celery_leases.groups.history.RETENTION` seconds.
        """

    @abstractmethod
    def _open(self, group: str, token: str | None, past: str) -> bool:
        """As :meth:`open`, with *past* as the text of the history."""

    @abstractmethod
    def _swap(
        self, before: Gate | None, after: Gate, remembered: float, token: str, past: str
    ) -> bool:
        """Write *after*, which expires after at least *remembered* seconds, and *past* as the text
        of its history, and free the probe slot if *token* holds it.

        Writes only if three values are still those of *before*: the trips, the state (closed or
        half-open), and whether *token* holds the slot. Does not write over a gate that is closed
        for longer than *after*.
        """
