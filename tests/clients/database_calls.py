"""Databases: PostgreSQL by psycopg, MySQL by PyMySQL, SQLite, each with SQLAlchemy and without."""

import sqlite3
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

from tests.clients.expectations import (
    ERROR,
    INFRASTRUCTURE,
    NOT_THERE_YET,
    REFUSED,
    Places,
    cases,
    raising,
)
from tests.clients.servers import GIVES_UP_AFTER, hangs_up_at_once, refuses


@contextmanager
def _engine(url: str, **options: Any) -> Iterator[Any]:
    from sqlalchemy import create_engine

    engine = create_engine(url, **options)
    try:
        yield engine
    finally:
        engine.dispose()


def _says(*statements: str) -> Any:
    """One transaction of some statements."""

    def execute(places: Places) -> None:
        from sqlalchemy import text

        with _engine(places.postgres) as engine, engine.begin() as connection:
            for statement in statements:
                connection.execute(text(statement))

    return execute


def _at_once(places: Places, isolation: str, first: str, second: str) -> None:
    """Two transactions on one row: both read it, then *first* commits, then *second* is tried."""
    from sqlalchemy import text

    table = f"accounts_{uuid4().hex[:12]}"
    with _engine(places.postgres) as engine:
        with engine.begin() as connection:
            connection.execute(text(f"CREATE TABLE {table} AS SELECT 1 AS id, 0 AS balance"))
        try:
            with (
                engine.connect().execution_options(isolation_level=isolation) as one,
                engine.connect().execution_options(isolation_level=isolation) as other,
            ):
                for connection in (one, other):
                    connection.execute(text(_READ.format(table)))
                one.execute(text(first.format(table)))
                if isolation != "READ COMMITTED":
                    one.commit()
                other.execute(text(second.format(table)))
        finally:
            with engine.begin() as connection:
                connection.execute(text(f"DROP TABLE {table}"))


_READ = "SELECT * FROM {}"
_BOOKING = "UPDATE {} SET balance = balance + 1"


def serialization(places: Places) -> None:
    """The row was changed since this transaction began."""
    _at_once(places, "REPEATABLE READ", _BOOKING, _BOOKING)


def locked_row(places: Places) -> None:
    """The row is locked by another transaction, and this one does not wait (NOWAIT)."""
    _at_once(places, "READ COMMITTED", _BOOKING, "SELECT * FROM {} FOR UPDATE NOWAIT")


def terminated(places: Places) -> None:
    """An administrator ends the session."""
    from sqlalchemy import text

    with _engine(places.postgres) as engine, engine.connect() as victim, engine.connect() as admin:
        pid = victim.scalar(text("SELECT pg_backend_pid()"))
        admin.execute(text("SELECT pg_terminate_backend(:pid, 5000)"), {"pid": pid})
        victim.execute(text("SELECT 1"))


def pool_is_empty(places: Places) -> None:
    """More connections are wanted than the pool may open."""
    options = {"pool_size": 1, "max_overflow": 0, "pool_timeout": GIVES_UP_AFTER}
    with _engine(places.postgres, **options) as engine, engine.connect(), engine.connect():
        pass


def no_row(places: Places) -> None:
    """``one()`` finds no row."""
    from sqlalchemy import text

    with _engine(places.postgres) as engine, engine.connect() as connection:
        connection.execute(text("SELECT 1 WHERE false")).one()


def plain_psycopg(places: Places) -> None:
    """A driver's own error."""
    import psycopg

    with psycopg.connect(places.postgres.replace("+psycopg", "")) as connection:
        connection.execute("CREATE TEMP TABLE t (id int PRIMARY KEY)")
        for _ in range(2):
            connection.execute("INSERT INTO t VALUES (1)")


def closed_psycopg(places: Places) -> None:
    """The second statement after an administrator has ended the session."""
    import psycopg

    with psycopg.connect(places.postgres.replace("+psycopg", "")) as connection:
        with suppress(psycopg.errors.AdminShutdown):
            connection.execute("SELECT pg_terminate_backend(pg_backend_pid())")
        connection.execute("SELECT 1")


def no_database(places: Places) -> None:
    """A database that does not exist."""
    import psycopg

    psycopg.connect(f"{places.postgres.replace('+psycopg', '').rpartition('/')[0]}/nowhere")


def _psycopg2(*statements: str) -> Any:
    def execute(places: Places) -> None:
        import psycopg2

        connection = psycopg2.connect(places.postgres.replace("+psycopg", ""))
        try:
            for statement in statements:
                connection.cursor().execute(statement)
        finally:
            connection.close()

    return execute


def _psycopg2_by_sqlalchemy(*statements: str) -> Any:
    def execute(places: Places) -> None:
        _says(*statements)(Places(postgres=places.postgres.replace("+psycopg", "+psycopg2")))

    return execute


def connect_psycopg2(url: str) -> None:
    import psycopg2

    where = urlsplit(url)
    psycopg2.connect(host=where.hostname, port=where.port, user="postgres", connect_timeout=2)


def connect_postgres(url: str) -> None:
    where = urlsplit(url)
    target = f"postgresql+psycopg://postgres@{where.hostname}:{where.port or 5432}/postgres?connect_timeout=2"
    with _engine(target) as engine, engine.connect():
        pass


_TABLE = "CREATE TEMP TABLE t (id int PRIMARY KEY, small smallint CHECK (small > 0))"
_ONE = "INSERT INTO t VALUES (1, 1)"
_END = "SELECT pg_terminate_backend(pg_backend_pid())"

