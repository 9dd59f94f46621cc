"""Rows that are locked by the user's own transaction: how their leases are renewed, and what
happens at the commit.
"""

import sqlite3
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import psycopg
import pymysql
import pytest
from psycopg.rows import dict_row, namedtuple_row
from sqlalchemy import Connection, Engine, create_engine, event, make_url, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
from sqlalchemy.orm import Session
from sqlalchemy.pool import NullPool

from celery_leases.attempt.held_lease import HeldLease
from celery_leases.attempt.renewal import HELD_BY_OTHER, Renewer, Stores
from celery_leases.decide.answers import (
    Acquired,
    Refused,
    Renewal,
    RenewalResult,
)
from celery_leases.errors import LeaseLost, StoreUnavailable, WrongDatabase
from celery_leases.record import Record
from celery_leases.stores.sql.connections import engine_for
from celery_leases.stores.sql.dialects import postgresql
from celery_leases.stores.sql.leases import DatabaseLeaseStore
from celery_leases.stores.sql.records import SqlRecordStore
from celery_leases.stores.sql.transactions import JoinedTransaction
from celery_leases.testing.contracts.calls import claimed as claimed_row
from celery_leases.testing.contracts.calls import fresh_key, make_call
from celery_leases.testing.contracts.group_case import probe_due
from celery_leases.testing.contracts.record_case import outcome, row, won
from celery_leases.testing.waits import wait_until
from tests.contract.sql_stores import is_mysql, migrated, wait_for_locks
from tests.contract.test_postgres import needs_told
from tests.crash.cutting_proxy import CuttingProxy
from tests.support.servers import PostgresServer
from tests.unit.memory_stores import ManualClock, Seen

TTL = 15.0
GROUP = "openai:large"
SHORT = 0.3
PATIENCE = 10.0


@pytest.fixture
def records(server_records: SqlRecordStore) -> SqlRecordStore:
    return server_records


@pytest.fixture
def leases(records: SqlRecordStore) -> DatabaseLeaseStore:
    return DatabaseLeaseStore(records)


@pytest.fixture
def engine(records: SqlRecordStore) -> Iterator[Engine]:
    made = create_engine(records.database.engine.url, poolclass=NullPool)
    yield made
    made.dispose()


@pytest.fixture
def driver(records: SqlRecordStore) -> Iterator[Any]:
    url = records.database.engine.url
    where: dict[str, Any] = {"host": url.host, "port": url.port, "user": url.username}
    if is_mysql(records.database.engine.dialect):
        connection: Any = pymysql.connect(**where, database=url.database)
    else:
        connection = psycopg.connect(**where, dbname=url.database)
    yield connection
    connection.close()


def claimed(leases: DatabaseLeaseStore, ttl: float = TTL) -> Record:
    return won(leases.records, make_call(fresh_key(), ttl=ttl), leases.name)


def renew_guarded(leases: DatabaseLeaseStore, record: Record, ttl: float = TTL) -> RenewalResult:
    """Renew as the renewer does while a transaction of the body may have locked the row."""
    (result,) = leases.renew([Renewal(record.stored_key, record.owner, ttl, guarded=True)])
    assert isinstance(result, RenewalResult)
    return result


def remaining(leases: DatabaseLeaseStore, record: Record) -> float:
    holder = leases.holder(record.stored_key)
    return holder.remaining if holder is not None else 0.0


