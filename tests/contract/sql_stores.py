"""The databases on which records are tested: SQLite, PostgreSQL and MariaDB."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, Dialect, event, text

from celery_leases.ops.client import OperatorClient
from celery_leases.stores.sql.connections import engine_for
from celery_leases.stores.sql.database import Database
from celery_leases.stores.sql.dialects.mysql import FAMILY
from celery_leases.stores.sql.records import SqlRecordStore
from celery_leases.testing.waits import wait_until

SERVERS = ("postgresql", "mariadb")
"""The databases that are servers: they lock rows, can lose connections, and must be migrated."""


def new_database(request: pytest.FixtureRequest, kind: str) -> str:
    server = request.getfixturevalue(
        "leases_postgres" if kind == "postgresql" else "leases_mariadb"
    )
    return str(server.new_database())


def is_mysql(dialect: Dialect) -> bool:
    """Whether SQLAlchemy's *dialect* is that of MySQL or MariaDB."""
    return dialect.name in FAMILY


@contextmanager
def migrated(url: str) -> Iterator[SqlRecordStore]:
    store = SqlRecordStore(engine_for(url))
    store.availability.grace = 0.0
    store.migrate()
    yield store
    store.database.close()


@contextmanager
def statements_of(database: Database) -> Iterator[list[str]]:
    """Collects all statements sent to the database meanwhile, also on the driver's cursor."""
    sent: list[str] = []
    on_cursor: Any = database._on_cursor

    def note(_1: Any, _2: Any, statement: str, *_: Any) -> None:
        sent.append(statement)

    def noted(connection: Any, pool: Any, compiled: Any, *given: Any) -> Any:
        sent.append(compiled.text)
        return on_cursor(connection, pool, compiled, *given)

    event.listen(database.engine, "before_cursor_execute", note)
    database._on_cursor = noted  # type: ignore[method-assign]
    try:
        yield sent
    finally:
        event.remove(database.engine, "before_cursor_execute", note)
        del database._on_cursor


def waiting_in(connection: Connection) -> int:
    """How many statements wait for row locks; on MariaDB, on the whole private server."""
    if is_mysql(connection.dialect):
        return int(
            connection.execute(
                text("SHOW GLOBAL STATUS LIKE 'Innodb_row_lock_current_waits'")
            ).one()[1]
        )
    waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
    return int(connection.execute(text(waiting)).scalar_one())


def wait_for_locks(records: SqlRecordStore, number: int = 1) -> None:
    with records.database.engine.connect() as watcher:
        wait_until(lambda: waiting_in(watcher) == number, 10, f"{number} to wait for a row")


def end_other_connections(records: SqlRecordStore) -> int:
    """Let the server end all other connections to this database; returns their number."""
    with records.database.engine.connect() as connection:
        if not is_mysql(records.database.engine.dialect):
            ended = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()"
            return connection.execute(text(ended + " AND datname = current_database()")).rowcount
        others = "SELECT id FROM information_schema.processlist WHERE id <> connection_id() AND db = database()"
        found = connection.execute(text(others)).scalars().all()
        for number in found:
            connection.execute(text(f"KILL {number}"))
        return len(found)


@pytest.fixture(params=["sqlite", *SERVERS])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'records.db'}"
    return new_database(request, request.param)


@pytest.fixture(params=SERVERS)
def server_url(request: pytest.FixtureRequest) -> str:
    return new_database(request, request.param)


@pytest.fixture
def server_records(server_url: str) -> Iterator[SqlRecordStore]:
    with migrated(server_url) as store:
        yield store


@pytest.fixture
def sql_records(database_url: str) -> Iterator[SqlRecordStore]:
    store = SqlRecordStore(engine_for(database_url))
    store.availability.grace = 0.0  # the database counts as always available
    store.migrate()
    store.check()
    yield store
    store.database.close()


@pytest.fixture
def mariadb_records(leases_mariadb_url: str) -> Iterator[SqlRecordStore]:
    with migrated(leases_mariadb_url) as store:
        yield store


def operator_of(leases: Any, records: SqlRecordStore) -> OperatorClient:
    """An operator's client, on stores that are open."""
    client = OperatorClient.__new__(OperatorClient)
    client._use(leases, records)
    return client
