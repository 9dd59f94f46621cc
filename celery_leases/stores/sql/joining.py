"""Checks that a session or connection of the user commits the user's rows and the record
together.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from sqlalchemy import URL, Connection, Engine, TwoPhaseTransaction
from sqlalchemy.exc import UnboundExecutionError
from sqlalchemy.orm import Session

from celery_leases.errors import WrongDatabase
from celery_leases.stores.sql.database import Database
from celery_leases.stores.sql.dbapi import database_of, reports_transaction
from celery_leases.stores.sql.dialects import DIALECTS, mysql
from celery_leases.stores.urls import display_database_url

AUTOCOMMIT: Final = "AUTOCOMMIT"
HOW_TO_JOIN: Final = (
    "give the connection that your rows go through, "
    "session.connection(bind_arguments={'mapper': …}) with their class"
)


def refuse_unjoinable(key: str, given: Any, database: Database) -> None:
    """Raise :class:`WrongDatabase` if *given* cannot commit the record together with the user's
    rows.
    """
    kind = type(given).__name__
    if inspect.iscoroutinefunction(getattr(given, "rollback", None)):
        raise WrongDatabase(
            f"{key}: {kind} is asynchronous and cannot be used here; give a Session, a Connection or a "
            "DB-API connection, such as SQLAlchemy's run_sync() passes to its function"
        )
    if isinstance(given, Session):
        _check_binds(key, given)
    if not isinstance(given, Session | Connection) and not callable(getattr(given, "cursor", None)):
        raise WrongDatabase(
            f"{key}: {kind} is not a SQLAlchemy Session or Connection, nor a DB-API connection"
        )
    _check_database(key, given, database)
    driver = driver_of(given)
    if driver is given and database.dialect.hides_transactions(driver):
        raise WrongDatabase(
            f"{key}: {type(driver).__module__} does not show whether its transaction is open; give a Session or a "
            "Connection of SQLAlchemy, or Django's connection"
        )
    if _autocommits(given, driver):
        raise WrongDatabase(
            f"{key}: the connection is in autocommit mode, so the record would not commit together with your rows; "
            "begin a transaction first"
        )


def connection_of(given: Session | Connection) -> Connection:
    """The connection of a session, or *given* itself if it is a connection."""
    return given.connection() if isinstance(given, Session) else given


def driver_of(given: Any) -> Any:
    """The DB-API connection of *given*, or *given* itself if it is one."""
    if isinstance(given, Session | Connection):
        return connection_of(given).connection.dbapi_connection
    for name in (
        "dbapi_connection",
        "connection",
    ):  # SQLAlchemy's raw_connection(), Django's; None once closed
        if hasattr(given, name):
            return getattr(given, name)
    return given


def _check_binds(key: str, session: Session) -> None:
    """Refuse a session whose other rows may go through other connections, which commit separately.

    A session class with its own ``get_bind`` is not checked. A two-phase transaction commits all
    engines together, so it is not refused.
    """
    binds: Mapping[Any, Engine | Connection] = {}
    if type(session).get_bind is Session.get_bind:
        binds = getattr(session, "binds", None) or getattr(
            session, "_Session__binds", {}
        )  # before SQLAlchemy 2.1
    try:
        connection = session.connection()
    except UnboundExecutionError as error:
        raise WrongDatabase(
            f"{key}: the session has no engine of its own; {HOW_TO_JOIN}"
        ) from error
    others = [bind for bind in binds.values() if bind.engine is not connection.engine]
    in_two_phases = isinstance(connection.get_transaction(), TwoPhaseTransaction)
    if others and not (in_two_phases and all(isinstance(bind, Engine) for bind in others)):
        ours, other = (
            display_database_url(connection.engine.url),
            display_database_url(others[0].engine.url),
        )
        raise WrongDatabase(
            f"{key}: the session has several engines, each of which commits by itself: {ours} for the record, "
            f"{other} for other rows; {HOW_TO_JOIN}"
        )


def _check_database(key: str, given: Any, database: Database) -> None:
    """Refuse a database other than that of the records. The name that the connection reports has
    precedence over the one in its URL.
    """
    ours, by_sqlalchemy = database.engine, isinstance(given, Session | Connection)
    if by_sqlalchemy and _product(connection_of(given).engine) != _product(ours):
        raise _wrong_database(key, ours, display_database_url(connection_of(given).engine.url))
    if driver_of(given) is None:  # Django connects at the first cursor()
        given.cursor().close()
    theirs = database_of(driver_of(given)) or (
        _database_in_url(connection_of(given).engine.url) if by_sqlalchemy else None
    )
    if (
        theirs is not None
        and theirs != _database_in_url(ours.url)
        and theirs != _database_of_records(database)
    ):
        raise _wrong_database(key, ours, repr(theirs))


def _database_of_records(database: Database) -> str | None:
    """The database of the records, as a connection to it reports it."""
    with database.errors(), database.engine.connect() as connection:
        return database_of(driver_of(connection)) or _database_in_url(database.engine.url)


def _wrong_database(key: str, ours: Engine, theirs: str) -> WrongDatabase:
    return WrongDatabase(
        f"{key}: the records are in {display_database_url(ours.url)}, the session or connection is on {theirs}; a "
        "record can only be committed with rows of its own database"
    )


def _autocommits(given: Any, driver: Any) -> bool:
    """Whether the connection is in autocommit mode; ``False`` if it reports an open transaction."""
    level = None
    if isinstance(given, Session | Connection):
        connection = connection_of(given)
        level = connection.get_execution_options().get("isolation_level")
        if level == AUTOCOMMIT:
            return True
        # The level given to create_engine(), because reading the connection's level would cost a
        # round trip.
        level = level or getattr(connection.dialect, "_on_connect_isolation_level", None)
    by_itself = (
        level == AUTOCOMMIT
        or getattr(driver, "autocommit", False) is True
        or mysql.commits_by_itself(driver)
    )
    # For sqlite3 isolation_level=None means autocommit; for psycopg it means the server's level.
    if hasattr(driver, "in_transaction"):
        by_itself = by_itself or getattr(driver, "isolation_level", "") is None
    return by_itself and not reports_transaction(driver)


def _product(engine: Engine) -> object:
    """The database product of an engine; MySQL and MariaDB count as one."""
    return DIALECTS.get(engine.dialect.name)


def _database_in_url(url: URL) -> str | None:
    """The database in a URL; for SQLite the absolute path of the file."""
    if url.get_backend_name() != "sqlite":
        return url.database
    name = url.database or ":memory:"
    return name if name.startswith(("file:", ":")) else str(Path(name).resolve())
