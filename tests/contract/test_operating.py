"""What an operator reads and changes in many records, in each database: pages, filters, counts
and bulk changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

import pytest
from celery import Celery
from sqlalchemy import insert, text

from celery_leases import LeasedTask
from celery_leases.errors import LeaseConfigurationError, LeaseMisuse, StoreUnavailable, UnknownKey
from celery_leases.failures.cooldown_policies import CooldownPolicy
from celery_leases.groups.group import Closing
from celery_leases.ops.client import OperatorClient
from celery_leases.record import Ended, Failure, State
from celery_leases.stores.sql.leases import DatabaseLeaseStore
from celery_leases.stores.sql.records import SqlRecordStore
from celery_leases.testing.contracts.calls import make_call
from celery_leases.testing.contracts.record_case import closed, won
from celery_leases.testing.waits import wait_until
from tests.contract.sql_stores import operator_of
from tests.unit.doc_pages import blocks, page

Put = Callable[..., None]
LIMIT = Failure("openai.RateLimitError", "too many", "rate-limited", "rate_limited", "openai:x")


@pytest.fixture
def client(sql_records: SqlRecordStore) -> OperatorClient:
    return operator_of(DatabaseLeaseStore(sql_records), sql_records)


@pytest.fixture
def put(sql_records: SqlRecordStore) -> Callable[..., None]:
    """Creates a record that started that many seconds ago, and ended as given."""

    def make(
        key: str, state: State = State.DONE, *, task: str = "t", ago: float = 0, **more: Any
    ) -> None:
        ended = Ended.RETURNED if state is State.DONE else Ended.FAILED
        record = won(
            sql_records, make_call(f"t:{task}|{key}", task=task, key=key, ttl=600.0), "database"
        )
        if state is not State.RUNNING:
            closed(
                sql_records, record, state, **({"ended": ended, "retention": 10 * 86_400.0} | more)
            )
        if ago:
            moved = text(
                "UPDATE celery_leases_records SET started_at = started_at - :ago, finished_at = finished_at - :ago, "
                "created_at = created_at - :ago WHERE stored_key = :key"
            )
            with sql_records.database.engine.connect() as connection:
                connection.execute(moved, {"ago": int(ago * 1e6), "key": f"t:{task}|{key}"})

    return make


def keys(statuses: Sequence[Any]) -> list[str]:
    return [status.key for status in statuses]


def _key_of(key: str) -> str:
    return key


def sql(records: SqlRecordStore, statement: str) -> None:
    with records.database.engine.connect() as connection:
        connection.execute(text(statement))


def test_a_key_of_a_task_of_the_app_is_found_without_reading_all_records(
    sql_records: SqlRecordStore, put: Put, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its stored key, also a shared one; a key of two tasks is refused."""
    app = Celery("operated", broker="memory://", set_as_current=False)
    app.conf.update(leases_url="database", leases_database_url=database_url)
    for name, lease_key in {"t": "{key}", "other": "{key}", "shared": "/all/{key}"}.items():
        app.task(name=name, base=LeasedTask, lease_key=lease_key, shared=False)(_key_of)
    put("of t")
    put("of all", task="all")
    put("removed", task="no longer there")
    put("of two")
    put("of two", task="other")
    put("of t and another", task="no longer there")
    put("of t and another")
    searched: list[str] = []
    search = SqlRecordStore.named
    monkeypatch.setattr(
        SqlRecordStore, "named", lambda self, key: (searched.append(key), search(self, key))[1]
    )
    with OperatorClient.from_app(app, eager=False) as client:
        assert client.status("of t").task == "t"
        assert client.status("/all/of all").state == "done"
        assert client.status("of t and another").task == "t"
        assert searched == []
        assert client.status("removed").task == "no longer there"
        assert client.status("nobody's").state == "absent"
        with pytest.raises(UnknownKey, match=r"several tasks \(other, t\)"):
            client.status("of two")
        assert client.status("of two", task="other").task == "other"
        assert searched == ["removed", "nobody's"]


def test_pages_have_each_record_once_in_order(client: OperatorClient, put: Put) -> None:
    for number in range(7):
        put(f"k{number}")
    sql(
        client._records,
        "UPDATE celery_leases_records SET started_at = 5000000, finished_at = 6000000",
    )
    seen: list[str] = []
    after: str | None = None
    for size in (3, 3, 1):
        page = client.page(limit=3, after=after)
        assert len(page.statuses) == size
        seen += keys(page.statuses)
        after = page.next
    assert after is None
    assert seen == [f"k{number}" for number in reversed(range(7))]
    assert client.page(limit=7).next is not None, "it has looked at no more than it shows"
    with pytest.raises(LeaseConfigurationError, match="is not usable"):
        client.page(after="nonsense!")


