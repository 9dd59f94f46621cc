"""What a process opens for its app: how many connections for whom, and what it closes."""

from __future__ import annotations

import socket
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy.orm import Session

from celery_leases.attempt import process
from celery_leases.attempt.process import BootClock, Process, open_process
from celery_leases.concurrency import os_threads
from celery_leases.settings import IN_MEMORY, Settings
from celery_leases.stores.memory import EagerTransaction
from celery_leases.stores.sql import leases
from celery_leases.stores.sql.transactions import JoinedTransaction
from tests.distributions.toy_leases import Memory, ToyLeaseStore
from tests.unit.memory_stores import ManualClock, Seen

SETTINGS = Settings("redis://h", "postgresql://h/db", pool_size=10)


class Store:
    """A store of any kind, which notes what is done with it."""

    def __init__(self, name: str, log: list[Any]) -> None:
        self.name, self.log = name, log
        self.database = self

    def __getattr__(self, name: str) -> Any:
        def noted(*given: Any, **named: Any) -> Any:
            self.log.append((self.name, name, *given, *named.values()))
            return Store(f"{self.name}.{name}", self.log)

        return noted


class Opened:
    """The process of the settings, on such stores."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, settings: Settings, **more: Any) -> None:
        self.log: list[Any] = []
        self.sizes: list[tuple[int | None, float | None]] = []
        self.stopping = lambda: True

        def records(_: Settings, size: int | None = None, wait: float | None = None) -> Any:
            self.sizes.append((size, wait))
            return Store(f"records {len(self.sizes)}", self.log)

        def lease_store(_: Settings, __: Any, size: int, wait: float) -> Any:
            self.sizes.append((size, wait))
            return Store("leases", self.log)

        monkeypatch.setattr(process, "open_records", records)
        monkeypatch.setattr(process, "lease_store", lease_store)
        monkeypatch.setattr(process, "open_effects", lambda _: Store("effects", self.log))

        def renewed_by(*given: Any) -> Any:
            self.given = given
            return Store("renewer", self.log)

        renewer: Any = renewed_by

        self.process = open_process(
            settings,
            Seen(),
            15.0,
            self.stopping,
            renewed_by=renewer,
            **more,
        )


@pytest.mark.parametrize(
    ("greenlets", "url", "sizes", "purged"),
    [
        (False, SETTINGS.database_url, [(9, 5.0), (8, 5.0), (1, None)], "records 1"),
        (True, SETTINGS.database_url, [(8, 5.0), (8, 5.0), (1, None), (1, None)], "records 4"),
        (False, IN_MEMORY, [(9, 5.0), (8, 5.0)], None),
        (True, IN_MEMORY, [(8, 5.0), (8, 5.0)], None),
    ],
)
def test_system_threads_have_connections_of_their_own(monkeypatch, greenlets, url, sizes, purged):
    """Records in memory have one connection for all threads."""
    monkeypatch.setattr(os_threads, "uses_greenlets", lambda: greenlets)
    opened = Opened(monkeypatch, replace(SETTINGS, database_url=url))
    assert opened.sizes == sizes
    for_renewals, for_bodies, _, _, of_purges = opened.given
    assert for_renewals.records.name == ("records 1" if url == IN_MEMORY else "records 3")
    assert for_bodies.records.name == "records 1"
    assert (of_purges.name if of_purges is not None else None) == purged
    assert opened.log == [("leases", "bounded", 1.5, 5.0)] * 2
    assert opened.process.stopping is opened.stopping


@pytest.mark.parametrize("shares", [False, True])
def test_only_a_process_of_many_bodies_shares_round_trips(monkeypatch, shares: bool) -> None:
    opened = Opened(monkeypatch, SETTINGS, shares_trips=shares)
    shared = [each[0] for each in opened.log if each[1] == "share_trips"]
    assert shared == (["records 1", "leases"] if shares else [])


@pytest.mark.parametrize("inherited", [False, True])
def test_a_fork_only_forgets_the_connections_of_its_parent(monkeypatch, inherited: bool) -> None:
    opened = Opened(monkeypatch, SETTINGS)
    opened.log.clear()
    opened.process.close(inherited=inherited)
    databases = [each for each in opened.log if each[0].startswith("records")]
    assert {each[0] for each in databases} == {"records 1", "records 3"}
    assert all(each[1:] == ("close", inherited) for each in databases)
    others = {each[0] for each in opened.log} - {"records 1", "records 3"}
    assert others == (set() if inherited else {"renewer", "leases", "leases.bounded"})


def test_the_tables_are_checked_until_they_are_as_they_must_be(monkeypatch) -> None:
    made: Process = Opened(monkeypatch, SETTINGS).process
    answers = iter([ValueError("outdated"), None])
    checks = []

    def check() -> None:
        checks.append(1)
        if (error := next(answers)) is not None:
            raise error

    made.records = SimpleNamespace(check=check)  # type: ignore[assignment]
    with pytest.raises(ValueError, match="outdated"):
        made.check_once()
    made.check_once()
    made.check_once()
    assert len(checks) == 2


def test_stores_of_one_database_share_their_compiled_statements(monkeypatch) -> None:
    real = process.open_records
    opened = Opened(monkeypatch, SETTINGS)
    monkeypatch.setattr(process, "_compiled", {})
    opened.log.clear()
    opened.process.share_statements()
    real(SETTINGS)
    real(SETTINGS, 3, 7.0)
    assert opened.log == [
        ("records 1", "compile_statements"),
        ("records 1", "with_connections", 10, 10.0),
        ("records 1", "with_connections", 3, 7.0),
    ]


@pytest.mark.parametrize(
    ("url", "given", "kind"),
    [
        (SETTINGS.database_url, object(), JoinedTransaction),
        (IN_MEMORY, Session(), EagerTransaction),
        (IN_MEMORY, object(), type(None)),
    ],
)
def test_a_transaction_is_joined_where_its_commit_can_be_seen(monkeypatch, url, given, kind):
    made = Opened(monkeypatch, replace(SETTINGS, database_url=url)).process
    assert type(made.transaction(given)) is kind


@pytest.mark.parametrize(("size", "given"), [(None, 10), (8, 8)])
def test_a_lease_store_beside_the_records_has_timeouts_and_marks(monkeypatch, size, given) -> None:
    toy: Any = ToyLeaseStore(Memory(now=ManualClock().now), "toy")
    asked: list[Any] = []
    monkeypatch.setattr(
        process, "open_lease_store", lambda settings: (asked.append(settings), toy)[1]
    )
    records: Any = Store("records", [])
    assert process.lease_store(SETTINGS, records, size, 5.0) is toy
    assert (asked[0].url, asked[0].timeout, asked[0].connections) == ("redis://h", 2.0, given)
    toy.groups = None
    monkeypatch.setattr(leases, "LeasesWithRowMarks", lambda *given: given)
    marked: Any = process.lease_store(SETTINGS, records, size, 5.0)
    assert marked == (toy, records)


def test_the_name_of_a_host_is_cut_to_what_can_be_stored(monkeypatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "h" * 300)
    assert len(process.host_here()) == 255


def test_the_clock_sleeps_no_negative_time(monkeypatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    for seconds in (0.5, -1.0):
        BootClock().sleep(seconds)
    assert slept == [0.5, 0.0]
    assert not process.never()
