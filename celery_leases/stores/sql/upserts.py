"""Writes whose SQL differs between databases: upserts, and updates with a limit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import (
    ColumnElement,
    CursorResult,
    Dialect,
    Executable,
    Select,
    Table,
    and_,
    insert,
    select,
    update,
)
from sqlalchemy.dialects import postgresql, sqlite

from celery_leases.stores.sql.dialects.mysql import is_mysql

Writes = tuple[Executable, ...]
"""Statements that are tried in order until one touches a row; an insert whose key exists touches
none.
"""


def upsert(
    table: Table,
    dialect: Dialect,
    key: Mapping[str, Any],
    values: Mapping[str, Any],
    *,
    where: ColumnElement[bool],
) -> Writes:
    """Give the row of *key* these *values*, if it is not there or *where* holds.

    MySQL and MariaDB need several statements. The first is an insert, because an update of a
    missing row may lock its gap. The last is an insert again, because the row may have been deleted
    meanwhile.
    """
    fresh = {**key, **values}
    if is_mysql(dialect):
        same = and_(*(table.c[name] == value for name, value in key.items()))
        inserted = insert(table).values(fresh)
        return inserted, update(table).where(same, where).values(values), inserted
    own = sqlite if dialect.name == "sqlite" else postgresql
    written = own.insert(table).values(fresh)
    places = [table.c[name] for name in key]
    return (
        written.on_conflict_do_update(index_elements=places, set_=values, where=where).returning(
            *places
        ),
    )


def insert_absent(
    table: Table, dialect: Dialect, key: Sequence[str], values: Mapping[str, Any]
) -> Writes:
    """Insert a row unless there is one with its *key*."""
    if is_mysql(dialect):
        return (insert(table).values(values),)
    own = sqlite if dialect.name == "sqlite" else postgresql
    written = own.insert(table).values(values)
    return (
        written.on_conflict_do_nothing(index_elements=key).returning(
            *(table.c[name] for name in key)
        ),
    )


def touched(executed: Any) -> bool:
    """Whether a write has touched a row, by its result or its DB-API cursor."""
    returns = (
        executed.returns_rows
        if isinstance(executed, CursorResult)
        else executed.description is not None
    )
    return executed.fetchone() is not None if returns else bool(executed.rowcount > 0)


def apart(limited: Select[Any]) -> Select[Any]:
    """The same rows, wrapped in a subquery: MySQL allows LIMIT on the table that is changed only
    there.
    """
    return select(limited.subquery())
