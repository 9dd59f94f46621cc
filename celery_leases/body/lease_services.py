"""The services behind a body's lease object: renewal, effects, progress, and transactions of the
user's own.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from celery_leases.attempt.body_state import Transaction
from celery_leases.attempt.renewal import Renewer
from celery_leases.body.effects import Effects
from celery_leases.record import Outcome, Record
from celery_leases.stores.interfaces import EffectStore


class UserTransaction(Transaction, Protocol):
    """A transaction of the user's own in the records' database."""

    def join(self, key: str) -> None:
        """Join the transaction; raises :class:`WrongDatabase` if it cannot commit a record."""
        ...

    def guard(self, record: Record) -> None:
        """Lock the record's row; raises :class:`LeaseLost`."""
        ...

    def has_completed(self, record: Record) -> bool:
        """Whether this attempt has completed the record, as far as this transaction can see."""
        ...

    def complete(self, record: Record, outcome: Outcome) -> None:
        """Write the outcome, to be committed with the user's rows; raises :class:`LeaseLost`."""
        ...


@dataclass(frozen=True, slots=True)
class LeaseServices:
    """The services of one attempt's lease object.

    ``store`` stores effects and progress. ``interrupts_deferred`` defers signals during a step.
    ``transaction`` makes a transaction from the user's session or connection; it returns ``None``
    for records in memory if the commit cannot be observed. ``outcome`` makes the outcome of an
    attempt from its result.
    """

    renewer: Renewer
    store: EffectStore
    effects: Effects
    interrupts_deferred: Callable[[], AbstractContextManager[None]]
    transaction: Callable[[Any], UserTransaction | None]
    outcome: Callable[[Any], Outcome]
