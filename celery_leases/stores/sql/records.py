"""Records in a SQL database, through SQLAlchemy Core.

A claim has two steps. PostgreSQL inserts or reads the row in one statement; the other databases
read, and then insert if there is no row. So a first run costs one step, and so does a refused
claim, which locks no row. To take over an existing row, the second step replaces it if it is
unchanged.
"""

from __future__ import annotations

import json
import math
import secrets
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, Final, Self

from sqlalchemy import (
    BigInteger,
    Engine,
    Executable,
    Select,
    Update,
    and_,
    bindparam,
    case,
    delete,
    exists,
    func,
    or_,
    select,
    tuple_,
    update,
)

from celery_leases.call import Call
from celery_leases.concurrency import os_threads
from celery_leases.concurrency.shared_trips import SharedTrips
from celery_leases.decide import attempt_history, repairs
from celery_leases.decide import claim as rule
from celery_leases.decide.answers import Acquired, Refusal, Refused
from celery_leases.decide.claim import ALWAYS, queues_another
from celery_leases.errors import KeyUnusable, StoreUnavailable, ValueRefused
from celery_leases.groups.group import ClosedGroup, stored_group
from celery_leases.groups.slots import Room, Taken, may_begin
from celery_leases.options import DATABASE
from celery_leases.record import Ended, Failure, Outcome, Record, State
from celery_leases.record_filters import Order, Position, RecordFilter
from celery_leases.stores.sql import migrations, record_queries, rows
from celery_leases.stores.sql.connections import with_other_connections
from celery_leases.stores.sql.cooldown_groups import SeenSlots, SqlGroups, seen_in
from celery_leases.stores.sql.database import Availability, Database, first_value
from celery_leases.stores.sql.record_queries import in_subquery
from celery_leases.stores.sql.record_statements import RecordStatements, is_running
from celery_leases.stores.sql.rows import MICROSECONDS, Row, microseconds
from celery_leases.stores.sql.schema import Tables
from celery_leases.text.notices import logger

CLAIM_TRIES: Final = 3
"""How often a claim is tried while other processes change the row between reading and writing.
Afterwards the delivery is rescheduled.
"""
BATCH = 500
PURGE_PATIENCE: Final = 5.0
"""Seconds after which a process that began to purge, and did not finish, counts as dead."""
_PURGE_MARK: Final = {"for_key": "celery_leases", "for_name": "purge"}
IDENTITY: Final = "database"
"""The name of a mark with an empty key, whose value identifies the database."""

_identities: dict[str, str] = {}
REPAIR_TRIES: Final = 20
"""How often an operator's write is retried when the row changes between reading and writing."""


Step = tuple[str, Mapping[str, Any]]
"""A step that goes with others in one statement: ``claims`` or ``successes``, and its values."""


class _KeyUnusableErrors:
    """Raises :class:`KeyUnusable` for a value that the database refuses: the value comes from the
    call, so this is not an outage.
    """

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, ValueRefused):
            raise _key_unusable(error) from error


def _key_unusable(error: ValueRefused) -> KeyUnusable:
    return KeyUnusable(f"a value of this call cannot be stored: {error}")


KEY_UNUSABLE_ERRORS: Final = _KeyUnusableErrors()


