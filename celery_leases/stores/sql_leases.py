"""Leases in the records' own database: the claimed row is the lease, so a run needs no other store."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from sqlalchemy import Executable, Update, bindparam, case, or_, select
from sqlalchemy.dialects import postgresql, sqlite

from celery_leases.core.decisions import holder_in
from celery_leases.core.ports import Claimed, Holder, Kept, Renewal
from celery_leases.core.records import Bid, Ended, State
from celery_leases.stores import rows
from celery_leases.stores.claims import DATABASE
from celery_leases.stores.sql import SqlRecordStore


class DatabaseLeaseStore:
    """A :class:`~celery_leases.core.ports.LeaseStore` and ``MarkStore`` made of the tables of *records*."""

    name = DATABASE
    in_records = True

    def __init__(self, records: SqlRecordStore) -> None:
        self.records = records
        self.database = records.database
        self._marks = records.tables.marks
        self._swap = self._swapping()

    def acquire(self, bid: Bid, *, settled: bool = False) -> Claimed:
        """Claim the row, and the lease with it."""
        return Claimed(self.records.claim(bid, self.name))

    def renew(self, renewals: Sequence[Renewal]) -> list[Kept]:
        """Push ``lease_until`` out, never back; one statement for all leases of one ttl."""
        kept: set[tuple[str, str]] = set()
        by_ttl: defaultdict[float, list[Renewal]] = defaultdict(list)
        for renewal in renewals:
            by_ttl[renewal.ttl].append(renewal)
        for ttl, group in by_ttl.items():
            kept |= {(row["stored_key"], row["owner"]) for row in self.database.all(self._renewing(ttl, group), {})}
        return [
            Kept.OURS if (renewal.stored_key, renewal.token) in kept else self._not_ours(renewal)
            for renewal in renewals
        ]

    def reassert(self, bid: Bid) -> bool:
        """Never: a row that is gone took the claim with it."""
        return False

    def release(self, stored_key: str, token: str) -> bool:
        """Close the row to ``pending`` if it is still running under *token*."""
        records = self.records.tables.records
        freed = records.update().where(
            records.c.stored_key == stored_key, records.c.owner == token, records.c.state == State.RUNNING
        )
        values = {"state": State.PENDING, "ended": Ended.RELEASED, "lease_until": None}
        return self.database.count(freed.values(values), {}) == 1

    def cool(self, stored_key: str, token: str, seconds: float) -> bool:
        """Nothing to do, as the settled row holds its ``retry_at``; whether nobody but *token* runs the key."""
        record = self.records.read(stored_key)
        return record is None or record.state is not State.RUNNING or record.owner == token

    def end_cooldown(self, stored_key: str) -> bool:
        """Never: the row is the cooldown, and is reset."""
        return False

    def holder(self, stored_key: str) -> Holder | None:
        """Who holds the key."""
        record = self.records.read(stored_key)
        return holder_in(record) if record is not None else None

    def holders(self, limit: int = 1000) -> Iterator[tuple[str, Holder]]:
        """The live leases."""
        records = self.records.tables.records
        live = select(*records.c, self.database.now.label("now")).where(
            records.c.state == State.RUNNING, records.c.lease_until > self.database.now
        )
        for row in self.database.all(live.limit(limit), {}):
            holder = holder_in(rows.to_record(row))
            if holder is not None:
                yield row["stored_key"], holder

    def mark(self, stored_key: str, name: str) -> str | None:
        """Read a mark."""
        marks = self._marks
        found = select(marks.c.value).where(
            marks.c.stored_key == stored_key, marks.c.name == name, marks.c.expires_at > self.database.now
        )
        row = self.database.first(found, {})
        return row["value"] if row is not None else None

    def swap_mark(self, stored_key: str, name: str, expected: str | None, value: str, ttl: float) -> bool:
        """Set a mark if it is absent, over, or equals *expected*; setting the same value again counts."""
        values = {"stored_key": stored_key, "name": name, "value": value, "expected": expected}
        return self.database.first(self._swap, values | {"ttl": int(ttl * 1e6)}) is not None

    def close(self) -> None:
        """Nothing of its own to close."""

    def _renewing(self, ttl: float, group: Sequence[Renewal]) -> Update:
        records = self.records.tables.records
        until = self.database.now + int(ttl * 1e6)
        renewed = records.update().where(
            records.c.stored_key.in_([renewal.stored_key for renewal in group]),
            records.c.owner.in_([renewal.token for renewal in group]),
            records.c.state == State.RUNNING,
        )
        longer = case((records.c.lease_until > until, records.c.lease_until), else_=until)
        return renewed.values(lease_until=longer).returning(records.c.stored_key, records.c.owner)

    def _not_ours(self, renewal: Renewal) -> Kept:
        record = self.records.read(renewal.stored_key)
        return Kept.MISSING if record is None or holder_in(record) is None else Kept.OTHER

    def _swapping(self) -> Executable:
        marks, now = self._marks, self.database.now
        insert = (sqlite if self.database.host_clock else postgresql).insert(marks)
        until = now + bindparam("ttl")
        given: dict[str, Any] = {name: bindparam(name) for name in ("stored_key", "name", "value")}
        swapped = insert.values(given | {"expires_at": until}).on_conflict_do_update(
            index_elements=[marks.c.stored_key, marks.c.name],
            set_={"value": bindparam("value"), "expires_at": until},
            where=or_(
                marks.c.expires_at <= now, marks.c.value == bindparam("expected"), marks.c.value == bindparam("value")
            ),
        )
        statement: Executable = swapped.returning(marks.c.name)
        return statement
