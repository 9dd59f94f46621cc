"""A group that changes between reading and writing: the new group is computed again from the
changed one.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from celery_leases.errors import StoreUnavailable
from celery_leases.groups import slots as group_slots
from celery_leases.groups.group import ClosedGroup, Closing
from celery_leases.groups.slots import Slots
from celery_leases.stores import group_closing
from celery_leases.stores.interfaces import MarkedLeaseStore
from celery_leases.stores.redis.leases import RedisLeaseStore
from celery_leases.stores.sql.connections import engine_for
from celery_leases.stores.sql.leases import DatabaseLeaseStore
from celery_leases.stores.sql.records import SqlRecordStore
from celery_leases.testing.contracts.calls import fresh_key, make_call
from celery_leases.testing.contracts.group_case import (
    closed,
    closing,
    found,
    freed,
    probe,
    probe_due,
    until_probe_due,
)
from tests.contract.sql_stores import SERVERS, new_database

GROUP = "openai:gpt"
OURS, THEIRS = "our-token", "their-token"
Step = Callable[[MarkedLeaseStore], Any]


@pytest.fixture(params=["redis", "sqlite", *SERVERS])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MarkedLeaseStore]:
    if request.param == "redis":
        redis_store = RedisLeaseStore.from_url(request.getfixturevalue("leases_redis_url"))
        yield redis_store
        redis_store.close()
        return
    sqlite = f"sqlite:///{tmp_path / 'records.db'}"
    records = SqlRecordStore(
        engine_for(sqlite if request.param == "sqlite" else new_database(request, request.param))
    )
    records.migrate()
    yield DatabaseLeaseStore(records)
    records.database.close()


def opened(store: MarkedLeaseStore) -> None:
    assert store.groups.open(GROUP)


def closed_for(server_delay: float, by: str = "late") -> Step:
    return lambda store: store.groups.close(GROUP, closing(server_delay), by)


def probed_by(token: str) -> Step:
    def step(store: MarkedLeaseStore) -> None:
        if store.groups.get(GROUP) is None:
            probe_due(store, GROUP)
        probe(store, make_call(fresh_key(), token, group=GROUP))

    return step


def all_of(*steps: Step) -> Step:
    def step(store: MarkedLeaseStore) -> None:
        for one in steps:
            one(store)

    return step


def given_back(store: MarkedLeaseStore) -> None:
    freed(store, GROUP, OURS)


def over(store: MarkedLeaseStore) -> None:
    until_probe_due(store, GROUP)


@pytest.mark.parametrize(
    ("before", "meanwhile", "in_a_row", "lasts", "slot"),
    [
        (all_of(), closed_for(200), 1, 200, None),
        (all_of(), closed_for(50), 1, 100, None),
        (closed_for(50), closed_for(200), 1, 200, None),
        (closed_for(50), closed_for(80), 1, 100, None),
        (closed_for(0.1), all_of(over, probed_by(THEIRS), closed_for(50, THEIRS)), 2, 100, None),
        (closed_for(50), opened, 1, 100, None),
        (closed_for(50), all_of(opened, closed_for(60)), 1, 100, None),
        (probed_by(OURS), all_of(), 2, 100, None),
        (probed_by(OURS), closed_for(200), 1, 200, None),
        (probed_by(OURS), closed_for(50), 1, 100, None),
        (probed_by(OURS), all_of(given_back, probed_by(THEIRS)), 1, 100, THEIRS),
        (probed_by(OURS), given_back, 1, 100, None),
        (probed_by(OURS), opened, 1, 100, None),
        (probed_by(THEIRS), closed_for(200, THEIRS), 2, 200, None),
        (probed_by(THEIRS), closed_for(50, THEIRS), 2, 100, None),
        (probed_by(THEIRS), all_of(closed_for(0.1, THEIRS), over), 2, 100, None),
        (all_of(probed_by(OURS), closed_for(0.1)), over, 2, 100, None),
        (all_of(probed_by(THEIRS), closed_for(0.1)), over, 1, 100, THEIRS),
    ],
)
def test_a_group_is_closed_as_if_one_came_after_the_other(
    store: MarkedLeaseStore,
    monkeypatch: pytest.MonkeyPatch,
    before: Step,
    meanwhile: Step,
    in_a_row: int,
    lasts: float,
    slot: str | None,
) -> None:
    """The failure asks for 100 s; something else happens between read and write."""
    before(store)
    read: list[ClosedGroup | None] = []

    def decided(slots: Slots, cause: Closing, token: str, now: float) -> Slots:
        decision = group_slots.close(slots, cause, token, now)
        read.append(slots.closed_group(GROUP, now))
        if len(read) == 1:
            meanwhile(store)
        return decision

    monkeypatch.setattr(group_closing, "close", decided)
    answer = store.groups.close(GROUP, closing(100.0), OURS)
    in_time = read[0] is not None and not read[0].probe_due
    if meanwhile is over and slot is None and in_time and not isinstance(store, RedisLeaseStore):
        in_a_row -= 1  # a database compares versions, so the time of the reading counts
    for closed_group in (answer, found(store, GROUP)):
        assert (closed_group.in_a_row, closed_group.probe) == (in_a_row, slot)
        assert lasts - 10 < closed_group.closed_for <= lasts


def test_a_changing_group_is_given_up(
    store: MarkedLeaseStore, monkeypatch: pytest.MonkeyPatch
) -> None:

    def decided(slots: Slots, cause: Closing, token: str, now: float) -> Slots:
        decision = group_slots.close(slots, cause, token, now)
        if token == OURS and not store.groups.open(GROUP):
            closed(store, GROUP, 50.0)
        return decision

    monkeypatch.setattr(group_closing, "close", decided)
    with pytest.raises(StoreUnavailable) as caught:
        store.groups.close(GROUP, closing(100.0), OURS)
    assert caught.value.executed is False
    closed_group = store.groups.get(GROUP)
    assert closed_group is None or closed_group.closed_for <= 50
