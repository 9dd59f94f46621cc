"""Closes and opens groups in any store: compute the new state and write it by compare-and-set,
together with its history for operators.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from celery_leases.groups.group import ClosedGroup, Closing
from celery_leases.groups.history import PastClosing, dump, load, with_closing, with_opening
from celery_leases.groups.slots import Slots, close, opened

Change: TypeAlias = Callable[[Slots, float], Slots | None]
"""Makes new slots from those at a time; ``None``: nothing is to be changed."""


class ClosingGroups(ABC):
    """A :class:`~celery_leases.stores.interfaces.GroupStore` that can replace the state of a group
    by compare-and-set.
    """

    def close(self, group: str, closing: Closing, token: str) -> ClosedGroup:
        """Close the group; see :class:`~celery_leases.stores.interfaces.GroupStore`."""
        closed = self._change_group(
            group, token, lambda slots, now: close(slots, closing, token, now)
        )
        assert closed is not None  # a closing always has a result
        slots, now = closed
        closed_group = slots.closed_group(group, now)
        assert closed_group is not None
        return closed_group

    def open(self, group: str, token: str | None = None) -> bool:
        """Open a group and reset how often it closed in a row. With *token*, open only a group that
        is due for a probe whose probe is *token*.
        """
        change = self._change_group(
            group, token or "", lambda slots, now: opened(slots, token, now)
        )
        return change is not None

    def history(
        self, groups: Sequence[str] | None = None, limit: int = 1000
    ) -> Mapping[str, Sequence[PastClosing]]:
        """The last closings of each of *groups*, or of at most *limit* groups that have any; the
        latest closing first.
        """
        found = self._read_histories(groups, limit) if groups is None or groups else {}
        past = {group: load(text) for group, text in found.items()}
        return {group: each for group, each in past.items() if each}

    def get(self, group: str) -> ClosedGroup | None:
        """*group*; ``None`` when it is open."""
        slots, now = self.slots([group]).get(group, (None, 0.0))
        return slots.closed_group(group, now) if slots is not None else None

    @abstractmethod
    def slots(
        self, groups: Sequence[str] | None = None, limit: int = 1000
    ) -> Mapping[str, tuple[Slots, float]]:
        """The slots by group; see :class:`~celery_leases.stores.interfaces.GroupStore`."""

    @abstractmethod
    def _read_histories(self, groups: Sequence[str] | None, limit: int) -> Mapping[str, str]:
        """The texts of the histories of those *groups* that have any, or of at most *limit* groups.

        A history is stored for :data:`~celery_leases.groups.history.RETENTION` seconds.
        """

    @abstractmethod
    def _change_group(self, group: str, token: str, change: Change) -> tuple[Slots, float] | None:
        """Apply *change*, which closes or opens the group and frees the slot of *token*, and note
        it in the history; returns the slots afterwards and their time, or ``None`` if nothing is to
        be changed.
        """


def noted(past: str | None, before: Slots, after: Slots, group: str, now: float) -> str | None:
    """The text of the history after a change of the group at *now*, by the clock of the store;
    ``None`` if it stays closed for the same time.
    """
    closed_group = after.closed_group(group, now)
    if closed_group is None:
        return dump(with_opening(load(past), time.time()))
    if before.closed is not None and after.closed == before.closed:
        return None
    return dump(with_closing(load(past), closed_group, time.time()))
