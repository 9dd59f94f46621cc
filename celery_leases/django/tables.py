"""Creates, migrates and drops the tables in a database that Django is connected to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from celery_leases.django.configuration import url_of_alias
from celery_leases.django.databases import IN_MEMORY
from celery_leases.stores.sql.connections import engine_for
from celery_leases.stores.sql.migrations import Migrated
from celery_leases.stores.sql.records import SqlRecordStore
from celery_leases.stores.sql.schema import NEWEST, Tables


def migrate(connection: Any) -> Migrated:
    """Create the tables in the database of Django's *connection*, or migrate older ones.

    Workers may run meanwhile. Raises as
    :meth:`~celery_leases.stores.sql.records.SqlRecordStore.migrate` does.
    """
    if _is_in_memory(connection):
        _execute(connection, sql(connection).split(";\n"))
        return Migrated(None, NEWEST)
    with _records_of(connection) as records:
        return records.migrate()


def drop(connection: Any) -> None:
    """Drop the tables with all records in them."""
    if _is_in_memory(connection):
        _execute(connection, sql_to_drop().split(";\n"))
        return
    with _records_of(connection) as records, records.database.errors():
        records.tables.drop(records.database.engine)


def sql(connection: Any) -> str:
    """The SQL that creates the tables in the database of Django's *connection*."""
    with _records_of(connection) as records:
        return records.tables.ddl(records.database.engine)


def sql_to_drop() -> str:
    """The SQL that drops the tables, the same for each kind of server."""
    return "".join(f"DROP TABLE IF EXISTS {table};\n" for table in Tables().metadata.tables)


def found(connection: Any) -> int | None:
    """The version of the tables, or ``None`` if there are none.

    Raises :class:`~celery_leases.errors.SchemaOutdated` for tables of a later release.
    """
    if _is_in_memory(connection):
        return NEWEST if Tables().version.name in connection.introspection.table_names() else None
    with _records_of(connection) as records, records.database.errors():
        return records.tables.existing_version(records.database.engine)


def _is_in_memory(connection: Any) -> bool:
    """Whether the database is in memory, so that only *connection* can use it; it is always new."""
    return url_of_alias(connection.alias) == IN_MEMORY


def _execute(connection: Any, statements: Iterable[str]) -> None:
    with connection.cursor() as cursor:
        for statement in statements:
            if statement.strip():
                cursor.execute(statement)


@contextmanager
def _records_of(connection: Any) -> Iterator[SqlRecordStore]:
    """The record store, with a connection of its own."""
    records = SqlRecordStore(engine_for(url_of_alias(connection.alias), 1))
    try:
        yield records
    finally:
        records.database.close()
