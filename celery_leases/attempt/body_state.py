"""State of a running body: its unsaved progress, and its own open transactions.

The wrapper reads it when the body has ended, the renewer while the body runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol


class Transaction(Protocol):
    """A transaction of the body's own that has locked or completed the record's row."""

    def is_open(self) -> bool:
        """Whether it is neither committed nor rolled back."""
        ...

    def is_over(self) -> bool:
        """Whether it has certainly ended, whatever its connection does now; may cost a
        round trip.
        """
        ...

    def is_of(self, given: Any) -> bool:
        """Whether *given*, a session or connection of the user, is in this transaction."""
        ...

    def roll_back(self) -> bool:
        """End it, if it is certainly open; returns whether it was. Called only after the body has
        ended.
        """
        ...


class Work:
    """The state of one attempt; written by its lease object, read by the wrapper and the renewer's
    threads.
    """

    def __init__(self) -> None:
        #: The attempt has made progress: a finished effect, or saved progress.
        self.progressed = False
        self._unsaved: Callable[[], str] | None = None
        #: ``complete()`` was called.
        self.completing = False
        self._transaction: Transaction | None = None
        self._locking = False
        self._joined: list[Transaction] = []

    @property
    def unsaved(self) -> str | None:
        """The unsaved progress, in its stored form."""
        return self._unsaved() if self._unsaved is not None else None

    @property
    def has_unsaved(self) -> bool:
        """Whether there is unsaved progress."""
        return self._unsaved is not None

    def leave_unsaved(self, progress: Callable[[], str] | None) -> None:
        """Set the unsaved progress, or none. It is serialized only when it is read, because it
        changes often.
        """
        self._unsaved = progress

    @property
    def guarded(self) -> bool:
        """Whether a transaction of the body's own has locked the record's row, as far as it knows,
        or is about to.
        """
        transaction = self._transaction
        return transaction is not None and (self._locking or transaction.is_open())

    def is_locked(self) -> bool:
        """Whether a transaction of the body's own holds the row; asks the server if its connection
        does not show it.
        """
        transaction = self._transaction
        if transaction is None or not transaction.is_over():
            return transaction is not None
        self._transaction = None
        return False

    def guarded_elsewhere(self, given: Any) -> bool:
        """Whether another transaction than that of *given* holds the record's row, so that *given*
        would wait for it.
        """
        transaction = self._transaction
        if transaction is None or not transaction.is_open():
            return False
        return not transaction.is_of(given) and self.is_locked()

    def join(self, transaction: Transaction) -> None:
        """The body uses *transaction*, which ends with the body at the latest."""
        self._joined = [joined for joined in self._joined if joined.is_open()] + [transaction]

    @contextmanager
    def locking(self, transaction: Transaction) -> Iterator[None]:
        """Enclose the step that locks the record's row by *transaction*; if it raises, the state is
        as before.
        """
        before, self._transaction, self._locking = self._transaction, transaction, True
        try:
            yield
        except BaseException:
            self._transaction = before
            raise
        finally:
            self._locking = False

    def end(self) -> bool:
        """End the transactions that the body left open: no code can commit them any more, and they
        would keep the row locked.

        Returns whether there was one.
        """
        self._transaction = None
        if not self._joined:
            return False
        joined, self._joined = self._joined, []
        return sum(transaction.roll_back() for transaction in joined) > 0
