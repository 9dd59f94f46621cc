"""The statements that read and write whole records."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, Final

from sqlalchemy import (
    JSON,
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
    column,
    exists,
    false,
    func,
    literal_column,
    null,
    select,
    true,
    union_all,
    update,
)
from sqlalchemy.types import TypeEngine

from celery_leases.record import Record, State
from celery_leases.stores.sql import rows
from celery_leases.stores.sql.database import Database
from celery_leases.stores.sql.rows import DETAILS, WHEN_CLAIMED, WHEN_NEW, WHEN_SETTLED
from celery_leases.stores.sql.schema import Tables

SUCCESS: Final = ("state", "result")
"""The columns that a success sets to its own values, if it leaves all others as they were claimed.
"""
LOCK_TIMEOUT: Final = "50ms"
"""For how long a statement for several calls waits for a locked row. All its calls wait meanwhile;
afterwards each has a statement of its own, which waits as long as usual.
"""

Given = Callable[[str, TypeEngine[Any]], ColumnElement[Any]]
"""Where a statement has a value from, by its name and type: a parameter, or a column."""


def bindparam_of(name: str, kind: TypeEngine[Any]) -> ColumnElement[Any]:
    """A parameter of the statement."""
    return bindparam(name, type_=kind)


class RecordStatements:
    """The statements of a record store for its table."""

    def __init__(self, database: Database, tables: Tables) -> None:
        self.table: Table = tables.records
        self._now = database.now
        self._groups = tables.groups
        self._dialect = database.dialect
        make = (
            self._insert_or_read_statement
            if self._dialect.reads_or_inserts
            else self._read_statement
        )
        self.select_now = select(self._now.label("now"))
        #: Selects whole rows, and the time of the statement as ``now``.
        self.select_rows = select(*self.table.c, self._now.label("now"))
        #: Selects the row of a key.
        self.select_row = self.select_rows.where(self.table.c.stored_key == bindparam("stored_key"))
        #: The first step of a claim; with ``True`` it also reads a group that is not open.
        #: On PostgreSQL it fails if another claim inserts the row at the same time, and is then
        #: repeated by ``insert_or_read_again``.
        self.insert_or_read = {in_group: make(in_group=in_group) for in_group in (False, True)}
        #: The second step of a claim.
        self.swap = self._swap_statement()
        #: Writes an outcome under the attempt's fence.
        self.settle = self._settle_statement((*WHEN_SETTLED, DETAILS))
        #: The same for an outcome that leaves all other columns as the claim wrote them.
        self.settle_success = self._settle_statement(SUCCESS, also_waits=False)

    @cached_property
    def insert_or_read_again(self) -> Mapping[bool, Executable]:
        """``insert_or_read`` on PostgreSQL with ``ON CONFLICT DO NOTHING``, which does not fail."""
        return {
            in_group: self._insert_or_read_statement(in_group=in_group, unless_present=True)
            for in_group in (False, True)
        }

    @cached_property
    def read_with_group(self) -> Executable:
        """Read the row of a key, and that of its group. The columns of a missing one are NULL."""
        return self._read_statement(in_group=True, also_open=True)

    @cached_property
    def together(self) -> Executable:
        """``insert_or_read`` for several new rows, and ``settle_success`` for several attempts,
        each an object of the JSON array ``claims`` or ``successes``.

        Returns the claims that were inserted, those whose rows exist, and the owners of the
        successes that were written. Another claim may have inserted a row that is neither.
        """
        inserted, present = self._claims()
        ended = self._successes().returning(self.table.c.owner).cte("ended")
        return union_all(
            select(
                inserted.c.owner,
                inserted.c.fence.label("now"),
                true().label("inserted"),
                null().label("record"),
            ),
            select(present.c.new_owner, present.c.now, false(), present.c.document).where(
                present.c.document.is_not(None)
            ),
            select(ended.c.owner, null(), null(), null()),
        )

    def _claims(self) -> tuple[FromClause, FromClause]:
        """The claims of ``claims`` that were inserted, and all of them, with the row of the key."""
        columns = {f"new_{name}": self.table.c[name].type for name in WHEN_NEW}
        wanted = self._given("claims", columns, "new_owner")
        row = self.table.alias("r")
        of_key = row.c.stored_key == wanted.selected_columns.new_stored_key
        seen = select(_as_json("r")).where(of_key).scalar_subquery().label("document")
        given = wanted.add_columns(self._now.label("now"), seen).cte("wanted")
        fresh = self._new_row(given.c.now, lambda name, _: given.c[name])
        inserted = (
            self._dialect.insert(self.table)
            .from_select(list(fresh), select(*fresh.values()).where(given.c.document.is_(None)))
            .on_conflict_do_nothing()
            .returning(self.table.c.owner, self.table.c.fence)
            .cte("inserted")
        )
        return inserted, given

    def _successes(self) -> Update:
        """Write the successes of ``successes``."""
        of_row, number = self.table.c, BigInteger()
        columns = {"for_key": of_row.stored_key.type, "for_fence": number}
        columns |= {"for_owner": of_row.owner.type, "keep": number, "keep_at_least": number}
        columns |= {f"new_{name}": of_row[name].type for name in SUCCESS}
        given = self._given("successes", columns, "for_owner").cte("won")
        return self._settle_statement(SUCCESS, lambda name, _: given.c[name], also_waits=False)

    def _given(self, array: str, columns: Mapping[str, TypeEngine[Any]], owner: str) -> Select[Any]:
        """The objects of the parameter *array*, as JSON, as rows with these *columns*; they wait
        for locks only for a moment.

        PostgreSQL would expect 100 rows, for which it would read a whole table of a few thousand
        rows. Of a comparison of two values of a row it expects that one row meets it, so that it
        uses the index.
        """
        objects = cast(bindparam(array), JSON)
        typed = [column(name, kind) for name, kind in columns.items()]
        rows = func.json_to_recordset(objects).table_valued(*typed).render_derived(with_types=True)
        limit = f"(SELECT set_config('lock_timeout', '{LOCK_TIMEOUT}', true)) = '{LOCK_TIMEOUT}'"
        always = rows.c[owner] == rows.c[owner] + literal_column("''", Text)
        return select(*rows.c).where(literal_column(limit, Boolean), always)

    @cached_property
    def insert(self) -> Executable:
        """Insert a new row, where the first step of a claim only reads. Its fence is the time of
        the insert.
        """
        return self._dialect.insert_now(self.table, self._new_row(self._now, bindparam_of), "fence")

    def usual(self) -> list[Executable]:
        """The statements that most calls need on this database."""
        first = self.insert_or_read.values()
        again = (
            self.insert_or_read_again.values() if self._dialect.reads_or_inserts else [self.insert]
        )
        ends = (self.settle, self.settle_without_details, self.settle_success)
        return [*first, *again, self.swap, self.select_row, *ends]

    def changed(self, found: Mapping[Any, Any], new: Record) -> Update:
        """The update of the row *found* to *new*, if its compared columns are unchanged, and its
        document, which says how earlier attempts ended.
        """
        compared = (*rows.COMPARED, rows.DETAILS)
        as_found = [self.table.c[name].is_not_distinct_from(found[name]) for name in compared]
        written = rows.column_values(new)
        return (
            update(self.table)
            .where(self.table.c.stored_key == found["stored_key"], *as_found)
            .values({name: value for name, value in written.items() if value != found[name]})
        )

    @cached_property
    def settle_without_details(self) -> Update:
        """The same, without a change of the column ``details``."""
        return self._settle_statement(WHEN_SETTLED)

    def _insert_or_read_statement(
        self, *, in_group: bool, unless_present: bool = False
    ) -> Select[Any]:
        """One statement that reads the row, or inserts a new one if there is none.

        An existing row is read from a snapshot, without a lock. It is returned as one JSON
        document, so that the reply to an insert has few columns. Only with *unless_present* is a
        row that was inserted after the snapshot not an error: ``ON CONFLICT`` writes 48 bytes more
        to the write-ahead log for each inserted row.
        """
        records, groups = self.table.alias("r"), self._groups.alias("g")
        seen = (
            select(_as_json("r"))
            .where(records.c.stored_key == bindparam("new_stored_key"))
            .cte("seen")
        )
        closed = select(*self._columns_of(groups)).where(self._is_closed(groups)).subquery("closed")
        closed_group = select(_as_json("closed")).select_from(closed).cte("closed_group")
        absent = [~exists(select(seen.c.document))] + [
            ~exists(select(closed_group.c.document))
        ] * in_group
        moment = select(self._now.label("now")).subquery("moment")
        fresh = self._new_row(moment.c.now, bindparam_of)
        made = self._dialect.insert(self.table).from_select(
            list(fresh),
            select(*(value.label(name) for name, value in fresh.items())).where(*absent),
        )
        if unless_present:
            made = made.on_conflict_do_nothing()
        inserted = made.returning(self.table.c.fence).cte("inserted")
        found: list[ColumnElement[Any]] = [
            self._now.label("now"),
            exists(select(inserted.c.fence)).label("inserted"),
            select(seen.c.document).scalar_subquery().label("record"),
        ]
        return select(
            *found,
            *(
                [select(closed_group.c.document).scalar_subquery().label("closed")]
                if in_group
                else []
            ),
        )

    def _read_statement(self, *, in_group: bool, also_open: bool = False) -> Select[Any]:
        """A statement that reads the row, and that of the group, if it is not open or if
        *also_open*. The columns of a missing one are NULL.
        """
        always: FromClause = select(literal_column("1").label("one")).subquery("always")
        columns: list[ColumnElement[Any]] = [self._now.label("now"), *self.table.c]
        if in_group:
            groups = self._groups
            name = groups.c.name == bindparam("group")
            columns += self._columns_of(groups)
            always = always.outerjoin(groups, name if also_open else self._is_closed(groups))
        row = self.table.c.stored_key == bindparam("new_stored_key")
        return select(*columns).select_from(always.outerjoin(self.table, row))

    def _columns_of(self, groups: FromClause) -> list[ColumnElement[Any]]:
        """What a claim needs of the row of its group."""
        columns = groups.c
        return [columns.version, columns.slots, columns.expires_at.label("kept_until")]

    def _new_row(self, now: ColumnElement[int], given: Given) -> dict[str, ColumnElement[Any]]:
        """The columns of a new row by name, from *given*; its times are relative to *now*."""
        values = {name: given(f"new_{name}", self.table.c[name].type) for name in WHEN_NEW}
        spans = {name: now + values[name] for name in ("lease_until", "expires_at")}
        moments: dict[str, ColumnElement[Any]] = dict.fromkeys(
            ("fence", "created_at", "started_at"), now
        )
        return values | spans | moments

    def _swap_statement(self) -> Update:
        columns = self.table.c
        as_seen = [_as_seen(columns[name], bindparam(f"seen_{name}")) for name in rows.COMPARED]
        values: Mapping[str, Any] = {name: bindparam(f"new_{name}") for name in WHEN_CLAIMED}
        return (
            update(self.table)
            .where(columns.stored_key == bindparam("for_key"), *as_seen)
            .values(values)
        )

    def _settle_statement(
        self, names: tuple[str, ...], given: Given = bindparam_of, *, also_waits: bool = True
    ) -> Update:
        """Write the columns *names*, as *given*, and the times of the end. Unless it *also_waits*,
        ``retry_at`` and the progress stay as they are.
        """
        columns, now, number = self.table.c, self._now, BigInteger()
        keep, least = given("keep", number), given("keep_at_least", number)
        values: dict[str, Any] = {name: given(f"new_{name}", columns[name].type) for name in names}
        values |= {
            "expires_at": case(
                (columns.expires_at.between(now + least, now + keep), columns.expires_at),
                else_=now + keep,
            ),
            "finished_at": now,
            "lease_until": None,
            "lease_store": "",  # the name is only needed in running rows
        }
        if also_waits:
            wait, progress = given("wait", number), given("new_progress", columns.progress.type)
            values["retry_at"] = now + wait  # NULL without a wait
            values["progress"] = func.coalesce(progress, columns.progress)
        return update(self.table).where(*is_running(self.table, given)).values(values)

    def _is_closed(self, groups: FromClause) -> ColumnElement[bool]:
        """Whether a row is that of the group, and its group is not open."""
        return and_(groups.c.name == bindparam("group"), groups.c.limited_until > self._now)


def is_running(table: Table, given: Given = bindparam_of) -> tuple[ColumnElement[bool], ...]:
    """The condition that a row is still running under the attempt's fence and owner."""
    return (
        table.c.stored_key == given("for_key", table.c.stored_key.type),
        table.c.state == State.RUNNING,
        table.c.fence == given("for_fence", table.c.fence.type),
        table.c.owner == given("for_owner", table.c.owner.type),
    )


def _as_json(alias: str) -> ColumnElement[str]:
    """The row of the table with this alias, as the text of a JSON object."""
    return cast(func.row_to_json(literal_column(alias)), Text).label("document")


def _as_seen(column: Column[Any], seen: BindParameter[Any]) -> ColumnElement[bool]:
    """The condition that a column is unchanged."""
    return column.is_not_distinct_from(seen) if column.nullable else column == seen
