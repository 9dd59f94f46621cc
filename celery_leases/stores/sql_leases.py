"""Leases in the records' own database: the claimed row is the lease, so a run needs no other store."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from sqlalchemy import BigInteger, BindParameter, ColumnElement, Update, bindparam, case, or_, select

from celery_leases.core.decisions import holder_in
from celery_leases.core.errors import StoreUnavailable
from celery_leases.core.ports import Claimed, Holder, Kept, Renewal, Shut
from celery_leases.core.records import Bid, Ended, Record, State, Won
from celery_leases.core.waiting import RETRY_GRACE
from celery_leases.stores import mysql, rows
from celery_leases.stores.claims import DATABASE
from celery_leases.stores.gate_values import gate_name
from celery_leases.stores.sql import SqlRecordStore
from celery_leases.stores.sql_gates import SqlGates
from celery_leases.stores.upserts import Writes, upsert

PROBE_TRIES = 3


class DatabaseLeaseStore(SqlGates):
    """A :class:`~celery_leases.core.ports.LeaseStore`, ``MarkStore`` and ``GateStore`` in the tables of *records*."""

    name = DATABASE
    in_records = True

    def __init__(self, records: SqlRecordStore) -> None:
        super().__init__(records.database, records.tables)
        self.records = records
        self._marks = records.tables.marks
        self._swap = self._swapping()

    def acquire(self, bid: Bid, *, settled: bool = False) -> Claimed | Shut:
        """Claim the row, and the lease with it: one statement, unless the gate of the bid's group is not open."""
        if bid.group is None:
            return Claimed(self.records.claim(bid, self.name))
        return self._acquire_in_group(bid, bid.group, PROBE_TRIES)

    def _acquire_in_group(self, bid: Bid, group: str, tries: int) -> Claimed | Shut:
        claim, won = self.records.claim_in_group(bid, self.name, gate_name(group))
        if won:
            return Claimed(claim, probe=won > 1)
        gate = self.gate(group)
        mine = gate is not None and gate.probe == bid.token
        if isinstance(claim, Won):  # by an earlier try, whose reply was lost
            return Claimed(claim, probe=mine)
        if mine:
            self.give_back_probe(group, bid.token)
        if gate is None or (mine and gate.half_open):
            return Claimed(claim)
        if not gate.half_open or gate.probe is not None or not tries:
            return Shut(gate, claim.record, looked=True)
        if claim.record is not None and _surely_refuses(claim.record, bid):
            return Claimed(claim)
        self.take_probe(group, bid.token, bid.ttl)
        return self._acquire_in_group(bid, group, tries - 1)

    def renew(self, renewals: Sequence[Renewal]) -> list[Kept]:
        """Push ``lease_until`` out, never back; one statement for all leases of one ttl, and one for their slots.

        On SQLite, whose writers exclude each other whatever they write, any writer locks what may not wait.
        """
        kept: set[tuple[str, str]] = set()
        alike: defaultdict[tuple[float, bool], list[Renewal]] = defaultdict(list)
        for renewal in renewals:
            alike[renewal.ttl, renewal.waits].append(renewal)
        for (ttl, waits), group in alike.items():
            kept |= self._renewed(ttl, group, waits=waits)
        for (ttl, _), group in alike.items():
            probes = [renewal for renewal in group if renewal.probe is not None]
            if probes and (kept or not self.database.host_clock):
                with suppress(StoreUnavailable):  # a slot that ends by itself changes nothing for the lease
                    self.renew_probes(probes, ttl)
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
        """Nothing to do: the settled row holds its ``retry_at``, and a renewal matches running rows only."""
        return True

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
        values = {"for_key": stored_key, "for_name": name, "new": value, "expected": expected, "ttl": int(ttl * 1e6)}
        return self.database.touch(self._swap, values)

    def close(self) -> None:
        """Nothing of its own to close."""

    def _renewed(self, ttl: float, group: Sequence[Renewal], *, waits: bool) -> set[tuple[str, str]]:
        """Renew those that are still ours; their keys and tokens."""
        records, keys = self.records.tables.records, [renewal.stored_key for renewal in group]
        values = {"span": int(ttl * 1e6), "keys": keys, "tokens": [renewal.token for renewal in group]}
        if not mysql.is_mysql(self.database.engine.dialect):
            renewing = self._renewing(waits=waits).returning(records.c.stored_key, records.c.owner)
            found = self.database.all(renewing, values) if waits else self.database.all_at_once(renewing, values)
            return {(row["stored_key"], row["owner"]) for row in found}
        statement = self._renewing(waits=True) if waits else mysql.renewing_free(records, self.database.engine.dialect)
        if self.database.count(statement, values) == len(group):
            return {(renewal.stored_key, renewal.token) for renewal in group}
        if len(group) == 1:
            return set()
        return set().union(*(self._renewed(ttl, [renewal], waits=waits) for renewal in group))

    def _renewing(self, *, waits: bool) -> Update:
        records = self.records.tables.records
        until: ColumnElement[int] = self.database.now + bindparam("span", type_=BigInteger)
        keys: BindParameter[Any] = bindparam("keys", expanding=True)
        tokens: BindParameter[Any] = bindparam("tokens", expanding=True)
        renewed = records.update().where(
            records.c.stored_key.in_(keys), records.c.owner.in_(tokens), records.c.state == State.RUNNING
        )
        if not waits:
            seen = records.alias()
            free = select(seen.c.stored_key).where(seen.c.stored_key.in_(keys)).with_for_update(skip_locked=True)
            renewed = renewed.where(records.c.stored_key.in_(free))
        longer = case((records.c.lease_until > until, records.c.lease_until), else_=until)
        return renewed.values(lease_until=longer)

    def _not_ours(self, renewal: Renewal) -> Kept:
        record = self.records.read(renewal.stored_key)
        if not renewal.waits and record and (record.state, record.owner) == (State.RUNNING, renewal.token):
            return Kept.LOCKED
        return Kept.MISSING if record is None or holder_in(record) is None else Kept.OTHER

    def _swapping(self) -> Writes:
        marks, now = self._marks, self.database.now
        new: BindParameter[str] = bindparam("new")
        key: dict[str, Any] = {"stored_key": bindparam("for_key"), "name": bindparam("for_name")}
        values = {"value": new, "expires_at": now + bindparam("ttl")}
        free = or_(marks.c.expires_at <= now, marks.c.value == bindparam("expected"), marks.c.value == new)
        return upsert(marks, self.database.engine.dialect, key, values, where=free)


def _surely_refuses(record: Record, bid: Bid) -> bool:
    """Whether the claim is plainly refused by the record, so that the probe's slot need not be taken to find out."""
    if record.expired:
        return False
    match record.state:
        case State.RUNNING:
            return record.lease_remaining > 0 and record.owner not in bid.prior
        case State.PENDING | State.COOLING:
            return record.waits > RETRY_GRACE
        case State.DONE | State.FAILED:
            return not bid.rerun or record.call_id == bid.call_id
        case State.UNCERTAIN:
            return True
