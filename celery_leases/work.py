"""What the body of one attempt does beside returning: its unsaved progress, and transactions of its own that are open.

The wrapper asks when the body has ended, the renewer while it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol


class Transaction(Protocol):
    """A transaction of the body's own in which the record's row is locked, or has been completed."""

    def is_open(self) -> bool:
        """Whether it is neither committed nor rolled back."""
        ...

    def is_over(self) -> bool:
        """Whether it is known to have ended, whatever its connection is doing now; may be a round trip."""
        ...

    def is_of(self, given: Any) -> bool:
        """Whether *given*, a session or connection of the user's, is in this very transaction."""
        ...

    def roll_back(self) -> bool:
        """End it, if it is surely open; whether it was. Called only once the body has ended."""
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
        self._locking = False
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
        """Whether a transaction of the body's own has the record's row locked, as far as it knows, or is about to."""
        transaction = self._transaction
        return transaction is not None and (self._locking or transaction.is_open())

    def is_locked(self) -> bool:
        """Whether the row is locked by a transaction of the body's own: asked, where its connection cannot tell."""
        transaction = self._transaction
        if transaction is None or not transaction.is_over():
            return transaction is not None
        self._transaction = None
        return False

    def guarded_elsewhere(self, given: Any) -> bool:
        """Whether the record's row is locked by another transaction than that of *given*, which would wait for it."""
        transaction = self._transaction
        if transaction is None or not transaction.is_open():
            return False
        return not transaction.is_of(given) and self.is_locked()

    def join(self, transaction: Transaction) -> None:
        """The body has given us *transaction*, which ends with the body at the latest."""
        self._joined = [joined for joined in self._joined if joined.is_open()] + [transaction]

    @contextmanager
    def locking(self, transaction: Transaction) -> Iterator[None]:
        """Enclose what locks the record's row by *transaction*; if it raises, all is as before."""
        before, self._transaction, self._locking = self._transaction, transaction, True
        try:
            yield
        except BaseException:
            self._transaction = before
            raise
        finally:
            self._locking = False

    def end(self) -> bool:
        """End what the body has left open: nobody can commit it any more, and it would keep the row locked.

        Whether there was any.
        """
        self._transaction = None
        if not self._joined:
            return False
        joined, self._joined = self._joined, []
        return sum(transaction.roll_back() for transaction in joined) > 0