def test_the_slowest_come_first_and_runs_count(client: OperatorClient, put: Put) -> None:
    for key, seconds in (("quick", 1), ("slow", 60), ("slower", 90)):
        put(key)
        ended = f"finished_at = started_at + {seconds * 1_000_000} WHERE stored_key = 't:t|{key}'"
        sql(client._records, f"UPDATE celery_leases_records SET {ended}")  # noqa: S608
    put("stuck", State.RUNNING, ago=3600)
    first = client.page(order="slowest", limit=3)
    assert keys(first.statuses) == ["stuck", "slower", "slow"]
    assert [round(status.runtime or 0) for status in first.statuses] == [3600, 90, 60]
    assert keys(client.page(order="slowest", limit=3, after=first.next).statuses) == ["quick"]


def test_each_filter_narrows(client: OperatorClient, put: Put) -> None:
    put("done:1")
    put("done:2", task="u", ago=7200)
    put("limit:1", State.COOLING, failure=LIMIT, reason="rate_limited", retry_after=60.0)
    put(
        "limit%2",
        State.FAILED,
        failure=Failure("E", 'says "group":"openai:x"', "error", "error"),
        reason="error",
    )
    put("dead:1", State.PENDING, crashes=2)
    put("run:1", State.RUNNING)

    def found(**given: Any) -> set[str]:
        return set(keys(client.page(client.where(**given)).statuses))

    assert found(states=["done"]) == {"done:1", "done:2"}
    assert found(states=["done"], task="u") == {"done:2"}
    assert found(prefix="limit") == {"limit:1", "limit%2"}
    assert found(prefix="limit%") == {"limit%2"}
    assert found(prefix="LIMIT") == set()
    assert found(group="openai:x") == {"limit:1"}
    assert found(reason="rate_limited") == {"limit:1"}
    assert found(reason="RATE_LIMITED") == set()
    assert found(crashed=True) == {"dead:1"}
    assert found(since="1h") == {"done:1", "limit:1", "limit%2", "dead:1", "run:1"}
    assert found(until="1h") == {"done:2"}
    assert found(since=datetime.now(UTC) - timedelta(hours=3), until="1h") == {"done:2"}
    assert found(states=["running"]) == {"run:1"}
    sql(client._records, "UPDATE celery_leases_records SET lease_until = 1 WHERE state = 'running'")
    assert found(reason="lease_ended") == found(states=["abandoned"]) == {"run:1"}
    assert found(states=["running"]) == set()
    for wanted, count in (
        ({}, 6),
        ({"states": ["done"]}, 2),
        ({"states": ["abandoned"]}, 1),
        ({"group": "openai:x"}, 1),
    ):
        assert client.how_many(client.where(**wanted)) == count
    with pytest.raises(ValueError, match="sleeping"):
        client.where(states=["sleeping"])
    with pytest.raises(LeaseConfigurationError, match="since="):
        client.where(since="soon")


def test_forgotten_keys_are_in_no_page(client: OperatorClient, put: Put) -> None:
    put("k")
    client.forget("k")
    assert client.page().statuses == []
    assert client.how_many() == 0


def test_statistics_count_by_state_and_by_rule(client: OperatorClient, put: Put) -> None:
    put("d1", ago=500)
    put("d2")
    put("c1", State.COOLING, failure=LIMIT, retry_after=60.0)
    put("c2", State.COOLING, failure=LIMIT, retry_after=60.0, task="u")
    put("r1", State.RUNNING, task="u")
    put("r2", State.RUNNING, task="u")
    columns = "stored_key = 't:u|r2'"
    sql(client._records, f"UPDATE celery_leases_records SET lease_until = 1 WHERE {columns}")  # noqa: S608
    client._leases.groups.close(
        "openai:x", Closing(CooldownPolicy(60.0), "rate_limited", "rate-limited", "m"), "token"
    )
    stats = client.stats()
    assert {(each.task, each.state): each.count for each in stats.states} == {
        ("t", "done"): 2,
        ("t", "cooling"): 1,
        ("u", "cooling"): 1,
        ("u", "running"): 1,
        ("u", "abandoned"): 1,
    }
    oldest = next(each.oldest for each in stats.states if each.state == "done")
    assert 450 < (datetime.now(UTC) - oldest).total_seconds() < 900
    assert [(each.rule, each.reason, each.count) for each in stats.rules] == [
        ("rate-limited", "rate_limited", 2)
    ]
    assert [each.group for each in stats.groups] == ["openai:x"]
    assert stats.trouble is None


