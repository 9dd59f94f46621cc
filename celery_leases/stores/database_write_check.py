"""Checks before a worker starts that it may write to the records database."""

from __future__ import annotations

from typing import Final

from sqlalchemy import Connection, Table, delete, false, insert, select, update
from sqlalchemy.exc import DBAPIError

from celery_leases.errors import LeaseConfigurationError
from celery_leases.stores.sql.dialects import mysql, postgresql
from celery_leases.stores.sql.records import SqlRecordStore
from celery_leases.stores.sql.schema import MIGRATE
from celery_leases.stores.urls import display_database_url

_RIGHTS: Final = "give the user of leases_database_url SELECT, INSERT, UPDATE and DELETE on {table}"
_READ_ONLY: Final = "write a leases_database_url whose server and user may write"
_TABLES: Final = f"change {{table}} to what `{MIGRATE} --sql` prints"

_BY_SQLSTATE: Final = {
    "42501": _RIGHTS,
    "25006": _READ_ONLY,
    postgresql.UNDEFINED_COLUMN: _TABLES,
    postgresql.UNDEFINED_TABLE: _TABLES,
}
_BY_MYSQL_CODE: Final = {
    1044: _RIGHTS,
    1142: _RIGHTS,
    1143: _RIGHTS,
    1290: _READ_ONLY,
    1792: _READ_ONLY,
    1836: _READ_ONLY,
    mysql.UNDEFINED_COLUMN: _TABLES,
    mysql.NO_SUCH_TABLE: _TABLES,
}
_BY_SQLITE_TEXT: Final = {
    "readonly database": "make the file and its directory writable for the worker",
    "no such column": _TABLES,
    "has no column named": _TABLES,
}


def check_writes(records: SqlRecordStore) -> None:
    """Run an INSERT, an UPDATE and a DELETE that match no row on each table that a worker writes.

    Raises :class:`LeaseConfigurationError`, with advice, for an error that would repeat, and
    :class:`~celery_leases.errors.StoreUnavailable` if the database does not answer.
    """
    tables, database = records.tables, records.database
    with database.errors(), database.engine.connect() as connection:
        for table in (records.statements.table, tables.effects, tables.marks, tables.gates):
            try:
                _touch_nothing(connection, table)
            except DBAPIError as error:
                if (line := _advice_for(error, database.engine.dialect.name)) is None:
                    raise
                raise LeaseConfigurationError(
                    f"{display_database_url(database.engine.url)} refuses to write into {table.fullname} "
                    f"({' '.join(str(error.orig).split())}); {line.format(table=table.fullname)}"
                ) from None


def _touch_nothing(connection: Connection, table: Table) -> None:
    column = next(iter(table.primary_key.columns))
    names = [each.name for each in table.columns]
    connection.execute(insert(table).from_select(names, select(*table.columns).where(false())))
    connection.execute(update(table).where(false()).values({column: column}))
    connection.execute(delete(table).where(false()))


def _advice_for(error: DBAPIError, dialect: str) -> str | None:
    """The advice for an error that would repeat; ``None`` for any other error."""
    if dialect == "sqlite":
        text = str(error.orig)
        return next((line for words, line in _BY_SQLITE_TEXT.items() if words in text), None)
    if dialect in mysql.FAMILY:
        return _BY_MYSQL_CODE.get(mysql.code_of(error) or 0)
    return _BY_SQLSTATE.get(postgresql.state_of(error) or "")
