"""What only PostgreSQL does: a server that does not answer, and the parameters of connections."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest
from sqlalchemy import insert, select, text

from celery_leases.decide import claim as rule
from celery_leases.decide.answers import Refused
from celery_leases.errors import StoreUnavailable
from celery_leases.record_filters import RecordFilter
from celery_leases.stores.sql.connections import engine_for
from celery_leases.stores.sql.dialects import postgresql
from celery_leases.stores.sql.leases import DatabaseLeaseStore
from celery_leases.stores.sql.records import SqlRecordStore
from celery_leases.stores.sql.rows import insert_parameters
from celery_leases.testing.contracts.calls import claimed, fresh_key, make_call
from celery_leases.testing.contracts.record_case import outcome, won
from celery_leases.testing.waits import wait_until
from tests.support.servers import PostgresServer

needs_told = pytest.mark.skipif(
    tuple(map(int, psycopg.__version__.split(".")[:3])) < (3, 2, 11),
    reason="psycopg tells of silence since 3.2.11",
)

SILENCE = 0.5
SLACK = 2.0


@pytest.fixture
def server(leases_postgres: PostgresServer) -> Iterator[PostgresServer]:
    with PostgresServer() as started:
        yield started


@needs_told
def test_silence_does_not_block_a_call(
    server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is frozen, while TCP acknowledges packets."""
    records = SqlRecordStore(engine_for(server.new_database()))
    records.migrate()
    record = won(records, make_call(fresh_key()))
    monkeypatch.setattr(postgresql, "SILENCE", SILENCE)
    server.pause()
    began = time.monotonic()
    with pytest.raises(StoreUnavailable) as caught:
        records.settle(record, outcome(record))
    assert (
        SILENCE <= time.monotonic() - began < SILENCE + SLACK
    )  # a second try would take as long to connect alone
    assert caught.value.executed is None
    server.resume()
    wait_until(
        lambda: isinstance(records.claim(make_call(record.stored_key), "redis:1"), Refused),
        10,
        "an answer",
    )
    records.database.close()


