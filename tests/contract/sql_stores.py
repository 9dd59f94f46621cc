"""The databases that records are tested on: SQLite and PostgreSQL."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from celery_leases.stores.database import engine_for
from celery_leases.stores.sql import SqlRecordStore


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty database of each kind."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'records.db'}"
    return str(request.getfixturevalue("leases_postgres_url"))


@pytest.fixture
def sql_records(database_url: str) -> Iterator[SqlRecordStore]:
    """A record store with its tables."""
    store = SqlRecordStore(engine_for(database_url))
    store.migrate()
    store.check()
    yield store
    store.database.close()
