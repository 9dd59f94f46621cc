"""What operators see of a group with a limit or a rate, in each lease store."""

from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from celery_leases.groups.slots import Ask
from celery_leases.ops.client import OperatorClient
from celery_leases.stores.interfaces import MarkedLeaseStore
from celery_leases.stores.sql.leases import DatabaseLeaseStore
from celery_leases.stores.sql.records import SqlRecordStore
from celery_leases.testing.contracts.calls import acquired, fresh_key, make_call
from celery_leases.testing.waits import wait_until
from tests.contract.redis_stores import OpenStore
from tests.contract.sql_stores import migrated


class _WhatOperatorsSee:
    """A full group, in each store."""

    def test_a_full_group_is_listed_and_explains_a_wait(self, client: OperatorClient) -> None:
        group = f"group-{uuid4().hex}"
        store = client._leases
        holder = make_call(fresh_key(), group=group, ask=Ask(1))
        assert acquired(store.acquire(holder))
        (listed,) = [each for each in client.groups() if each.group == group]
        assert (listed.state, listed.running, listed.limit) == ("full", 1, 1)
        assert listed.error == "1 of 1 calls run"
        assert client.group(group).state == "full"
        waiting = client.status("absent", group=group)
        assert (waiting.scope, waiting.group, waiting.reason) == ("group", group, "group_full")
        assert waiting.retry_after is None
        assert "waits for its turn" in waiting.what_next()
        client._leases.groups.release_slot(group, holder.token)
        wait_until(lambda: client.group(group).state == "open", 10, "the slot to be freed")
        assert client.status("absent", group=group).scope is None

    def test_a_rate_has_a_time(self, client: OperatorClient) -> None:
        group = f"group-{uuid4().hex}"
        store = client._leases
        assert acquired(store.acquire(make_call(fresh_key(), group=group, ask=Ask(0, 60_000.0))))
        waiting = client.status("absent", group=group)
        assert waiting.reason == "group_rate"
        assert 50 < (waiting.retry_after or 0.0) <= 60
        assert waiting.retry_at is not None


class TestWhatOperatorsSeeInRedis(_WhatOperatorsSee):
    @pytest.fixture
    def client(self, open_store: OpenStore, tmp_path: Path) -> Iterator[OperatorClient]:
        with migrated(f"sqlite:///{tmp_path / 'records.db'}") as records:
            yield operator(open_store(), records)


class TestWhatOperatorsSeeInDatabases(_WhatOperatorsSee):
    @pytest.fixture
    def client(self, sql_records: SqlRecordStore) -> OperatorClient:
        return operator(DatabaseLeaseStore(sql_records), sql_records)


def operator(store: MarkedLeaseStore, records: SqlRecordStore) -> OperatorClient:
    client = OperatorClient("database", "sqlite://")
    client._use(store, records)
    return client
