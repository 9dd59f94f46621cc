"""Records in a SQL database, through SQLAlchemy Core."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import (
    BigInteger,
    BindParameter,
    Boolean,
    Engine,
    RowMapping,
    Update,
    bindparam,
    case,
    delete,
    exists,
    null,
    select,
    update,
)

from celery_leases.core.errors import LeaseStoreMismatch
from celery_leases.core.records import Bid, Ended, Outcome, Record, Refused, State, Won
from celery_leases.stores import rows
from celery_leases.stores.claims import claim_statement
from celery_leases.stores.database import Database
from celery_leases.stores.schema import Tables

BATCH = 500


class SqlRecordStore:
    """A :class:`~celery_leases.core.ports.RecordStore` in one database."""

    def __init__(self, engine: Engine, tables: Tables | None = None) -> None:
        self.database = Database(engine)
        self.tables = tables or Tables()
        records = self.tables.records
        #: Selects whole rows with the time of the statement.
        self.reading = select(*records.c, self.database.now.label("now"))
        self._read = self.reading.where(records.c.stored_key == bindparam("stored_key"))
        self._claim = claim_statement(records, engine.dialect)
        self._claim_in_group = claim_statement(records, engine.dialect, self.tables.gates)
        #: Closes an attempt, fenced; see :func:`celery_leases.stores.rows.of_outcome` for its parameters.
        self.settling = self._settling()
        #: Locks the row of a running attempt; see :func:`celery_leases.stores.rows.of_guard`.
        self.guarding = self._fenced(records.update()).values(owner=records.c.owner)

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
        return self._claimed(bid, lease_store, self.database.first(self._claim, rows.of_bid(bid, lease_store)))

    def claim_in_group(self, bid: Bid, lease_store: str, gate: str) -> tuple[Won | Refused, int]:
        """The same, refused also by the gate of that name. With it 1 for a claim won by this call, 2 as the probe."""
        values = rows.of_bid(bid, lease_store) | {"gate": gate, "token": bid.token}
        row = self.database.first(self._claim_in_group, values)
        return self._claimed(bid, lease_store, row), row["won"] if row is not None else 0

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
        self, stored_key: str, *, keep: bool, forgive: bool = False, retention: float = 7 * 86_400
    ) -> Record | None:
        """Take the row away from whoever has it; see :class:`~celery_leases.core.ports.RecordStore`."""
        records = self.tables.records
        after = records.c.fence + 1
        values: dict[str, Any] = {
            "fence": case((after > self.database.now, after), else_=self.database.now),
            "owner": "",
            "state": State.PENDING,
            "ended": Ended.RELEASED,
            "retry_at": None,
            "lease_until": None,
            "expires_at": self.database.now + int(retention * 1e6),
        }
        if forgive or not keep:
            values |= {"failures": 0, "quick_retries": 0, "cooldowns": 0, "failed_at": None, "crashes": 0}
        if not keep:
            empty = ("fingerprint", "digests", "result", "reason", "error", "finished_results", "finished_at")
            values |= dict.fromkeys((*empty, "progress", "message", "publish_at"))
            values |= {"attempt": 0, "generation": records.c.generation + 1}
            values |= {"finished_calls": "", "call_id": "", "holder": "", "ended": None, "previous_ended": None}
        self.database.count(update(records).where(records.c.stored_key == stored_key).values(values), {})
        return self.read(stored_key)

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

    def resolve(self, stored_key: str, result: str | None, retention: float) -> bool:
        """Make the row ``done`` with *result* (JSON text), whoever has it; whether there was one that was not."""
        records = self.tables.records
        after = records.c.fence + 1
        values: dict[str, Any] = {
            "fence": case((after > self.database.now, after), else_=self.database.now),
            "owner": "",
            "state": State.DONE,
            "ended": Ended.RESOLVED,
            "result": result,
            "reason": None,
            "error": None,
            "retry_at": None,
            "lease_until": None,
            "finished_at": self.database.now,
            "expires_at": self.database.now + int(retention * 1e6),
        }
        undone = update(records).where(records.c.stored_key == stored_key, records.c.state != State.DONE)
        return self.database.count(undone.values(values), {}) == 1

    def purge(self, limit: int) -> int:
        """Delete at most *limit* rows whose retention is over, as many marks, and gates; how many rows were deleted."""
        for table in (self.tables.gates, self.tables.marks):
            key, over = table.primary_key.columns[0], table.c.expires_at <= self.database.now
            self.database.count(delete(table).where(key.in_(select(key).where(over).limit(limit)), over), {})
        records, effects = self.tables.records, self.tables.effects
        over = records.c.expires_at <= self.database.now
        # Others purge too: the effects that go are those of the very rows that go afterwards, and of no later claim.
        found = self.database.all(select(records.c.stored_key).where(over).limit(limit), {})
        old = [row["stored_key"] for row in found]
        of_old = exists().where(
            records.c.stored_key == effects.c.stored_key, records.c.generation >= effects.c.generation, over
        )
        if not old:
            return 0
        self.database.count(delete(effects).where(effects.c.stored_key.in_(old), of_old), {})
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

    def _fenced(self, statement: Update) -> Update:
        """*statement*, for the row of an attempt that is still running under its fence and owner."""
        records = self.tables.records
        return statement.where(
            records.c.stored_key == bindparam("for_key"),
            records.c.state == State.RUNNING,
            records.c.fence == bindparam("for_fence"),
            records.c.owner == bindparam("for_owner"),
        )
