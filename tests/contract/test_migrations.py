"""A later version of the tables: a made-up step is applied to the tables of this release while work
goes on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy import Connection, inspect, text

from celery_leases.errors import SchemaOutdated, StoreUnavailable
from celery_leases.record import State
from celery_leases.stores.sql import migrations
from celery_leases.stores.sql.connections import engine_for
from celery_leases.stores.sql.migrations import Migrated
from celery_leases.stores.sql.records import SqlRecordStore
from celery_leases.stores.sql.schema import NEWEST, Tables
from celery_leases.stores.sql.transactions import JoinedTransaction
from celery_leases.testing.contracts.calls import fresh_key, make_call
from celery_leases.testing.contracts.record_case import outcome, row, won
from celery_leases.testing.waits import wait_until


def columns(connection: Connection, tables: Tables) -> set[str]:
    return {column["name"] for column in inspect(connection).get_columns(tables.records.name)}


def up(connection: Connection, tables: Tables) -> None:
    if "colour" not in columns(connection, tables):
        connection.execute(text(f"ALTER TABLE {tables.records.name} ADD COLUMN colour VARCHAR(9)"))


def migrated(records: SqlRecordStore, step: Callable[[Connection, Tables], None] = up) -> Migrated:
    """Apply the step as an operator does with a later release, in another process."""
    engine = engine_for(records.database.engine.url.render_as_string(False))
    try:
        return migrations.migrate(engine, Tables(), (step,))
    finally:
        engine.dispose()


def test_claims_and_outcomes_go_on_while_a_step_is_applied(sql_records: SqlRecordStore) -> None:
    url = sql_records.database.engine.url.render_as_string(False)
    stop, ran, lock = threading.Event(), [], threading.Lock()

    def work() -> None:
        store = SqlRecordStore(engine_for(url))
        store.availability.grace = 0.0
        while not stop.is_set():
            record = eventually(lambda: won(store, make_call(fresh_key(), ttl=60.0)))
            assert eventually(lambda: store.settle(record, outcome(record, result="1")))  # noqa: B023
            with lock:
                ran.append(record.stored_key)
        store.database.close()

    def eventually(step: Callable[[], Any]) -> Any:
        while True:
            try:
                return step()
            except StoreUnavailable as error:  # locked: the delivery would be rescheduled
                assert error.executed is False  # noqa: PT017

    def grows(by: int) -> None:
        wanted = len(ran) + by
        wait_until(lambda: len(ran) >= wanted, 30, "work to go on")

    with ThreadPoolExecutor(3) as threads:
        working = [threads.submit(work) for _ in range(3)]
        try:
            grows(30)
            assert migrated(sql_records) == Migrated(NEWEST, NEWEST + 1)
            grows(30)
        finally:
            stop.set()
        for one in working:
            one.result()
    found = sql_records.of_keys(ran)
    assert {(record.state, record.attempt) for record in found} == {(State.DONE, 1)}
    assert len(found) == len(set(ran)) == len(ran)
    with sql_records.database.engine.connect() as connection:
        assert "colour" in columns(connection, sql_records.tables)


def test_earlier_tables_are_refused_until_migrated(sql_records: SqlRecordStore) -> None:
    with sql_records.database.engine.connect() as connection:
        connection.execute(text("UPDATE celery_leases_version SET version = 0"))
    with pytest.raises(SchemaOutdated, match=r"have version 0, not 1.*leases migrate"):
        sql_records.check()


def test_several_migrations_at_once_apply_a_step_once(sql_records: SqlRecordStore) -> None:
    applied = []

    def counted(connection: Connection, tables: Tables) -> None:
        applied.append(up(connection, tables))

    with ThreadPoolExecutor(3) as threads:
        done = list(threads.map(lambda _: migrated(sql_records, counted), range(3)))
    assert {each.after for each in done} == {2}
    assert len(applied) == 1


def test_a_step_that_was_interrupted_runs_again(sql_records: SqlRecordStore) -> None:

    class KilledError(BaseException):
        """Ends a migration as the death of its process would."""

    def killed(connection: Connection, tables: Tables) -> None:
        up(connection, tables)
        raise KilledError

    with pytest.raises(KilledError):
        migrated(sql_records, killed)
    sql_records.check()
    assert migrated(sql_records) == Migrated(1, 2)
    with sql_records.database.engine.connect() as connection:
        assert "colour" in columns(connection, sql_records.tables)


def test_a_step_waits_for_a_transaction_that_guards_a_row(server_records: SqlRecordStore) -> None:
    records, record = server_records, won(server_records, make_call(fresh_key()))
    user = engine_for(records.database.engine.url.render_as_string(False)).execution_options(
        isolation_level="READ COMMITTED"
    )
    tries = []

    def step(connection: Connection, tables: Tables) -> None:
        tries.append(1)
        up(connection, tables)

    with user.connect() as connection, ThreadPoolExecutor(1) as threads:
        transaction = JoinedTransaction(connection, records)
        transaction.guard(record)
        migrating = threads.submit(migrated, records, step)
        wait_until(lambda: len(tries) > 1, 30, "the step to be tried again")
        transaction.complete(record, outcome(record, result="1"))
        connection.commit()
        assert migrating.result(60).after == 2
    assert row(records, record.stored_key).state is State.DONE


def test_a_step_has_an_end(server_records: SqlRecordStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migrations, "RETRY_TIME", 0.0)
    record = won(server_records, make_call(fresh_key()))
    url = server_records.database.engine.url.render_as_string(False)
    user = engine_for(url).execution_options(isolation_level="READ COMMITTED")
    with user.connect() as connection:
        JoinedTransaction(connection, server_records).guard(record)
        with pytest.raises(StoreUnavailable, match=r"locked the tables.*run the migration again"):
            migrated(server_records)
    server_records.check()
