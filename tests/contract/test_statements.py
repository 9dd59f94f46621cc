"""Statements on the driver's own cursor: they convert values, return results and raise errors as
SQLAlchemy does.
"""

import gc
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from sqlalchemy import (
    JSON,
    BigInteger,
    Executable,
    Integer,
    bindparam,
    column,
    insert,
    literal,
    or_,
    select,
    text,
    update,
)

from celery_leases.decide.answers import Renewal, RenewalResult
from celery_leases.errors import KeyUnusable, StoreUnavailable, ValueRefused
from celery_leases.record import State
from celery_leases.stores.sql import rows as record_rows
from celery_leases.stores.sql.connections import engine_for
from celery_leases.stores.sql.database import Database, _cursors_of
from celery_leases.stores.sql.leases import DatabaseLeaseStore
from celery_leases.stores.sql.outbox import Outbox
from celery_leases.stores.sql.records import SqlRecordStore
from celery_leases.testing.contracts.calls import fresh_key, make_call
from celery_leases.testing.contracts.record_case import closed, outcome, row, won
from tests.contract.sql_stores import end_other_connections, migrated

DRIVERS = ("sqlite", "postgresql+psycopg", "postgresql+psycopg2", "mysql+pymysql", "mysql+mysqldb")
ON_SERVERS = DRIVERS[1:]


@pytest.fixture
def records(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SqlRecordStore]:
    backend, _, driver = request.param.partition("+")
    if backend == "sqlite":
        url = f"sqlite:///{tmp_path / 'records.db'}"
    else:
        pytest.importorskip({"mysqldb": "MySQLdb"}.get(driver, driver))
        server = request.getfixturevalue(
            "leases_postgres" if backend == "postgresql" else "leases_mariadb"
        )
        url = f"{request.param}://{server.new_database().partition('://')[2]}"
    with migrated(url) as store:
        yield store


@contextmanager
def on_cursors(database: Database) -> Iterator[list[int]]:
    """Counts the statements on the driver's cursor meanwhile, in the only item of a list."""
    number, on_cursor = [0], database._on_cursor

    def noted(*given: Any) -> Any:
        number[0] += 1
        return on_cursor(*given)

    database._on_cursor = noted  # type: ignore[method-assign]
    yield number
    del database._on_cursor


@pytest.mark.parametrize("records", DRIVERS, indirect=True)
def test_a_repeated_statement_returns_what_sqlalchemy_returned(records: SqlRecordStore) -> None:
    key = fresh_key() + "50%s :x 'ä'"
    closed(
        records,
        won(records, make_call(key, fingerprint="v1:a")),
        State.DONE,
        result='{"%(a)s": "100%"}',
    )
    table = records.tables.records
    truths = select(
        or_(table.c.fence > 0, table.c.fence < bindparam("least", type_=BigInteger)).label("yes"),
        (table.c.state == "running").label("no"),
        (table.c.attempt + bindparam("more", type_=Integer)).label("sum"),
        literal("%s 100%").label("percent"),
        bindparam("said", type_=JSON).label("said"),
    ).where(table.c.stored_key == bindparam("stored_key"))
    given = {"stored_key": key, "least": 2**62, "more": 41, "said": {"a": [1]}}
    whole = records.statements.select_rows.where(table.c.stored_key == bindparam("stored_key"))
    for statement in (whole, truths):
        with on_cursors(records.database) as number:
            first, *others = [records.database.first(statement, given) for _ in range(4)]
            everything = [records.database.all(statement, given) for _ in range(2)]
        assert number == [5]
        assert first is not None
        expected = {name: value for name, value in first.items() if name != "now"}
        for found in [*others, *(rows[0] for rows in everything)]:
            assert found is not None
            assert list(found) == list(first)
            assert {name: value for name, value in found.items() if name != "now"} == expected
            assert [type(value) for value in found.values()] == [
                type(value) for value in first.values()
            ]
        assert records.database.first(statement, given | {"stored_key": "absent"}) is None
        assert records.database.all(statement, given | {"stored_key": "absent"}) == []


@pytest.mark.parametrize("records", DRIVERS, indirect=True)
def test_a_repeated_write_counts_the_rows_it_touches(records: SqlRecordStore) -> None:
    """Matched rows count. An insert whose key exists counts none."""
    record, database = won(records, make_call(fresh_key())), records.database
    table = records.tables.records
    same = (
        update(table).where(table.c.stored_key == bindparam("for_key")).values(state=State.RUNNING)
    )
    with on_cursors(database) as number:
        assert [database.count(same, {"for_key": record.stored_key}) for _ in range(3)] == [1, 1, 1]
        assert [database.count(same, {"for_key": "absent"}) for _ in range(2)] == [0, 0]
    assert number == [4]
    marks = DatabaseLeaseStore(records)
    for value in "abc":
        assert marks.swap_mark(record.stored_key, value, None, value, 60.0)
        assert not marks.swap_mark(record.stored_key, value, None, "other", 60.0)
        assert marks.mark(record.stored_key, value) == value


