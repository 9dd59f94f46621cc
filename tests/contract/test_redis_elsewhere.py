"""The published suites on Redis over TLS, at unix sockets, for a user with few rights, behind
Sentinel, and in a cluster.
"""

import pytest

from celery_leases.stores.interfaces import LeaseStore, MarkStore
from celery_leases.stores.redis.leases import RedisLeaseStore
from celery_leases.testing.contracts import (
    GroupHistoryContract,
    GroupStoreContract,
    MarkStoreContract,
    SeparateLeaseStoreContract,
)


class TestLeases(SeparateLeaseStoreContract):
    @pytest.fixture
    def store(self, store_elsewhere: RedisLeaseStore) -> LeaseStore:
        return store_elsewhere


class TestMarks(MarkStoreContract):
    @pytest.fixture
    def marks(self, store_elsewhere: RedisLeaseStore) -> MarkStore:
        return store_elsewhere


class TestGroups(GroupStoreContract, GroupHistoryContract):
    """The published suites for groups. In a cluster their keys are read and written separately from
    the lease.
    """

    @pytest.fixture
    def store(self, store_elsewhere: RedisLeaseStore) -> RedisLeaseStore:
        return store_elsewhere