def test_rows_that_may_be_locked_are_not_waited_for(leases: DatabaseLeaseStore) -> None:
    """The results are in the order of the renewals."""
    free, ours, locked, others = [claimed(leases) for _ in range(4)]
    with leases.database.engine.connect() as connection:
        connection.execute(text("BEGIN"))
        where = text("SELECT 1 FROM celery_leases_records WHERE stored_key = :key FOR UPDATE")
        connection.execute(where, {"key": locked.stored_key})
        asked = [(record.stored_key, record.owner) for record in (free, ours, locked)]
        asked += [(others.stored_key, "stranger"), (fresh_key(), "nobody")]
        began = time.monotonic()
        results = leases.renew(
            [Renewal(key, token, 4 * TTL, guarded=key != free.stored_key) for key, token in asked]
        )
        assert time.monotonic() - began < 1.0
        connection.execute(text("ROLLBACK"))
    assert results == [
        RenewalResult.OURS,
        RenewalResult.OURS,
        RenewalResult.LOCKED,
        RenewalResult.OTHER,
        RenewalResult.MISSING,
    ]
    assert min(remaining(leases, free), remaining(leases, ours)) > TTL
    assert max(remaining(leases, locked), remaining(leases, others)) <= TTL


@pytest.mark.parametrize("guarded", [True, False])
def test_the_slot_of_a_probe_is_renewed_though_its_row_is_locked(
    leases: DatabaseLeaseStore, engine: Engine, guarded: bool
) -> None:
    probe_due(leases, GROUP)
    call = make_call(fresh_key(), ttl=TTL, group=GROUP)
    answer = leases.acquire(call)
    assert isinstance(answer, Acquired)
    assert answer.probe
    with Session(engine) as session:
        if guarded:
            JoinedTransaction(session, leases.records).guard(claimed_row(answer))
        leases.renew(
            [Renewal(call.key.stored, call.token, 4 * TTL, guarded=guarded, slot=(GROUP, 0))]
        )
        closed_group = leases.groups.get(GROUP)
        assert closed_group is not None
        assert closed_group.probe_for > 2 * TTL
        session.rollback()


@pytest.fixture
def on_sqlite(tmp_path: Any) -> Iterator[DatabaseLeaseStore]:
    store = SqlRecordStore(engine_for(f"sqlite:///{tmp_path / 'records.db'}"))
    store.migrate()
    yield DatabaseLeaseStore(store)
    store.database.close()


@pytest.fixture
def lite(on_sqlite: DatabaseLeaseStore) -> Iterator[sqlite3.Connection]:
    connection = sqlite3.connect(str(on_sqlite.database.engine.url.database), isolation_level=None)
    yield connection
    connection.close()


def test_on_sqlite_a_writer_locks_the_row_and_a_reader_does_not(
    on_sqlite: DatabaseLeaseStore, lite: sqlite3.Connection
) -> None:
    leases, record = on_sqlite, claimed(on_sqlite)
    lite.execute("BEGIN IMMEDIATE")
    transaction = JoinedTransaction(lite, leases.records)
    transaction.guard(record)
    began = time.monotonic()
    assert renew_guarded(leases, record, 4 * TTL) is RenewalResult.LOCKED
    assert time.monotonic() - began < 1.0
    lite.execute("COMMIT")
    lite.execute("BEGIN")
    assert lite.execute("SELECT count(*) FROM celery_leases_records").fetchone() == (1,)
    assert transaction.is_open()
    assert renew_guarded(leases, record, 4 * TTL) is RenewalResult.OURS
    assert remaining(leases, record) > TTL
    lite.execute("COMMIT")
    with leases.database.engine.connect() as connection:
        assert connection.exec_driver_sql("PRAGMA busy_timeout").scalar() == 5000


@pytest.mark.parametrize("look_at", ["stranger", "nobody"])
def test_on_sqlite_anothers_lease_is_not_renewed(
    on_sqlite: DatabaseLeaseStore, look_at: str
) -> None:
    key = claimed(on_sqlite).stored_key if look_at == "stranger" else fresh_key()
    expected = RenewalResult.OTHER if look_at == "stranger" else RenewalResult.MISSING
    assert on_sqlite.renew([Renewal(key, look_at, TTL, guarded=True)]) == [expected]