def test_a_statement_of_one_call_or_with_in_is_not_compiled(server_records: SqlRecordStore) -> None:
    database, table = server_records.database, server_records.tables.records
    many = select(table.c.stored_key).where(
        table.c.stored_key.in_(bindparam("keys", expanding=True))
    )
    keys = [won(server_records, make_call(fresh_key())).stored_key for _ in range(3)]
    with on_cursors(database) as number:
        for size in (1, 3, 2):
            found = database.all(many, {"keys": keys[:size]})
            assert sorted(row["stored_key"] for row in found) == sorted(keys[:size])
            assert (
                database.first(select(table.c.key).where(table.c.stored_key == keys[0]), {})
                is not None
            )
    assert number == [0]
    assert len(database._executed) < 8


@pytest.mark.parametrize("records", DRIVERS, indirect=True)
def test_what_workers_ask_all_the_time_is_compiled(records: SqlRecordStore) -> None:
    leases, outbox = DatabaseLeaseStore(records), Outbox(records)
    record = won(records, make_call(fresh_key()), leases.name)
    key = record.stored_key

    def asked() -> list[Any]:
        renewed = leases.renew([Renewal(key, record.owner, 15.0)])
        mark, due, stranded = leases.mark(key, "x"), outbox.due(5), outbox.stranded(0.0, 5)
        return [renewed, leases.held([key]), mark, due, stranded, records.now() > 0]

    first = asked()
    assert first == [[RenewalResult.OURS], {key}, None, [], [], True]
    with on_cursors(records.database) as number:
        assert asked() == first
    assert number == [6]


def idle_connection(database: Database) -> Any:
    """The pool's record of the connection that the next statement uses."""
    pool: Any = database.engine.pool
    record = pool.acquire()
    pool.release(record)
    return record


@pytest.mark.parametrize("records", ["postgresql+psycopg"], indirect=True)
def test_a_statement_has_one_cursor_on_a_connection(records: SqlRecordStore) -> None:
    """Psycopg looks up all converters for another cursor."""
    database = records.database
    statements = [select((bindparam("number", type_=Integer) * 2).label("doubled"))]

    def doubled(number: int) -> Any:
        row = database.first(statements[0], {"number": number})
        return row and row["doubled"]

    def cursor() -> Any:
        compiled = database._compiled[statements[0]]
        assert compiled is not None
        return _cursors_of(idle_connection(database))[compiled]

    assert [doubled(number) for number in range(3)] == [0, 2, 4]
    first = cursor()
    assert doubled(3) == 6
    assert cursor() is first
    idle_connection(database).invalidate()
    assert doubled(4) == 8
    assert cursor() is not first
    assert len(_cursors_of(idle_connection(database))) == 1
    statements.clear()
    database.engine.clear_compiled_cache()  # SQLAlchemy keeps the last 500 statements
    gc.collect()
    assert not _cursors_of(idle_connection(database))


