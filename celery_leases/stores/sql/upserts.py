"""SQL that differs between databases: upserts, deletes with a limit, and lists of values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import (
    Column,
    ColumnElement,
    CursorResult,
    Dialect,
    Executable,
    Select,
    Table,
    Text,
    and_,
    any_,
    bindparam,
    insert,
    select,
    update,
)
from sqlalchemy.dialects import postgresql, sqlite

from celery_leases.stores.sql.dialects.mysql import is_mysql

Writes = tuple[Executable, ...]
"""Statements that are run in order until one of them touches a row. An insert whose key exists
touches none.
"""


def upsert(
    table: Table,
    dialect: Dialect,
    key: Mapping[str, Any],
    values: Mapping[str, Any],
    *,
    where: ColumnElement[bool],
) -> Writes:
    """Insert the row of *key* with *values*, or update an existing row for which *where* is true.

    MySQL and MariaDB need several statements. The first is an insert, because an update of a
    missing row may take a gap lock. The last is an insert again, because the row may have been
    deleted after the first one.
    """
    fresh = {**key, **values}
    if is_mysql(dialect):
        same = and_(*(table.c[name] == value for name, value in key.items()))
        inserted = insert(table).values(fresh)
        return inserted, update(table).where(same, where).values(values), inserted
    written = _insert(table, dialect).values(fresh)
    places = [table.c[name] for name in key]
    return (
        written.on_conflict_do_update(index_elements=places, set_=values, where=where).returning(
            *places
        ),
    )


def insert_absent(
    table: Table, dialect: Dialect, key: Sequence[str], values: Mapping[str, Any]
) -> Writes:
    """Insert a row unless there is one with the same *key* columns."""
    if is_mysql(dialect):
        return (insert(table).values(values),)
    written = _insert(table, dialect).values(values)
    return (
        written.on_conflict_do_nothing(index_elements=key).returning(
            *(table.c[name] for name in key)
        ),
    )


def _insert(table: Table, dialect: Dialect) -> postgresql.Insert | sqlite.Insert:
    """An insert that can have ON CONFLICT."""
    return sqlite.insert(table) if dialect.name == "sqlite" else postgresql.insert(table)


def touched(executed: Any) -> bool:
    """Whether a write has inserted, changed or deleted a row, from its result or DB-API cursor."""
    returns = (
        executed.returns_rows
        if isinstance(executed, CursorResult)
        else executed.description is not None
    )
    return executed.fetchone() is not None if returns else bool(executed.rowcount > 0)


def is_one_of(column: Column[Any], name: str, dialect: Dialect) -> ColumnElement[bool]:
    """Whether *column* has one of the values in the list that is the parameter *name*.

    PostgreSQL gets the list as one array, so that the statement is the same for lists of any
    length, and is compiled and prepared once.
    """
    if dialect.name == "postgresql":
        return column == any_(bindparam(name, type_=postgresql.ARRAY(Text)))
    return column.in_(bindparam(name, expanding=True))


def in_subquery(limited: Select[Any]) -> Select[Any]:
    """*limited* in a subquery: MySQL allows LIMIT on the table that is changed only in one."""
    return select(limited.subquery())