def test_a_session_that_commits_is_open(leases: DatabaseLeaseStore, engine: Engine) -> None:
    """The row is locked until the commit is confirmed."""
    record = claimed(leases)
    seen: list[bool] = []
    with Session(engine) as session:
        transaction = JoinedTransaction(session, leases.records)
        transaction.guard(record)
        event.listen(engine, "commit", lambda _: seen.append(transaction.is_open()))
        session.commit()
        assert (seen, transaction.is_open()) == ([True], False)
        session.execute(text("SELECT 1"))
        assert not transaction.is_open()


@pytest.mark.parametrize("lock", ["guard", "complete"])
def test_a_row_locked_by_its_own_body_is_seen_as_locked_until_the_end(
    leases: DatabaseLeaseStore, engine: Engine, lock: str
) -> None:
    record = claimed(leases, SHORT)
    with Session(engine) as session:
        transaction = JoinedTransaction(session, leases.records)
        if lock == "guard":
            transaction.guard(record)
        else:
            transaction.complete(record, outcome(record, result="1"))
        time.sleep(1.5 * SHORT)
        assert renew_guarded(leases, record) is RenewalResult.LOCKED
        session.rollback()
    assert renew_guarded(leases, record) is RenewalResult.OURS


def test_a_savepoint_rolled_back_has_no_lock(leases: DatabaseLeaseStore, engine: Engine) -> None:
    record = claimed(leases)
    with engine.connect() as connection:
        savepoint = connection.begin_nested()
        transaction = JoinedTransaction(connection, leases.records)
        transaction.guard(record)
        assert renew_guarded(leases, record) is RenewalResult.LOCKED
        savepoint.rollback()
        assert transaction.is_open()
        assert renew_guarded(leases, record) is RenewalResult.OURS


def end_session(connection: Connection, leases: DatabaseLeaseStore) -> None:
    on_mysql = is_mysql(connection.dialect)
    pid = connection.execute(
        text("SELECT connection_id()" if on_mysql else "SELECT pg_backend_pid()")
    ).scalar()
    with leases.database.engine.connect() as other:
        other.execute(
            text("KILL :pid" if on_mysql else "SELECT pg_terminate_backend(:pid)"), {"pid": pid}
        )


@pytest.mark.parametrize("way", ["terminated", "idle for too long"])
def test_an_ended_session_has_no_lock(leases: DatabaseLeaseStore, engine: Engine, way: str) -> None:
    record = claimed(leases)
    with engine.connect() as connection:
        on_mysql = is_mysql(engine.dialect)
        transaction = JoinedTransaction(connection, leases.records)
        transaction.guard(record)
        assert renew_guarded(leases, record) is RenewalResult.LOCKED
        if way == "terminated":
            end_session(connection, leases)
        elif on_mysql and not getattr(engine.dialect, "is_mariadb", False):
            pytest.skip("MySQL ends idle connections only, by wait_timeout")
        else:
            pause = (
                "idle_transaction_timeout = 1"
                if on_mysql
                else "idle_in_transaction_session_timeout = '200ms'"
            )
            connection.execute(text(f"SET {pause}"))
        wait_until(
            lambda: renew_guarded(leases, record) is RenewalResult.OURS, PATIENCE, "the lock to go"
        )
        assert transaction.is_open()
        connection.invalidate()


def test_a_drivers_next_transaction_has_no_lock(leases: DatabaseLeaseStore, driver: Any) -> None:
    record = claimed(leases)
    transaction = JoinedTransaction(driver, leases.records)
    transaction.guard(record)
    assert renew_guarded(leases, record) is RenewalResult.LOCKED
    driver.commit()
    driver.cursor().execute("DELETE FROM celery_leases_marks")
    assert transaction.is_open()
    assert renew_guarded(leases, record) is RenewalResult.OURS


def test_a_lock_of_another_attempt_is_not_ours(leases: DatabaseLeaseStore, engine: Engine) -> None:
    record = claimed(leases, SHORT)
    time.sleep(1.5 * SHORT)
    successor = claimed_row(leases.acquire(make_call(record.stored_key, ttl=TTL)))
    with Session(engine) as session:
        JoinedTransaction(session, leases.records).guard(successor)
        assert renew_guarded(leases, record) is RenewalResult.OTHER


