"""What the body of one attempt does beside returning: its unsaved progress, and transactions of its own that are open.

The wrapper asks when the body has ended, the renewer while it runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol


class Transaction(Protocol):
    """A transaction of the body's own in which the record's row is locked, or has been completed."""

    def is_open(self) -> bool:
        """Whether it is neither committed nor rolled back."""
        ...

    def is_of(self, given: Any) -> bool:
        """Whether *given*, a session or connection of the user's, is in this very transaction."""
        ...

    def roll_back(self) -> None:
        """End it; called only once the body has ended."""
        ...


class Work:
    """Of one attempt; written by its handle, read by the wrapper and by the renewer's threads."""

    def __init__(self) -> None:
        #: The attempt has got on: a finished effect, or saved progress.
        self.progressed = False
        self._unsaved: Callable[[], str] | None = None
        #: ``complete()`` was called.
        self.completing = False
        self._transaction: Transaction | None = None
        self._joined: list[Transaction] = []

    @property
    def unsaved(self) -> str | None:
        """Progress that is not saved yet, as it is stored."""
        return self._unsaved() if self._unsaved is not None else None

    @property
    def has_unsaved(self) -> bool:
        """Whether there is any."""
        return self._unsaved is not None

    def leave_unsaved(self, progress: Callable[[], str] | None) -> None:
        """There is progress to be saved, or none any more. Written down only when somebody asks: it changes often."""
        self._unsaved = progress

    @property
    def guarded(self) -> bool:
        """Whether a transaction of the body's own has the record's row locked."""
        transaction = self._transaction
        return transaction is not None and transaction.is_open()

    def guarded_elsewhere(self, given: Any) -> bool:
        """Whether the record's row is locked by another transaction than that of *given*, which would wait for it."""
        transaction = self._transaction
        return transaction is not None and transaction.is_open() and not transaction.is_of(given)

    def join(self, transaction: Transaction) -> None:
        """The body has given us *transaction*, which ends with the body at the latest."""
        self._joined = [joined for joined in self._joined if joined.is_open()] + [transaction]

    def guard(self, transaction: Transaction) -> None:
        """The record's row is locked by *transaction* from now on."""
        self._transaction = transaction

    def end(self) -> None:
        """End what the body has left open: nobody can commit it any more, and it would keep the row locked."""
        joined, self._joined, self._transaction = self._joined, [], None
        for transaction in joined:
            if transaction.is_open():
                transaction.roll_back()
