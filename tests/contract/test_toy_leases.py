"""A lease store that another distribution brings passes the published contracts."""

from __future__ import annotations

from pathlib import Path

import pytest

from celery_leases.protocol.ports import LeaseStoreSettings, MarkStore, SeparateLeaseStore
from celery_leases.stores.registry import open_lease_store
from celery_leases.testing.contracts import (
    GateStoreContract,
    MarkStoreContract,
    SeparateLeaseStoreContract,
)

DISTRIBUTIONS = Path(__file__).parents[1] / "distributions"


class TestToyLeases(SeparateLeaseStoreContract, GateStoreContract, MarkStoreContract):
    """The store is found by the scheme of its URL."""

    short = 1.0

    @pytest.fixture
    def store(self, monkeypatch: pytest.MonkeyPatch) -> SeparateLeaseStore:
        """A store that all tests share."""
        monkeypatch.syspath_prepend(str(DISTRIBUTIONS))
        return open_lease_store(LeaseStoreSettings("toy://contract", "leases", 2.0, 10, 1.0))

    @pytest.fixture
    def marks(self, store: SeparateLeaseStore) -> MarkStore:
        """The same store."""
        return store
