"""Differences between PostgreSQL, MySQL or MariaDB, and SQLite, in one file for each."""

from __future__ import annotations

from typing import Final

import sqlalchemy

from celery_leases.stores.sql.dialects.dialect import Dialect, Fault, Mark, Writes, touched
from celery_leases.stores.sql.dialects.mysql import MySQL
from celery_leases.stores.sql.dialects.postgresql import PostgreSQL
from celery_leases.stores.sql.dialects.sqlite import SQLite

__all__ = ["DIALECTS", "Dialect", "Fault", "Mark", "Writes", "dialect_of", "touched"]

DIALECTS: Final[dict[str, type[Dialect]]] = {
    name: kind for kind in (SQLite, PostgreSQL, MySQL) for name in kind.NAMES
}
"""The supported databases, by the names in their URLs."""


def dialect_of(dialect: sqlalchemy.Dialect) -> Dialect:
    """How to use the database of SQLAlchemy's *dialect*, which must be a supported one."""
    return DIALECTS[dialect.name](dialect)
