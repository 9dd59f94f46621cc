"""Calls enqueued in a transaction: published once it has committed, relayed after a crash, and by
their keys.
"""

import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from decimal import Decimal
from typing import Any

import pytest
from celery.exceptions import TaskRevokedError
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.orm import Session
from sqlalchemy.pool import NullPool

from celery_leases import LeaseClient, PermanentFailure
from celery_leases.errors import KeyReused, LeaseConfigurationError, WrongDatabase
from celery_leases.keys import stored_key
from celery_leases.outbox import calls as outbox
from celery_leases.worker import processes
from tests.integration.conftest import MakeStage
from tests.integration.deployments import Stage, got, until
from tests.integration.outbox_helpers import (
    ORDERING,
    PG_DATABASE,
    TTL,
    at_once,
    begins,
    by,
    change,
    doubtful,
    driver,
    engine,
    let_be_due,
    let_be_old,
    module_stage,
    operator,
    record,
    relayed,
    rescued,
)
from tests.integration.terminal import Terminal
from tests.support.records import assert_has

__all__ = ["driver", "engine", "module_stage", "operator"]


# -- enqueue ---------------------------------------------------------------------------------------


def test_a_call_is_published_after_the_commit(stage: Stage, engine: Engine, name: str) -> None:
    with Session(engine) as session:
        handle = stage.tasks.order.delay_in(session, name)
        assert stage.find_row("order", f"order:{name}") is None
        assert not stage.left_over()
        session.commit()
    assert got(handle) == by(name, handle.id)
    row = record(stage, name)
    assert_has(row, state="done", attempt=1, publish_at=None, call_id=handle.id)
    assert begins(stage, name) == [handle.id]


def test_an_enqueued_call_has_its_options(stage: Stage, engine: Engine, name: str) -> None:
    tasks = stage.tasks
    with Session(engine) as session:
        called = time.monotonic()
        handle = tasks.order.apply_async_in(
            session,
            (name,),
            {"how": None},
            countdown=2.5,
            expires=60,
            headers={"asked_by": "a test"},
            link=tasks.single.si(f"{name}-linked"),
        )
        session.commit()
    assert got(handle) == by(name, handle.id)
    (begun,) = stage.events("begin", name=name)
    assert begun["asked_by"] == "a test"
    assert begun["t"] - called >= 2.4
    stage.wait_for("begin", name=f"{name}-linked")


def test_options_a_record_cannot_store_are_refused(stage: Stage, engine: Engine, name: str) -> None:
    order = stage.tasks.order
    with Session(engine) as session, session.begin():
        with pytest.raises(
            LeaseConfigurationError, match="does not take producer=; a record stores compression, "
        ):
            order.apply_async_in(session, (name,), producer=object())
        with pytest.raises(LeaseConfigurationError, match="lease_ttl"):
            order.apply_async_in(session, (name,), lease_ttl=3)
        with pytest.raises(LeaseConfigurationError, match="JSON"):
            order.apply_async_in(session, (name,), headers={"asked_by": object()})
    assert stage.find_row("order", f"order:{name}") is None


def test_after_a_rollback_there_was_nothing(stage: Stage, engine: Engine, name: str) -> None:
    with Session(engine) as session:
        stage.tasks.order.delay_in(session, name)
        session.rollback()
    with engine.connect() as connection, connection.begin() as transaction:
        stage.tasks.order.delay_in(connection, name)
        transaction.rollback()
    with closing(driver(stage)) as connection:
        stage.tasks.order.delay_in(connection, name)
        connection.rollback()
    assert stage.find_row("order", f"order:{name}") is None
    assert relayed(stage) == 0
    assert not stage.left_over()
    with Session(engine) as session:
        stage.tasks.order.delay_in(session, name)
        session.rollback()
        handle = stage.tasks.order.delay_in(session, name)
        session.commit()
    assert got(handle) == by(name, handle.id)
    assert begins(stage, name) == [handle.id]


def test_a_savepoint_decides_for_its_calls(stage: Stage, engine: Engine, name: str) -> None:
    with Session(engine) as session:
        with session.begin_nested() as savepoint:
            stage.tasks.order.delay_in(session, f"{name}-not")
            savepoint.rollback()
        with session.begin_nested():
            handle = stage.tasks.order.delay_in(session, f"{name}-yes")
        assert not stage.left_over()
        session.commit()
    assert got(handle) == by(f"{name}-yes", handle.id)
    assert stage.find_row("order", f"order:{name}-not") is None
    assert not begins(stage, f"{name}-not")


