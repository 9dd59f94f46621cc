"""Limits the memory of eager calls: only the latest records stay in this process."""

from __future__ import annotations

from typing import Final

from sqlalchemy import text

from celery_leases.stores.sql.records import SqlRecordStore

MAX_RECORDS: Final = 1000


def limit_records(records: SqlRecordStore) -> None:
    """Add triggers to a SQLite database: each new record deletes all but the latest
    ``MAX_RECORDS``, with their effects and marks.

    Records of running attempts stay. Raises :class:`~celery_leases.errors.StoreUnavailable`.
    """
    tables = records.tables
    dependent = (tables.effects, tables.marks)
    own = " ".join(f"DELETE FROM {table} WHERE stored_key = OLD.stored_key;" for table in dependent)  # noqa: S608
    old = f"DELETE FROM {tables.records} WHERE rowid <= NEW.rowid - {MAX_RECORDS} AND state <> 'running';"  # noqa: S608
    triggers = (
        f"CREATE TRIGGER IF NOT EXISTS celery_leases_evict AFTER INSERT ON {tables.records} BEGIN {old} END",
        f"CREATE TRIGGER IF NOT EXISTS celery_leases_cascade AFTER DELETE ON {tables.records} BEGIN {own} END",
    )
    with records.database.errors(), records.database.engine.connect() as connection:
        for trigger in triggers:
            connection.execute(text(trigger))
