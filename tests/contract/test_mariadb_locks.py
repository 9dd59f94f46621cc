"""Locks on MySQL and MariaDB: lock waits, deadlocks, servers that do not answer, and the user's
own transactions.
"""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pymysql
import pytest
from sqlalchemy import Connection, text

from celery_leases.decide.repairs import NewCall
from celery_leases.errors import LeaseLost, StoreUnavailable, WrongDatabase
from celery_leases.keys import CallKey
from celery_leases.stores.sql.connections import engine_for
from celery_leases.stores.sql.effects import SqlEffectStore
from celery_leases.stores.sql.leases import DatabaseLeaseStore
from celery_leases.stores.sql.outbox import Outbox
from celery_leases.stores.sql.records import SqlRecordStore
from celery_leases.stores.sql.transactions import JoinedTransaction
from celery_leases.testing.contracts.calls import fresh_key, make_call
from celery_leases.testing.contracts.effect_case import begin
from celery_leases.testing.contracts.record_case import outcome, won
from celery_leases.testing.waits import wait_until
from tests.contract.sql_stores import wait_for_locks
from tests.support.servers import MariaServer


@pytest.fixture
def records(mariadb_records: SqlRecordStore) -> SqlRecordStore:
    return mariadb_records


def locked(connection: Connection) -> None:
    connection.execute(text("BEGIN"))
    connection.execute(text("SELECT 1 FROM celery_leases_records FOR UPDATE"))


def test_after_a_lock_timeout_nothing_was_written(records: SqlRecordStore) -> None:
    record = won(records, make_call(fresh_key()))
    with records.database.engine.connect() as other:
        locked(other)
        began = time.monotonic()
        with pytest.raises(
            StoreUnavailable, match="another transaction has locked the row"
        ) as caught:
            records.settle(record, outcome(record))
        assert time.monotonic() - began < 4
        other.execute(text("ROLLBACK"))
    assert caught.value.executed is False
    assert records.settle(record, outcome(record))


def test_a_statement_rolled_back_by_a_deadlock_is_repeated(records: SqlRecordStore) -> None:
    leases = DatabaseLeaseStore(records)
    record = won(records, make_call(fresh_key()))
    effects = SqlEffectStore(records.database, records.tables)
    with records.database.engine.connect() as other:
        other.execute(text("BEGIN"))
        # The server rolls back the transaction with fewer changes, which is ours.
        for number in range(20):
            other.execute(
                text("INSERT INTO celery_leases_marks VALUES (:name, 'x', '', 0)"), {"name": number}
            )
        other.execute(text("SELECT 1 FROM celery_leases_effects FOR UPDATE"))
        other.execute(
            text(
                "INSERT INTO celery_leases_effects (stored_key, name, scope, state, fence, idempotency_key, sent_at) "
                "VALUES (:key, 'charge', '#0', 'sent', 1, 'x', 1)"
            ),
            {"key": record.stored_key},
        )
        begun: list[Any] = []
        ours = threading.Thread(target=lambda: begun.append(begin(effects, record)))
        ours.start()
        wait_for_locks(records)
        before = deadlocks(other)
        other.execute(text("UPDATE celery_leases_records SET lease_until = 1"))
        assert deadlocks(other) == before + 1
        other.execute(text("ROLLBACK"))
        ours.join(10)
    assert begun
    assert begun[0] is not None
    assert leases.holder(record.stored_key) is None


def deadlocks(connection: Connection) -> int:
    asked = "SELECT count FROM information_schema.innodb_metrics WHERE name = 'lock_deadlocks'"
    return int(connection.execute(text(asked)).scalar_one())


def test_a_silent_server_does_not_block_a_call_for_ever(leases_mariadb: MariaServer) -> None:
    with type(leases_mariadb)() as server:
        records = SqlRecordStore(
            engine_for(f"{server.new_database()}?read_timeout=1&connect_timeout=1")
        )
        records.migrate()
        record = won(records, make_call(fresh_key()))
        server.pause()
        began = time.monotonic()
        with pytest.raises(StoreUnavailable) as caught:
            records.settle(record, outcome(record))
        assert time.monotonic() - began < 2
        assert caught.value.executed is None
        server.resume()
        wait_until(lambda: records.settle(record, outcome(record)), 10, "the server to answer")
        records.database.close()


