"""Effects and progress in the databases with the published suite, and their row locks."""

import sqlite3
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, text
from sqlalchemy.exc import OperationalError

from celery_leases.effect import Begun, Effect, EffectState
from celery_leases.errors import StoreUnavailable
from celery_leases.stores.sql.connections import engine_for
from celery_leases.stores.sql.dialects import sqlite
from celery_leases.stores.sql.effects import SqlEffectStore
from celery_leases.stores.sql.records import SqlRecordStore
from celery_leases.testing.contracts import EffectStoreContract
from celery_leases.testing.contracts.calls import claimed, fresh_key, make_call
from celery_leases.testing.contracts.effect_case import begin, finished, found_of, sent
from celery_leases.testing.contracts.record_case import won
from tests.contract.sql_stores import SERVERS, migrated, new_database, wait_for_locks


@pytest.fixture(scope="module", params=["sqlite", *SERVERS])
def one_database(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SqlRecordStore]:
    """Records in each of the databases, shared by all tests of the suite."""
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path_factory.mktemp('effects') / 'records.db'}"
    else:
        url = new_database(request, request.param)
    with migrated(url) as store:
        yield store


class TestEffects(EffectStoreContract):
    @pytest.fixture
    def records(self, one_database: SqlRecordStore) -> SqlRecordStore:
        return one_database

    @pytest.fixture
    def effects(self, records: SqlRecordStore) -> SqlEffectStore:
        return effects_of(records)


@pytest.fixture
def postgres(leases_postgres_url: str) -> Iterator[SqlRecordStore]:
    with migrated(leases_postgres_url) as store:
        yield store


def effects_of(records: SqlRecordStore) -> SqlEffectStore:
    return SqlEffectStore(records.database, records.tables)


@contextmanager
def waiting_for(
    records: SqlRecordStore, *statements: str
) -> Iterator[tuple[ThreadPoolExecutor, Connection]]:
    """Threads, and another transaction that has executed *statements* and is still open."""
    engine = records.database.engine
    with ThreadPoolExecutor(2) as threads, engine.connect() as other:
        for statement in ("BEGIN", *statements):
            other.execute(text(statement))
        yield threads, other


def test_an_intent_waits_for_a_claim_and_is_refused(server_records: SqlRecordStore) -> None:
    """Without the lock it would read the old row."""
    effects, key = effects_of(server_records), fresh_key()
    zombie = won(server_records, make_call(key))
    claim = "UPDATE celery_leases_records SET fence = fence + 1, owner = 'successor'"
    with waiting_for(server_records, claim) as (threads, other):
        answer: Future[Any] = threads.submit(begin, effects, zombie)
        wait_for_locks(server_records)
        other.execute(text("COMMIT"))
        assert answer.result(10) is None
    assert effects.of_key(zombie) == []


def test_an_intent_waits_for_a_renewal_and_is_accepted(server_records: SqlRecordStore) -> None:
    effects, record = (effects_of(server_records), won(server_records, make_call(fresh_key())))
    with waiting_for(server_records, "UPDATE celery_leases_records SET lease_until = 1") as (
        threads,
        other,
    ):
        answer: Future[Any] = threads.submit(begin, effects, record)
        wait_for_locks(server_records)
        other.execute(text("COMMIT"))
        assert isinstance(answer.result(10), Begun)


def test_a_claim_waits_for_an_uncommitted_intent(server_records: SqlRecordStore) -> None:
    effects, key = effects_of(server_records), fresh_key()
    zombie = won(server_records, make_call(key))
    theirs: list[Effect] = []
    # Another transaction has inserted the same intent, which delays the end of the statement that
    # inserts it.
    place = (
        "INSERT INTO celery_leases_effects (stored_key, name, scope, state, fence, idempotency_key, sent_at) "
        "SELECT stored_key, 'charge', '#0', 'sent', 1, 'x', 1 FROM celery_leases_records"
    )
    with waiting_for(server_records, place) as (threads, other):
        answer: Future[Any] = threads.submit(begin, effects, zombie)
        wait_for_locks(server_records)
        claim: Future[Any] = threads.submit(server_records.claim, make_call(key), "redis:one")
        wait_for_locks(server_records, 2)
        other.execute(text("ROLLBACK"))
        begun, successor = answer.result(10), claim.result(10)
    assert isinstance(begun, Begun)
    theirs += effects.of_key(claimed(successor))
    assert [effect.fence for effect in theirs] == [zombie.fence]


def test_an_intent_does_not_wait_for_a_locked_row_for_ever(server_records: SqlRecordStore) -> None:
    effects, record = (effects_of(server_records), won(server_records, make_call(fresh_key())))
    with (
        waiting_for(server_records, "SELECT 1 FROM celery_leases_records FOR UPDATE") as (_, other),
        pytest.raises(StoreUnavailable) as caught,
    ):
        begin(effects, record)
    assert caught.value.executed is False
    assert effects.of_key(record) == []
    assert other.closed


def test_an_intent_whose_reply_is_lost_is_begun(sql_records: SqlRecordStore) -> None:
    effects, record = effects_of(sql_records), won(sql_records, make_call(fresh_key()))
    with reply_lost(effects):
        begun = sent(effects, record)
    assert found_of(effects, record)[0].sent_at == begun.sent_at
    with reply_lost(effects):
        assert finished(effects, begun, '"kept"')
    assert effects.of_key(record)[0].result == '"kept"'
    with reply_lost(effects):
        assert effects.save_progress(record, '{"n": 1}')


@contextmanager
def reply_lost(effects: SqlEffectStore) -> Iterator[None]:
    """Let the next statement be executed, and its connection be lost."""
    once, lost = effects.database._once, []

    def lose(*given: Any) -> Any:
        answer = once(*given)
        if not lost:
            lost.append(answer)
            raise OperationalError("", None, Exception("gone"), connection_invalidated=True)
        return answer

    effects.database._once = lose
    yield
    effects.database._once = once
    assert lost


def test_an_intent_withdrawn_before_it_is_read_is_begun(sql_records: SqlRecordStore) -> None:
    effects, key = effects_of(sql_records), fresh_key()
    old = sent(effects, won(sql_records, make_call(key)))
    record = won(sql_records, make_call(key))
    read = effects.read

    def withdrawn(stored_key: str, name: str, scope: str) -> Effect | None:
        effects.withdraw(old)
        return read(stored_key, name, scope)

    effects.read = withdrawn
    begun = begin(effects, record)
    assert isinstance(begun, Begun)
    assert begun.effect.fence == record.fence


def test_a_reference_no_database_stores_is_left_out(postgres: SqlRecordStore) -> None:
    effects, record = effects_of(postgres), won(postgres, make_call(fresh_key()))
    assert effects.finish(sent(effects, record), '"kept"', "a\x00b")
    (found,) = effects.of_key(record)
    assert (found.state, found.reference, found.result) == (EffectState.DONE, None, None)


def test_a_writer_of_sqlite_is_suspected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be the body's own."""
    monkeypatch.setattr(sqlite, "BUSY_TIMEOUT", 0.1)
    records = SqlRecordStore(engine_for(f"sqlite:///{tmp_path}/records.db"))
    records.migrate()
    record = won(records, make_call(fresh_key()))
    effects = SqlEffectStore(records.database, records.tables)
    with closing(sqlite3.connect(tmp_path / "records.db", isolation_level=None)) as own:
        own.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreUnavailable, match="open transaction if it has written") as caught:
            begin(effects, record)
    assert caught.value.executed is False
    assert begin(effects, record) is not None
    records.database.close()