# -- what check() asks -----------------------------------------------------------------------------


class Guarded:
    """An attempt whose lease has expired and whose body has locked the row."""

    def __init__(
        self, records: SqlRecordStore, lock: str, asking: SqlRecordStore | None = None
    ) -> None:
        self.leases = DatabaseLeaseStore(records)
        call = make_call(fresh_key(), ttl=SHORT)
        self.record = won(records, call, self.leases.name)
        leases, clock = self.leases, ManualClock()
        stores = Stores(leases, records)
        asked = Stores(DatabaseLeaseStore(asking), asking) if asking is not None else stores
        self.renewer = Renewer(stores, asked, Seen(), clock, None)
        self.held_lease = HeldLease(call, clock.now(), clock)
        self.held_lease.fence = self.record.fence
        self.renewer._held_leases[call.token] = self.held_lease
        self.held_lease.confirm = lambda: self.renewer.confirm(self.held_lease)
        self.session = Session(create_engine(records.database.engine.url, poolclass=NullPool))
        clock.sleep(0.001)
        self.lock(lock)
        time.sleep(1.2 * SHORT)
        clock.time += 2 * SHORT
        assert self.held_lease.needs_row_lock(clock.now())

    def lock(self, how: str) -> None:
        transaction = JoinedTransaction(self.session, self.leases.records)
        with self.held_lease.body_state.locking(transaction):
            if how == "guard":
                transaction.guard(self.record)
            else:
                transaction.complete(self.record, outcome(self.record, result="1"))
                self.held_lease.body_state.completing = True
        self.renewer.row_locked(self.held_lease, self.held_lease.now())

    def taken(self) -> None:
        answer = self.leases.acquire(make_call(self.record.stored_key))
        assert isinstance(answer, Acquired)


@pytest.fixture(params=["guard", "complete"])
def guarded(sql_records: SqlRecordStore, request: pytest.FixtureRequest) -> Iterator[Guarded]:
    made = Guarded(sql_records, request.param)
    yield made
    made.session.close()


def test_a_check_passes_while_the_row_is_locked(guarded: Guarded) -> None:
    for _ in range(3):
        guarded.held_lease.check()
        guarded.held_lease._clock.sleep(0.9)
        assert guarded.held_lease.held
    assert remaining(guarded.leases, guarded.record) == 0


def test_a_check_after_a_rollback_renews_the_lease(guarded: Guarded) -> None:
    guarded.session.rollback()
    guarded.held_lease.check()
    assert not guarded.held_lease.needs_row_lock(guarded.held_lease.now())
    assert remaining(guarded.leases, guarded.record) > 0


def test_a_check_after_a_commit_goes_on(guarded: Guarded) -> None:
    guarded.session.commit()
    guarded.held_lease.check()
    assert not guarded.held_lease.needs_row_lock(guarded.held_lease.now())


def test_a_check_after_a_rollback_that_let_another_call_in_raises(guarded: Guarded) -> None:
    guarded.session.rollback()
    guarded.taken()
    assert guarded.held_lease.held
    with pytest.raises(LeaseLost, match=HELD_BY_OTHER):
        guarded.held_lease.check()


@pytest.mark.parametrize("comes", [True, False], ids=["taken", "not taken"])
def test_a_check_fails_after_the_session_ended(server_records: SqlRecordStore, comes: bool) -> None:
    guarded = Guarded(server_records, "guard")
    end_session(guarded.session.connection(), guarded.leases)
    wait_until(
        lambda: not guarded.leases._locked([guarded.record.stored_key]), PATIENCE, "the lock to go"
    )
    assert guarded.held_lease.body_state.guarded
    if comes:
        guarded.taken()
        with pytest.raises(LeaseLost, match=HELD_BY_OTHER):
            guarded.held_lease.check()
    else:
        guarded.held_lease.check()
        assert not guarded.held_lease.needs_row_lock(guarded.held_lease.now())
    guarded.session.invalidate()


