"""Filters and orders of records, and positions for paging. Pure."""

from __future__ import annotations

import binascii
from base64 import urlsafe_b64decode, urlsafe_b64encode
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Self

from celery_leases.errors import LeaseConfigurationError
from celery_leases.record import Record, State
from celery_leases.status import ABANDONED, LEASE_ENDED, RECORD_UNREADABLE, UNREADABLE

KNOWN_STATES: Final = (*(state.value for state in State), ABANDONED, UNREADABLE)
"""The states that a filter may name; the last two are not in a row."""


class Order(StrEnum):
    """Orders of records: the latest start first, the longest run time first, or by key."""

    LATEST = "latest"
    SLOWEST = "slowest"
    KEY = "key"


@dataclass(frozen=True, slots=True)
class Position:
    """The position of a record in an order: the value to order by, and the stored key."""

    value: int
    stored_key: str

    @classmethod
    def of(cls, record: Record, order: Order) -> Self:
        """The position of *record*."""
        if order is Order.SLOWEST:
            running = record.state is State.RUNNING or record.finished_at is None
            return cls(
                (record.now if running else record.finished_at or 0) - record.started_at,
                record.stored_key,
            )
        return cls(record.started_at if order is Order.LATEST else 0, record.stored_key)

    @classmethod
    def read(cls, token: str) -> Self:
        """The position that :meth:`token` has written; raises :class:`LeaseConfigurationError` for
        another text.
        """
        try:
            value, _, key = urlsafe_b64decode(token.encode("ascii") + b"==").decode().partition(":")
            return cls(int(value), key)
        except (ValueError, binascii.Error):
            raise LeaseConfigurationError(
                f"page={token!r} is not usable; write the token that the previous page returned"
            ) from None

    def token(self) -> str:
        """The position as text for a command line or a URL."""
        return urlsafe_b64encode(f"{self.value}:{self.stored_key}".encode()).decode().rstrip("=")


@dataclass(frozen=True, slots=True)
class RecordFilter:
    """Conditions on a record, all of which must hold.

    ``since`` and ``until`` apply to the start of the latest attempt, ``unmoved_since`` to the last
    change of the row, and ``expired_at`` to the end of its retention; all are microseconds since
    the epoch. ``published``: the record has no message that must still be published. ``group`` is
    the cooldown group of the last failure, ``reason`` a code as in ``LeaseStatus.reason``.
    """

    states: tuple[str, ...] = ()
    task: str | None = None
    group: str | None = None
    prefix: str | None = None
    reason: str | None = None
    since: int | None = None
    until: int | None = None
    unmoved_since: int | None = None
    crashed: bool = False
    expired_at: int | None = None
    published: bool = False

    @property
    def row_states(self) -> tuple[str, ...]:
        """The states of rows to read; empty: all."""
        if UNREADABLE in self.states or self.reason == RECORD_UNREADABLE:
            return ()
        found = {State.RUNNING.value if state == ABANDONED else state for state in self.states}
        if self.reason == LEASE_ENDED:
            found = found & {State.RUNNING.value} if found else {State.RUNNING.value}
        return tuple(sorted(found))

    @property
    def stored_reason(self) -> str | None:
        """The reason, if it is one that rows have; otherwise ``None``."""
        return None if self.reason in (LEASE_ENDED, RECORD_UNREADABLE) else self.reason

    @property
    def decided_by_columns(self) -> bool:
        """Whether the columns that SQL compares decide whether a record matches, without a look at
        the lease store or the document.
        """
        looked_up = {ABANDONED, UNREADABLE, State.RUNNING}.intersection(self.states)
        return not looked_up and self.reason is None and self.group is None

    def admits(self, record: Record, state: str) -> bool:
        """Whether *record*, whose status is *state*, matches. SQL has already compared times and
        task.
        """
        if self.states and state not in self.states:
            return False
        failure = record.failure
        if self.group is not None and (failure is None or failure.group != self.group):
            return False
        if self.reason is None:
            return True
        if self.stored_reason is None:
            return state == (ABANDONED if self.reason == LEASE_ENDED else UNREADABLE)
        return self.reason in (
            record.reason,
            record.ended,
            failure.reason if failure is not None else None,
        )
