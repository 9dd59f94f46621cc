"""Leases in the records database, where the claimed row is the lease; and the marks and groups of a
lease store that has none of its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from sqlalchemy import (
    BigInteger,
    BindParameter,
    ColumnElement,
    Executable,
    Select,
    Update,
    and_,
    bindparam,
    case,
    cast,
    delete,
    or_,
    select,
    update,
)

from celery_leases.call import Call
from celery_leases.decide.answers import (
    Acquired,
    Holder,
    Refused,
    Renewal,
    RenewalResult,
)
from celery_leases.decide.before_run import holder_of_row
from celery_leases.decide.copies import waiting_call
from celery_leases.decide.latest import NEWEST, ORDER_TTL, Burst
from celery_leases.errors import StoreUnavailable
from celery_leases.options import DATABASE
from celery_leases.record import Ended, State
from celery_leases.stores.interfaces import LeaseStore, MarkedLeaseStore
from celery_leases.stores.sql.cooldown_groups import SqlGroups, later_of
from celery_leases.stores.sql.dialects import Writes
from celery_leases.stores.sql.records import SqlRecordStore
from celery_leases.stores.sql.rows import microseconds

_ORDER_TTL: Final = microseconds(ORDER_TTL)


class RowMarks:
    """Marks, and the state of groups, in the tables of *records*."""

    def __init__(self, records: SqlRecordStore) -> None:
        self.records = records
        self.database = records.database
        #: The groups, which the claim reads.
        self.groups = self.row_groups = SqlGroups(records.database, records.tables)
        self._marks = records.tables.marks
        self._swap_mark_writes = self.database.once(self._swap_statement)
        self._select_mark = self.database.once(self._mark_selection)
        self._raise_order, self._note_order, self._select_burst, self._end_burst = (
            self.database.once(self._burst_statements)
        )

    def mark(self, stored_key: str, name: str) -> str | None:
        """Read a mark."""
        row = self.database.first(self._select_mark, {"for_key": stored_key, "for_name": name})
        return row["value"] if row is not None else None

    def swap_mark(
        self, stored_key: str, name: str, expected: str | None, value: str, ttl: float
    ) -> bool:
        """Set a mark if it is absent, has expired, equals *expected*, or has this value already."""
        values = {
            "for_key": stored_key,
            "for_name": name,
            "new": value,
            "expected": expected,
            "ttl": microseconds(ttl),
        }
        return self.database.touch(self._swap_mark_writes, values)

    def new_order(self, stored_key: str) -> int:
        """The order of a new call, by the clock of the database."""
        return self.database.raised_to(self._raise_order, {"for_key": stored_key}) - _ORDER_TTL

    def note_order(self, stored_key: str, order: int, missing: int = 0) -> None:
        """Note a call, unless a newer one is noted than the missing one."""
        values = {
            "for_key": stored_key,
            "until": order + _ORDER_TTL,
            "first": str(order),
            "missing": missing + _ORDER_TTL,
        }
        self.database.touch(self._note_order, values)

    def burst(self, stored_key: str) -> Burst:
        """The newest call, and the first one of its burst."""
        row = self.database.first(self._select_burst, {"for_key": stored_key})
        assert row is not None
        if row["expires_at"] is None:
            return Burst(int(row["now"]))
        return Burst(int(row["now"]), row["expires_at"] - _ORDER_TTL, int(row["value"] or 0))

    def end_burst(self, stored_key: str, order: int) -> None:
        """Note that a run begins."""
        values = {"for_key": stored_key, "until": order + _ORDER_TTL}
        self.database.count(self._end_burst, values)

    def waiting(self, stored_key: str) -> list[str]:
        """The ids of the calls of the key that wait, as their marks say."""
        marks = self._marks
        found = select(marks.c.name, marks.c.value).where(
            marks.c.stored_key == stored_key, marks.c.expires_at > self.database.now
        )
        calls = (waiting_call(row["name"], row["value"]) for row in self.database.all(found, {}))
        return sorted({call for call in calls if call is not None})

    def delete_marks(self, stored_keys: Sequence[str]) -> None:
        """Delete all marks of these keys."""
        marks = self._marks
        self.database.count(delete(marks).where(marks.c.stored_key.in_(stored_keys)), {})

    def _renew_slots_of_groups(self, renewals: Sequence[Renewal]) -> Mapping[str, StoreUnavailable]:
        """Renew the slots of groups; returns the errors by owner token: a body must not outlive its
        slot, so its lease counts as not renewed.
        """
        failed: dict[str, StoreUnavailable] = {}
        for renewal in renewals:
            if renewal.slot is not None:
                try:
                    self.groups.renew_slot(renewal)
                except StoreUnavailable as error:
                    failed[renewal.token] = error
        return failed

    def _burst_statements(self) -> tuple[Executable, Writes, Executable, Update]:
        """Those that give a new order, note a given one, read the burst, and end it.

        The order of the newest call is the time at which its row expires, less a constant, so one
        statement can raise and return it. The value is the first call of the burst.
        """
        marks, now, dialect = self._marks, self.database.now, self.database.dialect
        key: dict[str, Any] = {"stored_key": bindparam("for_key"), "name": NEWEST}
        own = and_(*(marks.c[name] == value for name, value in key.items()))

        def begun(first: ColumnElement[Any]) -> ColumnElement[Any]:
            return case((marks.c.value == "", first), else_=marks.c.value)

        until, first = now + _ORDER_TTL, cast(now, marks.c.value.type)
        later = {"expires_at": later_of(marks.c.expires_at + 1, until), "value": begun(first)}
        new = {"expires_at": until, "value": first}
        raised = dialect.raised(marks, key, new, later, "expires_at")
        given: dict[str, BindParameter[Any]] = {
            "expires_at": bindparam("until", type_=BigInteger),
            "value": bindparam("first"),
        }
        missing: BindParameter[int] = bindparam("missing", type_=BigInteger)
        older = or_(marks.c.expires_at < given["expires_at"], marks.c.expires_at == missing)
        noted = update(marks).where(own, older)
        absent = dialect.insert_absent(marks, tuple(key), {**key, **given})
        writes = noted.values({**given, "value": begun(given["value"])}), *absent
        newest, value = (
            select(column).where(own).scalar_subquery().label(column.name)
            for column in (marks.c.expires_at, marks.c.value)
        )
        begins = case((marks.c.expires_at > given["expires_at"], first), else_="")
        ended = update(marks).where(own).values(value=begins)
        return raised, writes, select(newest, value, now.label("now")), ended

    def _mark_selection(self) -> Select[Any]:
        marks = self._marks
        return select(marks.c.value).where(
            marks.c.stored_key == bindparam("for_key"),
            marks.c.name == bindparam("for_name"),
            marks.c.expires_at > self.database.now,
        )

    def _swap_statement(self) -> Writes:
        marks, now = self._marks, self.database.now
        new: BindParameter[str] = bindparam("new")
        key: dict[str, Any] = {"stored_key": bindparam("for_key"), "name": bindparam("for_name")}
        values = {"value": new, "expires_at": now + bindparam("ttl")}
        free = or_(
            marks.c.expires_at <= now, marks.c.value == bindparam("expected"), marks.c.value == new
        )
        return self.database.dialect.upsert(marks, key, values, where=free)


class LeasesWithRowMarks(RowMarks):
    """A lease store without marks and groups of its own: both are in the tables of *records*. So
    the claim reads the group, and the lease is held meanwhile.
    """

    in_records = False

    def __init__(self, leases: LeaseStore, records: SqlRecordStore) -> None:
        super().__init__(records)
        self.leases = leases

    def __getattr__(self, name: str) -> Any:
        """What the lease store does itself."""
        return getattr(self.leases, name)

    def renew(self, renewals: Sequence[Renewal]) -> Sequence[RenewalResult | StoreUnavailable]:
        """Renew the leases, and the slots with statements of their own."""
        failed = self._renew_slots_of_groups(renewals)
        results = self.leases.renew(renewals)
        return [
            failed.get(renewal.token, result)
            for renewal, result in zip(renewals, results, strict=True)
        ]


class DatabaseLeaseStore(RowMarks, MarkedLeaseStore):
    """The claimed row of *records* is the lease, so the store cannot lose the lease and keep the
    row.
    """

    name = DATABASE
    in_records = True
    groups: SqlGroups

    def __init__(self, records: SqlRecordStore) -> None:
        super().__init__(records)
        #: Renews several leases, or one, as a process with one body does.
        self._renew_all, self._renew_one = self.database.once(self._renew_statements)
        self._select_unlocked, self._select_held, self._select_held_one = self.database.once(
            self._selections
        )

    def acquire(self, call: Call) -> Acquired | Refused:
        """Claim the row, which is the lease. The same statement reads the group."""
        return self.records.claim(call, self.name, groups=self.groups)

    def share_trips(self, running: Callable[[], int]) -> None:
        """Let claims share statements."""
        self.records.share_trips(running)

    def end(self, stored_key: str, token: str) -> None:
        """Do nothing: closing the row has released it."""

    def renew(self, renewals: Sequence[Renewal]) -> list[RenewalResult | StoreUnavailable]:
        """Extend ``lease_until``; never shorten it. There is one statement for all leases with the
        same ttl, and two for each slot.

        A transaction of the body may have locked a guarded row. A query finds the rows that are not
        locked, and only those are renewed.
        """
        locked = self._locked([renewal.stored_key for renewal in renewals if renewal.guarded])
        failed: Mapping[str, StoreUnavailable] = {}
        if not locked or self.database.dialect.has_server:
            failed = self._renew_slots_of_groups(renewals)
        renewed: set[tuple[str, str]] = set()
        by_ttl: defaultdict[float, list[Renewal]] = defaultdict(list)
        for renewal in renewals:
            if renewal.stored_key not in locked:
                by_ttl[renewal.ttl].append(renewal)
        for ttl, group in by_ttl.items():
            renewed |= self._renewed(ttl, group)
        return [
            failed[renewal.token]
            if renewal.token in failed
            else RenewalResult.OURS
            if (renewal.stored_key, renewal.token) in renewed
            else self._result_of_other(renewal, locked)
            for renewal in renewals
        ]

    def release(self, stored_key: str, token: str) -> bool:
        """Set the row to ``pending`` if it is still running under *token*."""
        records = self.records.tables.records
        freed = records.update().where(
            records.c.stored_key == stored_key,
            records.c.owner == token,
            records.c.state == State.RUNNING,
        )
        values = {
            "state": State.PENDING,
            "ended": Ended.RELEASED,
            "lease_until": None,
            "expires_at": None,
        }
        return self.database.count(freed.values(values), {}) == 1

    def cool(self, stored_key: str, token: str, seconds: float) -> bool:
        """Do nothing: the settled row has its ``retry_at``, and a renewal changes only running
        rows.
        """
        return True

    def holder(self, stored_key: str) -> Holder | None:
        """The holder of the key; ``None`` if no attempt holds it."""
        record = self.records.read(stored_key, lenient=True)
        return holder_of_row(record) if record is not None else None

    def held(self, stored_keys: Sequence[str]) -> set[str]:
        """The keys that are held, by one statement that locks no row."""
        if len(stored_keys) == 1:
            row = self.database.first(self._select_held_one, {"key": stored_keys[0]})
            return {row["stored_key"]} if row is not None else set()
        return {
            row["stored_key"] for row in self.database.all(self._select_held, {"keys": stored_keys})
        }

    def _locked(self, keys: Sequence[str]) -> set[str]:
        """The keys whose row is locked by a transaction. On SQLite a writer locks all rows."""
        if not keys:
            return set()
        if not self.database.dialect.has_server:
            return set() if self.database.has_no_writer() else set(keys)
        return set(keys) - {
            row["stored_key"] for row in self.database.all(self._select_unlocked, {"keys": keys})
        }

    def _renewed(self, ttl: float, group: Sequence[Renewal]) -> set[tuple[str, str]]:
        """Renew the leases that their tokens still hold; returns their keys and tokens."""
        keys, tokens = (
            [renewal.stored_key for renewal in group],
            [renewal.token for renewal in group],
        )
        statement = self._renew_all
        values: dict[str, Any] = {"span": microseconds(ttl), "keys": keys, "tokens": tokens}
        if len(group) == 1:
            statement, values["keys"], values["tokens"] = self._renew_one, keys[0], tokens[0]
        if self.database.dialect.writes_return:
            return {
                (row["stored_key"], row["owner"]) for row in self.database.all(statement, values)
            }
        if self.database.count(statement, values) == len(group):
            return set(zip(keys, tokens, strict=True))
        if len(group) == 1:
            return set()
        return set().union(*(self._renewed(ttl, [renewal]) for renewal in group))

    def _selections(self) -> tuple[Select[Any], Select[Any], Select[Any]]:
        """The rows of *keys* that no transaction locks, those that are held, and the row of *key*
        if it is held.
        """
        columns = self.records.tables.records.c
        keys = select(columns.stored_key)
        of_keys = keys.where(columns.stored_key.in_(bindparam("keys", expanding=True)))
        running = (columns.state == State.RUNNING) & (columns.lease_until > self.database.now)
        of_key = keys.where(columns.stored_key == bindparam("key"), running)
        return of_keys.with_for_update(skip_locked=True), of_keys.where(running), of_key

    def _renew_statements(self) -> tuple[Update, Update]:
        """The one for several leases, and that for one, whose text is always the same: a list
        changes it, but on PostgreSQL.
        """
        columns, is_one_of = self.records.tables.records.c, self.database.dialect.is_one_of
        return (
            self._renew_statement(
                is_one_of(columns.stored_key, "keys"), is_one_of(columns.owner, "tokens")
            ),
            self._renew_statement(
                columns.stored_key == bindparam("keys"), columns.owner == bindparam("tokens")
            ),
        )

    def _renew_statement(self, *leases: ColumnElement[bool]) -> Update:
        records = self.records.tables.records
        until: ColumnElement[int] = self.database.now + bindparam("span", type_=BigInteger)
        renewed = (
            records.update()
            .values(lease_until=later_of(records.c.lease_until, until))
            .where(*leases, records.c.state == State.RUNNING)
        )
        if not self.database.dialect.writes_return:
            return renewed
        return renewed.returning(records.c.stored_key, records.c.owner)

    def _result_of_other(self, renewal: Renewal, locked: set[str]) -> RenewalResult:
        record = self.records.read(renewal.stored_key, lenient=True)
        ours = record is not None and record.is_attempt(State.RUNNING, renewal.token)
        if ours and renewal.stored_key in locked:
            return RenewalResult.LOCKED
        return (
            RenewalResult.MISSING
            if record is None or holder_of_row(record) is None
            else RenewalResult.OTHER
        )
