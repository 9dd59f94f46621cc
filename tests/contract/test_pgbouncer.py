"""Records behind PgBouncer, whose transaction pooling gives each statement another connection of
the server.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
from sqlalchemy import make_url, text

from celery_leases.errors import LeaseConfigurationError
from celery_leases.stores.sql.connections import engine_for
from celery_leases.stores.sql.dialects import postgresql
from celery_leases.stores.sql.leases import DatabaseLeaseStore
from celery_leases.stores.sql.records import SqlRecordStore
from celery_leases.testing.contracts.calls import claimed, fresh_key, make_call
from celery_leases.testing.contracts.record_case import outcome
from tests.support.plugin import missing_server
from tests.support.servers import PgBouncer, PostgresServer, ServerMissing

CLIENTS = 4
CALLS = 40


@pytest.fixture(scope="module")
def pooler(leases_postgres: PostgresServer) -> Iterator[PgBouncer]:
    """Two connections of the server for each database."""
    server = PgBouncer(leases_postgres)
    try:
        server.start()
    except ServerMissing as missing:
        if os.environ.get("LEASES_NO_PGBOUNCER"):
            pytest.skip(str(missing))
        missing_server(str(missing))
    yield server
    server.stop()


@pytest.fixture
def pooled_url(pooler: PgBouncer, leases_postgres_url: str) -> str:
    return pooler.url_of(leases_postgres_url)


def threshold_of(url: str) -> int | None:
    """After how many executions psycopg prepares a statement."""
    engine = engine_for(url)
    with engine.connect() as connection:
        driver = connection.connection.driver_connection
        assert isinstance(driver, psycopg.Connection)
        assert driver.info.transaction_status == psycopg.pq.TransactionStatus.IDLE
        found = driver.prepare_threshold
    engine.dispose()
    return found


def test_every_call_of_several_processes_is_claimed_and_settled(pooled_url: str) -> None:
    stores = [SqlRecordStore(engine_for(pooled_url)) for _ in range(CLIENTS)]
    stores[0].migrate()

    def run(number: int) -> int:
        records = stores[number % CLIENTS]
        record = claimed(DatabaseLeaseStore(records).acquire(make_call(fresh_key())))
        return records.settle(record, outcome(record))

    with ThreadPoolExecutor(CLIENTS) as threads:
        settled = list(threads.map(run, range(CLIENTS * CALLS)))
    assert all(settled)
    for records in stores:
        records.database.close()


def test_a_pooled_connection_prepares_nothing(pooled_url: str, leases_postgres_url: str) -> None:
    assert threshold_of(pooled_url) is None
    assert threshold_of(leases_postgres_url) == 5


@pytest.mark.parametrize(("given", "threshold"), [("2", 2), ("None", None)])
def test_the_threshold_of_the_url_decides(
    pooled_url: str, leases_postgres_url: str, given: str, threshold: int | None
) -> None:
    for url in (pooled_url, leases_postgres_url):
        chosen = make_url(url).update_query_dict({"prepare_threshold": given})
        assert threshold_of(chosen.render_as_string(False)) == threshold


@pytest.mark.parametrize("given", ["never", "-1", "²"])
def test_a_threshold_that_is_no_number_is_refused(given: str) -> None:
    url = make_url("postgresql+psycopg://root:secret@nowhere/db")
    with pytest.raises(
        LeaseConfigurationError, match="write a number of executions, or None"
    ) as no:
        engine_for(url.update_query_dict({"prepare_threshold": given}).render_as_string(False))
    assert "secret" not in str(no.value)


@pytest.mark.parametrize(
    "refusal",
    [
        "FATAL:  unsupported startup parameter: options",
        "FATAL:  unsupported startup parameter in options: lock_timeout",
        "FATAL:  Feature not supported: RDS Proxy currently doesn\u2019t support command-line options.",
    ],
)
def test_a_connection_that_is_refused_for_its_options_is_opened_without_them(refusal: str) -> None:
    tried: list[dict[str, Any]] = []

    def opened(**given: Any) -> str:
        tried.append(given)
        if "options" in given:
            raise psycopg.OperationalError(refusal)
        return "connected"

    dialect: Any = SimpleNamespace(driver="psycopg2", connect=opened)
    assert postgresql.connect(dialect, None, [], {"host": "h"}) == "connected"
    assert tried == [{"host": "h", "options": "-c lock_timeout=1500"}, {"host": "h"}]
    with pytest.raises(psycopg.OperationalError):
        postgresql.connect(dialect, None, [], {"options": "-c search_path=x"})


def test_deallocated_statements_are_executed_again(leases_postgres_url: str) -> None:
    records = SqlRecordStore(engine_for(leases_postgres_url, 1))
    records.migrate()
    leases = DatabaseLeaseStore(records)
    for _ in range(8):
        leases.acquire(make_call(fresh_key()))
    with records.database.engine.connect() as connection:
        assert connection.execute(text("SELECT count(*) FROM pg_prepared_statements")).scalar_one()
        driver = connection.connection.driver_connection
        assert isinstance(driver, psycopg.Connection)
        driver.pgconn.exec_(b"DEALLOCATE ALL")  # psycopg does not see it
    claimed(leases.acquire(make_call(fresh_key())))
    records.database.close()
