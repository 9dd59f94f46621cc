"""Checks before a worker starts that it may write to the records database."""

from __future__ import annotations

from typing import Final

from sqlalchemy import Connection, Table, delete, false, insert, select, update
from sqlalchemy.exc import DBAPIError

from celery_leases.errors import LeaseConfigurationError
from celery_leases.stores.sql.dialects import Fault
from celery_leases.stores.sql.records import SqlRecordStore
from celery_leases.stores.sql.schema import MIGRATE
from celery_leases.stores.urls import display_database_url

_RIGHTS: Final = "give the user of leases_database_url SELECT, INSERT, UPDATE and DELETE on {table}"
_READ_ONLY: Final = "write a leases_database_url whose server and user may write"
_TABLES: Final = f"change {{table}} to what `{MIGRATE} --sql` prints"

_ADVICE: Final[dict[Fault | None, str]] = {
    Fault.NO_RIGHT: _RIGHTS,
    Fault.READ_ONLY: _READ_ONLY,
    Fault.NO_TABLE: _TABLES,
    Fault.NO_COLUMN: _TABLES,
}


def check_writes(records: SqlRecordStore) -> None:
    """Run an INSERT, an UPDATE and a DELETE that match no row on each table that a worker writes.

    Raises :class:`LeaseConfigurationError`, with advice, for an error that would repeat, and
    :class:`~celery_leases.errors.StoreUnavailable` if the database does not answer.
    """
    tables, database = records.tables, records.database
    with database.errors(), database.engine.connect() as connection:
        for table in (
            records.statements.table,
            tables.effects,
            tables.marks,
            tables.groups,
        ):
            try:
                _touch_nothing(connection, table)
            except DBAPIError as error:
                fault = database.dialect.fault(error)
                if fault not in _ADVICE:
                    raise
                raise LeaseConfigurationError(
                    f"{display_database_url(database.engine.url)} refuses to write into {table.fullname} "
                    f"({' '.join(str(error.orig).split())}); {_ADVICE[fault].format(table=table.fullname)}"
                ) from None


def _touch_nothing(connection: Connection, table: Table) -> None:
    column = next(iter(table.primary_key.columns))
    names = [each.name for each in table.columns]
    connection.execute(insert(table).from_select(names, select(*table.columns).where(false())))
    connection.execute(update(table).where(false()).values({column: column}))
    connection.execute(delete(table).where(false()))
