"""Unreadable records and effects, texts that a database refuses, and unexpected exceptions of
drivers.
"""

import errno
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg
import pytest
from billiard.exceptions import SoftTimeLimitExceeded
from sqlalchemy import text

from celery_leases.decide.answers import Acquired
from celery_leases.effect import Found, scope_of
from celery_leases.errors import KeyUnusable, RecordUnreadable, StoreUnavailable
from celery_leases.record import (
    Ended,
    Failure,
    Record,
    State,
)
from celery_leases.stores.sql.connections import engine_for
from celery_leases.stores.sql.dialects import postgresql
from celery_leases.stores.sql.effects import SqlEffectStore
from celery_leases.stores.sql.leases import DatabaseLeaseStore
from celery_leases.stores.sql.outbox import Outbox
from celery_leases.stores.sql.records import SqlRecordStore
from celery_leases.testing.contracts.calls import fresh_key, make_call
from celery_leases.testing.contracts.effect_case import begin, finished, sent
from celery_leases.testing.contracts.record_case import closed, outcome, row, won
from tests.contract.sql_stores import migrated, operator_of
from tests.support.servers import PostgresServer

NEEDED = {
    "progress": [
        "{",
        '"text"',
        '{"generation": 0, "value": "{"}',
        '{"generation": 0, "positions": 5}',
    ],
    "details": ["{", "[]", '{"results": 5}', '{"retries": "x"}', '{"args": "{"}'],
    "state": ["bogus"],
}
LOOKED_AT = NEEDED | {"ended": ["bogus"], "result": ["{"]}
"""A claim replaces the last two."""
SPARED = {
    "error": ["{", "5"],
    "details": ['{"before": {"ended": "bogus"}}', '{"before": {"ended": "failed", "error": 5}}'],
}


def pairs(columns: dict[str, list[str]]) -> Any:
    return pytest.mark.parametrize(
        ("column", "value"),
        [(column, value) for column, values in columns.items() for value in values],
    )


def change(
    records: SqlRecordStore,
    key: str,
    column: str,
    value: object,
    table: str = "celery_leases_records",
    where: str = "1 = 1",
) -> None:
    with records.database.engine.connect() as connection:
        statement = f"UPDATE {table} SET {column} = :value WHERE stored_key = :key AND {where}"  # noqa: S608
        connection.execute(text(statement), {"value": value, "key": key})


def raw(records: SqlRecordStore, key: str) -> Any:
    with records.database.engine.connect() as connection:
        query = text("SELECT * FROM celery_leases_records WHERE stored_key = :key")
        return connection.execute(query, {"key": key}).mappings().one()


def failed_once(records: SqlRecordStore, **call: Any) -> str:
    key = fresh_key()
    record = won(records, make_call(key, **call), "database")
    failure = Failure("ValueError", "no", group="g")
    closed(records, record, State.PENDING, ended=Ended.RETRIED, failure=failure)
    return key


# -- what cannot be read ---------------------------------------------------------------------------


@pairs(NEEDED)
def test_a_claim_of_a_row_that_cannot_be_read_changes_nothing_that_counts(
    sql_records: SqlRecordStore, column: str, value: str
) -> None:
    """The error names key and column; no later claim counts a crash."""
    key = failed_once(sql_records)
    change(sql_records, key, column, value)
    for _ in range(3):
        with pytest.raises(RecordUnreadable) as caught:
            sql_records.claim(make_call(key), "database")
        assert (caught.value.column, caught.value.key, caught.value.executed) == (
            column,
            key,
            False,
        )
        assert f"leases forget {key}" in str(caught.value)
        found = raw(sql_records, key)
        assert found["state"] == ("bogus" if column == "state" else "pending")
        assert (found["crashes"], found["attempt"]) == (0, 1)
    assert isinstance(sql_records.claim(make_call(fresh_key()), "database"), Acquired)


