"""Calls of one process that share statements on PostgreSQL: what is wrong with one of them fails
only that one.
"""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import text, update

from celery_leases.call import Call
from celery_leases.decide.answers import Acquired, Refused
from celery_leases.errors import KeyUnusable, RecordUnreadable, StoreUnavailable
from celery_leases.options import DATABASE
from celery_leases.record import Record, State
from celery_leases.stores.sql import record_statements
from celery_leases.stores.sql.connections import engine_for
from celery_leases.stores.sql.dialects import postgresql
from celery_leases.stores.sql.records import SqlRecordStore
from celery_leases.testing.contracts.calls import fresh_key, make_call
from celery_leases.testing.contracts.claims import ClaimContract
from celery_leases.testing.contracts.record_case import STORE, outcome, row
from celery_leases.testing.contracts.settling import SettleContract
from tests.contract.shared_trips import at_once
from tests.contract.sql_stores import migrated, statements_of, wait_for_locks
from tests.crash.cutting_proxy import CuttingProxy
from tests.support.servers import PostgresServer

MANY = 50


@pytest.fixture(scope="module")
def shared_url(leases_postgres: PostgresServer) -> Iterator[str]:
    url = leases_postgres.new_database()
    with migrated(url):
        yield url


@pytest.fixture
def shared(shared_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[SqlRecordStore]:
    """A store whose callers share statements, and wait 0.3 s for a locked row otherwise."""
    monkeypatch.setattr(postgresql, "LOCK_TIMEOUT", 300)
    store = SqlRecordStore(engine_for(shared_url))
    store.availability.grace = 0.0
    store.share_trips(lambda: 0)
    yield store
    store.database.close()


class TestClaims(ClaimContract):
    """Its calls come one after the other, or in threads."""

    @pytest.fixture
    def records(self, shared: SqlRecordStore) -> SqlRecordStore:
        return shared


class TestSettling(SettleContract):
    @pytest.fixture
    def records(self, shared: SqlRecordStore) -> SqlRecordStore:
        return shared


def claims(records: SqlRecordStore, calls: Sequence[Call], lease_store: str = STORE) -> list[Any]:
    """The claims of all *calls* at once."""
    steps = [lambda call=call: records.claim(call, lease_store) for call in calls]
    return at_once(records._trips, steps)


def settled(records: SqlRecordStore, attempts: Sequence[Record]) -> list[Any]:
    """The successes of all *attempts* at once."""
    steps = [lambda one=one: records.settle(one, outcome(one)) for one in attempts]
    return at_once(records._trips, steps)


def claimed(records: SqlRecordStore, number: int = MANY) -> list[Record]:
    return [answer.record for answer in claims(records, calls(number))]


def calls(number: int = MANY, **of_last: Any) -> list[Call]:
    return [make_call(fresh_key()) for _ in range(number - 1)] + [make_call(fresh_key(), **of_last)]


def all_won(records: SqlRecordStore, made: Sequence[Call], answers: Sequence[Any]) -> bool:
    """Whether each call has its own row, running under its own token."""
    return all(
        isinstance(answer, Acquired)
        and answer.record is not None
        and answer.record.owner == call.token
        and row(records, call.key.stored).is_attempt(State.RUNNING, call.token, answer.record.fence)
        for call, answer in zip(made, answers, strict=True)
    )


def test_claims_that_come_at_once_share_a_statement(shared: SqlRecordStore) -> None:
    made = calls()
    with statements_of(shared.database) as sent:
        answers = claims(shared, made)
    assert len(sent) == 1
    assert all_won(shared, made, answers)


def test_successes_that_come_at_once_share_a_statement(shared: SqlRecordStore) -> None:
    attempts = claimed(shared)
    with statements_of(shared.database) as sent:
        assert settled(shared, attempts) == [True] * MANY
    assert len(sent) == 1
    assert {row(shared, one.stored_key).state for one in attempts} == {State.DONE}


def test_claims_and_successes_that_come_at_once_share_a_statement(
    shared: SqlRecordStore,
) -> None:
    """A claim of a key that is closed by the same statement is refused, as if it came before."""
    attempts = [answer.record for answer in claims(shared, calls(10), DATABASE)]
    made, again = calls(10), make_call(attempts[-1].stored_key)
    steps: list[Any] = [lambda one=one: shared.settle(one, outcome(one)) for one in attempts]
    steps += [lambda call=call: shared.claim(call, DATABASE) for call in (*made, again)]
    with statements_of(shared.database) as sent:
        answers = at_once(shared._trips, steps)
    assert len(sent) == 1
    assert answers[:10] == [True] * 10
    assert {row(shared, one.stored_key).state for one in attempts} == {State.DONE}
    assert all_won(shared, made, answers[10:20])
    assert isinstance(answers[20], Refused)
    assert answers[20].record is not None
    assert answers[20].record.state is State.RUNNING


def test_of_claims_of_one_key_one_wins(shared: SqlRecordStore) -> None:
    key = fresh_key()
    answers = claims(shared, [make_call(key) for _ in range(10)], DATABASE)
    winner = row(shared, key).owner
    won = [answer for answer in answers if isinstance(answer, Acquired)]
    assert [answer.record.owner for answer in won if answer.record is not None] == [winner]
    assert sum(isinstance(answer, Refused) for answer in answers) == 9


def test_a_claim_of_finished_work_gets_its_row(shared: SqlRecordStore) -> None:
    done, *_ = attempts = claimed(shared, 2)
    settled(shared, attempts)
    made = calls()
    *others, answer = claims(shared, [*made, make_call(done.stored_key)])
    assert all_won(shared, made, others)
    assert isinstance(answer, Refused)
    assert answer.record is not None
    assert answer.record.state is State.DONE


def test_a_claim_that_meets_a_lock_fails_alone(shared: SqlRecordStore) -> None:
    made = calls()
    (other,) = claimed(shared, 1)
    with shared.database.engine.connect() as user:
        user.execute(text("BEGIN"))
        table = shared.tables.records
        copied = {"stored_key": made[-1].key.stored}
        columns = ", ".join(c.name for c in table.c if c.name != "stored_key")
        user.execute(
            text(
                f"INSERT INTO {table.name} (stored_key, {columns}) SELECT :stored_key, {columns} "  # noqa: S608
                f"FROM {table.name} WHERE stored_key = '{other.stored_key}'"
            ),
            copied,
        )
        *answers, locked = claims(shared, made)
        user.execute(text("ROLLBACK"))
    assert all_won(shared, made[:-1], answers)
    assert isinstance(locked, StoreUnavailable)
    assert locked.executed is False
    assert isinstance(shared.claim(made[-1], STORE), Acquired)


def test_an_outcome_that_meets_a_lock_fails_alone(shared: SqlRecordStore) -> None:
    *attempts, locked = claimed(shared)
    with shared.database.engine.connect() as user:
        user.execute(text("BEGIN"))
        user.execute(shared.lock_row, {**_of(locked)})
        *written, failed = settled(shared, [*attempts, locked])
        user.execute(text("ROLLBACK"))
    assert written == [True] * (MANY - 1)
    assert isinstance(failed, StoreUnavailable)
    assert failed.executed is False
    assert shared.settle(locked, outcome(locked))


def test_an_outcome_of_a_lost_attempt_is_refused_alone(shared: SqlRecordStore) -> None:
    *attempts, lost = claimed(shared)
    assert settled(shared, [*attempts, replace(lost, owner="another")]) == [
        *[True] * (MANY - 1),
        False,
    ]
    assert row(shared, lost.stored_key).state is State.RUNNING


def test_a_deadlock_fails_no_call(shared: SqlRecordStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's transaction locks two rows in the opposite order."""
    monkeypatch.setattr(record_statements, "LOCK_TIMEOUT", "20s")  # until PostgreSQL finds it
    _, one, other = attempts = claimed(shared, 3)
    with shared.database.engine.connect() as user, ThreadPoolExecutor(2) as threads:
        user.execute(text("BEGIN"))
        user.execute(text("SET LOCAL lock_timeout = 0"))
        user.execute(text("SET LOCAL deadlock_timeout = '60s'"))  # the other one is ended
        user.execute(shared.lock_row, _of(other))
        written = threads.submit(settled, shared, attempts)
        wait_for_locks(shared)
        user.execute(shared.lock_row, _of(one))  # waits until the shared statement has failed
        user.execute(text("ROLLBACK"))
        assert written.result(30) == [True, True, True]


def test_an_unreadable_row_fails_alone(shared: SqlRecordStore) -> None:
    (damaged,) = claimed(shared, 1)
    table = shared.tables.records
    with shared.database.engine.connect() as user:
        user.execute(
            update(table).where(table.c.stored_key == damaged.stored_key).values(state="bogus")
        )
    made = calls()
    with statements_of(shared.database) as sent:
        *answers, unreadable = claims(shared, [*made, make_call(damaged.stored_key)])
    assert len(sent) == 1
    assert all_won(shared, made, answers)
    assert isinstance(unreadable, RecordUnreadable)


@pytest.mark.parametrize("refused", ["NUL: \0", "x" * 300])
def test_a_value_that_the_database_refuses_fails_alone(
    shared: SqlRecordStore, refused: str
) -> None:
    made = calls(host=refused)
    *answers, unusable = claims(shared, made)
    assert all_won(shared, made[:-1], answers)
    assert isinstance(unusable, KeyUnusable)


@pytest.mark.parametrize("before", [False, True], ids=["its reply", "the request"])
def test_a_lost_connection_fails_no_call(
    leases_postgres: PostgresServer, shared_url: str, before: bool
) -> None:
    with CuttingProxy(leases_postgres.port) as proxy:
        through = shared_url.replace(f":{leases_postgres.port}/", f":{proxy.port}/")
        records = SqlRecordStore(engine_for(through))
        records.share_trips(lambda: 0)
        claimed(records, 2), claimed(records, 2)  # so that the statement is prepared
        made = calls()
        proxy.cut(made[-1].key.stored.encode(), before=before)
        answers = claims(records, made)
        assert proxy.was_cut.is_set()
        assert all_won(records, made, answers)
        proxy.cut(made[-1].key.stored.encode(), before=before)
        assert settled(records, [answer.record for answer in answers]) == [True] * MANY
        assert proxy.was_cut.is_set()
        assert {row(records, call.key.stored).state for call in made} == {State.DONE}
        records.database.close()


def _of(record: Record) -> Mapping[str, Any]:
    return {
        "for_key": record.stored_key,
        "for_fence": record.fence,
        "for_owner": record.owner,
    }
