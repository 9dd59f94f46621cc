"""The two steps of a claim in SQL: insert or read the row, and replace an unchanged row.

PostgreSQL does the first step in one statement. The other databases read, and then insert if there
is no row. A refused claim locks no row.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property
from typing import Any, Final

from sqlalchemy import bindparam, select

from celery_leases.errors import KeyUnusable, ValueRefused
from celery_leases.protocol.records import Record
from celery_leases.stores.availability import Availability
from celery_leases.stores.claim_procedure import COMPARED, Claiming, InsertOrReadResult
from celery_leases.stores.cooldown_group_values import gate_name
from celery_leases.stores.sql import record_columns, rows
from celery_leases.stores.sql.cooldown_groups import gate_of
from celery_leases.stores.sql.database import Database
from celery_leases.stores.sql.dialects import mysql
from celery_leases.stores.sql.record_statements import RecordStatements
from celery_leases.stores.sql.schema import Tables


class SqlClaims(Claiming):
    """The claims of a :class:`~celery_leases.protocol.interfaces.RecordStore` in one database."""

    def __init__(self, database: Database, tables: Tables) -> None:
        self.database = database
        self.tables = tables
        #: Decides whether an expired row that is itself the lease may be taken over.
        self.availability = Availability(database=self.tables_location)
        self._on_mysql = mysql.is_mysql(database.engine.dialect)
        #: Whether the first step is one statement.
        self._reads_and_inserts = database.engine.dialect.name == "postgresql"
        self.statements = RecordStatements(database, tables)
        records = tables.records
        self._lock = (
            select(records.c.fence)
            .where(records.c.stored_key == bindparam("for_key"))
            .with_for_update()
        )

    @cached_property
    def tables_location(self) -> str:
        """Where the tables are."""
        return f"{self.database.engine.url!r} {self.tables.metadata.schema}"

    def insert_or_read(self, new: Record, group: str | None) -> InsertOrReadResult:
        """Insert *new*, or read the row and the gate; see
        :class:`~celery_leases.stores.claim_procedure.Claiming`.

        Raises :class:`KeyUnusable` when the database refuses a value of *new*.
        """
        statements = self.statements
        values = record_columns.insert_parameters(new)
        if group is not None:
            values["gate"] = gate_name(group)
        with KEY_UNUSABLE_ERRORS:
            first, gated = self.database.first_unless_present, group is not None
            found = first(statements.insert_or_read[gated], values)
            if found is None:
                found = first(statements.insert_or_read_again[gated], values)
            assert found is not None  # the statement always returns one row
            now = int(found["now"])
            row: Mapping[Any, Any] | None
            if self._reads_and_inserts:
                row, gate = (
                    _from_json(found["record"]),
                    _from_json(found["gate"]) if group is not None else None,
                )
                inserted = bool(found["inserted"])
            else:
                row = found if found["stored_key"] is not None else None
                gate = self._gate_in(found) if group is not None else None
                moment = (
                    self._inserted(statements, values) if row is None and gate is None else None
                )
                inserted, now = moment is not None, moment or now
        return InsertOrReadResult(
            now,
            inserted,
            rows.to_record({**row, "now": now}) if row is not None else None,
            gate_of(group, gate, now) if group is not None and gate is not None else None,
        )

    def swap(self, seen: Record, new: Record) -> bool:
        """Replace *seen* by *new* if the row is unchanged; see
        :class:`~celery_leases.stores.claim_procedure.Claiming`.

        Raises :class:`KeyUnusable` when the database refuses a value of *new*.
        """
        before, after = record_columns.column_values(seen), record_columns.column_values(new)
        values: dict[str, Any] = {"for_key": seen.stored_key}
        values |= {f"seen_{name}": before[name] for name in COMPARED}
        values |= {f"new_{name}": after[name] for name in record_columns.SWAPPED}
        with KEY_UNUSABLE_ERRORS:
            return self.database.count(self.statements.swap, values) == 1

    def await_lock(self, row: Record) -> None:
        """Lock *row* and release the lock; see
        :class:`~celery_leases.stores.claim_procedure.Claiming`.
        """
        self.database.first(self._lock, {"for_key": row.stored_key})

    def _inserted(self, statements: RecordStatements, values: Mapping[str, Any]) -> int | None:
        """Insert a row; returns the time of the insert, or ``None`` if the key has a row now."""
        if self._on_mysql:
            return self.database.number(statements.insert, values)
        row = self.database.first(statements.insert, values)
        return row["fence"] if row is not None else None

    def _gate_in(self, found: Mapping[Any, Any]) -> Mapping[Any, Any] | None:
        gate = {column.name: found[f"gate_{column.name}"] for column in self.tables.gates.c}
        return gate if gate["name"] is not None else None


def _from_json(text: str | None) -> Mapping[Any, Any] | None:
    return json.loads(text) if text is not None else None


class _KeyUnusableErrors:
    """Raises :class:`KeyUnusable` for a value that the database refuses: the value comes from the
    call, so this is not an outage.
    """

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, ValueRefused):
            raise KeyUnusable(f"a value of this call cannot be stored: {error}") from error


KEY_UNUSABLE_ERRORS: Final = _KeyUnusableErrors()
