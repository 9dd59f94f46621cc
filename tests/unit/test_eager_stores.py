"""Under ``task_always_eager`` a call, its status, a client and ``delay_in()`` are on the same
stores.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from celery_leases import LeaseClient, LeasedTask
from celery_leases.errors import (
    KeyReused,
    PermanentFailure,
    SchemaOutdated,
    StoreUnavailable,
    WrongDatabase,
)
from celery_leases.ops.client import OperatorClient
from celery_leases.worker import processes

NOWHERE = "postgresql+psycopg://nobody@127.0.0.1:1/nothing"


class Shop:
    """An eager app whose settings name servers that do not exist."""

    def __init__(self, **conf: Any) -> None:
        self.app = Celery("shop", broker="redis://127.0.0.1:1/0", set_as_current=False)
        self.app.conf.update(task_always_eager=True, leases_database_url=NOWHERE, **conf)
        self.runs: list[int] = []

        @self.app.task(base=LeasedTask, name="shop.ship", lease_key="order:{number}", shared=False)
        def ship(number: int, to: str = "home") -> dict[str, Any]:
            self.runs.append(number)
            if to == "nowhere":
                raise PermanentFailure("no such place")
            return {"to": to}

        self.app.finalize()
        self.ship = self.app.tasks["shop.ship"]

    def state(self, number: int) -> str:
        """Where the key stands, as both ways of asking say."""
        status = self.ship.lease_status(number)
        with LeaseClient.from_app(self.app) as client:
            assert client.status(f"order:{number}", task="shop.ship").state == status.state
        state: str = status.state
        return state


@pytest.fixture
def shop() -> Iterator[Shop]:
    """One whose stores are forgotten after the test."""
    yield Shop()
    processes.close_all()


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    """The database of the user's own rows."""
    engine = create_engine(f"sqlite:///{tmp_path}/shop.db")
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE orders (number INTEGER)"))
    yield engine
    engine.dispose()


def test_a_body_has_one_lease(shop: Shop) -> None:
    @shop.app.task(bind=True, base=LeasedTask, name="shop.ask", lease_key="ask", shared=False)
    def ask(self: Any) -> bool:
        return self.lease is self.lease and self.lease.key == "ask"

    assert shop.app.tasks["shop.ask"].delay().get()


def test_status_and_client_see_what_an_eager_call_has_done(shop: Shop) -> None:
    assert shop.state(1) == "absent"
    assert shop.ship.delay(1).get() == {"to": "home"}
    assert shop.state(1) == "done"
    assert shop.ship.lease_status(1).result == {"to": "home"}
    assert [status.key for status in OperatorClient.from_app(shop.app).matching()] == ["order:1"]
    LeaseClient.from_app(shop.app).forget("order:1", task="shop.ship")
    assert shop.ship.delay(1).get() == {"to": "home"}
    assert shop.runs == [1, 1]


def test_without_eager_mode_the_configured_stores_are_asked(shop: Shop) -> None:
    shop.app.conf.task_always_eager = False
    with pytest.raises(StoreUnavailable):
        shop.ship.lease_status(1)
    shop.app.conf.task_always_eager = True
    assert shop.state(1) == "absent"


@pytest.mark.parametrize("again", range(2))
def test_the_same_test_passes_twice_in_one_process(shop: Shop, engine: Engine, again: int) -> None:
    with Session(engine) as session, session.begin():
        session.execute(text("INSERT INTO orders VALUES (7)"))
        result = shop.ship.delay_in(session, 7)
        assert shop.runs == []
        assert shop.state(7) == "absent"
    assert shop.runs == [7]
    assert shop.state(7) == "done"
    assert shop.ship.lease_status(7).call_id == result.id
    processes.close_all()
    assert shop.state(7) == "absent"


def test_a_call_of_a_transaction_that_does_not_commit_never_runs(shop, engine) -> None:
    with Session(engine) as session:
        shop.ship.delay_in(session, 1)
        session.rollback()
        shop.ship.delay_in(session, 2)
        session.close()
        shop.ship.delay_in(session, 3)
        with session.begin_nested() as savepoint:
            shop.ship.delay_in(session, 4)
            with session.begin_nested():
                shop.ship.delay_in(session, 5)
            savepoint.rollback()
        with session.begin_nested():
            shop.ship.delay_in(session, 6)
        assert shop.runs == []
        session.commit()
        assert shop.runs == [3, 6]
        session.commit()
    assert shop.runs == [3, 6]


