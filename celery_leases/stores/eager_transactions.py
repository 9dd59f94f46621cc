"""The user's transaction in an eager call, whose records are in memory.

A record in memory cannot be part of the user's transaction. So the outcome is written when the
transaction commits, and a rollback leaves the record unchanged.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection
from sqlalchemy.orm import Session, scoped_session

from celery_leases.errors import LeaseLost
from celery_leases.keys import CallKey
from celery_leases.record import Outcome, Record, State
from celery_leases.stores.sql.eager_after_commit import do_after_commit
from celery_leases.stores.sql.transactions import JoinedTransaction, open_check


def commit_is_observable(given: Any) -> bool:
    """Whether the commit of *given*, a session or connection, can be observed."""
    return isinstance(given, Session | Connection | scoped_session)


class EagerTransaction(JoinedTransaction):
    """One open transaction of the user's, in any database."""

    def join(self, key: str) -> None:
        """Join the transaction; begin one if the user gave a SQLAlchemy session or connection."""
        if self._is_open is None:
            self._is_open = open_check(self._given)

    def guard(self, record: Record) -> None:
        """Raise :class:`LeaseLost` unless the attempt still owns the record."""
        now = self.records.read(record.stored_key)
        if now is None or not now.is_attempt(State.RUNNING, record.owner, record.fence):
            why = "the record was changed by another attempt or an operator"
            raise LeaseLost(f"{record.key}: the lease is lost: {why}", record.key, why)

    def has_completed(self, record: Record) -> bool:
        """Whether the record is done under its attempt."""
        now = self.records.read(record.stored_key)
        return now is not None and now.is_attempt(State.DONE, record.owner, record.fence)

    def complete(self, record: Record, outcome: Outcome) -> None:
        """Write the outcome when this transaction commits; raises :class:`LeaseLost` as
        :meth:`guard` does.
        """
        self.guard(record)
        key = CallKey(record.key, record.stored_key)

        def committed(_: bool) -> None:
            self.records.settle(record, outcome)

        do_after_commit(self._given, key, record.call_id, committed, completes=True)