@pytest.mark.parametrize("records", DRIVERS, indirect=True)
def test_a_first_success_leaves_the_row_that_a_longer_statement_leaves(
    records: SqlRecordStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = []
    for short in (True, False):
        record = won(records, make_call(fresh_key(), retention=3600.0))
        success = outcome(record, result='"x"')
        assert record_rows.success_parameters(record, success)
        if not short:
            monkeypatch.setattr(record_rows, "success_parameters", lambda *_: None)
        assert records.settle(record, success)
        assert row(records, record.stored_key).finished_at is not None
        of_key = {"stored_key": record.stored_key}
        columns = records.database.first(records.statements.select_row, of_key)
        assert columns is not None
        assert columns["expires_at"] == columns["started_at"] + 3_600_000_000
        own = ("stored_key", "key", "owner", "call_id", "holder", "fence", "now")
        times = ("created_at", "started_at", "finished_at", "expires_at")
        left.append({name: columns[name] for name in columns if name not in (*own, *times)})
    assert left[0] == left[1]
    assert (left[0]["state"], left[0]["result"]) == ("done", '"x"')


def test_a_new_column_under_a_worker_disturbs_nothing(server_records: SqlRecordStore) -> None:
    records, record = server_records, won(server_records, make_call(fresh_key()))
    for _ in range(8):  # psycopg prepares a statement that is executed often
        before = row(records, record.stored_key)
        won(records, make_call(fresh_key()))
    name = records.tables.records.name
    engine = engine_for(
        records.database.engine.url.render_as_string(False)
    )  # psycopg discards prepared statements when it executes ALTER itself
    with engine.connect() as connection:
        connection.execute(text(f"ALTER TABLE {name} ADD COLUMN added INTEGER DEFAULT 7"))
    engine.dispose()
    for _ in range(2):
        assert row(records, record.stored_key).owner == before.owner
        assert records.settle(record, outcome(record, result="1"))
        assert won(records, make_call(fresh_key())).attempt == 1
        assert not DatabaseLeaseStore(records).release(record.stored_key, "another")


class Interrupted(Exception):
    """An exception that a signal handler raises at any point."""


class Ended(BaseException):
    """The same as a ``BaseException``."""


@contextmanager
def interrupted_after(seconds: float, error: type[BaseException]) -> Iterator[None]:
    """Raise *error* in this thread after that many seconds."""

    def raises(_: int, __: FrameType | None) -> None:
        raise error

    before = signal.signal(signal.SIGALRM, raises)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def slow(records: SqlRecordStore) -> Executable:
    """A statement that takes a second and returns 0."""
    name = records.database.engine.dialect.name
    sleep = "SELECT 0 AS answer FROM (SELECT pg_sleep(:span)) AS slept"
    if name in ("mysql", "mariadb"):
        sleep = "SELECT SLEEP(:span) AS answer"
    return text(sleep).columns(column("answer", Integer))


@pytest.mark.parametrize("compiled", [True, False], ids=["on the cursor", "by SQLAlchemy"])
@pytest.mark.parametrize("error", [Interrupted, Ended])
@pytest.mark.parametrize("records", ON_SERVERS, indirect=True)
def test_an_exception_during_a_statement_leaves_no_half_read_connection(
    records: SqlRecordStore, error: type[BaseException], compiled: bool
) -> None:
    database, statement = records.database, slow(records)
    if compiled:
        database.first(statement, {"span": 0})
    others = [database.engine.raw_connection() for _ in range(2)]
    others.pop().close()
    with on_cursors(database) as number, pytest.raises(error), interrupted_after(0.3, error):
        database.first(statement, {"span": 1})
    assert number == [int(compiled)]
    for answer in (5, 6, 7):
        found = database.first(select(literal(answer).label("answer")), {})
        assert found is not None
        assert found["answer"] == answer
    others.pop().close()


def pooled(records: SqlRecordStore, number: int) -> None:
    connections = [records.database.engine.raw_connection() for _ in range(number)]
    for connection in connections:
        connection.close()


@pytest.mark.parametrize("records", ON_SERVERS, indirect=True)
def test_a_server_that_has_restarted_costs_one_repetition(records: SqlRecordStore) -> None:
    record = won(records, make_call(fresh_key()))
    row(records, record.stored_key)
    pooled(records, 5)
    assert (
        end_other_connections(
            SqlRecordStore(engine_for(records.database.engine.url.render_as_string(False)))
        )
        == 5
    )
    with on_cursors(records.database) as number:
        assert row(records, record.stored_key).owner == record.owner
    assert number == [2]


@pytest.mark.parametrize("records", DRIVERS, indirect=True)
def test_an_unexpected_key_that_exists_is_an_error(records: SqlRecordStore) -> None:
    values = {name.key: name.key for name in records.tables.marks.c} | {"expires_at": 1}
    add = insert(records.tables.marks).values({name: bindparam(name) for name in values})
    records.database.count(add, values)
    for _ in range(3):
        with pytest.raises(StoreUnavailable, match=r"key exists|UNIQUE constraint failed"):
            records.database.count(add, values)


@pytest.mark.parametrize("records", DRIVERS, indirect=True)
def test_a_refused_value_costs_no_connection(records: SqlRecordStore) -> None:
    records.read("x")
    used = []
    for _ in range(3):
        with pytest.raises((KeyUnusable, ValueRefused)):
            records.read("\udcff")
        if "postgresql" in records.database.engine.dialect.name:
            with pytest.raises((KeyUnusable, ValueRefused)):
                records.read("a\0b")
        with records.database.engine.connect() as connection:
            used.append(id(connection.connection.dbapi_connection))
    assert len(set(used)) == 1


@pytest.mark.parametrize("records", DRIVERS, indirect=True)
def test_an_error_leaves_its_connection_in_the_pool(records: SqlRecordStore) -> None:
    gone = text("SELECT * FROM nowhere").columns(column("x"))
    records.database.first(records._select_any_expired, {})
    records.database._executed.add(gone)  # so that it is compiled
    for _ in range(3):
        with pytest.raises(StoreUnavailable, match="nowhere") as caught:
            records.database.first(gone, {})
        assert caught.value.executed is None
    pool: Any = records.database.engine.pool
    assert (len(pool._idle), len(pool.all())) == (1, 1)


def test_threads_share_the_statements_and_no_connection(server_records: SqlRecordStore) -> None:
    keys = [won(server_records, make_call(fresh_key())).stored_key for _ in range(4)]
    wrong: list[str] = []

    def ask(key: str) -> None:
        wrong.extend(key for _ in range(50) if row(server_records, key).stored_key != key)

    threads = [threading.Thread(target=ask, args=(key,)) for key in keys]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
