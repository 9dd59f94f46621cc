"""Tables of version 1, as release 0.1.0 created them: workers run on them, and migrations
convert them.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, event, inspect, make_url, text

from celery_leases.errors import RecordUnreadable, SchemaOutdated, StoreUnavailable
from celery_leases.protocol.effects import scope_of
from celery_leases.protocol.interfaces import RecordStore, Renewal, RenewalResult
from celery_leases.protocol.keys import CallKey
from celery_leases.protocol.records import Ended, Failure, Record, State, Won
from celery_leases.stores.sql import migrations
from celery_leases.stores.sql.database import engine_for
from celery_leases.stores.sql.dialects import postgresql
from celery_leases.stores.sql.dialects.mysql import FAMILY
from celery_leases.stores.sql.effects import SqlEffectStore
from celery_leases.stores.sql.leases import DatabaseLeaseStore
from celery_leases.stores.sql.outbox import Outbox
from celery_leases.stores.sql.records import SqlRecordStore
from celery_leases.stores.sql.schema import Tables, indexes_of
from celery_leases.stores.sql.table_versions import DOCUMENT, NARROW, WIDE, Migrated
from celery_leases.stores.sql.transactions import JoinedTransaction
from celery_leases.testing.contracts import EffectStoreContract, RecordStoreContract
from celery_leases.testing.contracts.claim_requests import acquired, fresh_key, make_claim_request
from celery_leases.testing.contracts.record_case import closed, outcome, row, timeless, won
from celery_leases.testing.waits import wait_until
from tests.contract.sql_stores import database_url, server_url, wait_for_locks

__all__ = ["database_url", "server_url"]

DAMAGED = {
    "finished_results": "{",
    "progress": "{",
    "state": "bogus",
    "ended": "bogus",
    "error": "{",
    "previous_error": "[]",
    "digests": "{",
}
"""Unreadable values, by column."""
UNREADABLE = {"finished_results", "progress", "state", "ended"}
FAILURE = Failure(
    "builtins.ValueError", "bad \N{SNOWMAN}", "rule", "busy", group="g", ambiguous=True
)


def make_old(url: str) -> None:
    """Create the tables of version 1."""
    engine = engine_for(url)
    dialect = "mysql" if engine.dialect.name == "mariadb" else engine.dialect.name
    written = (Path(__file__).parent / "version_1" / f"{dialect}.sql").read_text()
    with engine.connect() as connection:
        for statement in written.strip().removesuffix(";").split(";\n"):
            connection.exec_driver_sql(statement)
    engine.dispose()


def opened(url: str) -> SqlRecordStore:
    """A store that has read the layout of its tables."""
    store = SqlRecordStore(engine_for(url))
    store.availability.grace = 0.0
    store.check()
    return store


@pytest.fixture
def old(database_url: str) -> Iterator[SqlRecordStore]:
    """Records in tables of version 1."""
    make_old(database_url)
    with closing(opened(database_url).database) as database:
        store = SqlRecordStore(database.engine)
        store.availability.grace = 0.0
        store.check()
        assert store.statements.layout is WIDE
        yield store


def migrated(store: SqlRecordStore, to: int = NARROW.version) -> Migrated:
    """Migrate as an operator does, in another process."""
    other = SqlRecordStore(engine_for(store.database.engine.url.render_as_string(False)))
    try:
        return other.migrate(to)
    finally:
        other.database.close()


@pytest.mark.nightly
class TestOldRecords(RecordStoreContract):
    """The published suite on tables of version 1."""

    @pytest.fixture
    def records(self, old: SqlRecordStore) -> SqlRecordStore:
        """Each of the databases."""
        return old

    def test_a_repeated_claim_after_a_crash_still_shows_the_crash(
        self, records: RecordStore, key: str
    ) -> None:
        """Version 1 stores no history of attempts."""
        won(records, make_claim_request(key))
        claim_request = make_claim_request(key)
        first = won(records, claim_request)
        assert first.just_crashed
        assert first.history
        repeated = timeless(won(records, claim_request))
        assert repeated == replace(timeless(first), history=())


@pytest.mark.nightly
class TestOldEffects(EffectStoreContract):
    """The same for effects and progress."""

    @pytest.fixture
    def records(self, old: SqlRecordStore) -> SqlRecordStore:
        """Each of the databases."""
        return old

    @pytest.fixture
    def effects(self, old: SqlRecordStore) -> SqlEffectStore:
        """Effects in the same database."""
        return SqlEffectStore(old.database, old.tables)


def fill(records: SqlRecordStore) -> list[str]:
    """Create rows in every state, with all possible values; returns their keys."""
    keys: list[str] = []

    def begun(lease_store: str = "database", **claim_request: Any) -> Record:
        keys.append(fresh_key())
        given: dict[str, Any] = {
            "fingerprint": f"v1:{'ab' * 32}",
            "digests": {"a": "b"},
            "retention": 9.5,
            "ttl": 40.0,
        }
        return won(records, make_claim_request(keys[-1], **(given | claim_request)), lease_store)

    counts: dict[str, Any] = {
        "failures": 2,
        "quick_retries": 3,
        "cooldowns": 4,
        "crashes": 1,
        "crashed_call": "c",
    }
    failed: dict[str, Any] = counts | {
        "ended": Ended.FAILED,
        "failure": FAILURE,
        "failed": True,
        "reason": "busy",
    }
    begun()
    begun("redis:other/", ttl=2.3, retention=None, fingerprint=None, digests=None)
    for state in (State.PENDING, State.COOLING, State.FAILED, State.UNCERTAIN):
        closed(
            records,
            begun(),
            state,
            **failed,
            retry_after=60.0,
            resumes=state is State.COOLING,
            retries=3,
        )
    closed(
        records,
        begun(message='{"a": "50%"}'),
        result='"\N{SNOWMAN}"',
        finished={"a!b c": '"1"', "!": None},
    )
    closed(records, begun(), retention=None, reason="result_too_large")
    closed(records, begun(), State.PENDING, **failed)
    again = won(
        records, make_claim_request(keys[-1], rerun=True), "database"
    )  # with a previous attempt, and counts of an earlier generation
    closed(records, again, State.PENDING, ended=Ended.RETRIED)
    won(records, make_claim_request(keys[-1], rerun=True), "database")
    begun("redis:one")
    won(records, make_claim_request(keys[-1]), "redis:one")  # it has crashed
    saving = begun()
    effects = SqlEffectStore(records.database, records.tables)
    assert effects.save_progress(
        saving, '{"generation": 0, "value": "1", "positions": {"items": 3}}'
    )
    assert (
        effects.begin(saving, "charge", "key", scope_of(saving, rerun=False, retention=1.0))
        is not None
    )
    closed(records, begun(), State.FAILED, **failed)
    assert records.reset(keys[-1], keep=True) is not None
    closed(records, begun(), State.FAILED, **failed)
    assert records.reset(keys[-1], keep=False) is not None
    begun()
    assert records.resolve(keys[-1], '"by hand"')
    key = CallKey("enqueued", fresh_key(), f"v1:{'cd' * 32}", {"x": "y"})
    keys.append(key.stored)
    assert records.database.touch(
        Outbox(records).enqueue_writes("t", key, "first", "{}", ttl=7.0, retention=60.0), {}
    )
    return keys


def damage(records: SqlRecordStore) -> dict[str, str]:
    """Create a row for each unreadable column; returns their keys by column."""
    broken = {}
    for column, value in DAMAGED.items():
        record = won(records, make_claim_request(fresh_key(), retention=None), "database")
        closed(
            records, record, State.PENDING, ended=Ended.FAILED, failure=FAILURE, finished={"a": "1"}
        )
        won(records, make_claim_request(record.stored_key, rerun=True), "database")
        with records.database.engine.connect() as connection:
            written = text(
                f"UPDATE celery_leases_records SET {column} = :value WHERE stored_key = :key"  # noqa: S608
            )
            connection.execute(written, {"value": value, "key": record.stored_key})
        broken[column] = record.stored_key
    return broken


def reads(records: SqlRecordStore, keys: list[str]) -> dict[str, Record | None]:
    """The rows of keys, without the time at which they were read."""
    found = {key: records.read(key) for key in keys}
    return {key: timeless(record) if record is not None else None for key, record in found.items()}


def columns(records: SqlRecordStore) -> set[str]:
    """The columns of the table."""
    with records.database.engine.connect() as connection:
        return set(connection.execute(records.tables.any_column()).keys())


def test_each_record_reads_the_same_after_a_migration_and_back(old: SqlRecordStore) -> None:
    """In every state; and again after the next migration."""
    keys = fill(old)
    before = reads(old, keys)
    done = migrated(old)
    assert (done.before, done.after, done.rows >= len(keys)) == (1, 2, True)
    assert reads(old, keys) == before
    assert old.statements.layout.version == 2
    assert columns(old) == set(old.tables.records.c.keys())
    assert indexes(old) == wanted_indexes(old, 2)
    assert migrated(old) == Migrated(2, 2)
    assert migrated(old, 1).rows == len(keys)
    assert reads(old, keys) == before
    assert old.statements.layout.version == 1
    assert migrated(old, 1) == Migrated(1, 1)
    assert migrated(old).before == 1
    assert reads(old, keys) == before


@pytest.mark.parametrize("to", [2, 1], ids=["upgrade", "downgrade"])
def test_work_that_was_done_before_a_migration_may_be_run_again(
    old: SqlRecordStore, to: int
) -> None:
    """By another call of a ``rerun`` task, or after the retention."""
    if to == 1:
        migrated(old)
    rerun, expired = (won(old, make_claim_request(fresh_key()), "database") for _ in range(2))
    closed(old, rerun)
    closed(old, expired, retention=1e-6)
    migrated(old, to)
    assert won(old, make_claim_request(rerun.stored_key, rerun=True), "database").generation == 1
    assert won(old, make_claim_request(expired.stored_key), "database").generation == 1


def test_a_migration_that_has_nothing_to_do_waits_for_no_transaction(old: SqlRecordStore) -> None:
    """It is run again while a transaction of the user's has written a row."""
    migrated(old)
    won(old, make_claim_request(fresh_key()), "database")
    with old.database.engine.connect() as connection:
        if connection.dialect.name == "sqlite":
            pytest.skip("there is one writer at a time")
        connection.exec_driver_sql("BEGIN")
        connection.exec_driver_sql("UPDATE celery_leases_records SET holder = 'me'")
        assert migrated(old) == Migrated(2, 2)
        connection.exec_driver_sql("ROLLBACK")


