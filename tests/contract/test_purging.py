"""Which process deletes expired rows: one process of a database at a time, and not too often."""

import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy import Delete, text

from celery_leases.stores.sql import records
from celery_leases.stores.sql.effects import SqlEffectStore
from celery_leases.stores.sql.records import SqlRecordStore
from celery_leases.testing.contracts.calls import fresh_key, make_call
from celery_leases.testing.contracts.effect_case import found_of, sent
from celery_leases.testing.contracts.record_case import closed, refused, won
from celery_leases.testing.waits import wait_until


def expire(records: SqlRecordStore, number: int) -> None:
    for _ in range(number):
        closed(records, won(records, make_call(fresh_key())))
    with records.database.engine.connect() as connection:
        connection.execute(text("UPDATE celery_leases_records SET expires_at = 1"))


def left(records: SqlRecordStore) -> int:
    with records.database.engine.connect() as connection:
        return int(
            connection.execute(text("SELECT count(*) FROM celery_leases_records")).scalar_one()
        )


def test_a_turn_lasts_while_batches_are_full(sql_records: SqlRecordStore) -> None:
    expire(sql_records, 5)
    assert [sql_records.purge_in_turn(2, 60.0) for _ in range(3)] == [True, True, False]
    assert left(sql_records) == 0
    expire(sql_records, 1)
    assert not sql_records.purge_in_turn(2, 60.0)
    assert left(sql_records) == 1


def test_one_of_many_has_the_turn(
    sql_records: SqlRecordStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    expire(sql_records, 2)
    asked: list[int] = []
    purge = sql_records.purge
    monkeypatch.setattr(sql_records, "purge", lambda limit: (asked.append(limit), purge(limit))[1])
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda _: sql_records.purge_in_turn(10, 60.0), range(8)))
    assert (len(asked), left(sql_records)) == (1, 0)


def test_a_dead_one_is_followed(
    sql_records: SqlRecordStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "PURGE_PATIENCE", 0.5)
    expire(sql_records, 2)

    def die(_: int) -> int:
        raise SystemExit

    with monkeypatch.context() as dying:
        dying.setattr(sql_records, "purge", die)
        with pytest.raises(SystemExit):
            sql_records.purge_in_turn(10, 60.0)
    assert not sql_records.purge_in_turn(10, 60.0)
    wait_until(
        lambda: not sql_records.purge_in_turn(10, 60.0) and left(sql_records) == 0,
        10,
        "the next turn",
    )


def test_a_turn_costs_one_look_where_it_is_not_due(sql_records: SqlRecordStore) -> None:
    expire(sql_records, 1)
    assert not sql_records.purge_in_turn(10, 60.0)
    with sql_records.database.engine.connect() as writer:
        writer.execute(text("BEGIN"))
        writer.execute(text("UPDATE celery_leases_marks SET value = 'seen'"))
        assert not sql_records.purge_in_turn(10, 60.0)
        writer.execute(text("ROLLBACK"))


def test_where_nothing_is_over_nothing_is_written(sql_records: SqlRecordStore) -> None:
    """A process frozen in a write would block every other writer of a SQLite file."""
    closed(sql_records, won(sql_records, make_call(fresh_key())))
    with sql_records.database.engine.connect() as writer:
        writer.execute(text("BEGIN"))
        writer.execute(text("UPDATE celery_leases_records SET holder = 'seen'"))
        assert not sql_records.purge_in_turn(10, 60.0)
        writer.execute(text("ROLLBACK"))
        assert not writer.execute(
            text("SELECT count(*) FROM celery_leases_marks WHERE name = 'purge'")
        ).scalar()


def test_a_row_that_runs_for_longer_than_its_retention_stays(sql_records: SqlRecordStore) -> None:
    record = won(sql_records, make_call(fresh_key(), retention=0.001), "database")
    assert record.expires_at is None
    time.sleep(0.01)
    assert not sql_records.purge_in_turn(10, 60.0)
    assert sql_records.purge(10) == 0
    assert refused(sql_records, make_call(record.stored_key), "database").expires_at is None
    after = closed(sql_records, record, retention=0.001)
    assert after.expires_at is not None
    assert after.finished_at is not None
    assert after.expires_at - after.finished_at == 1000
    time.sleep(0.01)
    assert sql_records.purge(10) == 1


@pytest.mark.parametrize("ends", [False, True])
def test_a_row_that_is_claimed_during_a_purge_stays_with_its_effects(
    sql_records: SqlRecordStore, monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    """Also if it *ends*, and its retention is over, before the purge goes on: its effects came
    after those were deleted.
    """
    key, effects = fresh_key(), SqlEffectStore(sql_records.database, sql_records.tables)
    closed(sql_records, won(sql_records, make_call(key)), retention=0.001)
    time.sleep(0.01)
    count = sql_records.database.count

    def counted(statement: Any, values: Mapping[str, Any]) -> int:
        if isinstance(statement, Delete) and statement.table is sql_records.tables.records:
            monkeypatch.undo()
            record = won(sql_records, make_call(key))
            sent(effects, record)
            if ends:
                closed(sql_records, record, retention=0.001)
                time.sleep(0.01)
        return count(statement, values)

    monkeypatch.setattr(sql_records.database, "count", counted)
    assert sql_records.purge(10) == 0
    assert (record := sql_records.read(key)) is not None
    assert len(found_of(effects, record)) == 1


@pytest.mark.parametrize(("early", "unchanged"), [(0, True), (30, True), (40, False)])
def test_an_outcome_that_comes_soon_leaves_the_moment_of_expiry(
    sql_records: SqlRecordStore, early: int, unchanged: bool
) -> None:
    record = won(sql_records, make_call(fresh_key(), retention=3600.0), "database")
    ended = record.started_at + (3600 - early) * 1_000_000
    with sql_records.database.engine.connect() as connection:
        connection.execute(text(f"UPDATE celery_leases_records SET expires_at = {ended}"))  # noqa: S608
    after = closed(sql_records, record, retention=3600.0)
    assert after.expires_at is not None
    assert (after.expires_at == ended) is unchanged
    again = closed(
        sql_records,
        won(sql_records, make_call(fresh_key(), retention=3600.0), "database"),
        retention=60.0,
    )
    assert again.expires_at is not None
    assert again.finished_at is not None
    assert again.expires_at - again.finished_at == 60_000_000
