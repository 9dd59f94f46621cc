"""Groups in SQL databases with the published suite, and what only the database does: statements,
and records with groups.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import select, text

from celery_leases.call import Call
from celery_leases.decide.answers import (
    Acquired,
    Refusal,
    Refused,
    Renewal,
    RenewalResult,
)
from celery_leases.errors import StoreUnavailable
from celery_leases.failures.cooldown_policies import CooldownPolicy
from celery_leases.groups.slots import Taken, dump, load
from celery_leases.options import DATABASE
from celery_leases.record import (
    Ended,
    Record,
    State,
)
from celery_leases.stores.sql.leases import DatabaseLeaseStore
from celery_leases.stores.sql.records import SqlRecordStore
from celery_leases.testing.contracts import GroupHistoryContract, GroupStoreContract
from celery_leases.testing.contracts.calls import fresh_key, make_call
from celery_leases.testing.contracts.group_case import closed, closing, found, probe_due, probing
from celery_leases.testing.contracts.record_case import closed as settled
from celery_leases.testing.contracts.record_case import row, won
from celery_leases.testing.waits import wait_until
from tests.contract.sql_stores import statements_of

GROUP = "openai:gpt"
Shutting = Callable[[DatabaseLeaseStore, str], Any]


@pytest.fixture
def store(sql_records: SqlRecordStore) -> DatabaseLeaseStore:
    return DatabaseLeaseStore(sql_records)


class TestGroups(GroupStoreContract, GroupHistoryContract):
    """The published suite for groups, which the claim reads."""

    @pytest.fixture
    def store(self, sql_records: SqlRecordStore) -> DatabaseLeaseStore:
        return DatabaseLeaseStore(sql_records)


@contextmanager
def counted(store: DatabaseLeaseStore) -> Iterator[list[str]]:
    """Collects the first words of the statements that are executed meanwhile."""
    sent: list[str] = []
    with statements_of(store.database) as statements:
        yield sent
    sent.extend(statement.split(maxsplit=1)[0] for statement in statements)


def finished(store: DatabaseLeaseStore, key: str, state: State = State.DONE, **more: Any) -> Record:
    return settled(store.records, won(store.records, make_call(key), DATABASE), state, **more)


def test_an_open_group_costs_no_statement(store: DatabaseLeaseStore) -> None:
    closed(store, "closed", 60.0)
    probe_due(store, GROUP)
    at_once = store.database.engine.dialect.name == "postgresql"
    look, insert = (
        ["WITH"] if at_once else ["SELECT"],
        ["WITH"] if at_once else ["SELECT", "INSERT"],
    )
    probe = make_call(fresh_key(), group=GROUP)
    for sent, call in (
        (insert, make_call(fresh_key())),
        (insert, make_call(fresh_key(), group="open")),
        (look, make_call(fresh_key(), group="closed")),
        ([*look, "UPDATE", *insert], probe),
        (look, make_call(fresh_key(), group=GROUP)),
    ):
        with counted(store) as statements:
            store.acquire(call)
        assert statements == sent
    for sent, renewals in (
        (["UPDATE"], [Renewal(probe.key.stored, probe.token, 15.0)]),
        (
            ["SELECT", "UPDATE", "UPDATE"],
            [Renewal(probe.key.stored, probe.token, 15.0, slot=(GROUP, 0))],
        ),
    ):
        with counted(store) as statements:
            assert store.renew(renewals) == [RenewalResult.OURS]
        assert statements == sent
    with counted(store) as statements:
        store.groups.close(GROUP, closing(60.0), probe.token)
        store.groups.close(GROUP, closing(30.0), "another")
        store.groups.close("fresh", closing(30.0), "another")
    assert statements == ["SELECT", "UPDATE", "SELECT", "SELECT", "INSERT"]


def test_closings_are_remembered_for_a_month_after_the_last(store: DatabaseLeaseStore) -> None:
    closed(store, GROUP, 60.0)
    store.groups.open(GROUP)
    store.records.purge(100)
    assert [*store.groups.history()] == [GROUP]
    later = text("UPDATE celery_leases_groups SET expires_at = expires_at - 86400000000 * :days")
    for days, left in ((29, [GROUP]), (1, [])):
        with store.database.engine.connect() as connection:
            connection.execute(later, {"days": days})
        store.records.purge(100)
        assert [*store.groups.history()] == left


def shut_by_time(store: DatabaseLeaseStore, group: str) -> None:
    closed(store, group, 60.0)


def shut_by_probe(store: DatabaseLeaseStore, group: str) -> None:
    probe_due(store, group)
    assert probing(store.acquire(make_call(fresh_key(), group=group)))


@pytest.mark.parametrize("shutting", [shut_by_time, shut_by_probe])
@pytest.mark.parametrize("state", [State.DONE, State.FAILED, State.PENDING, State.COOLING])
def test_a_refusal_has_the_record(
    store: DatabaseLeaseStore, shutting: Shutting, state: State
) -> None:
    key = fresh_key()
    done = finished(
        store, key, state, result='"a"', retry_after=60.0 if state is State.COOLING else None
    )
    shutting(store, GROUP)
    answer = store.acquire(make_call(key, group=GROUP))
    assert isinstance(answer, Refused)
    assert answer.why is Refusal.CLOSED
    assert answer.record is not None
    assert answer.record.result == '"a"'
    assert row(store.records, key) == done


@pytest.mark.parametrize("shutting", [shut_by_time, shut_by_probe])
def test_a_closed_group_shows_the_holder(store: DatabaseLeaseStore, shutting: Shutting) -> None:
    call = make_call(fresh_key(), group=GROUP)
    assert isinstance(store.acquire(call), Acquired)
    shutting(store, GROUP)
    answer = store.acquire(make_call(call.key.stored, group=GROUP))
    assert isinstance(answer, Refused)
    assert answer.record is not None
    assert (answer.record.state, answer.record.owner) == (State.RUNNING, call.token)
    again = store.acquire(call)
    assert isinstance(again, Acquired)


@pytest.mark.parametrize(
    ("state", "more"),
    [
        (State.DONE, {}),
        (State.FAILED, {"ended": Ended.FAILED}),
        (State.UNCERTAIN, {}),
        (State.PENDING, {"retry_after": 60.0}),
        (State.COOLING, {"retry_after": 60.0}),
        (State.RUNNING, {}),
    ],
)
def test_a_refusal_has_no_slot(
    store: DatabaseLeaseStore, state: State, more: dict[str, Any]
) -> None:
    key = fresh_key()
    if state is State.RUNNING:
        store.acquire(make_call(key))
    else:
        finished(store, key, state, **more)
    probe_due(store, GROUP)
    with counted(store) as statements:
        answer = store.acquire(make_call(key, group=GROUP))
    assert isinstance(answer, Refused)
    assert answer.record is not None
    assert answer.record.state is state
    assert "UPDATE" not in statements
    assert found(store, GROUP).probe is None


def test_a_record_with_other_arguments_takes_no_slot(store: DatabaseLeaseStore) -> None:
    call = make_call(fresh_key(), fingerprint="v1:a")
    settled(store.records, won(store.records, call, DATABASE), State.PENDING, ended=Ended.LOST)
    probe_due(store, GROUP)
    with counted(store) as statements:
        answer = store.acquire(make_call(call.key.stored, group=GROUP, fingerprint="v1:b"))
    assert isinstance(answer, Refused)
    assert "UPDATE" not in statements
    assert found(store, GROUP).probe is None


def test_a_failed_claim_has_no_slot(
    store: DatabaseLeaseStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = fresh_key()
    finished(store, key, State.PENDING)
    probe_due(store, GROUP)
    monkeypatch.setattr(store.records, "swap", lambda *_: False)
    answer = store.acquire(make_call(key, group=GROUP))
    assert isinstance(answer, Refused)
    assert answer.why is Refusal.CHANGED
    assert found(store, GROUP).probe is None


@pytest.mark.parametrize(
    ("each_runs", "state"),
    [(True, State.DONE), (True, State.FAILED), (False, State.RUNNING), (False, State.PENDING)],
)
def test_a_lost_row_is_probed(store: DatabaseLeaseStore, each_runs: bool, state: State) -> None:
    key = fresh_key()
    call = make_call(key)
    if state is State.RUNNING:
        store.acquire(call)
    else:
        finished(store, key, state)
    probe_due(store, GROUP)
    assert probing(
        store.acquire(make_call(key, group=GROUP, each_runs=each_runs, prior=(call.token,)))
    )


def test_an_expired_row_is_probed(store: DatabaseLeaseStore) -> None:
    key = fresh_key()
    finished(store, key, State.DONE, retention=0.0)
    probe_due(store, GROUP)
    assert probing(store.acquire(make_call(key, group=GROUP)))


def test_a_probe_that_never_claimed_is_the_probe_again(store: DatabaseLeaseStore) -> None:
    probe_due(store, GROUP)
    call = make_call(fresh_key(), group=GROUP)
    assert takes_slot(store, call)
    assert probing(store.acquire(call))
    assert probing(store.acquire(call))


def test_an_expired_slot_admits_no_request(store: DatabaseLeaseStore) -> None:
    probe_due(store, GROUP)
    call = make_call(fresh_key(), group=GROUP)
    assert takes_slot(store, make_call(call.key.stored, call.token, group=GROUP, ttl=0.01))
    wait_until(lambda: found(store, GROUP).probe is None, 10, "the slot to end")
    assert probing(store.acquire(call))
    assert found(store, GROUP).probe == call.token


def test_a_slot_at_a_group_closed_meanwhile_is_given_back(store: DatabaseLeaseStore) -> None:
    probe_due(store, GROUP)
    call = make_call(fresh_key(), group=GROUP)
    assert takes_slot(store, call)
    closed(store, GROUP, 60.0)
    answer = store.acquire(call)
    assert isinstance(answer, Refused)
    assert found(store, GROUP).probe is None
    assert not takes_slot(store, call)


def takes_slot(store: DatabaseLeaseStore, call: Call) -> bool:
    """Take the slot of the probe, as a claim does before it writes the row."""
    return isinstance(store.groups.take(call, store.groups._seen(GROUP))[0], Taken)


def test_a_lease_counts_as_not_renewed_if_its_slot_cannot_be(store: DatabaseLeaseStore) -> None:
    call = make_call(fresh_key())
    store.acquire(call)
    with store.database.engine.connect() as connection:
        connection.execute(text("DROP TABLE celery_leases_groups"))
    (result,) = store.renew([Renewal(call.key.stored, call.token, 15.0, slot=(GROUP, 0))])
    assert isinstance(result, StoreUnavailable)


def test_a_group_is_forgotten_after_a_quiet_time(store: DatabaseLeaseStore) -> None:
    closed(store, GROUP, 60.0)
    for forgotten in (
        lambda: closed(store, GROUP, 60.0).in_a_row == 1,
        lambda: store.records.purge(10) == 0,
    ):
        forget(store)
        assert store.groups.get(GROUP) is None
        assert list(store.groups.all()) == []
        assert not store.groups.open(GROUP)
        answer = store.acquire(make_call(fresh_key(), group=GROUP))
        assert isinstance(answer, Acquired)
        assert not answer.probe
        assert forgotten()
    with store.database.engine.connect() as connection:
        assert connection.execute(text("SELECT count(*) FROM celery_leases_groups")).scalar() == 0


def forget(store: DatabaseLeaseStore) -> None:
    """Let all times of the group be over."""
    with store.database.engine.connect() as connection:
        groups = store.groups._groups
        ((slots,),) = connection.execute(select(groups.c.slots))
        closed = replace(load(slots).closed, ends=1.0, counts=1.0)  # type: ignore[type-var]
        past = {"slots": dump(replace(load(slots), closed=closed)), "limited_until": 1}
        connection.execute(groups.update().values(past | {"expires_at": 1}))


def test_a_closing_with_a_shorter_memory_shortens_nothing(store: DatabaseLeaseStore) -> None:
    long = CooldownPolicy(60, 2, 30 * 86_400, 0)
    closed(store, GROUP, 60.0, policy=long)
    closed(store, GROUP, 120.0)
    slots, _ = store.groups.slots([GROUP])[GROUP]
    assert slots.closed is not None
    counts = (slots.closed.counts - slots.closed.ends) / 1000
    assert long.quiet - 120 < counts < long.quiet


def test_a_group_is_purged_no_sooner(store: DatabaseLeaseStore) -> None:
    probe_due(store, GROUP)
    closed(store, "closed", 60.0)
    store.records.purge(10)
    assert len(list(store.groups.all())) == 2