def test_what_cannot_be_read_cannot_be_read_afterwards_either(old: SqlRecordStore) -> None:
    """It does not become an absent value, also on the way back."""
    broken = damage(old)
    for version in (2, 1, 2):
        migrated(old, version)
        for column, key in broken.items():
            if column not in UNREADABLE:
                assert old.read(key) is not None, column
                continue
            with pytest.raises(RecordUnreadable) as caught:
                old.read(key)
            moved = column == "finished_results" and version == 2
            assert caught.value.column == (DOCUMENT if moved else column)
    assert old.reset(broken["finished_results"], keep=False) is not None
    assert old.read(broken["finished_results"]) is not None


def test_a_downgrade_that_would_lose_something_is_refused(old: SqlRecordStore) -> None:
    """The error has the key, and nothing was changed."""
    keys = fill(old)
    migrated(old)
    before = reads(old, keys)
    with old.database.engine.connect() as connection:
        written = text("UPDATE celery_leases_records SET details = :value WHERE stored_key = :key")
        connection.execute(written, {"value": json.dumps({"later": 1}), "key": keys[0]})
    with pytest.raises(SchemaOutdated, match="cannot hold what its column details has"):
        migrated(old, 1)
    assert {**reads(old, keys), keys[0]: None} == {**before, keys[0]: None}
    assert migrated(old) == Migrated(2, 2, 0)
    assert columns(old) == set(old.tables.records.c.keys())


