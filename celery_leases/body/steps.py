"""The steps a handle can take beside the body: renew, act, save, and join a transaction of the user's own."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from celery_leases.body.effects import Effects
from celery_leases.core.ports import EffectStore
from celery_leases.core.records import Outcome, Record
from celery_leases.renewal import Renewer
from celery_leases.work import Transaction


class UserTransaction(Transaction, Protocol):
    """A transaction of the user's own in the records' database."""

    def join(self, key: str) -> None:
        """Be in it; raises :class:`WrongDatabase` for what cannot commit a record."""
        ...

    def guard(self, record: Record) -> None:
        """Lock the record's row; raises :class:`LeaseLost`."""
        ...

    def has_completed(self, record: Record) -> bool:
        """Whether the record is done under its attempt, as far as this transaction sees."""
        ...

    def complete(self, record: Record, outcome: Outcome) -> None:
        """Write the outcome, to be committed with the user's rows; raises :class:`LeaseLost`."""
        ...


@dataclass(frozen=True, slots=True)
class Steps:
    """What a handle works with: the renewer, the store of effects and progress, its effects, and the ways to complete.

    ``closed`` keeps signals away from a step; ``transaction`` makes one of what the user gives, where
    the records are in a database that can be shared; ``outcome`` is how the
    attempt is closed with a result.
    """

    renewer: Renewer
    store: EffectStore
    effects: Effects
    closed: Callable[[], AbstractContextManager[None]]
    transaction: Callable[[Any], UserTransaction] | None
    outcome: Callable[[Any], Outcome]
