"""An operator's commands while other processes claim the key, and the retention of a record that
an operator has changed.
"""

from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import text

from celery_leases.client import Write
from celery_leases.errors import LeaseIsLive
from celery_leases.ops.client import LOOK_THROUGH, OperatorClient
from celery_leases.record import Ended, Record, State
from celery_leases.record_filters import RecordFilter
from celery_leases.stores.sql.leases import DatabaseLeaseStore
from celery_leases.stores.sql.records import SqlRecordStore
from celery_leases.testing.contracts.calls import fresh_key, make_call
from celery_leases.testing.contracts.record_case import closed, row, won
from tests.contract.sql_stores import operator_of

DATABASE = "database"
DAY = 86_400.0
COMMANDS: dict[str, Callable[..., Any]] = {
    "retry": OperatorClient.retry,
    "forget": OperatorClient.forget,
    "resolve done": lambda client, key, **given: client.resolve(key, "done", **given),
    "resolve retry": lambda client, key, **given: client.resolve(key, "retry", **given),
}


@pytest.fixture
def client(sql_records: SqlRecordStore) -> OperatorClient:
    return operator_of(DatabaseLeaseStore(sql_records), sql_records)


def uncertain(records: SqlRecordStore, **call: Any) -> Record:
    record = won(records, make_call(fresh_key(), **call), DATABASE)
    return closed(records, record, State.UNCERTAIN, ended=Ended.FAILED, retention=None)


def call_after_first(
    monkeypatch: pytest.MonkeyPatch, store: Any, look: str, come: Callable[[], Any]
) -> None:
    """Let *come* be called just after the first *look* into *store*."""
    looks, came = getattr(store, look), []

    def looked(*given: Any, **options: Any) -> Any:
        answer = looks(*given, **options)
        if not came:
            came.append(True)
            come()
        return answer

    monkeypatch.setattr(store, look, looked)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("after", ["record", "lease"])
def test_an_attempt_that_begins_while_an_operator_reads_is_not_changed(
    client: OperatorClient,
    sql_records: SqlRecordStore,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    after: str,
) -> None:
    """Its lease or its fence is noticed."""
    old = closed(
        sql_records,
        won(sql_records, make_call(fresh_key()), DATABASE),
        State.PENDING,
        ended=Ended.FAILED,
    )
    begun: list[Record] = []

    def begin() -> None:
        begun.append(won(sql_records, make_call(old.stored_key), DATABASE))

    store, look = (client._records, "read") if after == "record" else (client._leases, "holder")
    call_after_first(monkeypatch, store, look, begin)
    with pytest.raises(LeaseIsLive) as caught:
        COMMANDS[command](client, old.stored_key)
    assert caught.value.remaining > 0
    (record,) = begun
    assert row(sql_records, old.stored_key).owner == record.owner
    assert closed(sql_records, record).state is State.DONE


@pytest.mark.parametrize("command", COMMANDS)
def test_with_force_such_an_attempt_is_ended(
    client: OperatorClient,
    sql_records: SqlRecordStore,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
) -> None:
    old = closed(
        sql_records,
        won(sql_records, make_call(fresh_key()), DATABASE),
        State.PENDING,
        ended=Ended.FAILED,
    )
    call_after_first(
        monkeypatch,
        client._leases,
        "holder",
        lambda: won(sql_records, make_call(old.stored_key), DATABASE),
    )
    COMMANDS[command](client, old.stored_key, force=True)
    assert row(sql_records, old.stored_key).state is (
        State.DONE if command == "resolve done" else State.PENDING
    )


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("command", ["resolve_done", "resolve_retry"])
def test_what_an_operator_found_is_resolved_and_nothing_that_came_later(
    client: OperatorClient, sql_records: SqlRecordStore, command: Write, *, force: bool
) -> None:
    old = uncertain(sql_records)
    found = client.status(old.stored_key)
    client.resolve(old.stored_key, "retry")
    later = won(sql_records, make_call(old.stored_key), DATABASE)
    closed(sql_records, later, State.UNCERTAIN, ended=Ended.FAILED, retention=None)
    (change,) = client.change(command, [found], force=force)
    assert "has changed meanwhile, and is uncertain now" in (change.why or "")
    assert row(sql_records, old.stored_key).state is State.UNCERTAIN
    now = client.status(old.stored_key)
    assert [each.done for each in client.change(command, [now], force=force)] == [True]
    assert row(sql_records, old.stored_key).state is not State.UNCERTAIN


@pytest.mark.parametrize("command", COMMANDS)
def test_a_key_that_ends_while_an_operator_reads_must_be_read_again(
    client: OperatorClient,
    sql_records: SqlRecordStore,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
) -> None:
    old = closed(
        sql_records,
        won(sql_records, make_call(fresh_key()), DATABASE),
        State.PENDING,
        ended=Ended.FAILED,
    )

    def run() -> None:
        closed(sql_records, won(sql_records, make_call(old.stored_key), DATABASE))

    call_after_first(monkeypatch, client._leases, "holder", run)
    with pytest.raises(LeaseIsLive, match="has changed meanwhile, and is done now"):
        COMMANDS[command](client, old.stored_key)
    assert row(sql_records, old.stored_key).state is State.DONE


