"""The two steps of a claim in SQL: insert the row or read it, and write the row if it is unchanged.

PostgreSQL does the first step in one statement. The other databases read, then insert if there is
no row. No claim locks a row that it does not get.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, Final, TypeVar

from sqlalchemy import bindparam, select

from celery_leases.errors import ColumnMissing, KeyUnusable, ValueRefused
from celery_leases.protocol.records import Record
from celery_leases.stores.availability import Evidence
from celery_leases.stores.claiming import COMPARED, Claiming, Met
from celery_leases.stores.group_values import gate_name
from celery_leases.stores.sql import rows
from celery_leases.stores.sql.database import Database
from celery_leases.stores.sql.dialects import mysql
from celery_leases.stores.sql.groups import gate_of
from celery_leases.stores.sql.record_statements import RecordStatements
from celery_leases.stores.sql.schema import Tables
from celery_leases.stores.sql.table_versions import NARROW, Layout

T = TypeVar("T")
_known: dict[str, Layout] = {}
"""The layout of the table at each place, for this process and its forks."""


class SqlClaims(Claiming):
    """The claims of a :class:`~celery_leases.protocol.ports.RecordStore` in one database."""

    def __init__(self, database: Database, tables: Tables) -> None:
        self.database = database
        self.tables = tables
        #: Whether a running row that is itself a lease may be taken over.
        self.evidence = Evidence()
        self._of_mysql = mysql.is_mysql(database.engine.dialect)
        #: Whether one statement both reads and inserts.
        self._at_once = database.engine.dialect.name == "postgresql"
        #: The statements for the layout that this process last saw.
        self.by = RecordStatements(_known.get(self.place, NARROW), database, tables)
        records = tables.records
        self._lock = (
            select(records.c.fence)
            .where(records.c.stored_key == bindparam("for_key"))
            .with_for_update()
        )

    @cached_property
    def place(self) -> str:
        """Where the tables are."""
        return f"{self.database.engine.url!r} {self.tables.metadata.schema}"

    @property
    def is_newest(self) -> bool:
        """Whether the table is known to have the newest layout, which no migration of this release
        changes.
        """
        return self.by.layout is NARROW is _known.get(self.place)

    def use(self, layout: Layout) -> None:
        """Set the layout of the table, for this process and its forks."""
        _known[self.place] = layout
        if self.by.layout is not layout:
            self.by = RecordStatements(layout, self.database, self.tables)

    def forget_layout(self) -> None:
        """A statement named a missing column: read the columns before the next statement in a
        transaction of the user's.
        """
        _known.pop(self.place, None)

    def look_again(self, by: RecordStatements) -> bool:
        """Whether the table has another layout than *by* is for; it is used from now on."""
        self.see_columns()
        return self.by.layout is not by.layout

    def see_columns(self) -> None:
        """Use the layout that the table has by now."""
        with self.database.errors():
            self.use(self.tables.layout(self.database.engine))

    def on_layout(self, run: Callable[[RecordStatements], T]) -> T:
        """The result of *run*; it runs again if the layout of the table has changed meanwhile."""
        by = self.by
        try:
            return run(by)
        except ColumnMissing:
            if not self.look_again(by):
                raise
            return run(self.by)

    def insert_or_read(self, new: Record, group: str | None) -> Met:
        """Insert *new*, or read the row and the gate; see
        :class:`~celery_leases.stores.claiming.Claiming`.

        Raises :class:`KeyUnusable` when the database refuses a value of *new*.
        """
        by = self.by
        values = by.layout.of_new(new)
        if group is not None:
            values["gate"] = gate_name(group)
        with OF_THE_CALL:
            found = self.database.first(by.looks[group is not None], values)
            assert found is not None  # it always gives one row
            now = int(found["now"])
            row: Mapping[Any, Any] | None
            if self._at_once:
                row, gate = (
                    _from_json(found["record"]),
                    _from_json(found["gate"]) if group is not None else None,
                )
                inserted = bool(found["inserted"])
            else:
                row = found if found["stored_key"] is not None else None
                gate = self._gate_in(found) if group is not None else None
                moment = self._inserted(by, values) if row is None and gate is None else None
                inserted, now = moment is not None, moment or now
        return Met(
            now,
            inserted,
            rows.to_record({**row, "now": now}) if row is not None else None,
            gate_of(group, gate, now) if group is not None and gate is not None else None,
        )

    def swap(self, seen: Record, new: Record) -> bool:
        """Write *new* if the row is as it was *seen*; see
        :class:`~celery_leases.stores.claiming.Claiming`.

        Raises :class:`KeyUnusable` when the database refuses a value of *new*.
        """
        by = self.by
        before, after = by.layout.of_record(seen), by.layout.of_record(new)
        values: dict[str, Any] = {"for_key": seen.stored_key}
        values |= {f"seen_{name}": before[name] for name in COMPARED}
        values |= {f"new_{name}": after[name] for name in by.layout.swapped}
        with OF_THE_CALL:
            return self.database.count(by.swap, values) == 1

    def await_lock(self, row: Record) -> None:
        """Lock *row* and release the lock; see :class:`~celery_leases.stores.claiming.Claiming`."""
        self.database.first(self._lock, {"for_key": row.stored_key})

    def _inserted(self, by: RecordStatements, values: Mapping[str, Any]) -> int | None:
        """Insert a row; returns the time of the insert, or ``None`` if its key exists by now."""
        if self._of_mysql:
            return self.database.number(by.insert, values)
        row = self.database.first(by.insert, values)
        return row["fence"] if row is not None else None

    def _gate_in(self, found: Mapping[Any, Any]) -> Mapping[Any, Any] | None:
        gate = {column.name: found[f"gate_{column.name}"] for column in self.tables.gates.c}
        return gate if gate["name"] is not None else None


def _from_json(text: str | None) -> Mapping[Any, Any] | None:
    return json.loads(text) if text is not None else None


class _OfTheCall:
    """Encloses statements with values of a call: a value that the database refuses is an error of
    the call, not an outage.
    """

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, ValueRefused):
            raise KeyUnusable(f"a value of this call cannot be stored: {error}") from error


OF_THE_CALL: Final = _OfTheCall()