def test_calls_of_a_transaction_are_published(stage: Stage, engine: Engine, name: str) -> None:
    with Session(engine) as session, session.begin():
        handles = [stage.tasks.order.delay_in(session, f"{name}-{number}") for number in range(3)]
        handles.append(stage.tasks.single.delay_in(session, name))
        twice = stage.tasks.order.delay_in(session, f"{name}-0")
    assert twice.id == handles[0].id
    names = [f"{name}-0", f"{name}-1", f"{name}-2", name]
    assert [got(handle) for handle in handles] == [
        by(each, handle.id) for each, handle in zip(names, handles, strict=True)
    ]


def test_the_same_key_twice_by_a_driver_is_one_call(stage: Stage, name: str) -> None:
    with closing(driver(stage)) as connection:
        handles = [stage.tasks.order.delay_in(connection, name) for _ in range(2)]
        connection.rollback()
    assert handles[0].id == handles[1].id


@pytest.mark.parametrize("kind", ["connection", "session on a connection", "driver"])
def test_a_connection_leaves_it_to_relays(
    stage: Stage, engine: Engine, name: str, kind: str
) -> None:
    if kind == "connection":
        with engine.begin() as connection:
            handle = stage.tasks.order.delay_in(connection, name)
    elif kind == "session on a connection":
        with engine.begin() as connection, Session(connection) as session, session.begin():
            handle = stage.tasks.order.delay_in(session, name)
    else:
        with closing(driver(stage)) as connection:
            handle = stage.tasks.order.delay_in(connection, name)
            connection.commit()
    assert record(stage, name)["state"] == "pending"
    if (
        kind != "session on a connection"
    ):  # which has waited for the lock of SQLite, perhaps until it was due
        assert relayed(stage) == 0  # its own process may be about to publish
    let_be_due(stage, name)
    assert relayed(stage) == 1
    assert relayed(stage) == 0
    assert got(handle) == by(name, handle.id)
    assert begins(stage, name) == [handle.id]


DYING = """
import os, signal
from sqlalchemy import create_engine
from sqlalchemy.orm import Session
from celery_leases.outbox import calls as outbox
from tests.apps.outbox_tasks import order
outbox._publish_after_commit = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
with Session(create_engine(os.environ["LEASES_DATABASE_URL"])) as session, session.begin():
    print(order.delay_in(session, os.environ["NAME"]).id, flush=True)
"""


def test_what_a_killed_process_had_committed_is_relayed_by_the_command(
    stage: Stage, operator: Terminal, name: str
) -> None:
    dead = subprocess.run(
        [sys.executable, "-c", DYING],
        env={**os.environ, **stage.env, "NAME": name},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
        timeout=60,
    )
    assert dead.returncode == -signal.SIGKILL
    call_id = dead.stdout.strip()
    assert (record(stage, name)["state"], record(stage, name)["call_id"]) == ("pending", call_id)
    let_be_due(stage, name)
    assert operator.sees("relay").strip() == "1 published"
    assert operator.sees("relay").strip() == "0 published"
    assert got(stage.app.AsyncResult(call_id)) == by(name, call_id)
    assert begins(stage, name) == [call_id]


def test_two_relays_publish_each_call_once(stage: Stage, engine: Engine, name: str) -> None:
    with engine.begin() as connection:
        handles = [
            stage.tasks.order.delay_in(connection, f"{name}-{number}") for number in range(5)
        ]
    for number in range(5):
        let_be_due(stage, f"{name}-{number}")
    assert sum(at_once(*[lambda: relayed(stage)] * 3)) == 5
    for number, handle in enumerate(handles):
        assert got(handle) == by(f"{name}-{number}", handle.id)
        assert begins(stage, f"{name}-{number}") == [handle.id]


