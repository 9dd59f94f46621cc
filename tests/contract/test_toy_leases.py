"""A lease store of another distribution passes the published contracts."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest

from celery_leases.stores.interfaces import LeaseStoreSettings, MarkedLeaseStore, MarkStore
from celery_leases.stores.registry import open_lease_store
from celery_leases.testing.contracts import (
    GroupStoreContract,
    MarkStoreContract,
    SeparateLeaseStoreContract,
)
from tests.contract.sql_stores import migrated, operator_of

DISTRIBUTIONS = Path(__file__).parents[1] / "distributions"


class TestToyLeases(SeparateLeaseStoreContract, GroupStoreContract, MarkStoreContract):
    """The store is found by the scheme of its URL."""

    short = 1.0

    @pytest.fixture
    def store(self, monkeypatch: pytest.MonkeyPatch) -> MarkedLeaseStore:
        monkeypatch.syspath_prepend(str(DISTRIBUTIONS))
        settings = LeaseStoreSettings("toy://contract", "leases", 2.0, 10, 1.0)
        return cast(MarkedLeaseStore, open_lease_store(settings))

    @pytest.fixture
    def marks(self, store: MarkedLeaseStore) -> MarkStore:
        return store

    def test_no_closings_are_shown(
        self, store: MarkedLeaseStore, group: str, tmp_path: Path
    ) -> None:
        with migrated(f"sqlite:///{tmp_path / 'r.db'}") as records:
            client = operator_of(store, records)
            client.close_group(group, "5m")
            found = {each.group: each for each in client.groups(opened=True)}
            assert (found[group].state, found[group].closings) == ("closed", ())
            assert client.open_group(group)
            assert group not in {each.group for each in client.groups(opened=True)}
            assert client.group(group).state == "open"
