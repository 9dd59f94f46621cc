"""The statements that read and write whole records, in one layout of their table."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from sqlalchemy import (
    BigInteger,
    BindParameter,
    Boolean,
    Column,
    ColumnElement,
    Executable,
    FromClause,
    Select,
    Table,
    Text,
    Update,
    and_,
    bindparam,
    case,
    cast,
    exists,
    func,
    insert,
    literal_column,
    null,
    select,
    update,
)
from sqlalchemy.dialects import postgresql, sqlite

from celery_leases.protocol.records import Ended, Outcome, Record, State
from celery_leases.stores.claiming import COMPARED
from celery_leases.stores.sql.database import Database
from celery_leases.stores.sql.dialects import mysql
from celery_leases.stores.sql.schema import Tables
from celery_leases.stores.sql.table_versions import Layout


class RecordStatements:
    """The statements of a store for a table in *layout*."""

    def __init__(self, layout: Layout, database: Database, tables: Tables) -> None:
        self.layout = layout
        self.table: Table = tables.layouts[layout.version]
        self._now = database.now
        self._gates = tables.gates
        self._of_mysql = mysql.is_mysql(database.engine.dialect)
        looking = (
            self._inserting_or_reading
            if database.engine.dialect.name == "postgresql"
            else self._reading
        )
        #: Selects whole rows with the time of the statement.
        self.reading = select(*self.table.c, self._now.label("now"))
        #: The row of a key.
        self.one = self.reading.where(self.table.c.stored_key == bindparam("stored_key"))
        #: The first step of a claim; the key says whether the statement also reads a gate.
        self.looks = {gated: looking(gated=gated) for gated in (False, True)}
        #: The second step of a claim.
        self.swap = self._swapping()
        self._settling = self._settled(layout.settled)

    @cached_property
    def insert(self) -> Executable:
        """Insert a row after reading. On MySQL the time of the insert is returned as
        ``LAST_INSERT_ID``.
        """
        if self._of_mysql:
            return insert(self.table).values(
                {**self._fresh(self._now), "fence": func.last_insert_id(self._now)}
            )
        made = sqlite.insert(self.table).values(self._fresh(self._now))
        return made.on_conflict_do_nothing().returning(self.table.c.fence)

    def settlement(self, record: Record, outcome: Outcome) -> tuple[Executable, dict[str, Any]]:
        """The fenced statement that ends an attempt, and its parameters."""
        if self.layout.only_succeeds(record, outcome):
            return self._succeeding, self.layout.of_success(record, outcome)
        values = self.layout.of_outcome(record, outcome)
        whole = f"new_{self.layout.settled[-1]}" in values
        return self._settling if whole else self._settling_alone, values

    def tagged_settlement(
        self, record: Record, outcome: Outcome, tag: str
    ) -> tuple[Executable, dict[str, Any]]:
        """The same, with *tag* in the column ``lease_store``, which is read of running rows only.
        Version 1 does not store a tag.
        """
        if self.layout.version == 1:
            return self.settlement(record, outcome)
        values = self.layout.of_outcome(record, outcome)
        whole = f"new_{self.layout.settled[-1]}" in values
        values["tag"] = tag
        return self._tagging if whole else self._tagging_alone, values

    def changed(self, found: Mapping[Any, Any], new: Record) -> Update:
        """Write the values of *new* that differ from the row *found*, if the ``COMPARED`` columns
        are unchanged.
        """
        as_found = [self.table.c[name].is_not_distinct_from(found[name]) for name in COMPARED]
        written = self.layout.of_record(new)
        values = {name: value for name, value in written.items() if value != found[name]}
        same = values or {"stored_key": found["stored_key"]}
        return (
            update(self.table)
            .where(self.table.c.stored_key == found["stored_key"], *as_found)
            .values(same)
        )

    @cached_property
    def _settling_alone(self) -> Update:
        """The settling statement that does not change the details column."""
        return self._settled(self.layout.settled[:-1])

    @cached_property
    def _succeeding(self) -> Update:
        """The same for an outcome that leaves all other columns as the claim wrote them."""
        return self._settled(("state", "result"), also_waits=False)

    @cached_property
    def _tagging(self) -> Update:
        return self._settling.values(
            lease_store=bindparam("tag", type_=self.table.c.lease_store.type)
        )

    @cached_property
    def _tagging_alone(self) -> Update:
        return self._settling_alone.values(
            lease_store=bindparam("tag", type_=self.table.c.lease_store.type)
        )

    def _inserting_or_reading(self, *, gated: bool) -> Select[Any]:
        """One statement that reads the row, or inserts it if missing; it returns the row as it was
        before.

        An existing row is only read, from a snapshot and without a lock. It is returned as one JSON
        document, so that the reply to an insert has few columns.
        """
        records, gates = self.table.alias("r"), self._gates.alias("g")
        seen = (
            select(_as_json("r"))
            .where(records.c.stored_key == bindparam("new_stored_key"))
            .cte("seen")
        )
        gate = select(_as_json("g")).where(self._is_shut(gates)).cte("gate")
        absent = [~exists(select(seen.c.document))] + [~exists(select(gate.c.document))] * gated
        moment = select(self._now.label("now")).subquery("moment")
        fresh = self._fresh(moment.c.now)
        made = postgresql.insert(self.table).from_select(
            list(fresh),
            select(*(value.label(name) for name, value in fresh.items())).where(*absent),
        )
        inserted = made.on_conflict_do_nothing().returning(self.table.c.fence).cte("inserted")
        found: list[ColumnElement[Any]] = [
            self._now.label("now"),
            exists(select(inserted.c.fence)).label("inserted"),
            select(seen.c.document).scalar_subquery().label("record"),
        ]
        return select(
            *found, *([select(gate.c.document).scalar_subquery().label("gate")] if gated else [])
        )

    def _reading(self, *, gated: bool) -> Select[Any]:
        """The row and the gate; all columns are NULL for a missing one."""
        always: FromClause = select(literal_column("1").label("one")).subquery("always")
        columns: list[ColumnElement[Any]] = [self._now.label("now"), *self.table.c]
        if gated:
            columns += [column.label(f"gate_{column.name}") for column in self._gates.c]
            always = always.outerjoin(self._gates, self._is_shut(self._gates))
        row = self.table.c.stored_key == bindparam("new_stored_key")
        return select(*columns).select_from(always.outerjoin(self.table, row))

    def _fresh(self, now: ColumnElement[int]) -> dict[str, ColumnElement[Any]]:
        """The columns of a new row by name; its times count from *now*."""
        values: dict[str, ColumnElement[Any]] = {
            name: self._bound("new", name) for name in self.layout.inserted
        }
        spans = {
            name: now + values[name] for name in ("lease_until", "expires_at") if name in values
        }
        moments: dict[str, ColumnElement[Any]] = dict.fromkeys(
            ("fence", "created_at", "started_at"), now
        )
        return values | spans | moments

    def _swapping(self) -> Update:
        columns = self.table.c
        compared = [(columns[name], self._bound("seen", name)) for name in COMPARED]
        as_seen = [_as_seen(column, seen) for column, seen in compared]
        values = {name: self._bound("new", name) for name in self.layout.swapped}
        return (
            update(self.table)
            .where(columns.stored_key == bindparam("for_key"), *as_seen)
            .values(values)
        )

    def _settled(self, names: tuple[str, ...], *, also_waits: bool = True) -> Update:
        """Write the columns *names* and the times of the end. Unless it *also_waits*, ``retry_at``
        and the progress stay as they are.
        """
        columns, now = self.table.c, self._now
        keep: BindParameter[int] = bindparam("keep", type_=BigInteger)
        least: BindParameter[int] = bindparam("keep_at_least", type_=BigInteger)
        values: dict[str, Any] = {name: bindparam(f"new_{name}") for name in names}
        values |= {
            "expires_at": case(
                (columns.expires_at.between(now + least, now + keep), columns.expires_at),
                else_=now + keep,
            ),
            "finished_at": now,
            "lease_until": None,
        }
        if self.layout.version > 1:
            values["lease_store"] = ""  # it is read of running rows only
        if "failed_at" in columns:
            failed = bindparam("failed", type_=Boolean)
            values["failed_at"] = case(
                (failed, now), else_=bindparam("last_failed", type_=BigInteger)
            )
        if also_waits:
            wait: BindParameter[int | None] = bindparam("wait", type_=BigInteger)
            progress: BindParameter[str | None] = bindparam(
                "new_progress", type_=columns.progress.type
            )
            values["retry_at"] = case((wait.is_not(None), now + wait), else_=null())
            values["progress"] = case((progress.is_not(None), progress), else_=columns.progress)
        return update(self.table).where(*is_running(self.table)).values(values)

    def _bound(self, prefix: str, name: str) -> BindParameter[Any]:
        return bindparam(f"{prefix}_{name}", type_=self.table.c[name].type)

    def _is_shut(self, gates: FromClause) -> ColumnElement[bool]:
        """Whether a row is the group's gate and has not expired: the gate is not open."""
        return and_(gates.c.name == bindparam("gate"), gates.c.expires_at > self._now)


def is_running(table: Table) -> tuple[ColumnElement[bool], ...]:
    """Whether a row is that of an attempt that still runs under its fence and owner."""
    return (
        table.c.stored_key == bindparam("for_key"),
        table.c.state == State.RUNNING,
        table.c.fence == bindparam("for_fence"),
        table.c.owner == bindparam("for_owner"),
    )


def _as_json(alias: str) -> ColumnElement[str]:
    """The row of that alias as the text of a JSON object."""
    return cast(func.row_to_json(literal_column(alias)), Text).label("document")


def _as_seen(column: Column[Any], seen: BindParameter[Any]) -> ColumnElement[bool]:
    """Whether a column is unchanged. ``ended`` of done work is NULL in version 2 and ``returned``
    in version 1.
    """
    if column.name == "ended":
        return func.coalesce(column, Ended.RETURNED.value) == func.coalesce(
            seen, Ended.RETURNED.value
        )
    return column.is_not_distinct_from(seen) if column.nullable else column == seen
