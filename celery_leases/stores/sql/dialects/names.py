"""SQL that differs between databases: the clock, and quoted names in textual statements."""

from __future__ import annotations

from typing import Final

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Dialect,
    Table,
    bindparam,
    cast,
    func,
    literal_column,
)

from celery_leases.stores.sql.dialects import mysql

_POSTGRESQL_NOW: Final = "CAST(extract(epoch from statement_timestamp()) * 1000000 AS BIGINT)"


def database_now(dialect: Dialect) -> ColumnElement[int]:
    """The time of the statement in microseconds since the epoch. For SQLite it is the parameter
    ``now``, with the host's time.
    """
    if dialect.name == "sqlite":
        return bindparam("now", type_=BigInteger)
    if mysql.is_mysql(dialect):
        return literal_column(mysql.NOW, BigInteger)
    return cast(literal_column("extract(epoch from statement_timestamp()) * 1000000"), BigInteger)


def position(text: ColumnElement[str], part: str, dialect: Dialect) -> ColumnElement[int]:
    """Where *part* begins in *text*, from 1; 0 if it is not in there."""
    find = func.strpos if dialect.name == "postgresql" else func.instr
    return find(text, part)


def now_in_text(dialect: Dialect) -> str:
    """The same as SQL text."""
    if mysql.is_mysql(dialect):
        return mysql.NOW
    return ":now" if dialect.name == "sqlite" else _POSTGRESQL_NOW


def in_text(table: Table, dialect: Dialect) -> str:
    """The quoted name of *table* for ``text()``, which doubles percent signs itself and reads
    colons as parameters.
    """
    preparer = dialect.identifier_preparer
    named = preparer.format_table(table)
    if preparer._double_percents:  # noqa: SLF001 - whether the driver reads %
        named = named.replace("%%", "%")
    return named.replace(":", "\\:")
