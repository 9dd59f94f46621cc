"""The outbox: messages in the rows of the records, which are published after the commit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Integer,
    Select,
    Table,
    Update,
    and_,
    bindparam,
    case,
    not_,
    or_,
    select,
    update,
)
from sqlalchemy.sql.dml import ReturningUpdate

from celery_leases.decide import repairs
from celery_leases.decide.after_run import CALL_ENDING_CAUSES
from celery_leases.decide.claim import has_message_of
from celery_leases.decide.repairs import NewCall
from celery_leases.record import CALLER_HAS_FAILURE, Ended, Record, State
from celery_leases.stores.sql import rows
from celery_leases.stores.sql.dialects import Writes
from celery_leases.stores.sql.records import SqlRecordStore
from celery_leases.stores.sql.rows import microseconds

PUBLISH_GRACE: Final = 5.0
"""Seconds after an enqueue in which only the process that enqueued the message publishes it.
Afterwards any relay may.
"""
PUBLISH_AGAIN: Final = 60.0
"""Seconds after which a process that took a message, and did not report the result, counts as
dead.
"""
_PUBLISH_GRACE_US: Final = microseconds(PUBLISH_GRACE)
_PUBLISH_AGAIN_US: Final = microseconds(PUBLISH_AGAIN)


class Outbox:
    """The messages in the rows of *records*. Times are those of the database's clock."""

    def __init__(self, records: SqlRecordStore) -> None:
        self.records = records
        self.database = records.database
        self._select_due, self._select_stranded = self.database.once(self._selections)

    @property
    def _table(self) -> Table:
        return self.records.tables.records

    def enqueue_writes(self, call: NewCall) -> Writes:
        """The write of a ``pending`` record with its message.

        It touches no row if the key has a record. For an expired record see :meth:`replace_writes`.
        """
        now = self.database.now
        new = rows.column_values(repairs.enqueued(None, call))
        new |= dict.fromkeys(("fence", "created_at", "started_at"), now) | {
            "publish_at": now + _PUBLISH_GRACE_US
        }
        return self.database.dialect.insert_absent(self._table, ("stored_key",), new)

    def replace_writes(self, old: Record, call: NewCall) -> Writes:
        """The same write for the expired record *old*. It touches no row if the record has
        changed.
        """
        return self._replacing(old, repairs.enqueued(old, call))

    def add_writes(self, record: Record, message: str, call_id: str) -> Writes:
        """The write that adds *message* of the call *call_id* to a record that belongs to no call.

        It touches no row if the record has changed. A record that was never run then belongs to
        this call. The record does not expire before its message is published.
        """
        until = self.database.now + _PUBLISH_GRACE_US
        owned = {"call_id": call_id} if _is_fresh(record) else {}
        return (
            self._unchanged(record).values(
                message=message, publish_at=until, expires_at=None, **owned
            ),
        )

    def reassign_writes(self, old: Record, call: NewCall, *, new_generation: bool) -> Writes:
        """The write that assigns *old*, a record that belongs to no call, to *call*. It touches no
        row if *old* has changed.
        """
        return self._replacing(old, repairs.reassigned(old, call, new_generation=new_generation))

    def _replacing(self, old: Record, new: Record) -> Writes:
        values = rows.column_values(replace(new, publish_at=new.now + _PUBLISH_GRACE_US))
        return (self._unchanged(old).values(values),)

    def sent(self, stored_key: str, call_id: str) -> None:
        """Record that the broker has the message of that call, which is queued unless it has begun
        meanwhile.
        """
        own, table = self._to_be_published(stored_key, call_id), self._table
        queued = and_(table.c.state == State.PENDING, table.c.ended.is_(None))
        published_at = case((queued, self.database.now), else_=None)
        self.database.count(own.values(publish_at=None, published_at=published_at), {})

    def withdraw(self, stored_key: str, call_id: str, retention: float) -> None:
        """Record that the broker has not accepted the message of that call. If the call has not
        begun, the key then belongs to no call; unless the message is shared, or the relay has taken
        it, perhaps because it is shared: then the relay publishes it.
        """
        own, table = self._to_be_published(stored_key, call_id), self._table
        due_in = table.c.publish_at - table.c.started_at
        not_taken = and_(due_in > 0, due_in < _PUBLISH_AGAIN_US)
        own = own.where(table.c.state == State.PENDING, table.c.ended.is_(None), not_taken)
        until = self.database.now + microseconds(retention)
        self.database.count(
            own.values(message=None, publish_at=None, call_id="", expires_at=until), {}
        )

    def share(self, record: Record) -> bool:
        """Make the message of a pending and unchanged row due since it was written: another caller
        relies on it, so it is published also if its publisher fails.

        Returns whether it is published in any case; ``False`` if the row has changed.
        """
        if record.publish_at is None or record.publish_at <= record.started_at:
            return True
        own = self._unchanged(record).values(publish_at=self._table.c.started_at)
        return self.database.count(own, {}) == 1

    def forget_message(self, stored_key: str, call_id: str) -> None:
        """Forget the message of that call in a row of another one, because it does not run any
        more.
        """
        record, table = self.records.read(stored_key, lenient=True), self._table
        if record is not None and has_message_of(record, call_id) and record.call_id != call_id:
            own = update(table).where(
                table.c.stored_key == stored_key, table.c.published_at == record.published_at
            )
            self.database.count(own.values(message=None, publish_at=None, published_at=None), {})

    def _to_be_published(self, stored_key: str, call_id: str) -> Update:
        table = self._table
        own = update(table).where(table.c.stored_key == stored_key, table.c.call_id == call_id)
        return own.where(table.c.publish_at.is_not(None))

    def take(self, stored_key: str, *, due: bool = False) -> Record | None:
        """Take the message of a key in order to publish it, unless it was published, or with *due*
        if it is due.
        """
        if not self.database.dialect.writes_return:
            return self._take_as_read(stored_key, due=due)
        row = self.database.first(self._taking(stored_key, due=due), {})
        return rows.to_record(row, lenient=True) if row is not None else None

    def due(self, limit: int) -> Sequence[str]:
        """The stored keys of at most *limit* messages that are due, the oldest first."""
        found = self.database.all(self._select_due, {"at_most": limit})
        return [row["stored_key"] for row in found]

    def published(self, record: Record) -> None:
        """Record that the broker has the message, unless another process has taken it since."""
        self.database.touch(self.published_writes(record), {})

    def published_writes(self, record: Record) -> Writes:
        """The write of :meth:`published`."""
        table = self._table
        mine = update(table).where(
            table.c.stored_key == record.stored_key, table.c.publish_at == record.publish_at
        )
        return (mine.values(publish_at=None, published_at=self.database.now),)

    def take_writes(self, record: Record, *, due: bool = False) -> tuple[Writes, Record]:
        """The write that takes the message of *record* if the row is unchanged, and the record as
        it is afterwards.
        """
        taken = replace(record, publish_at=record.now + _PUBLISH_AGAIN_US)
        as_seen = self._waiting(record.stored_key, due=due)
        as_seen = as_seen.where(self._table.c.publish_at == record.publish_at)
        return (as_seen.values(publish_at=taken.publish_at),), taken

    def drop(self, record: Record) -> None:
        """Drop the message of an unchanged row. If the call has not begun, the key then belongs to
        no call.
        """
        owned = {"call_id": ""} if _is_fresh(record) else {}
        self.database.count(
            self._unchanged(record).values(message=None, publish_at=None, **owned), {}
        )

    def oldest_due(self, since: float) -> Record | None:
        """The record whose message has been due longest, if that is at least *since* seconds."""
        before = self.database.now - microseconds(since)
        due = self._table.c.publish_at
        query = self.records.statements.select_rows.where(due <= before).order_by(due).limit(1)
        row = self.database.first(query, {})
        return rows.to_record(row, lenient=True) if row is not None else None

    def stranded(self, older: float, limit: int, last: Record | None = None) -> Sequence[Record]:
        """Rows whose message is perhaps in no queue, and was not published for *older* seconds.

        Either the message is due; or the row has not changed for that time, and is running,
        pending, or past a cooldown after which the call runs again by itself. A row that was
        published more recently is skipped, because its message may wait in a long queue. The caller
        must check the leases of running rows. The rows that started first come first, after
        *last*. In a row with an unreadable value ``unreadable`` says why.

        The result includes rows whose call has ended if the message of a call was published that
        had not begun: check whether it belongs to another call, which still runs then.
        """
        query, started_at = self._select_stranded, self._table.c.started_at
        if last is not None:
            later = and_(started_at == last.started_at, self._table.c.stored_key > last.stored_key)
            query = query.where(or_(started_at > last.started_at, later))
        found = self.database.all(query, {"older": microseconds(older), "at_most": limit})
        return [rows.to_record(row, lenient=True) for row in found]

    def _selections(self) -> tuple[Select[Any], Select[Any]]:
        """The statements of :meth:`due` and :meth:`stranded`."""
        table, at_most = self._table, bindparam("at_most", type_=Integer)
        due = select(table.c.stored_key).where(table.c.publish_at <= self.database.now)
        before = self.database.now - bindparam("older", type_=BigInteger)
        waited = or_(table.c.retry_at.is_(None), table.c.retry_at < before)
        moved = case(
            (table.c.finished_at.is_not(None), table.c.finished_at), else_=table.c.started_at
        )
        stopped = and_(
            table.c.ended.is_not_distinct_from(Ended.TERMINATED),
            table.c.reason.is_not(None),
            _is_one_of(table.c.reason, CALL_ENDING_CAUSES),
        )
        failed = and_(table.c.ended.is_not(None), _is_one_of(table.c.ended, CALLER_HAS_FAILURE))
        has_ended = and_(table.c.resumes == 0, or_(failed, stopped))
        queued = and_(table.c.published_at.is_not(None), table.c.finished_at.is_not(None))
        idle = or_(
            and_(table.c.state == State.PENDING, not_(has_ended)),
            and_(table.c.state == State.COOLING, table.c.resumes == 1),
            and_(not_(_is_one_of(table.c.state, (State.RUNNING, State.UNCERTAIN))), queued),
        )
        stuck = and_(
            table.c.publish_at.is_(None),
            moved < before,
            or_(table.c.state == State.RUNNING, and_(idle, waited)),
        )
        query = self.records.statements.select_rows.where(
            table.c.message.is_not(None),
            or_(table.c.published_at.is_(None), table.c.published_at < before),
            or_(table.c.publish_at <= self.database.now, stuck),
        )
        stranded = query.order_by(table.c.started_at, table.c.stored_key)
        return due.order_by(table.c.publish_at).limit(at_most), stranded.limit(at_most)

    def publish_again(self, record: Record) -> bool:
        """Make the message of an unchanged row due, so that it is taken as due; returns
        ``False`` if the row has changed.
        """
        return (
            self.database.count(self._unchanged(record).values(publish_at=self.database.now), {})
            == 1
        )

    def _unchanged(self, record: Record) -> Update:
        table = self._table
        return update(table).where(
            table.c.stored_key == record.stored_key,
            table.c.fence == record.fence,
            table.c.state == record.state,
            table.c.publish_at.is_not_distinct_from(record.publish_at),
            table.c.published_at.is_not_distinct_from(record.published_at),
        )

    def _taking(self, stored_key: str, *, due: bool) -> ReturningUpdate[Any]:
        now = self.database.now
        taken = self._waiting(stored_key, due=due).values(publish_at=now + _PUBLISH_AGAIN_US)
        return taken.returning(*self._table.c, now.label("now"))

    def _take_as_read(self, stored_key: str, *, due: bool) -> Record | None:
        record = self.records.read(stored_key, lenient=True)
        if record is None or record.publish_at is None:
            return None
        writes, taken = self.take_writes(record, due=due)
        return taken if self.database.touch(writes, {}) else None

    def _waiting(self, stored_key: str, *, due: bool) -> Update:
        columns = self._table.c
        waiting = update(self._table).where(
            columns.stored_key == stored_key, columns.publish_at.is_not(None)
        )
        return waiting.where(columns.publish_at <= self.database.now) if due else waiting


def _is_one_of(column: ColumnElement[str], values: Sequence[str]) -> ColumnElement[bool]:
    """``IN``, which SQLAlchemy would render again for each execution."""
    return or_(*(column == value for value in values))


def _is_fresh(record: Record) -> bool:
    return record.state is State.PENDING and not record.attempt