def test_the_database_counts_the_rules_whatever_is_in_the_texts(
    client: OperatorClient, put: Put, monkeypatch: pytest.MonkeyPatch
) -> None:
    trap = ',"group":"g","rule":"r","reason":"s"}'
    failures = {
        "plain": Failure("E", trap, "r", "s"),
        "group": Failure("E", trap, "r", "s", "g"),
        "unsure": Failure("E", "m", "r", "s", ambiguous=True),
        "strange": Failure(trap, "m", f"a{trap}", f"b{trap}", "g"),
        "no rule": Failure("E", trap, None, "s"),
        "neither": Failure("E", trap),
    }
    for key, failure in failures.items():
        for number in range(3):
            put(f"{key}{number}", State.FAILED, failure=failure)
    read, rows = client._records.database.all, []

    def counting(*given: Any) -> Any:
        found = read(*given)
        rows.append(len(found))
        return found

    monkeypatch.setattr(client._records.database, "all", counting)
    assert client._records.failures() == {
        ("r", "s"): 9,
        (f"a{trap}", f"b{trap}"): 3,
        ("", "s"): 3,
        ("", ""): 3,
    }
    assert rows in ([5], [6])


def test_keys_are_changed_if_they_are_as_found(client: OperatorClient, put: Put) -> None:
    for key in ("a", "b", "c", "d"):
        put(key, State.FAILED)
    found = [*client.matching(client.where(states=["failed"]))]
    assert keys(found) == ["a", "b", "c", "d"]
    client.retry("b", task="t")
    won(client._records, make_call("t:t|b", task="t", key="b"), "database")
    client.retry("c", task="t")
    put("c", State.FAILED)  # in the same state again, after another attempt
    changes = [*client.change("retry", found)]
    assert [change.done for change in changes] == [True, False, False, True]
    assert all(
        "has changed" in (change.why or "") or "held by" in (change.why or "")
        for change in changes[1:3]
    )
    states = {status.key: status.state for status in client.page().statuses}
    assert states == {"a": "pending", "b": "running", "c": "failed", "d": "pending"}
    forced = [*client.change("forget", [found[1]], force=True)]
    assert [change.done for change in forced] == [False], (
        "force takes a live lease, and not what was not seen"
    )


@pytest.mark.parametrize("what", ["retry", "forget"])
def test_what_became_of_a_key_is_known_without_another_look(
    client: OperatorClient,
    put: Put,
    monkeypatch: pytest.MonkeyPatch,
    what: Literal["retry", "forget"],
) -> None:
    put("a", State.FAILED)
    (found,) = client.matching()
    publishing = client.publish

    def looks(*_: object, **__: object) -> Any:
        raise AssertionError

    monkeypatch.setattr(client, "status", looks)
    monkeypatch.setattr(client, "publish", looks)
    (change,) = client.change(what, [found], publish=True)
    monkeypatch.undo()
    assert client.publish == publishing
    after = client.status("a", task="t")
    assert (change.done, change.published) == (True, None)
    for name in ("key", "task", "state", "attempt", "failures", "crashes", "fence", "retry_at"):
        assert getattr(change.status, name) == getattr(after, name), name


def test_a_key_that_changes_between_the_look_and_the_write_is_left_alone(
    client: OperatorClient, put: Put, monkeypatch: pytest.MonkeyPatch
) -> None:
    put("a", State.FAILED)
    found = [*client.matching()]
    holder = client._leases.holder

    def claimed_meanwhile(stored_key: str) -> Any:
        monkeypatch.undo()
        client.retry("a", task="t")
        return holder(stored_key)

    monkeypatch.setattr(client._leases, "holder", claimed_meanwhile)
    (change,) = client.change("forget", found)
    assert (change.done, client.status("a", task="t").state) == (False, "pending")


def test_release_takes_only_held_keys(client: OperatorClient, put: Put) -> None:
    put("a", State.FAILED)
    put("b", State.RUNNING)
    changes = {
        change.status.key: change.done for change in client.change("release", [*client.matching()])
    }
    assert changes == {"a": False, "b": True}


def test_later_changes_are_not_in_a_filter(client: OperatorClient, put: Put) -> None:
    put("a", State.FAILED, ago=10)
    wanted = client.as_of_now(client.where(states=["failed"]))
    put("b", State.FAILED)
    assert keys([*client.matching(wanted)]) == ["a"]