@pairs(SPARED)
def test_an_unreadable_value_without_a_decision_is_ignored_with_a_warning(
    sql_records: SqlRecordStore, caplog: pytest.LogCaptureFixture, column: str, value: str
) -> None:
    key = failed_once(sql_records)
    change(sql_records, key, column, value)
    with caplog.at_level(logging.WARNING):
        read = sql_records.read(key)
    assert read is not None
    assert f"column {column}" in caplog.text
    assert isinstance(sql_records.claim(make_call(key), "database"), Acquired)


@pairs(LOOKED_AT)
def test_one_broken_row_hides_no_other(
    sql_records: SqlRecordStore, column: str, value: str
) -> None:
    """``list`` and ``show`` name it, ``forget`` repairs it."""
    client = operator_of(DatabaseLeaseStore(sql_records), sql_records)
    well, key = failed_once(sql_records), failed_once(sql_records)
    if column == "result":
        change(sql_records, key, "state", "done")
    change(sql_records, key, column, value)
    assert {status.key: status.state for status in client.page().statuses} == {
        key: "unreadable",
        well: "pending",
    }
    assert [status.key for status in client.page(client.where(states=["unreadable"])).statuses] == [
        key
    ]
    status = client.status(key)
    assert (status.state, status.reason) == ("unreadable", "record_unreadable")
    assert status.detail is not None
    assert f"column {column}" in status.detail
    assert client.forget(key).state == "absent"
    assert won(sql_records, make_call(key), "database").attempt == 1


def of_third_generation(records: SqlRecordStore) -> tuple[SqlEffectStore, Record]:
    """A key that was forgotten twice, with an effect in each generation; and its current record."""
    effects = SqlEffectStore(records.database, records.tables)
    key = fresh_key()
    for generation in range(3):
        record = won(records, make_call(key), "database")
        assert record.generation == generation
        assert finished(effects, sent(effects, record))
        closed(records, record)
        if generation < 2:
            assert records.reset(key, keep=False) is not None
    return effects, record


def lose_the_generation(records: SqlRecordStore, column: str, value: str) -> None:
    """Twice: damage the generation of a key, forget the key, let it have an effect."""
    effects, record = of_third_generation(records)
    key = record.stored_key
    for _ in range(2):
        change(records, key, column, value)
        with pytest.raises(RecordUnreadable):
            records.read(key)
        after = records.reset(key, keep=False)
        assert after is not None
        assert after.generation > 2
        record = won(records, make_call(key), "database")
        assert record.generation == after.generation
        assert finished(effects, sent(effects, record))
        closed(records, record)
    assert records.reset(key, keep=False) is not None
    assert won(records, make_call(key), "database").generation == record.generation + 1


LOST = pytest.mark.parametrize("value", ["{", "[]", '"text"', '{"generation": "x"}', "9" * 30])


@LOST
def test_a_lost_generation_is_followed_by_a_new_one(
    sql_records: SqlRecordStore, value: str
) -> None:
    """No effect of an earlier generation is found."""
    lose_the_generation(sql_records, "details", value)


@pytest.mark.parametrize(
    "value", ['{"generation": 2, "results": 5}', '{"generation": 2, "retries": "x"}']
)
def test_a_readable_generation_has_the_next(sql_records: SqlRecordStore, value: str) -> None:
    _, record = of_third_generation(sql_records)
    change(sql_records, record.stored_key, "details", value)
    after = sql_records.reset(record.stored_key, keep=False)
    assert after is not None
    assert after.generation == 3


def test_a_broken_row_is_skipped_when_messages_are_looked_for(sql_records: SqlRecordStore) -> None:
    keys = [failed_once(sql_records, message="{}") for _ in range(3)]
    change(sql_records, keys[1], "progress", "{")
    for key in keys:
        change(sql_records, key, "finished_at", 1)
        change(sql_records, key, "resumes", 1)
    found = {
        record.stored_key: record.unreadable for record in Outbox(sql_records).stranded(1.0, 10)
    }
    assert set(found) == set(keys)
    assert [key for key, unreadable in found.items() if unreadable] == [keys[1]]


