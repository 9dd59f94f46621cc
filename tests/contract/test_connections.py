"""How many connections a process opens to its stores, and what happens to calls when all of them
are in use.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest
import redis
from sqlalchemy import Engine, Integer, column, event, make_url, text

from celery_leases.attempt.held_lease import HeldLease
from celery_leases.attempt.process import Process, open_process
from celery_leases.attempt.renewal import Renewer
from celery_leases.concurrency.resource_pool import ResourcePool, max_wait
from celery_leases.errors import LeaseConfigurationError, StoreUnavailable
from celery_leases.record import State
from celery_leases.settings import read_settings
from celery_leases.stores.redis.leases import RedisLeaseStore
from celery_leases.stores.sql.connections import engine_for
from celery_leases.stores.sql.database import Database
from celery_leases.testing.contracts.calls import acquired, claimed, fresh_key, make_call
from celery_leases.testing.contracts.record_case import outcome, row
from celery_leases.testing.waits import wait_until
from tests.contract.sql_stores import is_mysql
from tests.support.servers import RedisServer
from tests.unit.memory_stores import Seen

TTL = 1.0


@contextmanager
def all_lent(*lenders: ResourcePool[Any]) -> Iterator[None]:
    """A context manager during which all connections are in use."""
    before = max_wait.set(lambda: 10.0)
    things = [
        (resource_pool, resource_pool.acquire())
        for resource_pool in lenders
        for _ in range(resource_pool.size)
    ]
    max_wait.reset(before)
    yield
    for resource_pool, thing in things:
        resource_pool.release(thing)


def lender_of(engine: Engine) -> ResourcePool[Any]:
    return cast(ResourcePool[Any], engine.pool)


def in_threads(number: int, call: Callable[[], object]) -> list[BaseException]:
    """Make a call in that many threads at once; returns the exceptions."""
    together, errors = threading.Barrier(number), list[BaseException]()

    def run() -> None:
        together.wait(30)
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - it is what is asked for
            errors.append(error)

    threads = [threading.Thread(target=run, daemon=True) for _ in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return errors


def test_a_listener_of_an_application_sets_the_user_of_each_connection(server_url: str) -> None:
    right = make_url(server_url)
    connected: list[str] = []

    def set_user(_dialect: Any, _record: Any, _args: Any, parameters: dict[str, Any]) -> None:
        if parameters.get("user") == "expired":
            connected.append(parameters["user"])
            parameters["user"] = right.username

    url = right.set(username="expired").render_as_string(hide_password=False)
    database = Database(engine_for(url))
    with pytest.raises(StoreUnavailable):
        database.first(text("SELECT 1"), {})
    event.listen(Engine, "do_connect", set_user)
    try:
        assert database.first(text("SELECT 1 AS one"), {}) == {"one": 1}
        assert connected == ["expired"]
        if not is_mysql(database.engine.dialect):
            waits = text("SELECT current_setting('lock_timeout') AS waits")
            assert database.first(waits, {}) == {"waits": "1500ms"}
    finally:
        event.remove(Engine, "do_connect", set_user)
        database.close()


def backends(engine: Engine) -> int:
    """The number of connections to this database, without the one that counts them."""
    with engine.connect() as connection:
        if is_mysql(connection.dialect):
            query = "SELECT count(*) - 1 FROM information_schema.processlist WHERE db = database()"
        else:
            query = "SELECT count(*) - 1 FROM pg_stat_activity WHERE datname = current_database()"
            query += " AND backend_type = 'client backend'"
        return int(connection.execute(text(query)).scalar_one())


@pytest.mark.parametrize("times", [1, 3], ids=["by SQLAlchemy", "on the cursor"])
def test_many_threads_share_few_connections(server_url: str, times: int) -> None:
    database, watcher = Database(engine_for(server_url, 3, 30.0)), engine_for(server_url)
    sleep = "SLEEP(0.1)" if is_mysql(watcher.dialect) else "pg_sleep(0.1)"
    one = f"SELECT 1 AS one FROM (SELECT {sleep}) AS slept"  # noqa: S608
    statement = text(one).columns(column("one", Integer))
    for _ in range(times - 1):
        database.first(statement, {})
    counts: list[int] = []
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            counts.append(backends(watcher))

    watching = threading.Thread(target=watch, daemon=True)
    watching.start()
    began = time.monotonic()
    assert in_threads(12, lambda: database.first(statement, {})) == []
    assert time.monotonic() - began >= 12 / 3 * 0.1
    done.set()
    watching.join(30)
    assert max(counts) == 3
    database.close()
    watcher.dispose()


def test_where_all_connections_are_in_use_nothing_was_executed(server_url: str) -> None:
    database = Database(engine_for(server_url, 2, 0.3))
    statement = text("SELECT 1 AS one").columns(column("one", Integer))
    for _ in range(3):
        with all_lent(lender_of(database.engine)):
            began = time.monotonic()
            with pytest.raises(
                StoreUnavailable, match=r"all 2 were in use for 0\.3 s; see leases_pool_size"
            ) as caught:
                database.first(statement, {})
            assert time.monotonic() - began >= 0.3
            assert caught.value.executed is False
        assert database.first(statement, {}) == {"one": 1}
    database.close()


def test_connections_that_cannot_be_made_take_no_place() -> None:
    """The pool of a server that was unavailable for long is empty, not full."""
    database = Database(engine_for("postgresql+psycopg://127.0.0.1:1/x", 2, 0.0))
    statement = text("SELECT 1 AS one").columns(column("one", Integer))
    for _ in range(6):
        with pytest.raises(StoreUnavailable) as caught:
            database.first(statement, {})
        assert "leases_pool_size" not in str(caught.value)
    assert len(lender_of(database.engine).all()) <= 2
    database.close()


@pytest.mark.parametrize(
    "url", ["sqlite://", "sqlite:///x.db", "postgresql+psycopg://127.0.0.1:1/x"]
)
def test_no_log_lines_of_the_pool_at_debug(caplog: pytest.LogCaptureFixture, url: str) -> None:
    """Under eventlet, a log line of the renewer would block the worker for ever."""
    caplog.set_level("DEBUG")
    engine = engine_for(url)
    for pool in (engine.pool, engine.pool.recreate()):
        assert not pool._should_log_debug()
        assert pool.logger.getEffectiveLevel() >= logging.WARNING


def test_a_connection_in_use_is_closed_when_it_comes_back_to_a_closed_pool(server_url: str) -> None:
    engine, watcher = engine_for(server_url, 2), engine_for(server_url)
    used, idle = engine.raw_connection(), engine.raw_connection()
    idle.close()
    assert backends(watcher) == 2
    engine.dispose()
    wait_until(lambda: backends(watcher) == 1, 10, "the idle one to be closed")
    used.close()
    wait_until(lambda: backends(watcher) == 0, 10, "the other one to be closed")
    watcher.dispose()


@pytest.fixture
def server(leases_redis: RedisServer) -> Iterator[RedisServer]:
    with RedisServer() as started:
        yield started


def clients(admin: redis.Redis) -> int:
    """The number of clients, without the one that counts them."""
    return len(admin.client_list()) - 1


def test_many_threads_share_few_connections_to_redis(server: RedisServer) -> None:
    store = RedisLeaseStore.from_url(server.url, timeout=20.0, connections=3, longest_wait=30.0)
    calls = [make_call(fresh_key()) for _ in range(4)]
    for call in calls:
        assert acquired(store.acquire(call))

    def use() -> None:
        store.holder(calls[0].key.stored)
        store.mark(calls[0].key.stored, "x")
        store.release(calls[1].key.stored, "another")
        store.held([call.key.stored for call in calls])

    with redis.Redis.from_url(server.url) as admin:
        admin.execute_command("CLIENT", "PAUSE", "600", "ALL")
        assert in_threads(20, use) == []
        assert clients(admin) == 3
    store.close()


def test_where_all_turns_at_redis_are_taken_nothing_was_sent(server: RedisServer) -> None:
    store = RedisLeaseStore.from_url(server.url, timeout=1.0, connections=2, longest_wait=0.2)
    pool = store._commands._pool
    taken = [pool.acquire(), pool.acquire()]
    for step in (
        lambda: store.mark("a", "b"),
        lambda: store.release("a", "b"),
        lambda: store.holder("a"),
    ):
        with pytest.raises(
            StoreUnavailable, match=r"all 2 were in use for 0\.2 s; see leases_pool_size"
        ) as caught:
            step()
        assert caught.value.executed is False
    for connection in taken:
        pool.release(connection)
    server.pause()
    for _ in range(3):
        with pytest.raises(StoreUnavailable) as caught:
            store.mark("a", "b")
        assert "leases_pool_size" not in str(caught.value)
    server.resume()
    wait_until(lambda: len(pool._idle) == 2, 10, "both to be free")
    store.close()


@pytest.fixture(params=["redis", "database"])
def process(
    request: pytest.FixtureRequest, leases_redis_url: str, leases_postgres_url: str
) -> Iterator[Process]:
    """A process with at most three connections to each store."""
    leases = leases_redis_url if request.param == "redis" else "database"
    conf = {"leases_url": leases, "leases_database_url": leases_postgres_url, "leases_pool_size": 3}
    made = open_process(read_settings(conf, None), Seen(), TTL)
    made.records.migrate()
    made.records.availability.grace = 0.0
    yield made
    made.close()


def begun(process: Process, key: str) -> tuple[HeldLease, Any]:
    """A lease that is renewed, and its record."""
    call, renewer = make_call(key, ttl=TTL), process.renewer
    held_lease = HeldLease(call, renewer._clock.now(), renewer._clock)
    leases = process.leases
    assert leases.in_records or acquired(leases.acquire(call))
    record = claimed(process.records.claim(call, leases.name, groups=leases.row_groups))
    held_lease.fence = record.fence
    renewer.add(held_lease)
    return held_lease, record


def test_a_full_pool_loses_no_lease(process: Process) -> None:
    """The renewer has a connection of its own; a call without one fails in time."""
    held = [begun(process, fresh_key()) for _ in range(3)]
    lenders = [lender_of(process.records.database.engine)]
    if isinstance(process.leases, RedisLeaseStore):
        lenders.append(process.leases._commands._pool)
    with all_lent(*lenders):
        until = time.monotonic() + 3 * TTL
        while time.monotonic() < until:
            began = time.monotonic()
            with pytest.raises(StoreUnavailable) as caught:
                process.records.claim(make_call(fresh_key(), ttl=TTL), process.leases.name)
            assert caught.value.executed is False
            assert time.monotonic() - began < TTL
    for held_lease, record in held:
        assert held_lease.held, held_lease.lost
        assert process.records.settle(record, outcome(record))
        process.renewer.drop(held_lease)
        assert row(process.records, record.stored_key).state is State.DONE


def test_a_process_has_few_connections(process: Process, leases_postgres_url: str) -> None:
    held_lease, record = begun(process, fresh_key())
    renewer: Renewer = process.renewer
    watcher = engine_for(leases_postgres_url)

    def use() -> None:
        max_wait.set(lambda: 30.0)
        for _ in range(20):
            process.records.read(record.stored_key)
            renewer.extend(held_lease, TTL)
            assert not process.leases.holder("nothing")

    assert in_threads(8, use) == []
    wait_until(lambda: backends(watcher) <= 3, 10, "no more than three")
    engines = {store.database.engine for _, store in process._opened}
    assert sum(lender_of(engine).size for engine in engines) == 3
    assert process.records.settle(record, outcome(record))
    renewer.drop(held_lease)
    watcher.dispose()


@pytest.mark.parametrize("size", [0, 2, -1, 10.0, "10", True, [3]])
def test_a_number_of_connections_that_cannot_be_is_refused(size: object) -> None:
    conf = {
        "leases_url": "database",
        "leases_database_url": "sqlite:///x.db",
        "leases_pool_size": size,
    }
    with pytest.raises(LeaseConfigurationError, match=r"leases_pool_size=.* whole number from 3"):
        read_settings(conf, None)