def test_old_records_are_purged_and_nothing_else(client: OperatorClient, put: Put) -> None:
    """No running row, none to publish; an uncertain one if asked for."""
    for number in range(5):
        put(f"old{number}", ago=40 * 86_400)
    put("new")
    put("running", State.RUNNING, ago=40 * 86_400)
    put("doubt", State.UNCERTAIN, ago=40 * 86_400)
    put("enqueued", State.PENDING, ago=40 * 86_400)
    sql(
        client._records,
        "UPDATE celery_leases_records SET publish_at = 5 WHERE stored_key = 't:t|enqueued'",
    )
    doomed = client.purgeable(older="30d")
    put("younger", ago=30 * 86_400 - 1)
    assert client.how_many(doomed) == 5, "another one is to be published"
    wait_until(lambda: client.how_many(client.purgeable(older="30d")) == 6, 60, "its time")
    assert list(client.purge(doomed, batch=2)) == [2, 2, 1]
    assert list(client.purge(client.purgeable(older="30d"), batch=2)) == [1]
    assert set(keys(client.page().statuses)) == {"new", "running", "doubt", "enqueued"}
    assert list(client.purge(client.purgeable(client.where(states=["uncertain"]), "30d"))) == [1]
    for wrong in ({"states": ["running"]}, {"reason": "error"}):
        with pytest.raises(LeaseConfigurationError, match="cannot be purged"):
            client.purgeable(client.where(**wrong), "30d")
    with pytest.raises(LeaseMisuse, match="purgeable"):
        list(client.purge(client.where(states=["done"])))
    assert list(client.purge(client.purgeable())) == [], "their retention is not over"
    sql(client._records, "UPDATE celery_leases_records SET expires_at = 5 WHERE state = 'done'")
    assert list(client.purge(client.purgeable())) == [1]


def test_effects_go_with_a_purged_record(client: OperatorClient, put: Put) -> None:
    put("old", ago=40 * 86_400)
    put("new")
    effects = client._records.tables.effects
    given = {
        "name": "mail",
        "scope": "#0",
        "state": "done",
        "fence": 1,
        "idempotency_key": "i",
        "sent_at": 1,
    }
    with client._records.database.engine.connect() as connection:
        for key in ("old", "new"):
            connection.execute(insert(effects).values(stored_key=f"t:t|{key}", **given))
    list(client.purge(client.purgeable(older="30d")))
    with client._records.database.engine.connect() as connection:
        left = (
            connection.execute(text("SELECT stored_key FROM celery_leases_effects")).scalars().all()
        )
    assert left == ["t:t|new"]


def test_a_page_stays_readable_when_the_lease_store_does_not_answer(
    client: OperatorClient, put: Put, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key in ("a", "b", "c"):
        put(key, State.RUNNING)
    asked: list[str] = []

    def fails(stored_key: str) -> None:
        asked.append(stored_key)
        raise StoreUnavailable("no answer", False)

    monkeypatch.setattr(client._leases, "holder", fails)
    statuses = client.page().statuses
    assert [status.state for status in statuses] == ["running"] * 3
    assert {status.reason for status in statuses} == {"lease_store_unavailable"}
    assert len(asked) == 1


def test_a_page_reads_what_it_shows(client: OperatorClient, sql_records: SqlRecordStore) -> None:
    row = sql_records.tables.records
    columns = {
        "task": "t",
        "call_id": "c",
        "owner": "o",
        "holder": "h",
        "fence": 1,
        "created_at": 1,
        "attempt": 1,
    }
    columns |= {"lease_store": "", "state": "done", "finished_at": 9_000_000_000}
    many = [
        {"stored_key": f"t:t|{number:05}", "key": f"{number:05}", "started_at": number, **columns}
        for number in range(3000)
    ]
    with sql_records.database.engine.connect() as connection:
        connection.execute(insert(row), many)
    read: list[int] = []
    listed = sql_records._list

    def noted(query: Any) -> Any:
        found = listed(query)
        read.append(len(found))
        return found

    sql_records._list = noted
    page = client.page(limit=20)
    assert keys(page.statuses) == [f"{number:05}" for number in range(2999, 2979, -1)]
    assert read == [20]
    assert sum(1 for _ in client.matching()) == 3000
    assert max(read) == 500
    assert [*client.purge(client.purgeable(older="1d"), batch=1000)] == [1000, 1000, 1000]


def test_the_docs_example_retries_rate_limits(client: OperatorClient, put: Put) -> None:
    (source,) = (block for block in blocks(page("repair-keys"), "python") if "as_of_now" in block)
    names: dict[str, Any] = {}
    exec(source, names)  # noqa: S102 - our own page
    put("a", State.COOLING, failure=LIMIT, reason="rate_limited", retry_after=60.0)
    put("b", State.COOLING, failure=LIMIT, reason="rate_limited", retry_after=60.0, ago=86_400)
    names["leases"] = client
    names["retry_what_was_rate_limited_last_night"]()
    assert {status.key: status.state for status in client.page().statuses} == {
        "a": "pending",
        "b": "cooling",
    }
