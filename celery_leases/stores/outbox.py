"""Messages in the records: written in the user's transaction or by a claim, published later by whoever comes first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from sqlalchemy import Update, and_, case, not_, or_, select, update

from celery_leases.core.keys import CallKey
from celery_leases.core.records import Ended, Record, State
from celery_leases.stores import mysql, rows
from celery_leases.stores.sql import SqlRecordStore
from celery_leases.stores.upserts import Writes, upsert

PUBLISH_GRACE: Final = 5.0
"""Seconds after an enqueue in which its own process publishes; then any relay may."""
PUBLISH_AGAIN: Final = 60.0
"""Seconds after which a publisher that took a message and said nothing more is taken for dead."""


class Outbox:
    """The messages that are kept in the records of *records*; times are those of the database's clock."""

    def __init__(self, records: SqlRecordStore) -> None:
        self.records = records
        self.database = records.database
        self._table = records.tables.records

    def enqueuing(self, task: str, key: CallKey, call_id: str, message: str, *, ttl: float, retention: float) -> Writes:
        """What writes a ``pending`` record with its message; *ttl* and *retention* are the task's.

        No row is touched where the key has a record that still counts.
        """
        table, now = self._table, self.database.now
        fresh: dict[str, Any] = {
            "task": task,
            "key": key.key,
            "state": State.PENDING.value,
            "fence": now,
            "owner": "",
            "call_id": call_id,
            "holder": "",
            "fingerprint": key.fingerprint,
            "digests": rows.written_digests(key.digests),
            "lease_store": "",
            "lease_ttl": int(ttl * rows.MICROSECONDS),
            "retention": int(retention * rows.MICROSECONDS),
            "finished_calls": "",
            "created_at": now,
            "started_at": now,
            "message": message,
            "publish_at": now + int(PUBLISH_GRACE * rows.MICROSECONDS),
        }
        none = (
            "expires_at",
            "retry_at",
            "result",
            "reason",
            "error",
            "ended",
            "finished_at",
            "lease_until",
            "published_at",
        )
        zero = ("retries", "attempt", "crashes", "failures", "quick_retries", "cooldowns", "resumes", "counted")
        fresh |= dict.fromkeys(none) | dict.fromkeys(zero, 0)
        # An expired row is another generation's; its fence goes on growing.
        fence = case((table.c.fence >= now, table.c.fence + 1), else_=now)
        return upsert(
            table,
            self.database.engine.dialect,
            {"stored_key": key.stored},
            fresh,
            where=table.c.expires_at <= now,
            new={"generation": 0},
            changed={"fence": fence, "generation": table.c.generation + 1},
        )

    def adding(self, record: Record, message: str, call_id: str) -> Writes:
        """What has *message*, that of the call *call_id*, published for a record that is with nobody.

        No row is touched where it has changed since it was read. A record that nobody has begun becomes that call's;
        one that an operator has reset is not purged before its message has gone.
        """
        until = self.database.now + int(PUBLISH_GRACE * rows.MICROSECONDS)
        owned = {"call_id": call_id} if _is_fresh(record) else {}
        return (self._unchanged(record).values(message=message, publish_at=until, expires_at=None, **owned),)

    def take(self, stored_key: str) -> Record | None:
        """Take the message of one key to publish it, if it is still to be published."""
        return self._take(stored_key, due=False)

    def take_due(self, stored_key: str) -> Record | None:
        """Take the message of one key, if it is due."""
        return self._take(stored_key, due=True)

    def due(self, limit: int) -> Sequence[str]:
        """The stored keys of at most *limit* messages that are due, the oldest first."""
        table = self._table
        query = select(table.c.stored_key).where(table.c.publish_at <= self.database.now)
        found = self.database.all(query.order_by(table.c.publish_at).limit(limit), {})
        return [row["stored_key"] for row in found]

    def published(self, record: Record) -> None:
        """The broker has the message, as of now; unless somebody else has taken it since, it is not published again."""
        table = self._table
        mine = update(table).where(table.c.stored_key == record.stored_key, table.c.publish_at == record.publish_at)
        self.database.count(mine.values(publish_at=None, published_at=self.database.now), {})

    def drop(self, record: Record) -> None:
        """Give up the message of a row that has not changed; if nobody has begun it, it is nobody's then."""
        owned = {"call_id": ""} if _is_fresh(record) else {}
        self.database.count(self._unchanged(record).values(message=None, publish_at=None, **owned), {})

    def stranded(self, older: float, limit: int, last: Record | None = None) -> Sequence[Record]:
        """Rows whose message is kept and may be with nobody, and was not published for *older* seconds.

        Their message is due, whatever their state; or they have not changed for as long and are running, pending, or
        cooling that is over and was to run by itself. Look at the lease of those that run. A copy may wait in a long
        queue, so one that was published later is left alone. The oldest come first, after *last*.
        """
        table = self._table
        before = self.database.now - int(older * rows.MICROSECONDS)
        waited = or_(table.c.retry_at.is_(None), table.c.retry_at < before)
        moved = case((table.c.finished_at.is_not(None), table.c.finished_at), else_=table.c.started_at)
        told = and_(table.c.ended.is_not_distinct_from(Ended.FAILED), table.c.resumes == 0)
        idle = or_(
            and_(table.c.state == State.PENDING, not_(told)), and_(table.c.state == State.COOLING, table.c.resumes == 1)
        )
        stuck = and_(
            table.c.publish_at.is_(None), moved < before, or_(table.c.state == State.RUNNING, and_(idle, waited))
        )
        query = self.records.reading.where(
            table.c.message.is_not(None),
            or_(table.c.published_at.is_(None), table.c.published_at < before),
            or_(table.c.publish_at <= self.database.now, stuck),
        )
        if last is not None:
            later = and_(table.c.started_at == last.started_at, table.c.stored_key > last.stored_key)
            query = query.where(or_(table.c.started_at > last.started_at, later))
        found = self.database.all(query.order_by(table.c.started_at, table.c.stored_key).limit(limit), {})
        return [rows.to_record(row) for row in found]

    def publish_again(self, record: Record) -> bool:
        """Make the message of a row due, unless the row has changed since it was read; then :meth:`take_due` it."""
        return self.database.count(self._unchanged(record).values(publish_at=self.database.now), {}) == 1

    def _unchanged(self, record: Record) -> Update:
        table = self._table
        return update(table).where(
            table.c.stored_key == record.stored_key,
            table.c.fence == record.fence,
            table.c.state == record.state,
            table.c.publish_at.is_not_distinct_from(record.publish_at),
            table.c.published_at.is_not_distinct_from(record.published_at),
        )

    def _take(self, stored_key: str, *, due: bool) -> Record | None:
        table, now = self._table, self.database.now
        waiting: Update = update(table).where(table.c.stored_key == stored_key, table.c.publish_at.is_not(None))
        if due:
            waiting = waiting.where(table.c.publish_at <= now)
        again = int(PUBLISH_AGAIN * rows.MICROSECONDS)
        if mysql.is_mysql(self.database.engine.dialect):
            record = self.records.read(stored_key)
            if record is None or record.publish_at is None:
                return None
            taken = replace(record, publish_at=record.now + again)
            as_seen = waiting.where(table.c.publish_at == record.publish_at).values(publish_at=taken.publish_at)
            return taken if self.database.count(as_seen, {}) else None
        returned = waiting.values(publish_at=now + again).returning(*table.c, now.label("now"))
        row = self.database.first(returned, {})
        return rows.to_record(row) if row is not None else None


def _is_fresh(record: Record) -> bool:
    return record.state is State.PENDING and not record.attempt
