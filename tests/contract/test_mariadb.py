"""What only MySQL and MariaDB do: keys compared as bytes, claims of several statements, sessions
with any settings.
"""

import multiprocessing
import random
import time
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import text

from celery_leases.decide.answers import Acquired, Refused
from celery_leases.errors import KeyUnusable
from celery_leases.keys import CallKey
from celery_leases.record import State
from celery_leases.stores.sql.connections import engine_for
from celery_leases.stores.sql.dialects import mysql
from celery_leases.stores.sql.effects import SqlEffectStore
from celery_leases.stores.sql.leases import DatabaseLeaseStore
from celery_leases.stores.sql.records import SqlRecordStore
from celery_leases.testing.contracts.calls import claimed, fresh_key, make_call
from celery_leases.testing.contracts.effect_case import begin
from celery_leases.testing.contracts.record_case import outcome, row, won
from tests.contract.sql_stores import statements_of
from tests.support.servers import MariaServer


@pytest.fixture
def records(mariadb_records: SqlRecordStore) -> SqlRecordStore:
    return mariadb_records


def first_words(sent: list[str]) -> list[str]:
    return [statement.split(maxsplit=1)[0] for statement in sent]


@pytest.mark.parametrize(
    "other", ["A", "ä", "á", "a ", " a", "a\t", "\N{FULLWIDTH LATIN SMALL LETTER A}", "a\u200b"]
)
def test_keys_that_differ_at_all_are_different(sql_records: SqlRecordStore, other: str) -> None:
    """In case, accents, width and trailing spaces; owners, effects and marks too."""
    base = fresh_key()
    one, two = base + "a", base + other
    first, second = (won(sql_records, make_call(one)), won(sql_records, make_call(two)))
    assert (first.attempt, second.attempt) == (1, 1)
    assert [row(sql_records, key).owner for key in (one, two)] == [first.owner, second.owner]
    assert not sql_records.settle(replace(first, owner=first.owner + " "), outcome(first))
    marks = DatabaseLeaseStore(sql_records)
    assert marks.swap_mark(one, "a", None, "1", 60.0)
    assert marks.swap_mark(one, other, None, "2", 60.0)
    assert marks.swap_mark(one, "a", "1", "3", 60.0)
    assert not marks.swap_mark(one, other, "2 ", "4", 60.0)
    assert (marks.mark(one, "a"), marks.mark(one, other)) == ("3", "2")
    effects = SqlEffectStore(sql_records.database, sql_records.tables)
    assert begin(effects, first, "a") is not None
    assert begin(effects, first, other) is not None
    assert [effect.name for effect in effects.of_key(first)] == ["a", other]


def test_names_of_full_length_fit_into_the_keys_of_the_tables(records: SqlRecordStore) -> None:
    long = "\N{GRINNING FACE}" * 255
    record = won(records, make_call(long))
    assert row(records, long).owner == record.owner
    effects = SqlEffectStore(records.database, records.tables)
    assert begin(effects, record, long) is not None
    assert DatabaseLeaseStore(records).swap_mark(long, long, None, long, 60.0)


def test_a_key_that_is_too_long_is_refused_and_not_cut(records: SqlRecordStore) -> None:
    """With any ``sql_mode``: otherwise two long keys with the same beginning would be equal."""
    with pytest.raises(KeyUnusable):
        records.claim(make_call("k" * 256), "database")


def test_a_first_run_is_one_statement_more_than_elsewhere(records: SqlRecordStore) -> None:
    leases, call = DatabaseLeaseStore(records), make_call(fresh_key())
    with statements_of(records.database) as sent:
        leases.acquire(call)
    assert first_words(sent) == ["SELECT", "INSERT"]
    record = row(records, call.key.stored)
    with statements_of(records.database) as sent:
        leases.acquire(make_call(call.key.stored))
    assert first_words(sent) == ["SELECT"]
    assert row(records, call.key.stored).owner == record.owner
    with statements_of(records.database) as sent:
        records.settle(record, outcome(record, State.PENDING))
    assert first_words(sent) == ["UPDATE"]
    with statements_of(records.database) as sent:
        record = won(records, make_call(call.key.stored), "database")
    assert first_words(sent) == ["SELECT", "UPDATE"]
    records.settle(record, outcome(record, result="1"))
    with statements_of(records.database) as sent:
        assert isinstance(records.claim(make_call(call.key.stored), "database"), Refused)
    assert first_words(sent) == ["SELECT"]


def commands(records: SqlRecordStore) -> int:
    """The number of commands that the pooled connection has sent so far."""
    with records.database.engine.connect() as connection:
        return sum(
            int(number)
            for _, number in connection.execute(text("SHOW SESSION STATUS LIKE 'Com\\_%'"))
        )


