"""The state of a running body: its unsaved progress, and its own transactions.

The renewer reads it while the body runs; the run reads it after the body has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from celery_leases.stores.sql.transactions import JoinedTransaction


class BodyState:
    """The state of one attempt's body. The lease object writes it; the run and the renewer's
    threads read it.
    """

    def __init__(self) -> None:
        #: The attempt has finished an effect or saved its progress.
        self.progressed = False
        self._unsaved: Callable[[], str] | None = None
        #: ``complete()`` was called.
        self.completing = False
        self._transaction: JoinedTransaction | None = None
        self._locking = False
        self._joined: list[JoinedTransaction] = []

    @property
    def unsaved_progress(self) -> str | None:
        """The unsaved progress as JSON text."""
        return self._unsaved() if self._unsaved is not None else None

    @property
    def has_unsaved_progress(self) -> bool:
        """Whether there is unsaved progress."""
        return self._unsaved is not None

    def set_unsaved_progress(self, progress: Callable[[], str] | None) -> None:
        """Set the unsaved progress; ``None``: all is saved.

        *progress* returns the JSON text. It is called only when the text is needed, because the
        progress changes often.
        """
        self._unsaved = progress

    @property
    def guarded(self) -> bool:
        """Whether a transaction of the body's own has locked the record's row, or is locking it;
        asks no server.
        """
        transaction = self._transaction
        return transaction is not None and (self._locking or transaction.is_open())

    def holds_row_lock(self) -> bool:
        """Whether a transaction of the body's own has locked the record's row; asks the server if
        the connection does not show it.
        """
        transaction = self._transaction
        if transaction is None or not transaction.is_over():
            return transaction is not None
        self._transaction = None
        return False

    def locked_by_another(self, given: Any) -> bool:
        """Whether *given* would wait for the record's row, because another transaction of this body
        has locked it.
        """
        transaction = self._transaction
        if transaction is None or not transaction.is_open():
            return False
        return not transaction.is_of(given) and self.holds_row_lock()

    def join(self, transaction: JoinedTransaction) -> None:
        """Note that the body uses *transaction*, so that it ends with the body at the latest."""
        self._joined = [joined for joined in self._joined if joined.is_open()] + [transaction]

    @contextmanager
    def locking(self, transaction: JoinedTransaction) -> Iterator[None]:
        """Enclose the statement by which *transaction* locks the record's row. If the statement
        raises, the state is as before.
        """
        before, self._transaction, self._locking = self._transaction, transaction, True
        try:
            yield
        except BaseException:
            self._transaction = before
            raise
        finally:
            self._locking = False

    def roll_back_open(self) -> bool:
        """Roll back the transactions that the body left open, because no code can commit them any
        more and they would keep the row locked; return whether there was one.
        """
        self._transaction = None
        if not self._joined:
            return False
        joined, self._joined = self._joined, []
        return sum(transaction.roll_back() for transaction in joined) > 0
