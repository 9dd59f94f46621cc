"""A server that has become a replica, and whose address now leads to another server. It accepts the
commands of open connections, and refuses to write.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest
import redis
from redis.credentials import UsernamePasswordCredentialProvider
from sqlalchemy import event, text

from celery_leases.decide.answers import Acquired
from celery_leases.errors import StoreUnavailable
from celery_leases.stores.redis.leases import RedisLeaseStore
from celery_leases.stores.sql.connections import engine_for
from celery_leases.stores.sql.records import SqlRecordStore
from celery_leases.testing.contracts.calls import fresh_key, make_call
from celery_leases.testing.contracts.record_case import outcome, won
from tests.contract.sql_stores import is_mysql
from tests.crash.cutting_proxy import CuttingProxy
from tests.support.servers import RedisServer


@pytest.fixture
def servers(leases_redis: RedisServer) -> Iterator[tuple[RedisServer, RedisServer]]:
    """Two servers for this test, which makes one a replica of the other."""
    with RedisServer() as one, RedisServer() as other:
        yield one, other


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "pool"])
def test_leases_follow_a_primary(servers: tuple[RedisServer, RedisServer], direct: bool) -> None:
    old, new = servers
    options: dict[str, Any] = (
        {} if direct else {"credential_provider": UsernamePasswordCredentialProvider("default", "")}
    )
    with CuttingProxy(old.port) as proxy, redis.Redis.from_url(new.url) as admin:
        store = RedisLeaseStore.from_url(f"redis://127.0.0.1:{proxy.port}/0", options=options)
        held = make_call(fresh_key())
        assert isinstance(store.acquire(held), Acquired)
        store.release(held.key.stored, held.token)
        with redis.Redis.from_url(old.url) as former:
            former.replicaof("127.0.0.1", new.port)
        proxy.target = new.port
        with pytest.raises(StoreUnavailable, match="read only replica") as refused:
            store.acquire(make_call(fresh_key()))
        assert refused.value.executed is False
        assert isinstance(store.acquire(make_call(fresh_key())), Acquired)
        assert list(admin.scan_iter("*contract*"))
        store.close()


def test_records_follow_the_address_of_a_primary(server_url: str) -> None:
    records = SqlRecordStore(engine_for(server_url, 1))
    records.migrate()
    read_only = (
        "SET SESSION TRANSACTION READ ONLY"
        if is_mysql(records.database.engine.dialect)
        else "SET default_transaction_read_only = on"
    )

    def demote() -> None:
        with records.database.engine.connect() as connection:
            connection.execute(text(read_only))

    for _ in range(3):
        demote()
        record = won(records, make_call(fresh_key()))
        demote()
        assert records.settle(record, outcome(record))
    with pytest.raises(StoreUnavailable) as refused, refusing(records, read_only):
        records.claim(make_call(fresh_key()), "redis:1")
    assert refused.value.executed is False
    assert isinstance(records.claim(make_call(fresh_key()), "redis:1"), Acquired)
    records.database.close()


@contextmanager
def refusing(records: SqlRecordStore, statement: str) -> Iterator[None]:
    """A context manager during which each new connection only reads, and there is no other one."""
    engine = records.database.engine

    def refuse(connection: Any, _: Any) -> None:
        with closing(connection.cursor()) as cursor:
            cursor.execute(statement)

    engine.dispose()
    event.listen(engine, "connect", refuse)
    try:
        yield
    finally:
        event.remove(engine, "connect", refuse)
        engine.dispose()
