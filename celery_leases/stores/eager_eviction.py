"""Bounds the memory of eager calls: their records in this process keep only the latest keys."""

from __future__ import annotations

from typing import Final

from sqlalchemy import text

from celery_leases.stores.sql.records import SqlRecordStore

KEYS_KEPT: Final = 1000


def keep_the_latest(records: SqlRecordStore) -> None:
    """Let a SQLite database delete all but the latest ``KEYS_KEPT`` records as keys are added, with
    effects and marks.

    Records of running attempts stay. Raises :class:`~celery_leases.errors.StoreUnavailable`.
    """
    tables = records.tables
    dependent = (tables.effects, tables.marks)
    own = " ".join(f"DELETE FROM {table} WHERE stored_key = OLD.stored_key;" for table in dependent)  # noqa: S608
    old = f"DELETE FROM {tables.records} WHERE rowid <= NEW.rowid - {KEYS_KEPT} AND state <> 'running';"  # noqa: S608
    triggers = (
        f"CREATE TRIGGER IF NOT EXISTS celery_leases_keep AFTER INSERT ON {tables.records} BEGIN {old} END",
        f"CREATE TRIGGER IF NOT EXISTS celery_leases_forget AFTER DELETE ON {tables.records} BEGIN {own} END",
    )
    with records.database.errors(), records.database.engine.connect() as connection:
        for trigger in triggers:
            connection.execute(text(trigger))