@pytest.fixture
def driver(records: SqlRecordStore) -> Iterator[Any]:
    """A connection of PyMySQL with its defaults, which counts changed rows."""
    url = records.database.engine.url
    connection = pymysql.connect(
        host=url.host, port=url.port, user=url.username, database=url.database
    )
    yield connection
    connection.close()


@pytest.mark.parametrize("store", ["redis:one", "database"])
def test_a_plain_connections_guard_is_seen(
    records: SqlRecordStore, driver: Any, store: str
) -> None:
    """Such a connection counts changed rows, and a guard may change none."""
    record = won(records, make_call(fresh_key(), ttl=60.0), store)
    transaction = JoinedTransaction(driver, records)
    for _ in range(2):
        transaction.guard(record)
    assert transaction.is_open()
    with pytest.raises(StoreUnavailable):
        records.settle(record, outcome(record))
    driver.rollback()
    assert not transaction.is_open()
    assert records.settle(record, outcome(record))


def test_a_guard_in_an_old_snapshot_sees_more(records: SqlRecordStore, driver: Any) -> None:
    call = make_call(fresh_key())
    record = won(records, call)
    transaction = JoinedTransaction(driver, records)
    with driver.cursor() as cursor:
        cursor.execute("SELECT owner FROM celery_leases_records")
        won(records, make_call(call.key.stored))
        cursor.execute("SELECT owner FROM celery_leases_records")
        assert cursor.fetchone() == (record.owner,)
    with pytest.raises(LeaseLost):
        transaction.guard(record)
    with pytest.raises(LeaseLost):
        transaction.complete(record, outcome(record))


class Mute:
    """A connection without the server's status flags, like one of MySQLdb."""

    def __init__(self, driver: Any) -> None:
        self._driver = driver

    def __getattr__(self, name: str) -> Any:
        if name == "server_status":
            raise AttributeError(name)
        return getattr(self._driver, name)


class DjangoLike:
    def __init__(self, connection: Any) -> None:
        self.connection = connection

    def cursor(self) -> Any:
        return self.connection.cursor()


def test_a_hidden_transaction_is_refused(records: SqlRecordStore, driver: Any) -> None:
    """Django's shows one by switching off autocommit."""
    record, mute = won(records, make_call(fresh_key())), Mute(driver)
    with pytest.raises(WrongDatabase, match="does not show whether its transaction is open"):
        JoinedTransaction(mute, records).guard(record)
    transaction = JoinedTransaction(DjangoLike(mute), records)
    driver.autocommit(True)
    with pytest.raises(WrongDatabase, match="autocommit"):
        transaction.guard(record)
    driver.autocommit(False)
    transaction.guard(record)
    assert transaction.is_open()
    driver.commit()
    driver.autocommit(True)
    assert not transaction.is_open()


def test_a_call_enqueued_after_a_snapshot_is_seen(records: SqlRecordStore, driver: Any) -> None:
    key, outbox = CallKey("k", fresh_key(), None, None), Outbox(records)
    enqueuing = outbox.enqueue_writes(NewCall("contract", key, "first", "{}", 15.0, 60.0))
    transaction = JoinedTransaction(driver, records)
    assert transaction.read(key.stored, "k") is None
    assert records.database.touch(enqueuing, {})
    again = outbox.enqueue_writes(NewCall("contract", key, "second", "{}", 15.0, 60.0))
    assert not transaction.write(again, "k")
    assert transaction.read(key.stored, "k") is None
    found = transaction.read(key.stored, "k", newest=True)
    assert found is not None
    assert found.call_id == "first"
    driver.rollback()
    taken = outbox.take(key.stored)
    assert taken is not None
    assert taken.publish_at is not None
    assert outbox.take(key.stored, due=True) is None
    outbox.published(taken)
    assert outbox.take(key.stored) is None


def test_an_enqueued_call_is_taken_by_one_of_many(records: SqlRecordStore) -> None:
    key, outbox = CallKey("k", fresh_key(), None, None), Outbox(records)
    assert records.database.touch(
        outbox.enqueue_writes(NewCall("contract", key, "first", "{}", 15.0, 60.0)), {}
    )
    with records.database.engine.connect() as connection:
        connection.execute(text("UPDATE celery_leases_records SET publish_at = 1"))
    with ThreadPoolExecutor(8) as threads:
        taken = list(threads.map(lambda _: outbox.take(key.stored, due=True), range(8)))
    assert sum(record is not None for record in taken) == 1
