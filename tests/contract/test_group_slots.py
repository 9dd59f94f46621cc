"""Limits and rates of groups, in each lease store, with the published suite."""

import pytest

from celery_leases.stores.redis.leases import RedisLeaseStore
from celery_leases.stores.sql.leases import DatabaseLeaseStore
from celery_leases.stores.sql.records import SqlRecordStore
from celery_leases.testing.contracts import GroupSlotsContract
from tests.contract.redis_stores import OpenStore


class TestSlotsInRedis(GroupSlotsContract):
    """The script that takes a lease takes the slot too."""

    @pytest.fixture
    def store(self, open_store: OpenStore) -> RedisLeaseStore:
        return open_store()


class TestSlotsInDatabases(GroupSlotsContract):
    """The claim reads the slots, and takes one by compare-and-set."""

    @pytest.fixture
    def store(self, sql_records: SqlRecordStore) -> DatabaseLeaseStore:
        return DatabaseLeaseStore(sql_records)