def test_no_statement_is_followed_by_another_round_trip(records: SqlRecordStore) -> None:
    record = won(records, make_call(fresh_key()))
    before = commands(records)
    assert records.settle(record, outcome(record))
    assert commands(records) - before == 2  # this statement too


def race(url: str, seed: int, begin: Any, found: Any) -> None:
    records, rand = SqlRecordStore(engine_for(url)), random.Random(seed)
    wins = []
    begin.wait(30)
    for _ in range(1000):
        call = make_call(f"t:race|{rand.randrange(20)}")
        answer = records.claim(call, "database")
        if isinstance(answer, Acquired):
            record = claimed(answer)
            wins.append((call.key.stored, record.fence, record.attempt))
            if rand.random() < 0.8:
                assert DatabaseLeaseStore(records).release(call.key.stored, call.token)
            else:
                assert records.settle(record, outcome(record, State.PENDING))
        else:
            assert answer.record is not None
            assert answer.record.owner != call.token
    found.put(wins)


def test_of_two_processes_that_race_each_fence_has_one_winner(records: SqlRecordStore) -> None:
    """The fence of a key grows with each success."""
    spawn = multiprocessing.get_context("spawn")
    together, found = spawn.Barrier(2), spawn.Queue()
    url = records.database.engine.url.render_as_string(hide_password=False)
    processes = [spawn.Process(target=race, args=(url, seed, together, found)) for seed in range(2)]
    for process in processes:
        process.start()
    wins = [win for _ in processes for win in found.get(timeout=90)]
    for process in processes:
        process.join(10)
        assert process.exitcode == 0
    for key in {key for key, _, _ in wins}:
        of_key = sorted((attempt, fence) for name, fence, attempt in wins if name == key)
        attempts, fences = zip(*of_key, strict=True)
        assert attempts == tuple(range(1, len(of_key) + 1))
        assert list(fences) == sorted(set(fences))
    assert len(wins) > 1000


def test_the_clock_does_not_depend_on_the_time_zone_of_a_session(records: SqlRecordStore) -> None:
    with records.database.engine.connect() as connection:
        for zone in ("+00:00", "-11:00", "+13:00"):
            connection.execute(text(f"SET time_zone = '{zone}'"))
            found = connection.execute(text(f"SELECT {mysql.MySQL.NOW}")).scalar_one()
            assert abs(found / 1e6 - time.time()) < 60
            connection.execute(text("SET timestamp = 1729990800.25"))
            assert (
                connection.execute(text(f"SELECT {mysql.MySQL.NOW}")).scalar_one()
                == 1729990800250000
            )
            connection.execute(text("SET timestamp = DEFAULT"))


def test_a_server_with_other_sql_modes_can_be_used(leases_mariadb: MariaServer) -> None:
    """Quotes for names, full GROUP BY, truncated values, short lock timeouts."""
    modes = "ANSI_QUOTES,PIPES_AS_CONCAT,NO_BACKSLASH_ESCAPES"
    if leases_mariadb.name == "MariaDB":
        modes += ",SIMULTANEOUS_ASSIGNMENT"
    with type(leases_mariadb)(
        settings={"sql-mode": modes, "default-storage-engine": "MyISAM"}
    ) as server:
        records = SqlRecordStore(engine_for(server.new_database()))
        records.migrate()
        call = make_call(fresh_key() + "\\'\"%s")
        won(records, call)
        second = won(records, make_call(call.key.stored))
        assert (second.attempt, second.crashes) == (2, 1)
        with pytest.raises(KeyUnusable):
            records.claim(make_call("k" * 256), "database")
        with records.database.engine.connect() as connection:
            used = (
                connection.execute(text("SHOW TABLE STATUS LIKE 'celery_leases%'")).mappings().all()
            )
        assert {table["Engine"] for table in used} == {"InnoDB"}
        records.database.close()


@pytest.mark.parametrize("size", [3_000_000, 20_000_000])
def test_a_call_too_large_for_the_server_runs(records: SqlRecordStore, size: int) -> None:
    """A key that is too large is an error of its call."""

    def allow(bytes_of_a_packet: int) -> None:
        engine = records.database.engine
        engine.dispose()  # the server may have closed its connections
        with engine.connect() as connection:
            connection.exec_driver_sql(f"SET GLOBAL max_allowed_packet = {bytes_of_a_packet}")
        engine.dispose()  # it is the limit of new sessions

    allow(2**21)
    try:
        call = make_call(fresh_key(), message="x" * size)
        assert won(records, call).message is None
        with pytest.raises(KeyUnusable, match="max_allowed_packet"):
            records.claim(replace(call, key=CallKey("k" * size, fresh_key())), "store")
    finally:
        allow(2**24)