class SqlRecordStore:
    """One durable row for each key, in one database. Every method raises :class:`StoreUnavailable`
    if the database fails.
    """

    def __init__(self, engine: Engine, tables: Tables | None = None) -> None:
        self.database = Database(engine)
        self.tables = tables or Tables()
        #: Decides whether an expired row that is itself the lease may be taken over.
        self.availability = Availability(database=self.tables_location)
        self.statements = RecordStatements(self.database, self.tables)
        self._trips: SharedTrips[Step, Any] | None = None
        records = self.tables.records
        #: Locks the row of a running attempt, and extends the lease if the row is the lease; its
        #: parameters: :func:`celery_leases.stores.sql.rows.guard_parameters`.
        self.guard = self._guard_statement()
        marks, now = self.tables.marks, self.database.now
        until = now + bindparam("span", type_=BigInteger)
        key: dict[str, Any] = {"stored_key": bindparam("for_key"), "name": bindparam("for_name")}
        is_mark = [marks.c[name] == value for name, value in key.items()]
        values = {"value": "", "expires_at": until}
        self._select_purge_mark = select(marks.c.expires_at, now.label("now")).where(*is_mark)
        self._take_purge_mark = self.database.dialect.upsert(
            marks, key, values, where=marks.c.expires_at <= now
        )
        self._set_purge_mark = update(marks).where(*is_mark).values(expires_at=until)
        others = (self.tables.effects, marks, self.tables.groups)
        expired = [
            exists().where(records.c.expires_at <= now, records.c.state != State.RUNNING),
            *(exists().where(table.c.expires_at <= now) for table in others),
        ]
        self._select_any_expired = select(or_(*expired).label("any"))
        #: Waits for the lock of a row.
        self._lock = (
            select(records.c.fence)
            .where(records.c.stored_key == bindparam("for_key"))
            .with_for_update()
        )
        #: Locks the row of a running attempt without changing it.
        self.lock_row = select(records.c.fence).where(*is_running(records)).with_for_update()

    def with_connections(self, size: int, longest_wait: float) -> Self:
        """The same store with at most *size* other connections; see :func:`engine_for`. Both share
        all statements, and no trips.
        """
        engine = with_other_connections(self.database.engine, size, longest_wait)
        other = copy(self)
        other.database = self.database.with_engine(engine)
        other.availability = Availability(database=self.tables_location)
        other._trips = None  # noqa: SLF001 - of the same class
        return other

    def share_trips(self, running: Callable[[], int]) -> None:
        """Let calls of this process share statements on PostgreSQL: first claims, and successes;
        the more, the more calls are *running*.

        A shared statement waits for a locked row only for a moment. A call that it did not serve
        has a statement of its own, as on the other databases.
        """
        if self.database.dialect.reads_or_inserts:
            self._trips = SharedTrips(self._run_together, running)

    def compile_statements(self) -> None:
        """Compile the usual statements; :meth:`check` was called before."""
        purge = (self._select_purge_mark, self._select_any_expired, *self._take_purge_mark)
        self.database.compile(*self.statements.usual(), self.guard, *purge, self._set_purge_mark)

    @cached_property
    def tables_location(self) -> str:
        """Where the tables are."""
        return f"{self.database.engine.url!r} {self.tables.metadata.schema}"

    def check(self) -> None:
        """Raise :class:`SchemaOutdated` if this release does not support the version of the tables.
        On SQLite, create missing tables.
        """
        with self.database.errors():
            self.tables.check(self.database.engine)

    def migrate(self) -> migrations.Migrated:
        """Create the tables, or migrate those of an earlier version while workers run.

        Raises :class:`StoreUnavailable` if the database does not answer or the tables stay locked,
        and :class:`SchemaOutdated` for tables of a later release.
        """
        with self.database.errors():
            done = migrations.migrate(self.database.engine, self.tables)
        self.identity()
        return done

    def read(self, stored_key: str, *, lenient: bool = False) -> Record | None:
        """The row of a key. *lenient*, for operators: unreadable values count as absent.

        Raises :class:`RecordUnreadable`, and :class:`KeyUnusable` if the database refuses the key.
        """
        with KEY_UNUSABLE_ERRORS:
            row = self._row(stored_key)
        return rows.to_record(row, lenient=lenient) if row is not None else None

    def identity(self) -> str:
        """The random identifier of this database, which is read once in a process and its forks."""
        if self.tables_location not in _identities:
            _identities[self.tables_location] = self._identity()
        return _identities[self.tables_location]

    def _identity(self) -> str:
        marks = self.tables.marks
        key = {"stored_key": "", "name": IDENTITY}
        found = select(marks.c.value).where(marks.c.stored_key == "", marks.c.name == IDENTITY)
        row = self.database.first(found, {})
        if row is None:
            values = {"value": secrets.token_hex(4), "expires_at": ALWAYS}
            never = marks.c.expires_at < 0
            self.database.touch(self.database.dialect.upsert(marks, key, values, where=never), {})
            row = self.database.first(found, {})
        return str(row["value"]) if row is not None else ""

    def claim(
        self,
        call: Call,
        lease_store: str,
        *,
        age: Callable[[], float] = lambda: math.inf,
        groups: SqlGroups | None = None,
    ) -> Acquired | Refused:
        """Claim the row, if :mod:`celery_leases.decide.claim` allows it. Idempotent.

        A refused claim writes nothing. *age* returns the seconds since the lease store was emptied;
        it is called only before the running row of another attempt is taken over, and its errors
        are raised. Raises :class:`LeaseStoreMismatch` if the key runs under another lease store,
        :class:`KeyUnusable` if the database refuses a value of the call, and
        :class:`RecordUnreadable` for a row that cannot be read, which is not changed.

        With *groups*, the claim is also refused if the call's group does not let the body start. If
        the call has ``ask``, or the limit of the group is one, the claim takes a slot, or its turn
        by the rate, before it writes the row, and gives the slot back if the claim fails. That
        needs a statement of its own, because no insert can depend on a row that the same statement
        locks and counts.
        """
        try:
            return self._claim(call, lease_store, age, groups)
        except KeyUnusable as error:
            if call.message is None:
                raise
            # The message is only for a rescue, and may be what the database refuses.
            answer = self._claim(replace(call, message=None), lease_store, age, groups)
            logger.warning(
                "%s: the call could not be stored, so it cannot be rescued: %s",
                call.key.key,
                error,
                code="not-rescuable",
            )
            return answer
        except StoreUnavailable as error:
            if error.executed is not False:  # a locked row shows that the database is available
                self.availability.failed(os_threads.boot_clock())
            raise

    def _claim(  # noqa: C901, PLR0912 - one claim, in the order of its steps
        self, call: Call, lease_store: str, age: Callable[[], float], groups: SqlGroups | None
    ) -> Acquired | Refused:
        emptied, group = 0.0, call.group if groups is not None else None
        taken: Taken | Room | ClosedGroup | None = None
        read_at = 0.0
        for _ in range(CLAIM_TRIES):
            new, sent = rule.claimed(None, call, lease_store, 0), os_threads.boot_clock()
            inserted = False
            if groups is None or call.ask is None:
                now, inserted, row, seen = self.insert_or_read(new, group)
            else:
                now, row, seen = self._read_in_group(call)
            until = (
                self.availability.answered(sent, os_threads.boot_clock(), now)
                if lease_store == DATABASE
                else ALWAYS
            )
            if inserted:
                return Acquired(rule.dated(new, now))
            if row is not None and row.is_attempt(State.RUNNING, call.token):
                # The reply to the write was lost. If its turn by the rate was too, the last begin
                # of the group is the earliest one that is known to be no sooner.
                began = seen.slots.began - now / 1000 if seen is not None else 0.0
                probes = seen is not None and seen.slots.probes(call.token, now / 1000)
                return Acquired(row, probes, max(0.0, began / 1000))
            why = rule.decide(row, call, lease_store, takeover_until=until)
            if why is Refusal.EMPTIED:
                emptied = age()
                why = rule.decide(row, call, lease_store, emptied=emptied)
            if row is not None and why is Refusal.LAPSED:
                self.await_lock(row)
            if why is not None:
                break
            if groups is not None and seen is not None:
                taken, read_at = groups.take(call, seen)
                if not isinstance(taken, Taken):
                    break
            if (won := self._write(call, lease_store, row, now)) is not None:
                if not isinstance(taken, Taken):
                    return Acquired(won)
                starts_in = taken.starts_in and max(
                    0.0, taken.starts_in - (os_threads.boot_clock() - read_at)
                )
                return Acquired(won, taken.probe, starts_in)
        closed_group = room = None
        if isinstance(taken, ClosedGroup):
            why, closed_group = Refusal.CLOSED, taken
        elif isinstance(taken, Room):
            why, room = Refusal.FULL, taken
        elif seen is not None and not may_begin(seen.slots, call.token, seen.now / 1000):
            why, closed_group = (
                Refusal.CLOSED,
                seen.slots.closed_group(call.group or "", seen.now / 1000),
            )
        given = isinstance(taken, Taken) or (seen is not None and call.token in seen.slots.held)
        if groups is not None and given:
            groups.release_slot(call.group or "", call.token)
        return Refused(
            why or Refusal.CHANGED,
            closed_group=closed_group,
            record=row,
            emptied=emptied,
            room=room,
        )

    def _read_in_group(self, call: Call) -> tuple[int, Record | None, SeenSlots]:
        """The time of the database, the row of a key, and the slots of its group."""
        values = {"new_stored_key": call.key.stored, "group": stored_group(call.group or "")}
        with KEY_UNUSABLE_ERRORS:
            found = self.database.first(self.statements.read_with_group, values)
        assert found is not None  # the statement always returns one row
        now = int(found["now"])
        row = rows.to_record({**found, "now": now}) if found["stored_key"] is not None else None
        return now, row, seen_in(found)

    def _write(self, call: Call, lease_store: str, row: Record | None, now: int) -> Record | None:
        """The row that the claim has written; ``None`` if the row has changed since it was read."""
        if row is not None:
            new = rule.claimed(row, call, lease_store, now)
            return new if self.swap(row, new) else None
        new = rule.claimed(None, call, lease_store, 0)  # the group prevented the insert
        at, inserted, *_ = self.insert_or_read(new, None)
        return rule.dated(new, at) if inserted else None

    def insert_or_read(
        self, new: Record, group: str | None
    ) -> tuple[int, bool, Record | None, SeenSlots | None]:
        """Insert *new* if its key has no row and *group*, if given, is open; otherwise
        read the row and the group.

        Returns the time of the database, whether *new* was inserted, the existing row, and the
        slots of the group if it is not open. If *new* was not inserted, and there is neither
        row nor group, another claim has inserted a row that this statement could not see yet. An
        existing row is neither locked nor written. The times of *new* are relative to the insert.
        Raises :class:`RecordUnreadable` for a row that cannot be read, and :class:`KeyUnusable` if
        the database refuses a value of *new*.
        """
        statements = self.statements
        values = rows.insert_parameters(new)
        if group is not None:
            values["group"] = stored_group(group)
        try:
            in_group, unless_present = group is not None, self.database.unless_present
            statement = statements.insert_or_read[in_group]
            if self._trips is not None and not in_group:
                alone = partial(unless_present, statement, values)
                found = self._trips.run(("claims", values), alone)
            else:
                found = unless_present(statement, values)
            if found is None:
                found = unless_present(statements.insert_or_read_again[in_group], values)
            assert found is not None  # the statement always returns one row
            now = int(found["now"])
            row: Mapping[Any, Any] | None
            closed: Mapping[Any, Any] | None = None
            if self.database.dialect.reads_or_inserts:
                row = _from_json(found["record"])
                closed = _from_json(found["closed"]) if group is not None else None
                inserted = bool(found["inserted"])
            else:
                row = found if found["stored_key"] is not None else None
                if group is not None and found["version"] is not None:
                    closed = found
                moment = None
                if row is None and closed is None:
                    read = self.database.dialect.inserted_at or first_value
                    moment = unless_present(statements.insert, values, read)
                inserted, now = moment is not None, moment or now
        except ValueRefused as error:
            raise _key_unusable(error) from error
        return (
            now,
            inserted,
            rows.to_record({**row, "now": now}) if row is not None else None,
            seen_in({**closed, "now": now}) if closed is not None else None,
        )

    def _run_together(self, given: Sequence[Step]) -> list[Any]:
        """The row of :attr:`RecordStatements.together` for each claim, and 1 for each success that
        was written; ``None``: the step needs a statement of its own.
        """
        arrays: dict[str, list[Mapping[str, Any]]] = {"claims": [], "successes": []}
        for kind, values in given:
            arrays[kind].append(values)
        texts = {kind: json.dumps(array) for kind, array in arrays.items()}
        answers = {row["owner"]: row for row in self.database.all(self.statements.together, texts)}
        return [
            answers.get(values["new_owner"])
            if kind == "claims"
            else 1
            if values["for_owner"] in answers
            else None
            for kind, values in given
        ]

    def swap(self, seen: Record, new: Record) -> bool:
        """Replace *seen* by *new* if the :data:`~celery_leases.stores.sql.rows.COMPARED` columns of
        the row are unchanged; returns whether it was replaced.

        Raises :class:`KeyUnusable` when the database refuses a value of *new*.
        """
        before, after = rows.column_values(seen), rows.column_values(new)
        values: dict[str, Any] = {"for_key": seen.stored_key}
        values |= {f"seen_{name}": before[name] for name in rows.COMPARED}
        values |= {f"new_{name}": after[name] for name in rows.WHEN_CLAIMED}
        with KEY_UNUSABLE_ERRORS:
            return self.database.count(self.statements.swap, values) == 1

    def await_lock(self, row: Record) -> None:
        """Wait until no transaction locks *row*, for as long as the database waits for locks.

        Raises :class:`StoreUnavailable` with ``executed=False`` if the row stays locked: the
        holder's transaction is still open, and the delivery is rescheduled.
        """
        self.database.first(self._lock, {"for_key": row.stored_key})

    def settle(self, record: Record, outcome: Outcome) -> bool:
        """Write *outcome* if the row is still running under the record's fence and owner.

        If no row matches, the row is read: an earlier try may have been executed whose reply was
        lost. If the database refuses a text of the outcome, the outcome is written without texts.
        """
        statement, values = self.settlement(record, outcome)
        shared = self._trips if statement is self.statements.settle_success else None
        alone = partial(self.database.count, statement, values)
        try:
            written = shared.run(("successes", values), alone) if shared is not None else alone()
        except ValueRefused as error:
            logger.error(
                "%s: its outcome was written without result, reason and message: %s",
                record.key,
                error,
                code="outcome-shortened",
            )
            record, outcome = replace(record, finished_results=None), rows.without_texts(outcome)
            written = self.database.count(*self.settlement(record, outcome))
        return written > 0 or self._was_settled(record, outcome)

    def settlement(self, record: Record, outcome: Outcome) -> tuple[Executable, dict[str, Any]]:
        """The statement of :meth:`settle` and its parameters, also for a transaction of the
        user's.
        """
        short = rows.success_parameters(record, outcome)
        if short is not None:
            return self.statements.settle_success, short
        values = rows.settle_parameters(record, outcome)
        if f"new_{rows.DETAILS}" in values:
            return self.statements.settle, values
        return self.statements.settle_without_details, values

    def _was_settled(self, record: Record, outcome: Outcome) -> bool:
        row = self._row(record.stored_key)
        if row is None or (row["fence"], row["owner"]) != (record.fence, record.owner):
            return False
        ours = rows.settle_parameters(record, outcome)
        return all(
            row[name] == ours.get(f"new_{name}", row[name])
            for name in (*rows.WHEN_SETTLED, rows.DETAILS)
        )

    def _row(self, stored_key: str) -> Row | None:
        return self.database.first(self.statements.select_row, {"stored_key": stored_key})

    def stop_resuming(self, record: Record, failure: Failure) -> bool:
        """Write that a call will not run again, because *failure* is raised to its caller. The
        history keeps how the latest attempt ended.

        Returns ``False`` if the row has changed.
        """

        def repair(row: Record) -> Record | None:
            if not row.resumes:
                return None
            row = attempt_history.with_attempt_aside(row)
            return replace(row, resumes=False, ended=Ended.FAILED, failure=failure)

        return self._repair(record.stored_key, record, repair) is not None

    def search(
        self, *, states: Sequence[str] = (), task: str | None = None, limit: int = 100
    ) -> list[Record]:
        """Rows; those that started last come first. If a value of a row is unreadable,
        ``unreadable`` says which.

        Scans the whole table: an index would make the writes of each run more than 5 % slower.
        """
        return self._list(_latest(self.statements, states, task, limit))

    def find(
        self,
        wanted: RecordFilter,
        *,
        order: Order = Order.LATEST,
        limit: int = 100,
        after: Position | None = None,
    ) -> list[Record]:
        """At most *limit* rows that may match *wanted*, in that *order*, after the position
        *after*; see :meth:`search`.
        """
        now = self.database.now
        return self._list(
            record_queries.matching(self.statements, wanted, order, limit, after, now)
        )

    def how_many(self, wanted: RecordFilter) -> int:
        """An upper bound of the number of rows that match *wanted*. It is exact if SQL alone can
        decide the filter.
        """
        records = self.tables.records
        counted = select(func.count().label("count")).select_from(records)
        conditions = record_queries.conditions(records, wanted)
        row = self.database.first(counted.where(*conditions), {})
        return int(row["count"]) if row is not None else 0

    def now(self) -> int:
        """The database's clock, in microseconds since the epoch."""
        row = self.database.first(self.statements.select_now, {})
        return int(row["now"]) if row is not None else 0

    def counts(self) -> Sequence[Row]:
        """How many rows there are of each task in each state: ``task``, ``state``, ``count``,
        ``oldest``.
        """
        return self.database.all(record_queries.counted(self.tables.records), {})

    def run_times(self, task: str | None, limit: int) -> dict[str, list[float]]:
        """The durations in seconds of the latest *limit* finished runs of each task."""
        found: dict[str, list[float]] = {}
        query = record_queries.run_times(self.tables.records, task, limit)
        for row in self.database.all(query, {}):
            found.setdefault(row["task"], []).append(int(row["took"]) / MICROSECONDS)
        return found

    def failures(self) -> Counter[tuple[str, str]]:
        """How many rows that are not done failed last by each rule, with the reason of the rule."""
        query = record_queries.failures(self.tables.records, self.database.dialect)
        counts: Counter[tuple[str, str]] = Counter()
        for row in self.database.all(query, {}):
            with suppress(ValueError, TypeError, RecursionError):
                failure = rows.failure_in("{" + row["part"].rstrip("}") + "}")
                counts[failure.rule or "", failure.reason or ""] += int(row["count"])
        return counts

    def delete_unmoved(
        self, wanted: RecordFilter, limit: int, after: str = ""
    ) -> tuple[int, str | None]:
        """Delete at most *limit* rows that match *wanted*, after the key *after*, with their
        effects.

        Running rows and rows with an unpublished message are never deleted. SQL alone must be able
        to decide the filter. Returns the number of deleted rows, and the key to continue after,
        which is ``None`` after the last row.
        """
        records, effects = self.tables.records, self.tables.effects
        idle = (records.c.state != State.RUNNING, records.c.publish_at.is_(None))
        over = and_(*idle, *record_queries.conditions(records, wanted))
        place = records.c.stored_key
        found = self.database.all(
            select(place).where(over, place > after).order_by(place).limit(limit), {}
        )
        old = [row["stored_key"] for row in found]
        if not old:
            return 0, None
        of_old = exists().where(records.c.stored_key == effects.c.stored_key, over)
        self.database.count(delete(effects).where(effects.c.stored_key.in_(old), of_old), {})
        deleted = self.database.count(delete(records).where(place.in_(old), over), {})
        return deleted, old[-1] if len(old) == limit else None

    def named(self, key: str) -> list[Record]:
        """The rows of all tasks with this *key*, as in :meth:`search`; scans the whole table.

        Raises :class:`KeyUnusable` if the database refuses the key.
        """
        with KEY_UNUSABLE_ERRORS:
            of_key = self.tables.records.c.key == key
            return self._list(self.statements.select_rows.where(of_key).limit(20))

    def of_keys(self, stored_keys: Collection[str]) -> list[Record]:
        """The rows of these stored keys, as in :meth:`search`."""
        with KEY_UNUSABLE_ERRORS:
            wanted = self.tables.records.c.stored_key.in_(stored_keys)
            return self._list(self.statements.select_rows.where(wanted))

    def _list(self, query: Select[Any]) -> list[Record]:
        return [rows.to_record(row, lenient=True) for row in self.database.all(query, {})]

    def reset(
        self,
        stored_key: str,
        *,
        keep: bool,
        forgive: bool = False,
        retention: float | None = None,
        seen: Record | None = None,
    ) -> Record | None:
        """Take the row from its holder: it gets a new fence, is ``pending``, and does not wait.

        With *keep* it keeps its counts and history, and *forgive* sets failures, crashes, quick
        retries and cooldowns to 0, unless the row is done. Without *keep* it becomes an empty row
        of the next generation. It counts as absent after *retention* seconds; the default is its
        own retention, or 7 days. With *seen*, the row is only changed if it still has that fence
        and state. Returns the row afterwards, or ``None`` if no row was changed.
        """

        def repair(row: Record) -> Record | None:
            if forgive and row.state is State.DONE and not row.expired:
                return None  # since the operator has looked
            return repairs.reset(row, keep=keep, forgive=forgive, retention=retention)

        return self._repair(stored_key, seen, repair)

    def _repair(
        self, stored_key: str, seen: Record | None, repair: Callable[[Record], Record | None]
    ) -> Record | None:
        """The row after *repair*; ``None`` if fence or state are no longer those of *seen*, or if
        *repair* returns ``None``.

        Unreadable values of the row are overwritten.
        """
        for _ in range(REPAIR_TRIES):
            found = self._row(stored_key)
            if found is None:
                return None
            row = rows.to_record(found, lenient=True)
            if seen is not None and (row.fence, row.state) != (seen.fence, seen.state):
                return None
            after = repair(row)
            if after is None:
                return None
            if self.database.count(self.statements.changed(found, after), {}) == 1:
                return replace(after, unreadable=None)
        raise StoreUnavailable(
            f"{stored_key}: its record changed {REPAIR_TRIES} times while it was being written; try again",
            False,
        )

    def note_end(
        self, stored_key: str, owner: str, ended: Ended, counted_for: str | None = None
    ) -> Record | None:
        """Write how an abandoned attempt with the token *owner* has ended into the row of a later
        attempt. :func:`celery_leases.decide.attempt_history.with_end` describes the arguments.

        Returns the row afterwards, or ``None`` if it does not have that attempt.
        """
        return self._repair(
            stored_key,
            None,
            lambda row: (
                attempt_history.with_end(row, owner, ended, counted_for)
                if row.unreadable is None
                else None
            ),
        )

    def close_waiting(
        self, stored_key: str, close: Callable[[Record], Outcome | None]
    ) -> tuple[Record, Outcome] | None:
        """Write the outcome that *close* gives for a row that does not run. Its message is not
        published again, unless the call still resumes, or the message is that of another call. If
        the outcome is not that of an attempt (``unrun``), the history keeps how the latest one
        ended.

        Returns the row as it was read, and the outcome; ``None`` if there is no row, or *close*
        returns ``None``.
        """
        closed: list[tuple[Record, Outcome]] = []

        def repair(row: Record) -> Record | None:
            outcome = close(row) if row.state is not State.RUNNING else None
            if outcome is None:
                return None
            closed[:] = [(row, outcome)]
            before = attempt_history.with_attempt_aside(row) if outcome.unrun else row
            after = repairs.settled(before, outcome, row.now)
            if outcome.state is row.state and outcome.retry_after == (row.waits or None):
                after = replace(after, retry_at=row.retry_at)  # also if that time is over
            if after.resumes or queues_another(after):
                return after
            return replace(after, message=None, publish_at=None)

        return closed[0] if self._repair(stored_key, None, repair) is not None else None

    def end_waits(self, group: str) -> int:
        """End the cooldowns of all keys that are waiting for this cooldown group; returns their
        number.
        """
        records = self.tables.records
        cooling = records.c.state == State.COOLING
        query = select(records.c.stored_key, records.c.error).where(
            cooling, records.c.retry_at > self.database.now
        )
        found = [
            row["stored_key"]
            for row in self.database.all(query, {})
            if rows.group_of(row["error"]) == group
        ]
        ended = update(records).where(
            records.c.stored_key.in_(bindparam("keys", expanding=True)), cooling
        )
        ended = ended.values(retry_at=self.database.now)
        batches = [found[start : start + BATCH] for start in range(0, len(found), BATCH)]
        return sum(self.database.count(ended, {"keys": batch}) for batch in batches)

    def resolve(
        self,
        stored_key: str,
        result: str | None,
        retention: float | None = None,
        seen: Record | None = None,
    ) -> bool:
        """Set the row to ``done`` with *result* (JSON text), even if an attempt holds it; returns
        whether the row was changed.

        With *seen*, the row is changed only if its fence and state are those of *seen*.
        *retention* is in seconds, by default the row's own.
        """
        done = self._repair(
            stored_key,
            seen,
            lambda row: (
                None if row.state is State.DONE else repairs.resolved(row, result, retention)
            ),
        )
        return done is not None

    def purge(self, limit: int) -> int:
        """Delete expired rows: at most *limit* each of records, marks, groups and effects of calls.

        Returns the number of deleted records or of deleted effects, whichever is greater.
        """
        for table in (self.tables.groups, self.tables.marks):
            key, over = table.primary_key.columns[0], table.c.expires_at <= self.database.now
            found = in_subquery(select(key).where(over).limit(limit))
            self.database.count(delete(table).where(key.in_(found), over), {})
        return max(self._purge_effects(limit), self._purge_records(limit))

    def purge_in_turn(self, limit: int, every: float) -> bool:
        """Purge a batch unless another process is purging or has finished purging within *every*
        seconds; returns whether there may be more rows to purge.

        A mark decides which process purges. It expires after a few seconds, because its process may
        die. After a complete purge it lasts *every* seconds.
        """
        row = self.database.first(self._select_purge_mark, _PURGE_MARK)
        if row is not None and row["expires_at"] > row["now"]:
            return False
        over = self.database.first(self._select_any_expired, {})
        if over is None or not over["any"]:
            return False  # without a write: on SQLite a process that hangs in a write blocks all others
        if not self.database.touch(
            self._take_purge_mark, _PURGE_MARK | {"span": microseconds(PURGE_PATIENCE)}
        ):
            return False
        if self.purge(limit) >= limit:
            self.database.count(self._set_purge_mark, _PURGE_MARK | {"span": 0})
            return True
        self.database.count(self._set_purge_mark, _PURGE_MARK | {"span": microseconds(every)})
        return False

    def _purge_effects(self, limit: int) -> int:
        """Delete the expired effects of calls, except those of a record's current call."""
        records, effects = self.tables.records, self.tables.effects
        present = exists().where(
            records.c.stored_key == effects.c.stored_key, records.c.call_id == effects.c.scope
        )
        over = and_(effects.c.expires_at <= self.database.now, ~present)
        key = tuple_(*effects.primary_key.columns)
        found = in_subquery(select(*effects.primary_key.columns).where(over).limit(limit))
        return self.database.count(delete(effects).where(key.in_(found), over), {})

    def _purge_records(self, limit: int) -> int:
        records, effects = self.tables.records, self.tables.effects
        ended, now = records.c.state != State.RUNNING, self.database.now
        expired = select(records.c.stored_key, now.label("now"))
        expired = expired.where(records.c.expires_at <= now, ended).limit(limit)
        if self.database.dialect.joint_index:
            expired = expired.order_by(records.c.started_at)  # so that it uses the index
        found = self.database.all(expired, {})
        if not found:
            return 0
        old = [row["stored_key"] for row in found]
        # Both deletes repeat the condition, with the time of the select, so a row that was claimed
        # since stays with its effects, also if it has expired again.
        over = and_(records.c.expires_at <= int(found[0]["now"]), ended)
        of_old = exists().where(records.c.stored_key == effects.c.stored_key, over)
        gone = delete(effects).where(
            effects.c.stored_key.in_(old), effects.c.expires_at.is_(None), of_old
        )
        self.database.count(gone, {})
        return self.database.count(delete(records).where(records.c.stored_key.in_(old), over), {})

    def _guard_statement(self) -> Update:
        records = self.tables.records
        until = self.database.now + bindparam("ttl", type_=BigInteger)
        longer = case((records.c.lease_until < until, until), else_=records.c.lease_until)
        return update(records).where(*is_running(records)).values(lease_until=longer)


def _from_json(text: str | None) -> Mapping[Any, Any] | None:
    return json.loads(text) if text is not None else None


def _latest(
    statements: RecordStatements, states: Sequence[str], task: str | None, limit: int
) -> Select[Any]:
    """Rows by the time of their start. The keys are sorted first, because sorting whole rows is
    slower.
    """
    columns = statements.table.c
    keys = select(columns.stored_key)
    if states:
        keys = keys.where(columns.state.in_(states))
    if task is not None:
        keys = keys.where(columns.task == task)
    latest = keys.order_by(columns.started_at.desc()).limit(limit)
    return statements.select_rows.where(columns.stored_key.in_(in_subquery(latest))).order_by(
        columns.started_at.desc()
    )
