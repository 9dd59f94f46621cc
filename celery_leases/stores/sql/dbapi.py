"""What DB-API drivers do differently: the state of a transaction, the database's name, the type
of a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing, suppress
from pathlib import Path
from secrets import token_hex
from typing import Any, Final

from sqlalchemy import BigInteger, CursorResult, Dialect, bindparam, func, select

from celery_leases.errors import StoreUnavailable
from celery_leases.stores.sql.database import Database
from celery_leases.stores.sql.dialects import mysql

IN_PROGRESS: Final = "in progress"


class TransactionMark:
    """Identifies a transaction of a DB-API connection, so that it is not confused with a later one.

    On PostgreSQL the mark is the transaction id, on SQLite a savepoint. MySQL has none.
    """

    def __init__(self, driver: Any, database: Database) -> None:
        self._driver = driver
        self._database = database
        self._number: int | None = None
        self._savepoint: str | None = None

    def set(self) -> None:
        """Mark the current transaction of the connection, unless it is marked."""
        kind = self._database.engine.dialect.name
        if kind == "postgresql" and self._number is None:
            with closing(self._driver.cursor()) as cursor:
                cursor.execute("SELECT txid_current() AS number")
                with suppress(Exception):  # a row factory of the user's may hide the column
                    self._number = int(first_row(cursor)["number"])
        elif kind == "sqlite" and self._savepoint is None and self._driver.in_transaction:
            savepoint = f"celery_leases_{token_hex(8)}"
            self._driver.execute(f"SAVEPOINT {savepoint}")
            self._savepoint = savepoint

    def is_over(self) -> bool:
        """Whether the transaction has certainly ended; asks on another connection."""
        with suppress(StoreUnavailable):
            if self._number is not None:
                return self._status() != IN_PROGRESS
            if self._savepoint is not None:
                return self._database.has_no_writer()
        return False

    def is_surely_open(self) -> bool:
        """Whether the transaction is certainly open. Releases the savepoint, so call it only once,
        right before a rollback.
        """
        with suppress(Exception):
            if self._number is not None:
                return self._status() == IN_PROGRESS
            if self._savepoint is not None:
                self._driver.execute(f"RELEASE {self._savepoint}")
                return True
        return False

    def _status(self) -> str | None:
        asked = select(func.txid_status(bindparam("number", type_=BigInteger)).label("status"))
        row = self._database.first(asked, {"number": self._number})
        return row["status"] if row is not None else None


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