def test_a_group_is_opened_though_an_error_is_unreadable(sql_records: SqlRecordStore) -> None:
    keys = []
    for _ in range(2):
        record = won(sql_records, make_call(fresh_key()))
        closed(
            sql_records,
            record,
            State.COOLING,
            ended=Ended.FAILED,
            retry_after=60.0,
            failure=Failure("E", "", group="g"),
        )
        keys.append(record.stored_key)
    change(sql_records, keys[0], "error", "{")
    assert sql_records.end_waits("g") == 1


# -- effects that cannot be read -------------------------------------------------------------------


@pytest.mark.parametrize(("column", "value"), [("state", "bogus"), ("result", "{")])
def test_an_effect_that_cannot_be_read_is_not_taken_for_one_that_has_not_happened(
    sql_records: SqlRecordStore, column: str, value: str
) -> None:
    """The error names effect and column, and nothing is written."""
    effects, record = (
        SqlEffectStore(sql_records.database, sql_records.tables),
        won(sql_records, make_call(fresh_key())),
    )
    assert finished(effects, sent(effects, record))
    assert finished(effects, sent(effects, record, "mail"))
    change(
        sql_records, record.stored_key, column, value, "celery_leases_effects", "name = 'charge'"
    )
    for _ in range(2):
        with pytest.raises(RecordUnreadable) as caught:
            begin(effects, record)
        assert (caught.value.column, caught.value.key, caught.value.executed) == (
            column,
            record.stored_key,
            False,
        )
        assert f"leases resolve {record.stored_key} --done" in str(caught.value)
        assert "'charge'" in str(caught.value)
    assert isinstance(begin(effects, record, "mail"), Found)
    status = operator_of(DatabaseLeaseStore(sql_records), sql_records).status(record.stored_key)
    assert {effect.name: effect.state for effect in status.effects} == {
        "charge": "unreadable",
        "mail": "done",
    }
    assert [effect.detail for effect in status.effects if effect.name == "charge"] == [
        str(caught.value)
    ]


def test_an_effect_whose_number_is_a_text_is_named(tmp_path: Path) -> None:
    with migrated(f"sqlite:///{tmp_path}/leases.db") as records:
        effects, record = (
            SqlEffectStore(records.database, records.tables),
            won(records, make_call(fresh_key())),
        )
        sent(effects, record)
        change(records, record.stored_key, "sent_at", "yesterday", "celery_leases_effects")
        with pytest.raises(RecordUnreadable, match="column sent_at has 'yesterday'"):
            effects.begin(
                replace(record, fence=record.fence + 1),
                "charge",
                "",
                scope_of(record, each_runs=False, retention=0),
            )
        assert [effect.unreadable is not None for effect in effects.of_key(record)] == [True]


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "reason", ["a\x00b", "half \ud83d of it", "x" * 300, "\N{GRINNING FACE}" * 300]
)
def test_any_reason_can_be_written(sql_records: SqlRecordStore, reason: str) -> None:
    record = won(sql_records, make_call(fresh_key()))
    snoozed = outcome(record, State.PENDING, Ended.SNOOZED, reason=reason, retry_after=5.0)
    assert sql_records.settle(record, snoozed)
    assert sql_records.settle(record, snoozed), "the same again is known as the same"
    written = row(sql_records, record.stored_key)
    assert written.state is State.PENDING
    assert written.reason is not None
    assert len(written.reason) <= 255


def database_in(server: PostgresServer, encoding: str) -> str:
    url = server.new_database()
    name = url.rpartition("/")[2]
    with engine_for(server.url).connect() as connection:
        connection.execute(text(f"DROP DATABASE {name}"))
        connection.execute(
            text(f"CREATE DATABASE {name} ENCODING '{encoding}' LOCALE 'C' TEMPLATE template0")
        )
    return url


@pytest.fixture
def latin(leases_postgres: PostgresServer) -> Any:
    with migrated(database_in(leases_postgres, "LATIN1")) as store:
        yield store


