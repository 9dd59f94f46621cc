"""Records in a SQL database, through SQLAlchemy Core."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from sqlalchemy import (
    BigInteger,
    BindParameter,
    Boolean,
    ColumnElement,
    Engine,
    RowMapping,
    Update,
    and_,
    bindparam,
    case,
    delete,
    exists,
    func,
    null,
    select,
    tuple_,
    update,
)

from celery_leases.core.errors import LeaseStoreMismatch
from celery_leases.core.records import Bid, Ended, Outcome, Record, Refused, State, Won
from celery_leases.stores import rows
from celery_leases.stores.claims import Claim, claim_of
from celery_leases.stores.database import Database
from celery_leases.stores.schema import Tables
from celery_leases.stores.upserts import apart

BATCH = 500
RETENTION: Final = 7 * 86_400.0
"""Seconds for which a row counts whose task has not said how long."""


class SqlRecordStore:
    """A :class:`~celery_leases.core.ports.RecordStore` in one database."""

    def __init__(self, engine: Engine, tables: Tables | None = None) -> None:
        self.database = Database(engine)
        self.tables = tables or Tables()
        records = self.tables.records
        #: Selects whole rows with the time of the statement.
        self.reading = select(*records.c, self.database.now.label("now"))
        self._read = self.reading.where(records.c.stored_key == bindparam("stored_key"))
        self._claim = claim_of(records, engine.dialect)
        self._claim_in_group = claim_of(records, engine.dialect, self.tables.gates)
        #: Closes an attempt, fenced; see :func:`celery_leases.stores.rows.of_outcome` for its parameters.
        self.settling = self._settling()
        #: Locks the row of a running attempt, and pushes out the lease if the row is one;
        #: see :func:`celery_leases.stores.rows.of_guard`.
        self.guarding = self._guarding()
        #: Locks that row without a change.
        self.locking = select(records.c.fence).where(*self._running()).with_for_update()

    def check(self) -> None:
        """Raise :class:`SchemaOutdated` unless the tables are there in this version; SQLite gets them made."""
        with self.database.errors():
            self.tables.check(self.database.engine)

    def migrate(self) -> None:
        """Create the tables that are missing; raises :class:`StoreUnavailable` when the database does not answer."""
        with self.database.errors():
            self.tables.create(self.database.engine)

    def claim(self, bid: Bid, lease_store: str) -> Won | Refused:
        """Make the row ours; see :class:`~celery_leases.core.ports.RecordStore`.

        Raises :class:`LeaseStoreMismatch` when the key runs under another lease store.
        """
        return self._claimed(bid, lease_store, self._answer(self._claim, rows.of_bid(bid, lease_store)))

    def claim_in_group(self, bid: Bid, lease_store: str, gate: str) -> tuple[Won | Refused, int]:
        """The same, refused also by the gate of that name. With it 1 for a claim won by this call, 2 as the probe."""
        values = rows.of_bid(bid, lease_store) | {"gate": gate, "token": bid.token}
        row = self._answer(self._claim_in_group, values)
        return self._claimed(bid, lease_store, row), row["won"] if row is not None else 0

    def _answer(self, claim: Claim, values: Mapping[str, Any]) -> RowMapping | None:
        self.database.touch(claim.writes, values)
        return self.database.first(claim.answer, values)

    def _claimed(self, bid: Bid, lease_store: str, row: RowMapping | None) -> Won | Refused:
        if row is not None and row["won"]:
            return Won(rows.to_record(row))
        record = rows.to_record(row) if row is not None else None
        if record is None and self.database.host_clock:
            record = self.read(bid.stored_key)
        if record is not None and (record.state, record.owner) == (State.RUNNING, bid.token):
            return Won(record)  # the reply to an earlier try was lost
        if record and record.state is State.RUNNING and record.lease_store != lease_store and not record.expired:
            raise LeaseStoreMismatch(
                f"{record.key} is running under the lease store {record.lease_store}, this worker uses {lease_store}; "
                f"give all workers of this database one leases_url (or, if the other is retired: leases release)",
                record.key,
                lease_store,
                record.lease_store,
            )
        return Refused(record)

    def read(self, stored_key: str) -> Record | None:
        """The row of a key."""
        row = self.database.first(self._read, {"stored_key": stored_key})
        return rows.to_record(row) if row is not None else None

    def settle(self, record: Record, outcome: Outcome) -> bool:
        """Write *outcome* if the row is still running under the record's fence and owner.

        When nothing matched, the row is read: an earlier try may have been carried out without its reply coming back.
        """
        values = rows.of_outcome(record, outcome)
        if self.database.count(self.settling, values):
            return True
        row = self.database.first(self._read, {"stored_key": record.stored_key})
        written = {"fence": record.fence, "owner": record.owner}
        written |= {name: values[f"new_{name}"] for name in rows.SETTLED}
        return row is not None and all(row[name] == value for name, value in written.items())

    def search(self, *, states: Sequence[str] = (), task: str | None = None, limit: int = 100) -> list[Record]:
        """Rows, the latest started first."""
        records = self.tables.records
        query = self.reading.order_by(records.c.started_at.desc()).limit(limit)
        if states:
            query = query.where(records.c.state.in_(states))
        if task is not None:
            query = query.where(records.c.task == task)
        return [rows.to_record(row) for row in self.database.all(query, {})]

    def named(self, key: str) -> list[Record]:
        """The rows of all tasks whose key is *key*; looks at every row, for an operator's sake."""
        query = self.reading.where(self.tables.records.c.key == key).limit(20)
        return [rows.to_record(row) for row in self.database.all(query, {})]

    def reset(
        self,
        stored_key: str,
        *,
        keep: bool,
        forgive: bool = False,
        retention: float | None = None,
        seen: Record | None = None,
    ) -> Record | None:
        """Take the row away from whoever has it; see :class:`~celery_leases.core.ports.RecordStore`."""
        records = self.tables.records
        values = self._taken_away(retention) | {"state": State.PENDING, "ended": Ended.RELEASED}
        if forgive or not keep:
            values |= {"failures": 0, "quick_retries": 0, "cooldowns": 0, "failed_at": None, "crashes": 0}
        if not keep:
            empty = ("fingerprint", "digests", "result", "reason", "error", "finished_results", "finished_at")
            values |= dict.fromkeys((*empty, "progress", "message", "publish_at", "published_at"))
            values |= {"attempt": 0, "generation": records.c.generation + 1}
            values |= {"finished_calls": "", "call_id": "", "holder": "", "ended": None, "previous_ended": None}
        taken = update(records).where(records.c.stored_key == stored_key, *self._unmoved(seen)).values(values)
        return self.read(stored_key) if self.database.count(taken, {}) else None

    def end_waits(self, group: str) -> int:
        """Let the keys run that cool down only because of this cooldown group; how many there were."""
        records = self.tables.records
        cooling = records.c.state == State.COOLING
        query = select(records.c.stored_key, records.c.error).where(cooling, records.c.retry_at > self.database.now)
        found = [row["stored_key"] for row in self.database.all(query, {}) if rows.group_of(row["error"]) == group]
        ended = update(records).where(records.c.stored_key.in_(bindparam("keys", expanding=True)), cooling)
        ended = ended.values(retry_at=self.database.now)
        batches = [found[start : start + BATCH] for start in range(0, len(found), BATCH)]
        return sum(self.database.count(ended, {"keys": batch}) for batch in batches)

    def resolve(
        self, stored_key: str, result: str | None, retention: float | None = None, seen: Record | None = None
    ) -> bool:
        """Make the row ``done`` with *result* (JSON text), whoever has it; whether there was one that was not.

        With *seen* only if its fence and state are still those. *retention* is in seconds, by default the row's own.
        """
        records = self.tables.records
        values = self._taken_away(retention) | {
            "state": State.DONE,
            "ended": Ended.RESOLVED,
            "result": result,
            "reason": None,
            "error": None,
            "finished_at": self.database.now,
        }
        undone = (records.c.stored_key == stored_key, records.c.state != State.DONE, *self._unmoved(seen))
        return self.database.count(update(records).where(*undone).values(values), {}) == 1

    def _taken_away(self, retention: float | None) -> dict[str, Any]:
        """What takes a row from its owner, and how long it counts then."""
        records, now = self.tables.records, self.database.now
        after = records.c.fence + 1
        own = func.coalesce(func.nullif(records.c.retention, 0), int(RETENTION * rows.MICROSECONDS))
        keep = own if retention is None else int(retention * rows.MICROSECONDS)
        fence = case((after > now, after), else_=now)
        return {"fence": fence, "owner": "", "retry_at": None, "lease_until": None, "expires_at": now + keep}

    def _unmoved(self, seen: Record | None) -> Sequence[ColumnElement[bool]]:
        records = self.tables.records
        return () if seen is None else (records.c.fence == seen.fence, records.c.state == seen.state)

    def purge(self, limit: int) -> int:
        """Delete at most *limit* rows whose retention is over, as many marks, gates and effects of calls.

        How many rows were deleted, or effects where those were more.
        """
        for table in (self.tables.gates, self.tables.marks):
            key, over = table.primary_key.columns[0], table.c.expires_at <= self.database.now
            found = apart(select(key).where(over).limit(limit))
            self.database.count(delete(table).where(key.in_(found), over), {})
        return max(self._purge_effects(limit), self._purge_records(limit))

    def _purge_effects(self, limit: int) -> int:
        """Delete effects of calls that are over, but for those of the call that a record is at."""
        records, effects = self.tables.records, self.tables.effects
        present = exists().where(records.c.stored_key == effects.c.stored_key, records.c.call_id == effects.c.scope)
        over = and_(effects.c.expires_at <= self.database.now, ~present)
        key = tuple_(*effects.primary_key.columns)
        found = apart(select(*effects.primary_key.columns).where(over).limit(limit))
        return self.database.count(delete(effects).where(key.in_(found), over), {})

    def _purge_records(self, limit: int) -> int:
        records, effects = self.tables.records, self.tables.effects
        over = records.c.expires_at <= self.database.now
        # Others purge too: the effects that go are those of the very rows that go afterwards, and of no later claim.
        found = self.database.all(select(records.c.stored_key).where(over).limit(limit), {})
        old = [row["stored_key"] for row in found]
        of_old = exists().where(records.c.stored_key == effects.c.stored_key, over)
        if not old:
            return 0
        gone = delete(effects).where(effects.c.stored_key.in_(old), effects.c.expires_at.is_(None), of_old)
        self.database.count(gone, {})
        return self.database.count(delete(records).where(records.c.stored_key.in_(old), over), {})

    def _settling(self) -> Update:
        records = self.tables.records
        now = self.database.now
        wait: BindParameter[int | None] = bindparam("wait", type_=BigInteger)
        keep: BindParameter[int] = bindparam("keep", type_=BigInteger)
        failed = bindparam("failed", type_=Boolean)
        values: dict[str, Any] = {name: bindparam(f"new_{name}") for name in rows.SETTLED}
        values |= {
            "retry_at": case((wait.is_not(None), now + wait), else_=null()),
            "expires_at": now + keep,
            "finished_at": now,
            "failed_at": case((failed, now), else_=bindparam("last_failed", type_=BigInteger)),
            "lease_until": None,
        }
        progress: BindParameter[str | None] = bindparam("new_progress", type_=records.c.progress.type)
        values["progress"] = case((progress.is_not(None), progress), else_=records.c.progress)
        return self._fenced(records.update()).values(values)

    def _guarding(self) -> Update:
        records = self.tables.records
        until = self.database.now + records.c.lease_ttl
        longer = case((records.c.lease_until < until, until), else_=records.c.lease_until)
        return self._fenced(records.update()).values(lease_until=longer)

    def _fenced(self, statement: Update) -> Update:
        """*statement*, for the row of an attempt that is still running under its fence and owner."""
        return statement.where(*self._running())

    def _running(self) -> tuple[ColumnElement[bool], ...]:
        records = self.tables.records
        return (
            records.c.stored_key == bindparam("for_key"),
            records.c.state == State.RUNNING,
            records.c.fence == bindparam("for_fence"),
            records.c.owner == bindparam("for_owner"),
        )