def indexes(records: SqlRecordStore) -> set[str | None]:
    """The names of the table's indexes, including invalid ones."""
    engine = records.database.engine
    if engine.dialect.name != "postgresql":
        return {index["name"] for index in inspect(engine).get_indexes(records.tables.records.name)}
    with engine.connect() as connection:
        names = (
            "SELECT indexname FROM pg_indexes WHERE tablename = :name AND indexname NOT LIKE 'pk%'"
        )
        return set(connection.execute(text(names), {"name": records.tables.records.name}).scalars())


def wanted_indexes(records: SqlRecordStore, version: int) -> set[str | None]:
    """The names of the indexes of a version."""
    dialect = records.database.engine.dialect
    found: set[str | None] = {str(index.name) for index in indexes_of(Tables().records, dialect)}
    if version == 1:
        found |= {migrations.BY_STATE, migrations.BY_EXPIRY}
        found -= {migrations.BY_START}
    return found


def ready_indexes(records: SqlRecordStore) -> set[str]:
    """The valid indexes on PostgreSQL."""
    with records.database.engine.connect() as connection:
        names = (
            "SELECT c.relname FROM pg_index AS i JOIN pg_class AS c ON c.oid = i.indexrelid "
            "WHERE i.indisvalid AND NOT i.indisprimary AND i.indrelid = 'celery_leases_records'::regclass"
        )
        return set(connection.execute(text(names)).scalars())


