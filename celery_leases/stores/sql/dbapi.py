"""What DB-API drivers do differently: whether a transaction is open, the database's name, the type
of a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from sqlalchemy import CursorResult, Dialect

from celery_leases.stores.sql.dialects import mysql


def database_of(driver: Any) -> str | None:
    """The database of a DB-API connection (for SQLite the absolute path of the file); ``None``
    if it is not known.
    """
    if hasattr(driver, "total_changes"):  # sqlite3
        with closing(driver.cursor()) as cursor:
            cursor.row_factory = None
            files = [
                file for _, name, file in cursor.execute("PRAGMA database_list") if name == "main"
            ]
        return str(Path(files[0]).resolve()) if files and files[0] else None
    name = getattr(getattr(driver, "info", None), "dbname", None) or getattr(driver, "db", None)
    if isinstance(name, bytes):
        name = name.decode(errors="replace")
    return name if isinstance(name, str) else None


def dialect_by_format(dialect: Dialect) -> Dialect:
    """A dialect of the same database that writes parameters as ``%s``, which Django requires."""
    return type(dialect)(paramstyle="format") if dialect.positional else dialect  # type: ignore[call-arg]


def first_row(executed: Any) -> Any:
    """The first row of a result or cursor, as a mapping."""
    if isinstance(executed, CursorResult):
        return executed.mappings().first()
    row = executed.fetchone()
    if row is None or isinstance(row, Mapping):
        return row
    return dict(zip([column[0] for column in executed.description], row, strict=True))


def in_transaction(driver: Any) -> bool:
    """Whether a DB-API connection is in a transaction. If the driver does not report that, an open
    connection counts as in one.
    """
    if driver is None:
        return False
    is_open = reports_transaction(driver)
    return is_open if is_open is not None else not getattr(driver, "closed", False)


def reports_transaction(driver: Any) -> bool | None:
    """Whether a DB-API connection reports an open transaction; ``None`` if its driver does not
    report that. Knows psycopg, psycopg2, sqlite3 and the MySQL drivers.
    """
    if hasattr(driver, "in_transaction"):
        return bool(driver.in_transaction)
    info = getattr(driver, "info", None)
    status = getattr(info, "transaction_status", None)
    if status is not None:
        # PQTRANS_ACTIVE, PQTRANS_INTRANS and PQTRANS_INERROR of libpq
        return int(status) in (1, 2, 3)
    return mysql.in_transaction(driver) if hasattr(driver, "get_autocommit") else None