def test_one_transaction_calls_a_key_once(shop: Shop, engine: Engine) -> None:
    session = scoped_session(sessionmaker(engine))
    first, second = shop.ship.delay_in(session, 1), shop.ship.delay_in(session, 1)
    assert first.id == second.id
    with pytest.raises(KeyReused):
        shop.ship.delay_in(session, 1, "office")
    session.commit()
    assert shop.runs == [1]
    assert shop.ship.delay_in(session, 1).id == first.id
    with pytest.raises(KeyReused):
        shop.ship.delay_in(session, 1, "office")
    session.commit()
    session.remove()
    assert shop.runs == [1]


def test_a_failed_key_refuses_the_next_enqueue(shop: Shop, engine: Engine) -> None:
    shop.app.conf.task_eager_propagates = True
    with Session(engine) as session:
        shop.ship.delay_in(session, 1, "nowhere")
        with pytest.raises(PermanentFailure):
            session.commit()
        with pytest.raises(PermanentFailure):
            shop.ship.delay_in(session, 1, "nowhere")
    assert shop.state(1) == "failed"


def test_a_connection_leaves_its_calls_to_the_relay(shop: Shop, engine: Engine) -> None:
    client = LeaseClient.from_app(shop.app)
    with engine.connect() as connection:
        shop.ship.delay_in(connection, 1)
        connection.rollback()
        shop.ship.delay_in(connection, 2)
        with connection.begin_nested() as savepoint:
            shop.ship.delay_in(connection, 3)
            savepoint.rollback()
        assert shop.state(2) == "absent"
        connection.commit()
    assert (shop.state(1), shop.state(2), shop.runs) == ("absent", "pending", [])
    assert [record.key for record in client.relay().published] == ["order:2"]
    assert shop.runs == [2]
    assert not client.relay()


def test_a_connection_whose_commit_cannot_be_observed_is_refused(shop: Shop) -> None:
    with pytest.raises(WrongDatabase, match="leases_eager_stores=True"):
        shop.ship.delay_in(sqlite3.connect(":memory:"), 1)


def test_django_runs_it_when_the_connection_commits(shop: Shop) -> None:
    """By its own hook, so that tests capture it as they capture all others."""

    class Connection:
        """What of Django's connections counts here."""

        def __init__(self) -> None:
            self.hooks: list[Any] = []

        def on_commit(self, hook: Any) -> None:
            self.hooks.append(hook)

    connection = Connection()
    shop.ship.delay_in(connection, 1)
    assert shop.runs == []
    connection.hooks.pop()()
    assert shop.runs == [1]


def test_with_the_real_stores_all_of_it_is_there(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/records.db"
    shop = Shop(leases_eager_stores=True, leases_url="database")
    shop.app.conf.leases_database_url = url
    engine = create_engine(url)
    assert shop.state(1) == "absent"
    with Session(engine) as session:
        shop.ship.delay_in(session, 1)
        session.rollback()
        shop.ship.delay_in(session, 2)
        session.commit()
    assert shop.runs == [2]
    assert (shop.state(1), shop.state(2)) == ("absent", "done")
    engine.dispose()
    processes.close_all()


def test_missing_tables_are_reported_at_once(tmp_path, monkeypatch) -> None:
    def outdated(*_: Any) -> Any:
        raise SchemaOutdated("no tables")

    monkeypatch.setattr("celery_leases.stores.sql.schema.Tables.check", outdated)
    shop = Shop(leases_eager_stores=True, leases_url="database")
    shop.app.conf.leases_database_url = f"sqlite:///{tmp_path}/records.db"
    began = time.monotonic()
    assert isinstance(shop.ship.apply((1,)).result, SchemaOutdated)
    with pytest.raises(SchemaOutdated):
        shop.ship.lease_status(1)
    assert time.monotonic() - began < 5
    processes.close_all()


def test_an_eager_call_says_that_a_store_does_not_answer(shop, monkeypatch) -> None:
    records = processes.process_of(shop.app).records

    def unavailable(*_: Any, **__: Any) -> Any:
        raise StoreUnavailable("gone", False)

    monkeypatch.setattr(type(records), "claim", unavailable)
    monkeypatch.setattr(type(processes.process_of(shop.app).leases), "acquire", unavailable)
    assert isinstance(shop.ship.apply((1,)).result, StoreUnavailable)