@contextmanager
def held_up(
    old: SqlRecordStore, migrating: Callable[[], Any]
) -> Iterator[tuple[Connection, Future[Any]]]:
    """A migration in a thread, while PostgreSQL creates an index and waits for an older
    transaction. Yields the connection of that transaction.
    """
    waits = text(
        "SELECT 1 FROM pg_locks JOIN pg_stat_activity USING (pid) WHERE NOT granted AND query LIKE :query"
    )
    with (
        old.database.engine.connect() as older,
        old.database.engine.connect() as watcher,
        ThreadPoolExecutor(1) as one,
    ):
        older.exec_driver_sql("BEGIN ISOLATION LEVEL REPEATABLE READ")
        older.exec_driver_sql("SELECT 1 FROM celery_leases_marks")
        running = one.submit(migrating)
        made = {"query": "CREATE INDEX CONCURRENTLY%"}
        wait_until(
            lambda: running.done() or watcher.execute(waits, made).first() is not None,
            20,
            "the index to wait",
        )
        yield older, running
        if older.in_transaction():
            older.exec_driver_sql("ROLLBACK")


@pytest.mark.only(server="postgresql")
def test_work_goes_on_while_indexes_are_made(old: SqlRecordStore) -> None:
    """They are created beside the old ones. Under the table lock they are only renamed."""
    with held_up(old, lambda: migrated(old)) as (older, running):
        record = won(old, make_claim_request(fresh_key()), "database")
        assert closed(old, record).state is State.DONE
        assert not running.done()
        older.exec_driver_sql("ROLLBACK")
        assert running.result(60).after == 2
    assert indexes(old) == ready_indexes(old) == wanted_indexes(old, 2)


@pytest.mark.only(server="postgresql")
def test_an_invalid_index_is_created_again(old: SqlRecordStore) -> None:
    """The server does not use an invalid index for queries, but maintains it at each write."""
    end = text(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query LIKE 'CREATE INDEX CONCURRENTLY%'"
    )
    with held_up(old, lambda: migrated(old)) as (older, running):
        with old.database.engine.connect() as connection:
            connection.execute(end)
        assert isinstance(running.exception(60), StoreUnavailable)
        older.exec_driver_sql("ROLLBACK")
    (left,) = indexes(old) - wanted_indexes(old, 1)
    making = text(
        "SELECT query FROM pg_stat_activity WHERE query LIKE 'CREATE INDEX CONCURRENTLY%' AND state = 'active'"
    )
    with held_up(old, lambda: migrated(old)) as (older, running):
        with old.database.engine.connect() as connection:
            assert str(left) in connection.execute(making).scalar_one()
        older.exec_driver_sql("ROLLBACK")
        assert running.result(60).after == 2
    assert indexes(old) == ready_indexes(old) == wanted_indexes(old, 2)