def test_a_relay_and_a_publish_are_one_run(stage: Stage, engine: Engine, name: str) -> None:
    with engine.begin() as connection:
        handle = stage.tasks.order.delay_in(connection, name)
    let_be_due(stage, name)
    stored = stored_key(f"{ORDERING}.order", f"order:{name}")
    at_once(lambda: relayed(stage), lambda: outbox._publish_after_commit(stage.app, stored))
    assert got(handle) == by(name, handle.id)
    stage.wait_until_drained()
    assert begins(stage, name) == [handle.id]


def test_a_commit_succeeds_during_an_outage_of_the_broker(
    stage: Stage, engine: Engine, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = processes.process_of(stage.app).publisher
    copies.close()
    with monkeypatch.context() as patch:
        patch.setattr(
            stage.app.conf,
            "broker_write_url",
            f"{stage.broker_url.split(':', maxsplit=1)[0]}://127.0.0.1:1",
        )
        began = time.monotonic()
        with Session(engine) as session, session.begin():
            handle = stage.tasks.order.delay_in(session, name)
        assert time.monotonic() - began < 6.0
        assert record(stage, name)["state"] == "pending"
        let_be_due(stage, name)
        assert relayed(stage) == 0
        copies.close()
    let_be_due(stage, name)
    assert relayed(stage) == 1
    assert got(handle) == by(name, handle.id)


# -- enqueue of a key that has a record ------------------------------------------------------------


def test_a_key_with_a_record_is_not_enqueued(stage: Stage, engine: Engine, name: str) -> None:
    gate = stage.gate()
    with engine.begin() as connection:
        first = stage.tasks.order.delay_in(connection, name, str(gate))
    ids = []
    with engine.begin() as connection:
        ids.append(stage.tasks.order.delay_in(connection, name, str(gate)).id)
    let_be_due(stage, name)
    assert relayed(stage) == 1
    stage.wait_for("begin", name=name)
    with Session(engine) as session, session.begin():
        ids.append(stage.tasks.order.delay_in(session, name, str(gate)).id)
    gate.touch()
    assert got(first) == by(name, first.id)
    with Session(engine) as session, session.begin():
        ids.append(stage.tasks.order.delay_in(session, name, str(gate)).id)
    assert ids == [first.id] * 3
    assert record(stage, name)["publish_at"] is None
    stage.wait_until_drained()
    assert begins(stage, name) == [first.id]


def test_a_key_failed_for_good_is_refused(stage: Stage, engine: Engine, name: str) -> None:
    with pytest.raises(PermanentFailure):
        got(stage.tasks.order.delay(name, None, "fail"))
    with Session(engine) as session, session.begin():
        with pytest.raises(PermanentFailure, match=f"nobody sells {name}"):
            stage.tasks.order.delay_in(session, name, None, "fail")
        handle = stage.tasks.order.delay_in(session, f"{name}-other")
    assert got(handle) == by(f"{name}-other", handle.id)


def test_other_content_of_a_key_is_refused(stage: Stage, engine: Engine, name: str) -> None:
    with Session(engine) as session, session.begin():
        first = stage.tasks.order.delay_in(session, name)
        with pytest.raises(KeyReused) as told:
            stage.tasks.order.delay_in(session, name, how="well")
    assert told.value.differing == ["how"]
    assert got(first) == by(name, first.id)


def test_a_key_left_to_callers_is_enqueued(stage: Stage, engine: Engine, name: str) -> None:
    with pytest.raises(Exception, match="Retry available"):
        got(stage.tasks.order.delay(name, None, "cool"))
    assert (record(stage, name)["state"], record(stage, name)["resumes"]) == ("cooling", 0)
    until(
        lambda: not stage.client.status(f"order:{name}", task=f"{ORDERING}.order").retry_after,
        "the cooldown",
    )
    with Session(engine) as session, session.begin():
        handle = stage.tasks.order.delay_in(session, name, None, "cool")
    assert got(handle) == by(name, handle.id)
    assert begins(stage, name)[1:] == [handle.id]


def test_a_released_key_is_enqueued_again(stage: Stage, engine: Engine, name: str) -> None:
    stage.client.resolve(doubtful(stage, name), "retry", task=f"{ORDERING}.order")
    with Session(engine) as session, session.begin():
        handle = stage.tasks.order.delay_in(session, name, None, "doubt")
        twice = stage.tasks.order.delay_in(session, name, None, "doubt")
    assert twice.id == handle.id
    assert got(handle) == by(name, handle.id)


def let_expire(patch: pytest.MonkeyPatch, task: Any) -> None:
    """Calls of a task that are made now expired a moment ago."""
    patch.setattr(task, "expires", -5.0)
    patch.setattr(task, "_exec_options", None)


def test_a_key_whose_enqueued_call_has_expired_is_enqueued_again(
    stage: Stage, engine: Engine, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = stage.tasks.order
    with monkeypatch.context() as patch, Session(engine) as session, session.begin():
        let_expire(patch, order)
        expired = order.delay_in(session, name)
    stage.wait_until_drained()
    let_be_old(stage, name, "order")
    assert rescued(stage, name, dry_run=True) == rescued(stage, name) == 0
    with engine.begin() as connection:
        handle = order.delay_in(connection, name)
    assert handle.id != expired.id
    change(stage, name, "publish_at = NULL")
    with engine.begin() as connection:
        assert order.delay_in(connection, name).id == handle.id
    assert rescued(stage, name) == 1
    assert got(handle) == by(name, handle.id)
    assert begins(stage, name) == [handle.id]


@pytest.mark.parametrize("dropped", [relayed, rescued])
def test_what_has_expired_is_dropped_and_an_enqueue_replaces_it(
    stage: Stage, engine: Engine, name: str, monkeypatch: pytest.MonkeyPatch, dropped: Any
) -> None:
    """Its caller is told that it was revoked, as by a worker that discards a message."""
    order, names = stage.tasks.order, (f"{name}-dropped", f"{name}-replaced")
    with monkeypatch.context() as patch, engine.begin() as connection:
        let_expire(patch, order)
        expired = [order.delay_in(connection, each) for each in names]
    let_be_due(stage, names[0])
    assert dropped(stage, *([name] if dropped is rescued else [])) == 0
    assert [call.state for call in expired] == ["REVOKED", "PENDING"]
    row = record(stage, names[0])
    assert_has(row, state="pending", message=None, publish_at=None, call_id="")
    with Session(engine) as session, session.begin():
        handles = [order.delay_in(session, each) for each in names]
    assert [call.state for call in expired] == ["REVOKED", "REVOKED"]
    for each, handle in zip(names, handles, strict=True):
        assert got(handle) == by(each, handle.id)
        assert begins(stage, each) == [handle.id]


def test_a_key_whose_enqueued_call_was_revoked_is_free_once_it_is_forgotten(
    stage: Stage, engine: Engine, operator: Terminal, name: str
) -> None:
    """A revocation does not change the record."""
    with engine.begin() as connection:
        revoked = stage.tasks.order.delay_in(connection, name)
    host = f"{stage.worker.name}@{os.uname().nodename}"
    assert stage.app.control.revoke(revoked.id, destination=[host], reply=True, timeout=10)
    let_be_due(stage, name)
    assert relayed(stage) == 1
    with pytest.raises(TaskRevokedError):
        got(revoked)
    with Session(engine) as session, session.begin():
        assert stage.tasks.order.delay_in(session, name).id == revoked.id
    let_be_old(stage, name, "order")
    assert rescued(stage, name, dry_run=True) == 1
    operator.sees("forget", f"order:{name}", "--task", f"{ORDERING}.order")
    assert rescued(stage, name, dry_run=True) == 0
    with Session(engine) as session, session.begin():
        handle = stage.tasks.order.delay_in(session, name)
    assert got(handle) == by(name, handle.id)
    assert begins(stage, name) == [handle.id]


def test_another_call_may_come_before_it(stage: Stage, engine: Engine, name: str) -> None:
    with engine.begin() as connection:
        enqueued = stage.tasks.order.delay_in(connection, name)
    early = stage.tasks.order.delay(name)
    assert got(early) == by(name, early.id)
    let_be_due(stage, name)
    assert relayed(stage) == 1
    assert got(enqueued) == by(name, early.id)
    assert begins(stage, name) == [early.id]


def test_a_lost_first_delivery_runs_at_the_next(stage: Stage, engine: Engine, name: str) -> None:
    with engine.begin() as connection:
        handle = stage.tasks.order.delay_in(connection, name)
    side = stage.side_queue()
    stage.send("order", name, task_id=handle.id, queue=side)
    stage.redeliver(side)
    assert got(handle) == by(name, handle.id)
    let_be_due(stage, name)
    assert relayed(stage) == 1
    stage.wait_until_drained()
    assert begins(stage, name) == [handle.id]


def test_a_client_of_the_app_relays(stage: Stage, engine: Engine, name: str) -> None:
    with engine.begin() as connection:
        handle = stage.tasks.order.delay_in(connection, name)
    let_be_due(stage, name)
    with stage.client as client:
        with pytest.raises(LeaseConfigurationError, match="from_app"):
            client.relay()
        with pytest.raises(LeaseConfigurationError, match="from_app"):
            client.rescue(older="1h")
    with LeaseClient.from_app(stage.app) as client:
        assert [record.call_id for record in client.relay().published] == [handle.id]
        assert client.rescue(older="1h").published == []
    assert got(handle) == by(name, handle.id)


def test_what_cannot_be_enqueued_writes_nothing(stage: Stage, engine: Engine, name: str) -> None:
    with Session(engine) as session, session.begin():
        with pytest.raises(TypeError):
            stage.tasks.order.delay_in(session, name, unknown=1)
        with pytest.raises(LeaseConfigurationError, match="JSON"):
            stage.tasks.single.delay_in(session, object())
        with pytest.raises(LeaseConfigurationError, match="each"):
            stage.tasks.again.delay_in(session, name)
        with pytest.raises(WrongDatabase, match="not a SQLAlchemy Session"):
            stage.tasks.order.delay_in(object(), name)
    with stage._engine.connect() as connection, pytest.raises(WrongDatabase, match="autocommit"):
        stage.tasks.order.delay_in(connection, name)
    assert stage.find_row("order", f"order:{name}") is None


def test_arguments_must_not_change(stage: Stage, engine: Engine, name: str) -> None:
    typed = stage.tasks.typed
    with Session(engine) as session, session.begin():
        for content in ((2, 3), {1: [2]}, [{"a": (1,)}]):
            with pytest.raises(LeaseConfigurationError, match="JSON, which would change these"):
                typed.delay_in(session, name, content)
        with pytest.raises(
            LeaseConfigurationError, match="cannot be published with the serializer 'typed'"
        ):
            typed.delay_in(session, name, Decimal("1.5"))
        with pytest.raises(
            LeaseConfigurationError, match="cannot be published with the serializer 'typed'"
        ):
            typed.delay_in(session, name, content=Decimal("1.5"))
    assert stage.find_row("typed", f"typed:{name}") is None
    with Session(engine) as session, session.begin():
        handle = typed.delay_in(session, name, [{"a": [1, None]}])
        number = stage.tasks.single.delay_in(session, name, None, how=(Decimal("1.5"),))
    assert got(handle) == "[{'a': [1, None]}]"
    assert got(number) == by(name, number.id)


@pytest.mark.only(database="postgres")  # there are no row locks on SQLite
def test_a_locked_record_does_not_stop_the_relay(stage: Stage, engine: Engine, name: str) -> None:
    with engine.begin() as connection:
        handles = [
            stage.tasks.order.delay_in(connection, f"{name}-{number}") for number in range(3)
        ]
    for number in range(3):
        let_be_due(stage, f"{name}-{number}")
    lock = text("SELECT 1 FROM celery_leases_records WHERE stored_key = :key FOR UPDATE")
    key = {"key": stored_key(f"{ORDERING}.order", f"order:{name}-0")}
    with engine.begin() as connection:
        connection.execute(lock, key)
        assert relayed(stage) == 2
    assert relayed(stage) == 1
    for number, handle in enumerate(handles):
        assert got(handle) == by(f"{name}-{number}", handle.id)


def test_beat_relays_by_itself(stage_factory: MakeStage, name: str) -> None:
    stage = stage_factory(
        PG_DATABASE, home=ORDERING, start=False, env={"CHORES_EVERY": "0.5", "TTL": f"{TTL:g}"}
    )
    engine = create_engine(stage.database_url, poolclass=NullPool)
    with engine.begin() as connection:
        handle = stage.tasks.order.delay_in(connection, name)
    let_be_due(stage, name)
    schedule = str(stage.directory / "schedule")
    with stage.new_worker(concurrency=2, options=("-B", "--schedule", schedule)):
        assert got(handle) == by(name, handle.id)