@needs_told
def test_silence_closes_a_connection(
    leases_postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A late reply must not be read as that to the next statement."""
    engine = engine_for(leases_postgres_url)
    monkeypatch.setattr(postgresql, "SILENCE", SILENCE)
    with engine.connect() as connection:
        driver = connection.connection.driver_connection
        with pytest.raises(Exception, match=r"has not answered for 0\.5 s") as caught:
            connection.execute(text("SELECT pg_sleep(3)"))
        assert getattr(caught.value, "connection_invalidated", False)
        assert driver is not None
        assert driver.closed
    with engine.connect() as connection:
        assert connection.execute(text("SELECT 1")).scalar_one() == 1
    engine.dispose()


@pytest.mark.parametrize("group", [None, "open"])
@pytest.mark.parametrize("end", ["COMMIT", "ROLLBACK"])
def test_a_claim_waits_for_an_insert_of_its_row_that_is_not_committed(
    leases_postgres_url: str, end: str, group: str | None
) -> None:
    records = SqlRecordStore(engine_for(leases_postgres_url))
    records.migrate()
    leases = DatabaseLeaseStore(records)
    record = won(records, make_call(fresh_key()), "database")
    call = make_call(record.stored_key, group=group)
    table = records.tables.records
    is_row = table.c.stored_key == record.stored_key
    with (
        records.database.engine.connect() as other,
        records.database.engine.connect() as watching,
        ThreadPoolExecutor(2) as threads,
    ):
        row = dict(watching.execute(table.select().where(is_row)).mappings().one())
        watching.execute(table.delete().where(is_row))
        other.execute(text("BEGIN"))
        other.execute(table.insert().values(row))
        claiming, waiting = threads.submit(leases.acquire, call), 1
        if (
            end == "COMMIT"
        ):  # the second statement of a claim does not see the row, and does not fail
            again = records.statements.insert_or_read_again[group is not None]
            values = insert_parameters(rule.claimed(None, call, "database", 0))
            repeated = threads.submit(records.database.first, again, values | {"group": group})
            waiting = 2
        waits = text(
            "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'transactionid' AND datname = current_database()"
        )
        wait_until(lambda: watching.execute(waits).scalar_one() == waiting, 10, "the claim to wait")
        other.execute(text(end))
        answer = claiming.result(10)
    if end == "COMMIT":
        found = repeated.result(10)
        assert found is not None
        assert (found["inserted"], found["record"]) == (False, None)
        assert isinstance(answer, Refused)
        assert answer.record is not None
        assert answer.record.owner == record.owner
    else:
        assert claimed(answer).owner == call.token
    records.database.close()


def test_a_refused_claim_writes_nothing_and_takes_no_transaction_id(server: PostgresServer) -> None:
    records = SqlRecordStore(engine_for(server.new_database()))
    records.migrate()
    leases = DatabaseLeaseStore(records)
    done, running = (won(records, make_call(fresh_key()), "database") for _ in range(2))
    assert records.settle(done, outcome(done, result="1"))

    def refusals() -> None:
        for _ in range(20):
            for record in (done, running):
                for group in (None, "open"):
                    answer = leases.acquire(make_call(record.stored_key, group=group))
                    assert isinstance(answer, Refused)

    def seen() -> dict[str, Any]:
        asked = """SELECT pg_current_wal_insert_lsn()::text AS wal,
            pg_snapshot_xmax(pg_current_snapshot())::text AS xid,
            array_agg(concat_ws(' ', xmin, xmax, ctid) ORDER BY stored_key) AS rows FROM celery_leases_records"""
        with records.database.engine.connect() as connection:
            return dict(connection.execute(text(asked)).mappings().one())

    refusals()  # now hint bits are set and statements are prepared

    def nothing_written() -> bool:
        before = seen()
        refusals()
        after = seen()
        assert (after["xid"], after["rows"]) == (before["xid"], before["rows"])
        return bool(after["wal"] == before["wal"])

    wait_until(nothing_written, 30, "a while in which the server itself writes no WAL")
    before = seen()
    won(records, make_call(fresh_key()))
    assert seen()["wal"] != before["wal"]
    assert seen()["xid"] != before["xid"]
    records.database.close()


@pytest.mark.parametrize("asked", ["", "?options=-c%20lock_timeout%3D700"])
def test_the_lock_timeout_is_that_of_the_url(leases_postgres_url: str, asked: str) -> None:
    engine = engine_for(leases_postgres_url + asked)
    with engine.connect() as connection:
        assert connection.execute(text("SHOW lock_timeout")).scalar_one() == (
            "700ms" if asked else "1500ms"
        )
    engine.dispose()


def test_the_latest_and_the_expired_records_are_found_by_an_index(leases_postgres_url: str) -> None:
    records = SqlRecordStore(engine_for(leases_postgres_url))
    records.migrate()
    records.check()
    row = won(records, make_call(fresh_key()), "database")
    assert records.settle(row, outcome(row, result="1", retention=3600.0))
    table = records.tables.records
    with records.database.engine.connect() as connection:
        copied = connection.execute(select(table)).mappings().one()
        many = [
            {
                **copied,
                "stored_key": f"t:many|{number}",
                "started_at": copied["started_at"] - number,
            }
            for number in range(5000)
        ]
        connection.execute(insert(table), many)
        connection.execute(text("ANALYZE celery_leases_records"))
    plans: list[str] = []
    run = records.database.all

    def explained(query: Any, values: Any) -> Any:
        compiled = query.compile(
            dialect=records.database.engine.dialect, compile_kwargs={"literal_binds": True}
        )
        with records.database.engine.connect() as connection:
            plan = connection.exec_driver_sql(f"EXPLAIN {compiled}").scalars().all()
        plans.append("\n".join(plan))
        return run(query, values)

    records.database.all = explained  # type: ignore[method-assign]
    assert len(records.find(RecordFilter(), limit=20)) == 20
    assert records.purge(500) == 0
    assert len(plans) == 2
    for plan in plans:
        assert "ix_celery_leases_records_started_at_expires_at" in plan
        assert "Seq Scan" not in plan
    records.database.close()


def test_a_list_sorts_nothing_but_keys(leases_postgres_url: str) -> None:
    records = SqlRecordStore(engine_for(leases_postgres_url))
    records.migrate()
    records.check()
    sent: list[Any] = []

    def explained(query: Any, _: Any) -> list[Any]:
        compiled = query.compile(
            dialect=records.database.engine.dialect, compile_kwargs={"literal_binds": True}
        )
        with records.database.engine.connect() as connection:
            sent.extend(connection.exec_driver_sql(f"EXPLAIN (VERBOSE) {compiled}").scalars())
        return []

    records.database.all = explained  # type: ignore[method-assign]
    records.search(states=["done"], task="t")
    plan = [line.strip() for line in sent]
    below = plan[[line.startswith("->  Limit") for line in plan].index(True) :]
    sorted_rows = [line for line in below if line.startswith("Output")][:3]
    assert len(sorted_rows) == 3
    assert not [line for line in sorted_rows if "statement_timestamp" in line or "message" in line]
    records.database.close()