POSTGRES = [
    *raising(
        "PostgreSQL",
        {
            "23505 unique": (_says(_TABLE, _ONE, _ONE), REFUSED),
            "23514 check": (_says(_TABLE, "INSERT INTO t VALUES (1, 0)"), REFUSED),
            "22003 range": (_says(_TABLE, "INSERT INTO t VALUES (1, 70000)"), REFUSED),
            "42P01 no table": (_says("SELECT * FROM nowhere"), REFUSED),
            "40001 serialization": (serialization, INFRASTRUCTURE),
            "55P03 lock": (locked_row, INFRASTRUCTURE),
            "57014 statement timeout": (
                _says("SET statement_timeout = '50ms'", "SELECT pg_sleep(5)"),
                ERROR.of("OperationalError"),
            ),
            "57P01 terminated": (terminated, INFRASTRUCTURE),
            "25006 read only": (
                _says("SET TRANSACTION READ ONLY", "CREATE TABLE t (id int)"),
                INFRASTRUCTURE,
            ),
            "pool is empty": (pool_is_empty, INFRASTRUCTURE),
            "no row": (no_row, NOT_THERE_YET),
            "23505 unique, without SQLAlchemy": (plain_psycopg, REFUSED),
            "closed, without SQLAlchemy": (closed_psycopg, INFRASTRUCTURE),
            "no database": (no_database, INFRASTRUCTURE),
            "23505 unique, psycopg2": (_psycopg2(_TABLE, _ONE, _ONE), REFUSED),
            "23505 unique, psycopg2 by SQLAlchemy": (
                _psycopg2_by_sqlalchemy(_TABLE, _ONE, _ONE),
                REFUSED,
            ),
            "57P01 terminated, psycopg2": (_psycopg2(_END), INFRASTRUCTURE),
            "57P01 terminated, psycopg2 by SQLAlchemy": (
                _psycopg2_by_sqlalchemy(_END),
                INFRASTRUCTURE,
            ),
        },
        needs="postgres",
    ),
    *cases(
        "PostgreSQL",
        connect_postgres,
        {
            "refuses the connection": (refuses, INFRASTRUCTURE),
            "hangs up": (hangs_up_at_once, INFRASTRUCTURE),
        },
    ),
    *cases(
        "PostgreSQL, psycopg2:",
        connect_psycopg2,
        {"refuses the connection": (refuses, INFRASTRUCTURE)},
    ),
]


def mysql_says(number: int, state: str, text: str) -> Any:
    """An error packet, read by the driver's own parser."""

    def execute(_: Places) -> None:
        from pymysql.err import raise_mysql_exception

        raise_mysql_exception(b"\xff" + struct.pack("<H", number) + f"#{state}{text}".encode())

    return execute


def _by_sqlalchemy(driver_call: Any) -> Any:
    def execute(places: Places) -> None:
        import pymysql
        from sqlalchemy.exc import DBAPIError

        try:
            driver_call(places)
        except pymysql.err.Error as error:
            raise DBAPIError.instance("UPDATE accounts", {}, error, pymysql.err.Error) from error

    return execute


def connect_mysql(url: str) -> None:
    import pymysql

    where = urlsplit(url)
    pymysql.connect(
        host=where.hostname,
        port=where.port or 3306,
        user="somebody",
        connect_timeout=1,
        read_timeout=1,
    )


_DEADLOCK = mysql_says(
    1213, "40001", "Deadlock found when trying to get lock; try restarting transaction"
)
_DUPLICATE = mysql_says(1062, "23000", "Duplicate entry '1' for key 'PRIMARY'")

MYSQL = [
    *raising(
        "MySQL",
        {
            "1213 deadlock": (_DEADLOCK, INFRASTRUCTURE),
            "1213 deadlock, by SQLAlchemy": (_by_sqlalchemy(_DEADLOCK), INFRASTRUCTURE),
            "1205 lock": (mysql_says(1205, "HY000", "Lock wait timeout exceeded"), INFRASTRUCTURE),
            "2006 gone": (mysql_says(2006, "HY000", "MySQL server has gone away"), INFRASTRUCTURE),
            "1062 duplicate": (_DUPLICATE, REFUSED),
            "1062 duplicate, by SQLAlchemy": (_by_sqlalchemy(_DUPLICATE), REFUSED),
        },
    ),
    *cases(
        "MySQL",
        connect_mysql,
        {
            "refuses the connection": (refuses, INFRASTRUCTURE),
            "hangs up": (hangs_up_at_once, INFRASTRUCTURE),
        },
    ),
]


def sqlite_locked(_: Places) -> None:
    """Another connection holds the write lock."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "books.db"
        one, other = (sqlite3.connect(file, timeout=0, isolation_level=None) for _ in range(2))
        try:
            one.execute("BEGIN IMMEDIATE")
            other.execute("BEGIN IMMEDIATE")
        finally:
            one.close()
            other.close()


def sqlite_locked_by_sqlalchemy(_: Places) -> None:
    from sqlalchemy import text

    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "books.db"
        other = sqlite3.connect(file, isolation_level=None)
        try:
            other.execute("BEGIN IMMEDIATE")
            with _engine(f"sqlite:///{file}?timeout=0") as engine, engine.begin() as connection:
                connection.execute(text("CREATE TABLE t (id)"))
        finally:
            other.close()


def sqlite_unique(_: Places) -> None:
    from sqlalchemy import text

    with _engine("sqlite://") as engine, engine.begin() as connection:
        connection.execute(text("CREATE TABLE t (id PRIMARY KEY)"))
        connection.execute(text("INSERT INTO t VALUES (1), (1)"))


SQLITE = raising(
    "SQLite",
    {
        "locked": (sqlite_locked, INFRASTRUCTURE),
        "locked, by SQLAlchemy": (sqlite_locked_by_sqlalchemy, INFRASTRUCTURE),
        "unique, by SQLAlchemy": (sqlite_unique, REFUSED),
    },
)