@pytest.mark.parametrize("driver", postgresql.PostgreSQL.DRIVERS)
def test_without_an_encoding_texts_are_utf_8(leases_postgres: PostgresServer, driver: str) -> None:
    """``SQL_ASCII`` leaves the encoding to the clients."""
    url = database_in(leases_postgres, "SQL_ASCII").replace("+psycopg:", f"+{driver}:")
    with migrated(url) as records:
        record = won(records, make_call(f"{fresh_key()}|\u5f85"))
        assert records.settle(record, outcome(record, result='"\u5f85"'))
        assert row(records, record.stored_key).result == '"\u5f85"'


@pytest.mark.parametrize(
    "more",
    [
        {
            "ended": Ended.SNOOZED,
            "reason": "\u5f85\u3063\u3066",
            "retry_after": 60.0,
            "state": State.PENDING,
        },
        {"result": '"\u5f85"', "finished": {"call": '"\u5f85"'}},
    ],
)
def test_an_outcome_that_the_database_refuses_for_its_text_is_written_without_it(
    latin: SqlRecordStore, more: dict[str, Any]
) -> None:
    record = won(latin, make_call(fresh_key()))
    assert latin.settle(record, outcome(record, **({"state": State.DONE} | more)))
    written = row(latin, record.stored_key)
    assert written.state is more.get("state", State.DONE)
    assert (written.result, written.attempt) == (None, 1)
    assert written.reason == ("result_refused" if "result" in more else None)


def test_a_key_that_the_database_refuses_is_an_error_of_the_call(latin: SqlRecordStore) -> None:
    for call in (
        lambda: latin.claim(make_call("t:contract|\u5f85"), "database"),
        lambda: latin.read("\u5f85"),
        lambda: latin.named("\u5f85"),
    ):
        with pytest.raises(KeyUnusable):
            call()


def test_a_reply_that_the_database_refuses_leaves_its_effect_done(latin: SqlRecordStore) -> None:
    effects, record = (
        SqlEffectStore(latin.database, latin.tables),
        won(latin, make_call(fresh_key())),
    )
    effect = sent(effects, record)
    assert effects.finish(effect, None, "\u5f85")
    assert [(found.state.value, found.reference) for found in effects.of_key(record)] == [
        ("done", None)
    ]


# -- what is raised --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EMFILE, "Too many open files"),
        MemoryError(),
        RuntimeError("no thread"),
        ValueError("fd"),
        KeyError(1),
    ],
    ids=repr,
)
def test_any_exception_of_a_driver_means_that_the_store_is_unavailable(
    database_url: str, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    with migrated(database_url) as records:
        record = won(records, make_call(fresh_key()))

        def refuse(*_: Any, **__: Any) -> Any:
            raise error

        monkeypatch.setattr(records.database.engine.dialect, "connect", refuse)
        monkeypatch.setattr(psycopg.Connection, "connect", refuse)
        records.database.engine.dispose()
        steps: list[Callable[[], object]] = [
            lambda: records.read(record.stored_key),
            lambda: records.claim(make_call(record.stored_key), "database"),
            lambda: records.settle(record, outcome(record)),
            records.check,
            lambda: DatabaseLeaseStore(records).mark("k", "m"),
        ]
        for step in steps:
            with pytest.raises(StoreUnavailable):
                step()


def test_a_soft_time_limit_in_a_statement_is_the_tasks(sql_records: SqlRecordStore) -> None:
    with pytest.raises(SoftTimeLimitExceeded), sql_records.database.errors():
        raise SoftTimeLimitExceeded


def test_a_refused_claim_of_a_row_that_runs_is_not_given_back(sql_records: SqlRecordStore) -> None:
    record = won(sql_records, make_call(fresh_key()), "database")
    change(sql_records, record.stored_key, "progress", "{")
    with pytest.raises(RecordUnreadable):
        sql_records.claim(make_call(record.stored_key), "database")
    assert raw(sql_records, record.stored_key)["owner"] == record.owner
