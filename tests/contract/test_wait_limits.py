"""Each wait of the library before a body ends when half of the call's time limit is over.

The servers here accept connections and never answer, as one that hangs, or whose machine is frozen.
"""

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from celery_leases.concurrency import wait_limit
from celery_leases.concurrency.resource_pool import Permit, ResourcePool
from celery_leases.errors import StoreUnavailable
from celery_leases.settings import POOL_SIZE
from celery_leases.stores.interfaces import LeaseStoreSettings
from celery_leases.stores.registry import open_lease_store
from celery_leases.stores.sql.connections import engine_for
from celery_leases.stores.sql.records import SqlRecordStore
from tests.support.servers import MariaServer, PostgresServer, RedisServer

LIMIT = 0.5
SLACK = 1.5
"""Seconds that a busy machine may add. Each wait without the limit is longer than both."""


@contextmanager
def limited() -> Iterator[None]:
    """Let waits end soon, and see that they do."""
    before = wait_limit.until.get()
    wait_limit.set_seconds(LIMIT)
    began = time.monotonic()
    try:
        yield
    finally:
        wait_limit.until.set(before)
        assert time.monotonic() - began < LIMIT + SLACK


@pytest.fixture
def silent() -> Iterator[int]:
    """The port of a server that never answers."""
    with closing(socket.create_server(("127.0.0.1", 0), backlog=16)) as server:
        yield server.getsockname()[1]


def read(url: str) -> Callable[[], object]:
    records = SqlRecordStore(engine_for(url))
    return lambda: records.read("t:work|1")


def held(url: str) -> Callable[[], object]:
    store = open_lease_store(LeaseStoreSettings(url, "p", 30.0, POOL_SIZE, 30.0))
    return lambda: store.holder("t:work|1")


@pytest.mark.every_argument
@pytest.mark.parametrize(
    ("made", "url"),
    [
        (read, "postgresql+psycopg://user@127.0.0.1:{port}/records"),
        (read, "mysql+pymysql://user@127.0.0.1:{port}/records"),
        (held, "redis://127.0.0.1:{port}/0"),
        (held, "sentinel://127.0.0.1:{port}/0?master_name=mine"),
        (held, "redis+cluster://127.0.0.1:{port}"),
    ],
    ids=["postgresql", "mysql", "redis", "sentinel", "cluster"],
)
def test_connecting(made: Callable[[str], Callable[[], object]], url: str, silent: int) -> None:
    step = made(url.format(port=silent))
    with limited(), pytest.raises(StoreUnavailable):
        step()


@pytest.mark.parametrize("server", ["leases_postgres", "leases_mariadb"])
def test_a_statement(request: pytest.FixtureRequest, server: str) -> None:
    running: PostgresServer | MariaServer = request.getfixturevalue(server)
    records = SqlRecordStore(engine_for(running.new_database()))
    records.migrate()
    records.read("t:work|1")
    running.pause()
    try:
        with limited(), pytest.raises(StoreUnavailable):
            records.read("t:work|1")
    finally:
        running.resume()
    assert records.read("t:work|1") is None
    records.database.close()


def test_a_command(leases_redis: RedisServer, leases_redis_url: str) -> None:
    """Afterwards the connection has its own timeout again."""
    ask = held(leases_redis_url)
    ask()
    leases_redis.pause()
    try:
        with limited(), pytest.raises(StoreUnavailable):
            ask()
    finally:
        leases_redis.resume()
    assert ask() is None


def test_another_writer_of_sqlite(tmp_path: Path) -> None:
    engine = engine_for(f"sqlite:///{tmp_path}/records.db")
    records, other = SqlRecordStore(engine), engine_for(str(engine.url))
    records.check()
    with other.connect() as connection:
        connection.exec_driver_sql("BEGIN IMMEDIATE")
        with limited(), pytest.raises(StoreUnavailable, match="locked"):
            records.reset("t:work|1", keep=True) or records.identity()
        connection.exec_driver_sql("ROLLBACK")
    assert records.identity()
    other.dispose()
    records.database.close()


def test_a_connection_of_the_pool() -> None:
    pool = ResourcePool(1, Permit, 30.0)
    taken = pool.acquire()
    with limited(), pytest.raises(StoreUnavailable):
        pool.acquire()
    pool.release(taken)
