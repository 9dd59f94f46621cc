"""Checks before a worker starts that its records database lets it write."""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import Connection, Table, delete, false, insert, select, update
from sqlalchemy.exc import DBAPIError

from celery_leases.errors import LeaseConfigurationError
from celery_leases.stores.sql.dialects import mysql
from celery_leases.stores.sql.records import SqlRecordStore
from celery_leases.stores.sql.schema import MIGRATE
from celery_leases.stores.urls import shown_database

_RIGHTS: Final = "give the user of leases_database_url SELECT, INSERT, UPDATE and DELETE on {table}"
_READ_ONLY: Final = "write a leases_database_url whose server and user may write"
_TABLES: Final = f"change {{table}} to what `{MIGRATE} --sql` prints"

_BY_SQLSTATE: Final = {"42501": _RIGHTS, "25006": _READ_ONLY, "42703": _TABLES, "42P01": _TABLES}
_BY_MYSQL_CODE: Final = {
    1044: _RIGHTS,
    1142: _RIGHTS,
    1143: _RIGHTS,
    1290: _READ_ONLY,
    1792: _READ_ONLY,
    1836: _READ_ONLY,
    1054: _TABLES,
    1146: _TABLES,
}
_BY_SQLITE_TEXT: Final = {
    "readonly database": "make the file and its directory writable for the worker",
    "no such column": _TABLES,
    "has no column named": _TABLES,
}


def check_writes(records: SqlRecordStore) -> None:
    """Run one INSERT, UPDATE and DELETE on each table that a worker writes, with all its columns,
    without touching a row.

    Raises :class:`LeaseConfigurationError`, with advice, if the database will always refuse, and
    :class:`~celery_leases.errors.StoreUnavailable` when it does not answer.
    """
    tables, database = records.tables, records.database
    with database.errors(), database.engine.connect() as connection:
        for table in (records.by.table, tables.effects, tables.marks, tables.gates):
            try:
                _touch_nothing(connection, table)
            except DBAPIError as error:
                if (line := _line_to_write(error, database.engine.dialect.name)) is None:
                    raise
                raise LeaseConfigurationError(
                    f"{shown_database(database.engine.url)} refuses to write into {table.fullname} "
                    f"({' '.join(str(error.orig).split())}); {line.format(table=table.fullname)}"
                ) from None


def _touch_nothing(connection: Connection, table: Table) -> None:
    column = next(iter(table.primary_key.columns))
    names = [each.name for each in table.columns]
    connection.execute(insert(table).from_select(names, select(*table.columns).where(false())))
    connection.execute(update(table).where(false()).values({column: column}))
    connection.execute(delete(table).where(false()))


def _line_to_write(error: DBAPIError, dialect: str) -> str | None:
    """The advice for an error that repetition does not cure; ``None`` for any other error."""
    cause: Any = error.orig
    if dialect == "sqlite":
        return next((line for words, line in _BY_SQLITE_TEXT.items() if words in str(cause)), None)
    if dialect in mysql.FAMILY:
        return _BY_MYSQL_CODE.get(mysql.code_of(cause) or 0)
    state = getattr(cause, "sqlstate", None) or getattr(cause, "pgcode", None)
    return _BY_SQLSTATE.get(str(state))