@needs_told
@pytest.mark.parametrize("how", ["silent", "unreachable"])
def test_a_check_does_not_pass_where_the_database_does_not_answer(
    leases_postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """The server may have ended the session, and another attempt may have taken the row."""
    url = leases_postgres.new_database()
    with CuttingProxy(leases_postgres.port) as proxy, migrated(url) as direct:
        through = SqlRecordStore(
            engine_for(url.replace(f":{leases_postgres.port}/", f":{proxy.port}/"))
        )
        guarded = Guarded(direct, "guard", asking=through)
        guarded.held_lease.check()
        monkeypatch.setattr(postgresql, "SILENCE", 0.5)
        if how == "silent":
            proxy.silent = True
        else:
            proxy.refusing = True
            proxy.cut(b"SKIP LOCKED", before=True)
        with pytest.raises(StoreUnavailable):
            guarded.held_lease.check()
        assert guarded.held_lease.held
        proxy.silent = proxy.refusing = False
        guarded.held_lease.check()
        guarded.session.rollback()
        guarded.taken()
        with pytest.raises(LeaseLost, match=HELD_BY_OTHER):
            guarded.held_lease.check()
        guarded.session.close()
        through.database.close()


# -- what guard and commit write -------------------------------------------------------------------


GUARDS: dict[str, Callable[[Any], Any]] = {
    "session": Session,
    "connection": lambda engine: engine.connect(),
}


def test_a_guard_extends_the_lease_with_its_commit(leases: DatabaseLeaseStore, driver: Any) -> None:
    """By the ttl from the guard; a rollback undoes it, and a longer lease stays."""
    record = claimed(leases)
    JoinedTransaction(driver, leases.records).guard(record)
    driver.rollback()
    assert remaining(leases, record) <= TTL
    with leases.database.engine.connect() as connection:
        connection.execute(
            text("UPDATE celery_leases_records SET lease_until = lease_until - 10000000")
        )
    assert remaining(leases, record) < 6
    JoinedTransaction(driver, leases.records).guard(record)
    driver.commit()
    assert TTL - 2 < remaining(leases, record) <= TTL
    assert renew_guarded(leases, record, 4 * TTL) is RenewalResult.OURS
    JoinedTransaction(driver, leases.records).guard(record)
    driver.commit()
    assert remaining(leases, record) > 3 * TTL


def test_a_guard_leaves_a_separate_lease_alone(records: SqlRecordStore, engine: Engine) -> None:
    record = won(records, make_call(fresh_key(), ttl=SHORT), "redis:one")
    with Session(engine) as session:
        JoinedTransaction(session, records).guard(record)
        time.sleep(SHORT)
        session.commit()
    assert row(records, record.stored_key).lease_until is None


@pytest.mark.parametrize("given", GUARDS)
def test_a_late_commit_finds_the_lease_alive(sql_records: SqlRecordStore, given: str) -> None:
    leases = DatabaseLeaseStore(sql_records)
    engine = create_engine(sql_records.database.engine.url, poolclass=NullPool)
    record = claimed(leases, 1.0)
    with GUARDS[given](engine) as own:
        JoinedTransaction(own, sql_records).guard(record)
        time.sleep(1.5)
        own.commit()
    assert 0.5 < remaining(leases, record) <= 1.0
    answer = leases.acquire(make_call(record.stored_key))
    assert isinstance(answer, Refused)


def test_a_claim_that_waits_there_is_refused(leases: DatabaseLeaseStore, engine: Engine) -> None:
    record = claimed(leases, 1.0)
    with Session(engine) as session, ThreadPoolExecutor(1) as threads:
        JoinedTransaction(session, leases.records).guard(record)
        time.sleep(1.2)
        call = threads.submit(leases.acquire, make_call(record.stored_key))
        wait_for_locks(leases.records)
        session.commit()
        answer = call.result(PATIENCE)
    assert isinstance(answer, Refused)
    assert row(leases.records, record.stored_key).owner == record.owner


def updates(connection: Connection) -> list[str]:
    found: list[str] = []

    def note(_: Any, __: Any, statement: str, *___: Any) -> None:
        if statement.startswith("UPDATE celery_leases"):
            found.append(statement)

    event.listen(connection, "before_cursor_execute", note)
    return found


def test_nothing_is_extended_without_need(leases: DatabaseLeaseStore, engine: Engine) -> None:
    long, short = claimed(leases, SHORT), claimed(leases, 60.0)
    with engine.connect() as connection:
        made = updates(connection)
        JoinedTransaction(connection, leases.records).guard(short)
        connection.commit()
        assert len(made) == 1
        JoinedTransaction(connection, leases.records).guard(long)
        time.sleep(SHORT)
        connection.rollback()
        connection.execute(text("SELECT 1"))
        connection.commit()
        assert len(made) == 2
        JoinedTransaction(connection, leases.records).guard(long)
        time.sleep(SHORT)
        connection.commit()
        assert len(made) == 4
        connection.execute(text("SELECT 1"))
        connection.commit()
        JoinedTransaction(connection, leases.records).complete(long, outcome(long, result="1"))
        time.sleep(SHORT)
        connection.commit()
        assert len(made) == 5


def test_a_long_connection_gathers_no_listeners(leases: DatabaseLeaseStore, engine: Engine) -> None:
    record = claimed(leases)
    with engine.connect() as connection:
        for number in range(50):
            JoinedTransaction(connection, leases.records).guard(record)
            (connection.commit if number % 2 else connection.rollback)()
        assert len(connection.dispatch.commit) == 1
        assert len(connection.info) <= 1


@pytest.mark.only(server="postgresql")  # on other databases, an error leaves the transaction open
@pytest.mark.parametrize("given", GUARDS)
def test_an_error_commits_nothing(leases: DatabaseLeaseStore, engine: Engine, given: str) -> None:
    record = claimed(leases, SHORT)
    with leases.database.engine.connect() as other:
        other.execute(text("CREATE TABLE books (name text)"))
    with GUARDS[given](engine) as own:
        own.execute(text("INSERT INTO books VALUES ('half')"))
        JoinedTransaction(own, leases.records).guard(record)
        own.execute(text("SAVEPOINT s"))
        with pytest.raises(DBAPIError):
            own.execute(text("SELECT 1 / 0"))
        time.sleep(SHORT)
        with pytest.raises(
            DBAPIError, match="current transaction is aborted"
        ):  # a plain COMMIT would succeed as a ROLLBACK
            own.commit()
        own.rollback()
    with leases.database.engine.connect() as other:
        assert other.execute(text("SELECT count(*) FROM books")).scalar() == 0
    assert renew_guarded(leases, record) is RenewalResult.OURS


# -- which transaction it is, and where ------------------------------------------------------------


@pytest.mark.only(server="postgresql")
def test_a_pooled_connection_in_use_by_another_user_is_left_alone(
    leases: DatabaseLeaseStore, driver: psycopg.Connection[Any]
) -> None:
    """The driver may be in a later transaction of another user."""
    record = claimed(leases)
    first = JoinedTransaction(driver, leases.records)
    first.guard(record)
    assert not first.is_over()
    driver.commit()
    driver.execute("CREATE TEMPORARY TABLE books (name text)")
    assert (first.is_open(), first.is_over(), first.roll_back()) == (True, True, False)
    assert driver.execute("SELECT count(*) FROM books").fetchone() == (0,)
    second = JoinedTransaction(driver, leases.records)
    second.guard(record)
    assert (second.is_over(), second.roll_back(), second.is_over()) == (False, True, True)
    assert not driver.execute("SELECT 1 FROM pg_class WHERE relname = 'books'").fetchall()


@pytest.mark.only(server="postgresql")
@pytest.mark.parametrize("rows", [namedtuple_row, dict_row], ids=["named", "dict"])
def test_a_row_factory_of_the_user_does_not_matter(
    leases: DatabaseLeaseStore, driver: psycopg.Connection[Any], rows: Any
) -> None:
    record = claimed(leases)
    driver.row_factory = rows
    transaction = JoinedTransaction(driver, leases.records)
    transaction.guard(record)
    assert renew_guarded(leases, record) is RenewalResult.LOCKED
    assert (transaction.is_over(), transaction.roll_back()) == (False, True)


def test_on_sqlite_the_next_is_left(
    on_sqlite: DatabaseLeaseStore, lite: sqlite3.Connection
) -> None:
    record = claimed(on_sqlite)
    lite.execute("BEGIN IMMEDIATE")
    first = JoinedTransaction(lite, on_sqlite.records)
    first.guard(record)
    assert not first.is_over()
    lite.execute("COMMIT")
    lite.execute("BEGIN")
    assert (first.is_open(), first.is_over(), first.roll_back()) == (True, True, False)
    lite.execute("CREATE TABLE books (name text)")
    assert (first.roll_back(), lite.in_transaction) == (False, True)
    second = JoinedTransaction(lite, on_sqlite.records)
    second.guard(record)
    assert (second.is_over(), second.roll_back(), lite.in_transaction) == (False, True, False)
    assert not lite.execute("SELECT 1 FROM sqlite_master WHERE name = 'books'").fetchall()


def test_a_closed_connection_has_no_transaction(leases: DatabaseLeaseStore, engine: Engine) -> None:
    raw = engine.raw_connection()
    transaction = JoinedTransaction(raw, leases.records)
    transaction.guard(claimed(leases))
    assert transaction.is_open()
    raw.commit()
    assert not transaction.is_open()
    raw.close()
    assert (transaction.is_open(), transaction.is_over(), transaction.roll_back()) == (
        False,
        True,
        False,
    )


@pytest.mark.only(server="postgresql")
def test_a_connection_to_another_database_is_refused(
    leases: DatabaseLeaseStore, on_sqlite: DatabaseLeaseStore, tmp_path: Any
) -> None:
    url = make_url(leases.database.engine.url)
    elsewhere = url.set(drivername="postgresql", database="postgres").render_as_string(
        hide_password=False
    )
    given: dict[Any, DatabaseLeaseStore] = {
        psycopg.connect(elsewhere): leases,
        sqlite3.connect(tmp_path / "other.db"): on_sqlite,
    }
    for connection, store in given.items():
        transaction = JoinedTransaction(connection, store.records)
        with (
            closing(connection),
            pytest.raises(WrongDatabase, match="rows of its own database") as caught,
        ):
            transaction.join("invoice:1")
        assert "done" not in str(caught.value)
        assert not transaction.is_open()


@pytest.mark.parametrize("kind", ["AsyncSession", "AsyncConnection"])
def test_what_is_asynchronous_is_refused(leases: DatabaseLeaseStore, kind: str) -> None:
    given = AsyncSession() if kind == "AsyncSession" else object.__new__(AsyncConnection)
    transaction = JoinedTransaction(given, leases.records)
    with pytest.raises(WrongDatabase, match=f"{kind} is asynchronous"):
        transaction.guard(claimed(leases))
    assert not transaction.is_open()


@pytest.mark.only(server="postgresql")
def test_a_snapshot_before_the_attempt_is_refused(leases: DatabaseLeaseStore, driver: Any) -> None:
    driver.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    driver.execute("SELECT 1")
    record = claimed(leases)
    with pytest.raises(WrongDatabase, match="or its transaction began before this attempt"):
        JoinedTransaction(driver, leases.records).guard(record)