@pytest.mark.only(server="postgresql")
def test_an_index_that_waits_for_too_long_is_given_up(
    old: SqlRecordStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is lost. A downgrade drops what is left of it."""
    monkeypatch.setattr(postgresql, "LOCK_TIMEOUT_OF_MIGRATIONS", 300)
    with held_up(old, lambda: migrated(old)) as (older, running):
        failed = running.exception(60)
        older.exec_driver_sql("ROLLBACK")
    assert isinstance(failed, StoreUnavailable)
    assert "run the migration again when they have ended" in str(failed)
    old.check()
    assert indexes(old) > wanted_indexes(old, 1)
    migrated(old, 1)
    assert indexes(old) == wanted_indexes(old, 1)


@pytest.mark.only(server="mariadb")
def test_columns_and_indexes_are_dropped_by_statements_of_their_own(old: SqlRecordStore) -> None:
    """MySQL copies the whole table if one statement does both."""
    sent: list[str] = []

    def note(_1: Any, _2: Any, statement: str, *_: Any) -> None:
        sent.append(statement)

    event.listen(Engine, "before_cursor_execute", note)
    try:
        migrated(old)
    finally:
        event.remove(Engine, "before_cursor_execute", note)
    assert any("DROP INDEX" in statement for statement in sent)
    assert any("DROP COLUMN" in statement for statement in sent)
    assert not [
        statement for statement in sent if "DROP INDEX" in statement and "DROP COLUMN" in statement
    ]


def test_no_statement_of_a_migration_times_out(
    server_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if the server does not answer for longer than other statements may take."""
    make_old(server_url)
    url = make_url(server_url)
    on_mysql = url.get_backend_name() in FAMILY
    made = (
        ["CREATE TRIGGER slow BEFORE UPDATE ON celery_leases_version FOR EACH ROW DO SLEEP(2)"]
        if on_mysql
        else [
            "CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN PERFORM pg_sleep(1); RETURN NEW; END'",
            "CREATE TRIGGER slow BEFORE UPDATE ON celery_leases_version FOR EACH ROW EXECUTE FUNCTION slow()",
        ]
    )
    monkeypatch.setattr(postgresql, "SILENCE", 0.3)
    stopping = url.update_query_dict({"read_timeout": "1"} if on_mysql else {})
    records = SqlRecordStore(engine_for(stopping.render_as_string(hide_password=False)))
    with closing(records.database):
        with records.database.engine.connect() as connection:
            for statement in made:
                connection.exec_driver_sql(statement)
        with pytest.raises(StoreUnavailable):
            records.database.count(text("UPDATE celery_leases_version SET version = version"), {})
        assert records.migrate().after == 2
        assert records.migrate(1).after == 1


STEPS: dict[str, Callable[[SqlRecordStore, Record], object]] = {
    "read": lambda records, record: records.read(record.stored_key),
    "settle": lambda records, record: records.settle(
        record, outcome(record, failure=FAILURE, failed=True)
    ),
    "claim": lambda records, _: won(records, make_claim_request(fresh_key()), "database"),
    "take over": lambda records, record: records.claim(
        make_claim_request(record.stored_key), "redis:one"
    ),
    "search": lambda records, _: records.search(states=[State.RUNNING]),
    "named": lambda records, record: records.named(record.key),
    "reset": lambda records, record: records.reset(record.stored_key, keep=True, seen=record),
    "resolve": lambda records, record: records.resolve(record.stored_key, "1"),
    "held": lambda records, record: DatabaseLeaseStore(records).held([record.stored_key]),
    "renew": lambda records, record: (
        DatabaseLeaseStore(records).renew([Renewal(record.stored_key, record.owner, 60.0)])
        == [RenewalResult.OURS]
    ),
    "stranded": lambda records, _: Outbox(records).stranded(0.0, 10),
    "take": lambda records, _: Outbox(records).take("absent") is None,
    "progress": lambda records, record: SqlEffectStore(
        records.database, records.tables
    ).save_progress(record, "{}"),
}


@pytest.mark.parametrize("step", STEPS)
def test_a_worker_finds_out_that_its_tables_were_migrated(old: SqlRecordStore, step: str) -> None:
    """With its next statement, in both directions; no call fails."""
    for version in (2, 1):
        record = won(
            old, make_claim_request(fresh_key()), "redis:one" if step == "take over" else "database"
        )
        for _ in range(8):  # psycopg prepares a statement that is executed often
            STEPS["read"](old, record)
        migrated(old, version)
        assert STEPS[step](old, record) is not None
        STEPS[step](old, record)
        assert isinstance(old.claim(make_claim_request(fresh_key()), "database"), Won)


def test_an_attempt_that_was_claimed_before_ends_after_the_migration(old: SqlRecordStore) -> None:
    """With the values of its row: counts, finished calls, and the end of the previous attempt."""
    first = won(old, make_claim_request(fresh_key(), rerun=True), "database")
    closed(
        old,
        first,
        State.PENDING,
        ended=Ended.FAILED,
        failure=FAILURE,
        failures=2,
        finished={"a": "1"},
        failed=True,
    )
    record = won(old, make_claim_request(first.stored_key, rerun=True), "database")
    migrated(old)
    done = closed(old, record, result="1", finished={"a": "1", "b": "2"})
    assert (done.finished_calls, done.finished_results) == (("a", "b"), {"a": "1", "b": "2"})
    assert done.previous == record.previous
    assert (done.generation, done.lease_ttl, done.fingerprint) == (
        1,
        record.lease_ttl,
        record.fingerprint,
    )


def test_many_claims_and_outcomes_go_on_during_migrations(old: SqlRecordStore) -> None:
    """Each key is claimed once and done once, during several migrations in both directions."""
    url = old.database.engine.url.render_as_string(False)
    stop, ran, lock = threading.Event(), [], threading.Lock()

    def work(number: int) -> None:
        store = opened(url)
        while not stop.is_set():
            try:
                record = won(store, make_claim_request(fresh_key(), ttl=60.0), "database")
            except (
                StoreUnavailable
            ) as error:  # locked for too long: the delivery would be rescheduled
                assert error.executed is not True  # noqa: PT017
                continue
            while True:
                try:
                    assert store.settle(record, outcome(record, result=str(number)))
                    break
                except StoreUnavailable:
                    continue
            with lock:
                ran.append(record.stored_key)
        store.database.close()

    def grows(by: int) -> None:
        wanted = len(ran) + by
        wait_until(lambda: len(ran) >= wanted, 30, "work to go on")

    with ThreadPoolExecutor(4) as threads:
        working = [threads.submit(work, number) for number in range(4)]
        try:
            for version in (2, 1, 2):
                grows(20)
                migrated(old, version)
            grows(20)
        finally:
            stop.set()
        for one in working:
            one.result()
    found = reads(old, ran)
    assert {record.state for record in found.values() if record is not None} == {State.DONE}
    assert {record.attempt for record in found.values() if record is not None} == {1}
    assert len(set(ran)) == len(ran)


class KilledError(BaseException):
    """Ends a migration as the death of its process would."""


KILLED_AT = [
    (name, number)
    for name, times in (("_alter", 2), ("_batch", 2), ("_write_version", 1))
    for number in range(times)
]


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(("name", "number"), KILLED_AT)
@pytest.mark.parametrize("to", [2, 1])
def test_a_migration_that_was_killed_is_run_again(
    old: SqlRecordStore,
    monkeypatch: pytest.MonkeyPatch,
    to: int,
    name: str,
    number: int,
    after: bool,
) -> None:
    """Wherever it was killed, workers can use the tables. The next migration finishes it, or
    goes back.
    """
    keys = fill(old)
    before = reads(old, keys)
    if to == 1:
        migrated(old)
        name = {"_batch": "_convert_back"}.get(name, name)
    kind = type(migrations.migration(old.database.engine, old.tables))
    step, calls = getattr(kind, name), [0]

    def killed(*given: Any, **more: Any) -> Any:
        calls[0] += 1
        if calls[0] <= number:
            return step(*given, **more)
        if after:
            step(*given, **more)
        raise KilledError

    with monkeypatch.context() as dying:
        dying.setattr(kind, name, killed)
        if name == "_convert_back" and number:
            migrated(old, to)
        else:
            with pytest.raises(KilledError):
                migrated(old, to)
    assert reads(old, keys) == before
    for store in (old, opened(old.database.engine.url.render_as_string(False))):
        record = won(store, make_claim_request(fresh_key()), "database")
        assert closed(store, record, result="1", finished={"a": "1"}).state is State.DONE
        keys.append(record.stored_key)
    before = reads(old, keys)
    for version in (to, 3 - to, 2):
        migrated(old, version)
        assert reads(old, keys) == before
        assert columns(old) == set(old.tables.layouts[version].c.keys())
        assert indexes(old) == wanted_indexes(old, version)
    old.check()


def test_two_migrations_at_once_do_it_once(old: SqlRecordStore) -> None:
    """The second one finds nothing to do."""
    keys = fill(old)
    before = reads(old, keys)
    with ThreadPoolExecutor(4) as threads:
        done = list(threads.map(lambda _: migrated(old), range(4)))
    assert {each.after for each in done} == {2}
    assert reads(old, keys) == before
    assert columns(old) == set(old.tables.records.c.keys())


def test_a_migration_waits_for_a_transaction_that_guards_a_row(old: SqlRecordStore) -> None:
    """It lets other transactions pass meanwhile, and continues when that transaction has ended."""
    if old.database.host_clock:
        pytest.skip("SQLite allows one writer")
    record = won(old, make_claim_request(fresh_key()), "database")
    user = engine_for(old.database.engine.url.render_as_string(False)).execution_options(
        isolation_level="READ COMMITTED"
    )
    with user.connect() as connection, ThreadPoolExecutor(1) as threads:
        transaction = JoinedTransaction(connection, old)
        transaction.guard(record)
        migrating = threads.submit(migrated, old)
        if old.database.engine.dialect.name == "postgresql":
            wait_for_locks(old)
        transaction.complete(record, outcome(record, result="1"))
        connection.commit()
        assert migrating.result(60).after == 2
    assert row(old, record.stored_key).state is State.DONE


def test_a_call_is_completed_and_enqueued_in_a_transaction_after_a_migration(
    old: SqlRecordStore,
) -> None:
    """An error would end the transaction, so the columns are read first."""
    record = won(old, make_claim_request(fresh_key()), "database")
    migrated(old)
    user = engine_for(old.database.engine.url.render_as_string(False)).execution_options(
        isolation_level="READ COMMITTED" if not old.database.host_clock else "SERIALIZABLE"
    )
    key = CallKey("enqueued", fresh_key(), None, None)
    with user.connect() as connection:
        transaction = JoinedTransaction(connection, old)
        transaction.load_layout("k")
        writes = Outbox(old).enqueue_writes("t", key, "first", "{}", ttl=7.0, retention=60.0)
        assert transaction.write(writes, "k")
        transaction.complete(record, outcome(record, result="1"))
        connection.commit()
    assert row(old, record.stored_key).state is State.DONE
    assert row(old, key.stored).call_id == "first"


@pytest.mark.parametrize("by", ["sqlalchemy", "driver"])
def test_a_transaction_fails_once_after_a_downgrade(old: SqlRecordStore, by: str) -> None:
    """If the tables are known to be the newest, the columns are not read. The first statement
    fails with an error that says so.
    """
    migrated(old)
    migrated(old, 1)
    old.use(NARROW)  # as another process would know it
    user = engine_for(old.database.engine.url.render_as_string(False)).execution_options(
        isolation_level="READ COMMITTED" if not old.database.host_clock else "SERIALIZABLE"
    )
    written: list[bool | None] = []
    for _ in range(3):
        with user.connect() as connection:
            given: Any = (
                connection if by == "sqlalchemy" else connection.connection.driver_connection
            )
            if by == "driver" and old.database.host_clock:
                given.execute("BEGIN IMMEDIATE")
            transaction = JoinedTransaction(given, old)
            key = CallKey("enqueued", fresh_key(), None, None)
            try:
                transaction.load_layout("k")
                writes = Outbox(old).enqueue_writes("t", key, "", "{}", ttl=7.0, retention=60.0)
                written.append(transaction.write(writes, "k"))
            except Exception as error:  # noqa: BLE001 - that of the driver
                assert DOCUMENT in str(error)  # noqa: PT017
                written.append(None)
            given.rollback()
    assert written == [None, True, True]


def test_the_printed_sql_leaves_old_tables_as_they_are(old: SqlRecordStore) -> None:
    """Also when it is run twice. The tables are migrated afterwards."""
    keys = fill(old)
    before = reads(old, keys)
    with old.database.engine.connect() as connection:
        for statement in 2 * old.tables.ddl(old.database.engine).strip().removesuffix(";").split(
            ";\n"
        ):
            connection.execute(text(statement))
    old.tables.create(old.database.engine)
    assert reads(old, keys) == before
    assert migrated(old).before == 1
    assert reads(old, keys) == before


def test_a_worker_on_old_tables_says_so(
    old: SqlRecordStore, caplog: pytest.LogCaptureFixture
) -> None:
    """It runs nevertheless."""
    old.check()
    assert "have version 1" in caplog.text
    assert "leases migrate" in caplog.text


def test_a_lease_survives_a_migration(old: SqlRecordStore) -> None:
    """The row is the lease."""
    leases = DatabaseLeaseStore(old)
    claim_request = make_claim_request(fresh_key(), ttl=60.0)
    assert acquired(leases.acquire(claim_request))
    migrated(old)
    assert leases.renew([Renewal(claim_request.stored_key, claim_request.token, 60.0)]) == [
        RenewalResult.OURS
    ]
    assert not acquired(leases.acquire(make_claim_request(claim_request.stored_key)))