def test_a_key_that_is_done_while_an_operator_takes_it_stays_done(
    client: OperatorClient, sql_records: SqlRecordStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = won(sql_records, make_call(fresh_key()), DATABASE)
    call_after_first(monkeypatch, client._leases, "holder", lambda: closed(sql_records, held))
    assert client.release(held.stored_key).state == "done"
    assert row(sql_records, held.stored_key).state is State.DONE


def test_an_attempt_that_begins_while_an_operator_takes_the_key_loses_it(
    client: OperatorClient, sql_records: SqlRecordStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its history says so, and its outcome is refused."""
    old = closed(sql_records, won(sql_records, make_call(fresh_key()), DATABASE), State.PENDING)
    begun: list[Record] = []

    def begin(record: Record | None) -> Record | None:
        begun.append(won(sql_records, make_call(old.stored_key), DATABASE))
        return record

    its, calls = sql_records.read, iter([begin])
    monkeypatch.setattr(
        client._records,
        "read",
        lambda *args, **given: next(calls, lambda record: record)(its(*args, **given)),
    )
    client.release(old.stored_key)
    now = row(sql_records, old.stored_key)
    assert now.fence > begun[0].fence
    assert (now.state, now.ended, now.owner) == (State.PENDING, Ended.RELEASED, "")


@pytest.mark.parametrize("command", ["retry", "resolve retry"])
def test_a_key_that_is_done_while_an_operator_lets_it_run_again_stays_done(
    client: OperatorClient,
    sql_records: SqlRecordStore,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
) -> None:
    """Whatever is forced."""
    running = won(sql_records, make_call(fresh_key()), DATABASE)
    call_after_first(monkeypatch, client._leases, "holder", lambda: closed(sql_records, running))
    with pytest.raises(LeaseIsLive, match="has changed meanwhile, and is done now"):
        COMMANDS[command](client, running.stored_key, force=True)
    assert row(sql_records, running.stored_key).state is State.DONE


@pytest.mark.parametrize(
    ("own", "given", "days"), [(30.0, None, 30), (30.0, "2d", 2), (None, None, 7)]
)
@pytest.mark.parametrize("command", [*COMMANDS, "release"])
def test_a_changed_record_has_the_retention_of_its_task(
    client: OperatorClient,
    sql_records: SqlRecordStore,
    command: str,
    own: float | None,
    given: str | None,
    days: int,
) -> None:
    """The last claim has stored it; without any it is 7 days."""
    retention = own * DAY if own else None
    if command == "release":
        record = won(sql_records, make_call(fresh_key(), retention=retention), DATABASE)
    else:
        record = uncertain(sql_records, retention=retention)
    (COMMANDS | {"release": OperatorClient.release})[command](
        client, record.stored_key, retention=given
    )
    after = sql_records.read(record.stored_key)
    assert after is not None
    assert after.expires_at is not None
    assert (after.expires_at - after.now) / 1e6 == pytest.approx(days * DAY, abs=30)


def test_a_list_reads_no_more_rows_than_it_shows(
    client: OperatorClient, sql_records: SqlRecordStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[int] = []
    find = sql_records.find

    def noted(wanted: RecordFilter, **given: Any) -> list[Record]:
        limits.append(given["limit"])
        return find(wanted, **given)

    monkeypatch.setattr(sql_records, "find", noted)
    keys = [won(sql_records, make_call(fresh_key()), "database").stored_key for _ in range(5)]
    for key in keys[:3]:
        closed(sql_records, row(sql_records, key))
    assert [
        status.key for status in client.page(client.where(states=["done"]), limit=2).statuses
    ] == [keys[2], keys[1]]
    assert [
        status.key for status in client.page(client.where(states=["done"]), limit=5).statuses
    ] == [keys[2], keys[1], keys[0]]
    assert limits == [2, 5]
    with sql_records.database.engine.connect() as connection:
        connection.execute(
            text("UPDATE celery_leases_records SET lease_until = 1 WHERE state = 'running'")
        )
    late = won(sql_records, make_call(fresh_key()), "database").stored_key
    assert [
        status.key for status in client.page(client.where(states=["abandoned"]), limit=2).statuses
    ] == [keys[4], keys[3]]
    assert [
        status.key for status in client.page(client.where(states=["running"]), limit=1).statuses
    ] == [late]
    assert limits[2:] == [2, LOOK_THROUGH - 2, 1]


def test_two_attempts_whose_ends_are_noted_at_once_both_have_them(
    sql_records: SqlRecordStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although the row has nothing else that changes."""
    key = fresh_key()
    first, second, _ = (won(sql_records, make_call(key)) for _ in range(3))

    def note(attempt: Record) -> Record | None:
        return sql_records.note_end(first.stored_key, attempt.owner, Ended.CRASHED)

    call_after_first(monkeypatch, sql_records, "_row", lambda: note(first))
    assert note(second) is not None
    assert [past.ended for past in row(sql_records, key).history] == [Ended.CRASHED] * 2
