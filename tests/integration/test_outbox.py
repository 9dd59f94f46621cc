"""Calls enqueued in a transaction, relayed after a crash, rescued from the records, resolved by an operator."""

import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from decimal import Decimal
from typing import Any

import psycopg
import pytest
import redis
from celery import chain, chord
from celery.exceptions import TaskRevokedError
from sqlalchemy import Engine, create_engine, event, make_url, text
from sqlalchemy.orm import Session
from sqlalchemy.pool import NullPool

from celery_leases import (
    AlreadyDone,
    KeyReused,
    LeaseConfigurationError,
    LeaseIsLive,
    PermanentFailure,
    UnknownKey,
    WrongDatabase,
)
from celery_leases.core.keys import stored_key
from celery_leases.seam import apps, outgoing
from celery_leases.stores.outbox import Outbox
from celery_leases.testing.process import wait_until
from tests.integration.conftest import StageFactory
from tests.integration.stages import PATIENCE, Stage, spelled
from tests.integration.terminal import Terminal

ORDERING = "tests.apps.ordering"
PG_REDIS = ("redis", "redis", "postgres")
PG_DATABASE = ("rabbit", "database", "postgres")
LITE_DATABASE = ("redis", "database", "sqlite")
TTL = 2.0


@pytest.fixture(scope="module", params=(PG_REDIS, PG_DATABASE, LITE_DATABASE), ids=spelled)
def module_stage(request: pytest.FixtureRequest, stage_factory: StageFactory) -> Iterator[Stage]:
    """A worker of the tasks that are ordered; at its end nothing may be left in the queue."""
    made = stage_factory(request.param, home=ORDERING, env={"TTL": f"{TTL:g}"})
    yield made
    try:
        if not request.session.testsfailed:
            made.wait_until_drained()
    finally:
        made.close()


@pytest.fixture(scope="module")
def operator(module_stage: Stage) -> Iterator[Terminal]:
    """Somebody at a terminal with the settings of the worker."""
    with Terminal(ORDERING, module_stage.env) as terminal:
        yield terminal


@pytest.fixture(scope="module")
def engine(module_stage: Stage) -> Iterator[Engine]:
    """What a user's program has for the records' database."""
    made = create_engine(module_stage.database_url, poolclass=NullPool)
    if module_stage.record_store == "sqlite":
        event.listen(made, "connect", lambda connection, _: setattr(connection, "isolation_level", None))
        event.listen(made, "begin", lambda connection: connection.exec_driver_sql("BEGIN IMMEDIATE"))
    yield made
    made.dispose()


def driver(stage: Stage) -> Any:
    """A plain DB-API connection in a transaction."""
    if stage.record_store == "sqlite":
        return sqlite3.connect(str(make_url(stage.database_url).database))
    url = make_url(stage.database_url).set(drivername="postgresql")
    return psycopg.connect(url.render_as_string(hide_password=False))


def record(stage: Stage, name: str, task: str = "order") -> dict[str, Any]:
    """The record of a name."""
    row = stage.row(task, f"{task}:{name}")
    assert row is not None
    return row


def change(stage: Stage, name: str, values: str, task: str = "order") -> None:
    """Change columns of a record, as time or a crash would."""
    key = {"key": stored_key(f"{stage.home}.{task}", f"{task}:{name}", "task")}
    with stage._engine.connect() as connection:
        done = connection.execute(text(f"UPDATE celery_leases_records SET {values} WHERE stored_key = :key"), key)  # noqa: S608 - the test's own words
        assert done.rowcount == 1


def let_be_due(stage: Stage, name: str) -> None:
    """As if the process that was to publish had been gone for a while."""
    change(stage, name, "publish_at = publish_at - 60000000")


def let_be_old(stage: Stage, name: str, task: str = "kept", *, unpublished: bool = False) -> None:
    """As if nothing had happened to a record for an hour."""
    ago = "{0} = {0} - 3600000000"
    times = ", ".join(ago.format(column) for column in ("started_at", "finished_at", "retry_at", "published_at"))
    change(stage, name, times + ("" if unpublished else ", publish_at = NULL"), task)


def relayed(stage: Stage) -> int:
    """How many messages a relay has published."""
    return len(outgoing.relay(stage.app).published)


def begins(stage: Stage, name: str) -> list[str]:
    """Whose calls have run, in their order."""
    return [seen["id"] for seen in stage.events("begin", name=name)]


def by(name: str, call_id: str) -> str:
    """The answer of a call."""
    return f"{name} by {call_id}"


# -- enqueue -----------------------------------------------------------------------------------------------


def test_an_enqueued_call_is_published_once_its_transaction_has_committed(
    stage: Stage, engine: Engine, name: str
) -> None:
    """Before that it is neither in the queue nor in the records; afterwards it is as any other call."""
    with Session(engine) as session:
        handle = stage.tasks.order.enqueue(session, name)
        assert stage.row("order", f"order:{name}") is None
        assert not stage.left_over()
        session.commit()
    assert handle.get(timeout=PATIENCE) == by(name, handle.id)
    row = record(stage, name)
    assert (row["state"], row["attempt"], row["publish_at"], row["call_id"]) == ("done", 1, None, handle.id)
    assert begins(stage, name) == [handle.id]


def test_after_a_rollback_there_was_nothing(stage: Stage, engine: Engine, name: str) -> None:
    """By session, connection and driver: no record, no message, and the session may be used again."""
    with Session(engine) as session:
        stage.tasks.order.enqueue(session, name)
        session.rollback()
    with engine.connect() as connection, connection.begin() as transaction:
        stage.tasks.order.enqueue(connection, name)
        transaction.rollback()
    with closing(driver(stage)) as connection:
        stage.tasks.order.enqueue(connection, name)
        connection.rollback()
    assert stage.row("order", f"order:{name}") is None
    assert relayed(stage) == 0
    assert not stage.left_over()
    with Session(engine) as session:
        stage.tasks.order.enqueue(session, name)
        session.rollback()
        handle = stage.tasks.order.enqueue(session, name)
        session.commit()
    assert handle.get(timeout=PATIENCE) == by(name, handle.id)
    assert begins(stage, name) == [handle.id]


def test_a_savepoint_decides_for_what_was_enqueued_within(stage: Stage, engine: Engine, name: str) -> None:
    """What was rolled back to it never was; what was released waits for the outer commit."""
    with Session(engine) as session:
        with session.begin_nested() as savepoint:
            stage.tasks.order.enqueue(session, f"{name}-not")
            savepoint.rollback()
        with session.begin_nested():
            handle = stage.tasks.order.enqueue(session, f"{name}-yes")
        assert not stage.left_over()
        session.commit()
    assert handle.get(timeout=PATIENCE) == by(f"{name}-yes", handle.id)
    assert stage.row("order", f"order:{name}-not") is None
    assert not begins(stage, f"{name}-not")


def test_several_calls_of_one_transaction_are_all_published(stage: Stage, engine: Engine, name: str) -> None:
    """Tasks without a key too; the same key twice is one call."""
    with Session(engine) as session, session.begin():
        handles = [stage.tasks.order.enqueue(session, f"{name}-{number}") for number in range(3)]
        handles.append(stage.tasks.single.enqueue(session, name))
        twice = stage.tasks.order.enqueue(session, f"{name}-0")
    assert twice.id == handles[0].id
    names = [f"{name}-0", f"{name}-1", f"{name}-2", name]
    assert [handle.get(timeout=PATIENCE) for handle in handles] == [
        by(each, handle.id) for each, handle in zip(names, handles, strict=True)
    ]


def test_the_same_key_twice_by_a_driver_is_one_call(stage: Stage, name: str) -> None:
    """A DB-API connection sees its own row too."""
    with closing(driver(stage)) as connection:
        handles = [stage.tasks.order.enqueue(connection, name) for _ in range(2)]
        connection.rollback()
    assert handles[0].id == handles[1].id


@pytest.mark.parametrize("kind", ["connection", "driver"])
def test_a_connection_leaves_the_publishing_to_the_relay(stage: Stage, engine: Engine, name: str, kind: str) -> None:
    """Nobody tells of its commit; the relay publishes what is due, and nothing a second time."""
    if kind == "connection":
        with engine.begin() as connection:
            handle = stage.tasks.order.enqueue(connection, name)
    else:
        with closing(driver(stage)) as connection:
            handle = stage.tasks.order.enqueue(connection, name)
            connection.commit()
    assert record(stage, name)["state"] == "pending"
    assert relayed(stage) == 0  # its own process may be about to publish
    let_be_due(stage, name)
    assert relayed(stage) == 1
    assert relayed(stage) == 0
    assert handle.get(timeout=PATIENCE) == by(name, handle.id)
    assert begins(stage, name) == [handle.id]


DYING = """
import os, signal
from sqlalchemy import create_engine
from sqlalchemy.orm import Session
from celery_leases.seam import outgoing
from tests.apps.ordering import order
outgoing._publish_own = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
with Session(create_engine(os.environ["LEASES_DATABASE_URL"])) as session, session.begin():
    print(order.enqueue(session, os.environ["NAME"]).id, flush=True)
"""


def test_what_a_killed_process_had_committed_is_relayed_by_the_command(
    stage: Stage, operator: Terminal, name: str
) -> None:
    """SIGKILL between commit and publish: ``celery leases relay`` publishes it, once."""
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
    assert stage.app.AsyncResult(call_id).get(timeout=PATIENCE) == by(name, call_id)
    assert begins(stage, name) == [call_id]


def test_the_chore_in_a_worker_relays_too(stage: Stage, engine: Engine, name: str) -> None:
    """``celery_leases.relay`` is a task of any app that includes ``celery_leases.chores``."""
    with engine.begin() as connection:
        handle = stage.tasks.order.enqueue(connection, name)
    let_be_due(stage, name)
    stage.app.send_task("celery_leases.relay")
    assert handle.get(timeout=PATIENCE) == by(name, handle.id)


def at_once(*steps: Callable[[], Any]) -> list[Any]:
    """What steps give that are begun at one moment."""
    barrier, answers = threading.Barrier(len(steps)), {}

    def go(number: int, step: Callable[[], Any]) -> None:
        barrier.wait()
        answers[number] = step()

    threads = [threading.Thread(target=go, args=given) for given in enumerate(steps)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [answers[number] for number in range(len(steps))]


def test_two_relays_at_once_publish_each_call_once(stage: Stage, engine: Engine, name: str) -> None:
    """Whoever takes a message first publishes it."""
    with engine.begin() as connection:
        handles = [stage.tasks.order.enqueue(connection, f"{name}-{number}") for number in range(5)]
    for number in range(5):
        let_be_due(stage, f"{name}-{number}")
    assert sum(at_once(*[lambda: relayed(stage)] * 3)) == 5
    for number, handle in enumerate(handles):
        assert handle.get(timeout=PATIENCE) == by(f"{name}-{number}", handle.id)
        assert begins(stage, f"{name}-{number}") == [handle.id]


def test_a_relay_and_a_publish_at_once_are_one_run(stage: Stage, engine: Engine, name: str) -> None:
    """The second copy of the call is dropped or replayed."""
    with engine.begin() as connection:
        handle = stage.tasks.order.enqueue(connection, name)
    let_be_due(stage, name)
    stored = stored_key(f"{ORDERING}.order", f"order:{name}", "task")
    at_once(lambda: relayed(stage), lambda: outgoing._publish_own(stage.app, stored))
    assert handle.get(timeout=PATIENCE) == by(name, handle.id)
    stage.wait_until_drained()
    assert begins(stage, name) == [handle.id]


def test_a_commit_succeeds_while_the_broker_is_away(
    stage: Stage, engine: Engine, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The relay publishes once the broker is back, and says of a try without it that nothing was published."""
    copies = apps.parts_of(stage.app).copies
    copies.close()
    with monkeypatch.context() as patch:
        patch.setattr(stage.app.conf, "broker_write_url", f"{stage.broker_url.split(':', maxsplit=1)[0]}://127.0.0.1:1")
        began = time.monotonic()
        with Session(engine) as session, session.begin():
            handle = stage.tasks.order.enqueue(session, name)
        assert time.monotonic() - began < 6.0
        assert record(stage, name)["state"] == "pending"
        let_be_due(stage, name)
        assert relayed(stage) == 0
        copies.close()
    let_be_due(stage, name)
    assert relayed(stage) == 1
    assert handle.get(timeout=PATIENCE) == by(name, handle.id)


# -- enqueue of a key that has a record --------------------------------------------------------------------


def test_a_key_that_has_a_record_is_not_enqueued_again(stage: Stage, engine: Engine, name: str) -> None:
    """Pending, running or done: the handle is that of the first call, and nothing is published."""
    gate = stage.gate()
    with engine.begin() as connection:
        first = stage.tasks.order.enqueue(connection, name, str(gate))
    ids = []
    with engine.begin() as connection:
        ids.append(stage.tasks.order.enqueue(connection, name, str(gate)).id)
    let_be_due(stage, name)
    assert relayed(stage) == 1
    stage.wait_for("begin", name=name)
    with Session(engine) as session, session.begin():
        ids.append(stage.tasks.order.enqueue(session, name, str(gate)).id)
    gate.touch()
    assert first.get(timeout=PATIENCE) == by(name, first.id)
    with Session(engine) as session, session.begin():
        ids.append(stage.tasks.order.enqueue(session, name, str(gate)).id)
    assert ids == [first.id] * 3
    assert record(stage, name)["publish_at"] is None
    stage.wait_until_drained()
    assert begins(stage, name) == [first.id]


def test_a_key_that_has_failed_for_good_is_refused(stage: Stage, engine: Engine, name: str) -> None:
    """With what it has failed of; the transaction may go on."""
    with pytest.raises(PermanentFailure):
        stage.tasks.order.delay(name, None, "fail").get(timeout=PATIENCE)
    with Session(engine) as session, session.begin():
        with pytest.raises(PermanentFailure, match=f"nobody sells {name}"):
            stage.tasks.order.enqueue(session, name, None, "fail")
        handle = stage.tasks.order.enqueue(session, f"{name}-other")
    assert handle.get(timeout=PATIENCE) == by(f"{name}-other", handle.id)


def test_other_content_under_the_same_key_is_refused(stage: Stage, engine: Engine, name: str) -> None:
    """``KeyReused`` names the arguments that differ."""
    with Session(engine) as session, session.begin():
        first = stage.tasks.order.enqueue(session, name)
        with pytest.raises(KeyReused) as told:
            stage.tasks.order.enqueue(session, name, how="well")
    assert told.value.differing == ["how"]
    assert first.get(timeout=PATIENCE) == by(name, first.id)


def test_a_key_whose_call_will_not_come_back_is_enqueued_anew(stage: Stage, engine: Engine, name: str) -> None:
    """Its cooldown is over, and it was left to its callers: this one is published, and runs."""
    with pytest.raises(Exception, match="Retry available"):
        stage.tasks.order.delay(name, None, "cool").get(timeout=PATIENCE)
    assert (record(stage, name)["state"], record(stage, name)["resumes"]) == ("cooling", 0)
    wait_until(
        lambda: not stage.client.status(f"order:{name}", task=f"{ORDERING}.order").retry_after, PATIENCE, "the cooldown"
    )
    with Session(engine) as session, session.begin():
        handle = stage.tasks.order.enqueue(session, name, None, "cool")
    assert handle.get(timeout=PATIENCE) == by(name, handle.id)
    assert begins(stage, name)[1:] == [handle.id]


def test_a_key_an_operator_has_released_is_enqueued_anew(stage: Stage, engine: Engine, name: str) -> None:
    """Nothing is queued for it, as the operator was told."""
    stage.client.resolve(doubtful(stage, name), "retry", task=f"{ORDERING}.order")
    with Session(engine) as session, session.begin():
        handle = stage.tasks.order.enqueue(session, name, None, "doubt")
        twice = stage.tasks.order.enqueue(session, name, None, "doubt")
    assert twice.id == handle.id
    assert handle.get(timeout=PATIENCE) == by(name, handle.id)


def let_expire(patch: pytest.MonkeyPatch, task: Any) -> None:
    """Calls of a task that are made now expired a moment ago; Celery remembers the options of a task."""
    patch.setattr(task, "expires", -5.0)
    patch.setattr(task, "_exec_options", None)


def test_a_key_whose_enqueued_call_has_expired_is_enqueued_anew(
    stage: Stage, engine: Engine, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Published and discarded: no rescue publishes it again, and the next call has the key."""
    order = stage.tasks.order
    with monkeypatch.context() as patch, Session(engine) as session, session.begin():
        let_expire(patch, order)
        expired = order.enqueue(session, name)
    stage.wait_until_drained()
    let_be_old(stage, name, "order")
    assert rescued(stage, name, dry_run=True) == rescued(stage, name) == 0
    with engine.begin() as connection:
        handle = order.enqueue(connection, name)
    assert handle.id != expired.id
    change(stage, name, "publish_at = NULL")
    with engine.begin() as connection:
        assert order.enqueue(connection, name).id == handle.id
    assert rescued(stage, name) == 1
    assert handle.get(timeout=PATIENCE) == by(name, handle.id)
    assert begins(stage, name) == [handle.id]


def test_a_relay_drops_what_has_expired_and_an_enqueue_replaces_it(
    stage: Stage, engine: Engine, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it was ever published; either way the key is free for the next call."""
    order, names = stage.tasks.order, (f"{name}-dropped", f"{name}-replaced")
    with monkeypatch.context() as patch, engine.begin() as connection:
        let_expire(patch, order)
        for each in names:
            order.enqueue(connection, each)
    let_be_due(stage, names[0])
    assert relayed(stage) == 0
    row = record(stage, names[0])
    assert (row["state"], row["message"], row["publish_at"], row["call_id"]) == ("pending", None, None, "")
    with Session(engine) as session, session.begin():
        handles = [order.enqueue(session, each) for each in names]
    for each, handle in zip(names, handles, strict=True):
        assert handle.get(timeout=PATIENCE) == by(each, handle.id)
        assert begins(stage, each) == [handle.id]


def test_a_key_whose_enqueued_call_was_revoked_is_free_once_it_is_forgotten(
    stage: Stage, engine: Engine, operator: Terminal, name: str
) -> None:
    """Nobody tells the records of a revocation, so an operator does; a release would leave the message to a rescue."""
    with engine.begin() as connection:
        revoked = stage.tasks.order.enqueue(connection, name)
    host = f"{stage.worker.name}@{os.uname().nodename}"
    assert stage.app.control.revoke(revoked.id, destination=[host], reply=True, timeout=10)
    let_be_due(stage, name)
    assert relayed(stage) == 1
    with pytest.raises(TaskRevokedError):
        revoked.get(timeout=PATIENCE)
    with Session(engine) as session, session.begin():
        assert stage.tasks.order.enqueue(session, name).id == revoked.id
    let_be_old(stage, name, "order")
    for command, left in (("release", 1), ("forget", 0)):
        operator.sees(command, f"order:{name}", "--task", f"{ORDERING}.order")
        assert rescued(stage, name, dry_run=True) == left
    with Session(engine) as session, session.begin():
        handle = stage.tasks.order.enqueue(session, name)
    assert handle.get(timeout=PATIENCE) == by(name, handle.id)
    assert begins(stage, name) == [handle.id]


def test_another_call_of_the_key_may_come_before_the_enqueued_one(stage: Stage, engine: Engine, name: str) -> None:
    """It runs, and the enqueued one is answered with its result: one run."""
    with engine.begin() as connection:
        enqueued = stage.tasks.order.enqueue(connection, name)
    early = stage.tasks.order.delay(name)
    assert early.get(timeout=PATIENCE) == by(name, early.id)
    let_be_due(stage, name)
    assert relayed(stage) == 1
    assert enqueued.get(timeout=PATIENCE) == by(name, early.id)
    assert begins(stage, name) == [early.id]


def test_an_enqueued_call_whose_first_delivery_was_lost_runs_at_the_next(
    stage: Stage, engine: Engine, name: str
) -> None:
    """Its record is pending and has never ended in any way: a redelivered message finds it free."""
    with engine.begin() as connection:
        handle = stage.tasks.order.enqueue(connection, name)
    side = stage.side_queue()
    stage.send("order", name, task_id=handle.id, queue=side)
    stage.redeliver(side)
    assert handle.get(timeout=PATIENCE) == by(name, handle.id)
    let_be_due(stage, name)
    assert relayed(stage) == 1
    stage.wait_until_drained()
    assert begins(stage, name) == [handle.id]


def test_what_cannot_be_enqueued_is_refused_and_writes_nothing(stage: Stage, engine: Engine, name: str) -> None:
    """Wrong arguments, arguments that are no JSON, tasks whose calls share a record, and autocommit."""
    with Session(engine) as session, session.begin():
        with pytest.raises(TypeError):
            stage.tasks.order.enqueue(session, name, unknown=1)
        with pytest.raises(LeaseConfigurationError, match="JSON"):
            stage.tasks.single.enqueue(session, object())
        with pytest.raises(LeaseConfigurationError, match="rerun"):
            stage.tasks.again.enqueue(session, name)
        with pytest.raises(WrongDatabase, match="no SQLAlchemy Session"):
            stage.tasks.order.enqueue(object(), name)
    with (
        stage._engine.connect() as connection,
        pytest.raises(WrongDatabase, match="autocommit"),
    ):
        stage.tasks.order.enqueue(connection, name)
    assert stage.row("order", f"order:{name}") is None


def test_arguments_that_would_not_arrive_as_they_are_cannot_be_enqueued(
    stage: Stage, engine: Engine, name: str
) -> None:
    """Nor those that cannot be published at all; nothing is written."""
    typed = stage.tasks.typed
    with Session(engine) as session, session.begin():
        for content in ((2, 3), {1: [2]}, [{"a": (1,)}]):
            with pytest.raises(LeaseConfigurationError, match="JSON, which would change these"):
                typed.enqueue(session, name, content)
        with pytest.raises(LeaseConfigurationError, match="cannot be published with the serializer 'typed'"):
            typed.enqueue(session, name, Decimal("1.5"))
        with pytest.raises(LeaseConfigurationError, match="cannot be published with the serializer 'typed'"):
            typed.enqueue(session, name, content=Decimal("1.5"))
    assert stage.row("typed", f"typed:{name}") is None
    with Session(engine) as session, session.begin():
        handle = typed.enqueue(session, name, [{"a": [1, None]}])
        number = stage.tasks.single.enqueue(session, name, None, how=(Decimal("1.5"),))
    assert handle.get(timeout=PATIENCE) == "[{'a': [1, None]}]"
    assert number.get(timeout=PATIENCE) == by(name, number.id)


def test_a_call_whose_arguments_json_would_change_is_not_stored(stage: Stage, name: str) -> None:
    """The worker says so once; others of the task are stored."""
    for number, content in enumerate([(2, 3), {1: "x"}]):
        assert stage.tasks.typed.delay(f"{name}-{number}", content).get(timeout=PATIENCE) == repr(content)
        assert record(stage, f"{name}-{number}", "typed")["message"] is None
    stage.wait_for_log(f"{ORDERING}.typed", "cannot be rescued: records keep arguments as JSON, which would change")
    assert stage.tasks.typed.delay(name, [2, 3]).get(timeout=PATIENCE) == "[2, 3]"
    assert "[2, 3]" in record(stage, name, "typed")["message"]


def test_a_locked_record_does_not_keep_the_relay_from_the_others(stage: Stage, engine: Engine, name: str) -> None:
    """A transaction that goes on for long has one of them locked; the others are published."""
    if stage.record_store == "sqlite":
        pytest.skip("there are no row locks on SQLite")
    with engine.begin() as connection:
        handles = [stage.tasks.order.enqueue(connection, f"{name}-{number}") for number in range(3)]
    for number in range(3):
        let_be_due(stage, f"{name}-{number}")
    lock = text("SELECT 1 FROM celery_leases_records WHERE stored_key = :key FOR UPDATE")
    key = {"key": stored_key(f"{ORDERING}.order", f"order:{name}-0", "task")}
    with engine.begin() as connection:
        connection.execute(lock, key)
        assert relayed(stage) == 2
    assert relayed(stage) == 1
    for number, handle in enumerate(handles):
        assert handle.get(timeout=PATIENCE) == by(f"{name}-{number}", handle.id)


def test_beat_relays_by_itself(stage_factory: StageFactory, name: str) -> None:
    """As the documentation's schedule says, with a beat inside the worker."""
    stage = stage_factory(PG_DATABASE, home=ORDERING, start=False, env={"CHORES_EVERY": "0.5", "TTL": f"{TTL:g}"})
    engine = create_engine(stage.database_url, poolclass=NullPool)
    with engine.begin() as connection:
        handle = stage.tasks.order.enqueue(connection, name)
    let_be_due(stage, name)
    schedule = str(stage.directory / "schedule")
    with stage.new_worker(concurrency=2, options=("-B", "--schedule", schedule)):
        assert handle.get(timeout=PATIENCE) == by(name, handle.id)


# -- rescue ------------------------------------------------------------------------------------------------


def rescued(stage: Stage, name: str, *, dry_run: bool = False) -> int:
    """How many records of a name a rescue has published, or would publish."""
    found = outgoing.stranded(stage.app) if dry_run else outgoing.rescue(stage.app).published
    return sum(name in record.key or name in (record.call_id or "") for record in found)


def test_what_was_published_and_never_delivered_is_rescued(
    stage: Stage, engine: Engine, operator: Terminal, name: str
) -> None:
    """The broker has lost the message of an enqueued call: ``--dry-run`` tells, ``rescue`` publishes it."""
    with engine.begin() as connection:
        handle = stage.tasks.order.enqueue(connection, name)
    change(stage, name, "publish_at = NULL")
    assert rescued(stage, name) == 0  # it has only just begun to wait
    let_be_old(stage, name, "order")
    told = operator.sees("rescue", "--dry-run")
    assert f"order:{name}" in told
    assert "would be published" in told
    assert not begins(stage, name)
    assert f"order:{name}" not in operator.sees("rescue", "--dry-run", "--older", "2h")
    assert f"order:{name}" in operator.sees("rescue")
    assert handle.get(timeout=PATIENCE) == by(name, handle.id)
    let_be_old(stage, name, "order")
    assert rescued(stage, name) == 0
    assert begins(stage, name) == [handle.id]


def test_two_rescues_at_once_publish_a_message_once(stage: Stage, engine: Engine, name: str) -> None:
    """The row is compared as it is set."""
    with engine.begin() as connection:
        handle = stage.tasks.order.enqueue(connection, name)
    let_be_old(stage, name, "order")
    assert sum(at_once(*[lambda: rescued(stage, name)] * 3)) >= 1
    assert handle.get(timeout=PATIENCE) == by(name, handle.id)
    stage.wait_until_drained()
    assert begins(stage, name) == [handle.id]


def test_a_record_that_changed_since_it_was_read_is_not_published(stage: Stage, engine: Engine, name: str) -> None:
    """Of two rescues that have read the same row the second finds it taken."""
    with engine.begin() as connection:
        stage.tasks.order.enqueue(connection, name)
    let_be_old(stage, name, "order")
    outbox = Outbox(apps.parts_of(stage.app).records)
    (read,) = [row for row in outbox.stranded(60, 1000) if name in row.key]
    assert [outbox.publish_again(read), outbox.publish_again(read)] == [True, False]
    stage.client.forget(f"order:{name}", task=f"{ORDERING}.order")


def test_a_key_that_waits_in_a_backlog_gets_one_copy_in_each_interval(stage_factory: StageFactory, name: str) -> None:
    """Beat comes round more often than that; nobody works off the queue."""
    stage = stage_factory(PG_REDIS, home=ORDERING, start=False, env={"TTL": f"{TTL:g}"})
    made = create_engine(stage.database_url, poolclass=NullPool)
    with Session(made) as session, session.begin():
        stage.tasks.order.enqueue(session, name)
    assert (rescued(stage, name), stage.left_over()["queue"]) == (0, 1)
    for copies in (2, 3):
        let_be_old(stage, name, "order")
        outbox = Outbox(apps.parts_of(stage.app).records)
        (read,) = outbox.stranded(60, 1000)
        assert [rescued(stage, name) for _ in range(3)] == [1, 0, 0]
        assert stage.left_over()["queue"] == copies
        assert not outbox.publish_again(read)  # another rescue that has read the row before


def test_what_a_rescue_could_not_publish_is_not_counted_and_the_next_one_does(
    stage: Stage, engine: Engine, operator: Terminal, name: str
) -> None:
    """The broker is away: the command fails and says why, and nothing is lost for those who only rescue."""
    with engine.begin() as connection:
        handle = stage.tasks.order.enqueue(connection, name)
    change(stage, name, "publish_at = NULL")
    let_be_old(stage, name, "order")
    away = f"{stage.broker_url.split(':', maxsplit=1)[0]}://127.0.0.1:1"
    with Terminal(ORDERING, {**stage.env, "CELERY_BROKER_URL": away}) as cut_off:
        done = cut_off.types("rescue")
    assert (done.returncode, done.stdout.strip()) == (1, "0 published")
    assert "1 could not be published" in done.stderr
    let_be_due(stage, name)
    assert f"order:{name}" in operator.sees("rescue", "--dry-run")
    assert f"order:{name}" in operator.sees("rescue")
    assert rescued(stage, name) == 0
    assert handle.get(timeout=PATIENCE) == by(name, handle.id)
    assert begins(stage, name) == [handle.id]


def test_what_a_killed_rescue_has_marked_is_published_by_the_next(stage: Stage, engine: Engine, name: str) -> None:
    """It died before it published, and nobody relays."""
    with engine.begin() as connection:
        handle = stage.tasks.order.enqueue(connection, name)
    change(stage, name, "publish_at = NULL")
    let_be_old(stage, name, "order")
    outbox = Outbox(apps.parts_of(stage.app).records)
    (read,) = [row for row in outbox.stranded(60, 1000) if name in row.key]
    assert outbox.publish_again(read)
    assert [rescued(stage, name, dry_run=True), rescued(stage, name), rescued(stage, name)] == [1, 1, 0]
    assert handle.get(timeout=PATIENCE) == by(name, handle.id)


def test_an_enqueued_record_knows_the_retention_of_its_task(stage: Stage, engine: Engine, name: str) -> None:
    """Before anybody has claimed it."""
    with engine.begin() as connection:
        stage.tasks.order.enqueue(connection, name)
    assert record(stage, name)["retention"] == stage.tasks.order.lease_options.retention * 1e6
    stage.client.forget(f"order:{name}", task=f"{ORDERING}.order")


def test_a_call_enqueued_after_the_key_was_reset_is_kept_until_it_is_published(
    stage: Stage, engine: Engine, name: str
) -> None:
    """An operator's retention is for what nobody asks for any more."""
    with engine.begin() as connection:
        stage.tasks.order.enqueue(connection, name)
    stage.client.forget(f"order:{name}", task=f"{ORDERING}.order")
    assert record(stage, name)["expires_at"]
    with Session(engine) as session, session.begin():
        handle = stage.tasks.order.enqueue(session, name)
        asked = text("SELECT count(*) FROM celery_leases_records WHERE call_id = :id AND expires_at IS NULL")
        assert session.execute(asked, {"id": handle.id}).scalar_one() == 1
    assert handle.get(timeout=PATIENCE) == by(name, handle.id)


def test_nothing_is_rescued_while_its_lease_lives(stage: Stage, name: str) -> None:
    """However long it has been running, and were its message due."""
    gate = stage.gate()
    result = stage.tasks.kept.delay(name, str(gate))
    stage.wait_for("begin", name=name)
    let_be_old(stage, name)
    assert rescued(stage, name, dry_run=True) == rescued(stage, name) == 0
    change(stage, name, "publish_at = 1", "kept")
    assert rescued(stage, name, dry_run=True) == rescued(stage, name) == 0
    change(stage, name, "publish_at = NULL", "kept")
    gate.touch()
    assert result.get(timeout=PATIENCE) == by(name, result.id)


def test_live_ones_do_not_hide_a_stranded_one(
    stage: Stage, engine: Engine, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many have been running for longer than the page that is looked at."""
    monkeypatch.setattr(outgoing, "LOOKED_AT_ONCE", 1)
    gate = stage.gate()
    results = [stage.tasks.kept.delay(f"{name}-live-{number}", str(gate)) for number in range(2)]
    for number in range(2):
        stage.wait_for("begin", name=f"{name}-live-{number}")
        let_be_old(stage, f"{name}-live-{number}")
    with engine.begin() as connection:
        stage.tasks.order.enqueue(connection, f"{name}-stranded")
    change(stage, f"{name}-stranded", "publish_at = NULL")
    let_be_old(stage, f"{name}-stranded", "order")
    assert rescued(stage, name, dry_run=True) == 1
    gate.touch()
    for result in results:
        result.get(timeout=PATIENCE)


def test_a_locked_record_does_not_keep_a_rescue_from_the_others(stage: Stage, engine: Engine, name: str) -> None:
    """What somebody has locked is with somebody."""
    if stage.record_store == "sqlite":
        pytest.skip("there are no row locks on SQLite")
    with engine.begin() as connection:
        handles = [stage.tasks.order.enqueue(connection, f"{name}-{number}") for number in range(2)]
    for number in range(2):
        let_be_old(stage, f"{name}-{number}", "order")
    lock = text("SELECT 1 FROM celery_leases_records WHERE stored_key = :key FOR UPDATE")
    key = {"key": stored_key(f"{ORDERING}.order", f"order:{name}-0", "task")}
    with engine.begin() as connection:
        connection.execute(lock, key)
        assert rescued(stage, name) == 1
    assert rescued(stage, f"{name}-0") == 1
    for number, handle in enumerate(handles):
        assert handle.get(timeout=PATIENCE) == by(f"{name}-{number}", handle.id)


@pytest.fixture
def lossy_stage(stage_factory: StageFactory) -> Stage:
    """A worker whose broker forgets everything when :func:`lose` is called."""
    return stage_factory(PG_REDIS, home=ORDERING, env={"TTL": f"{TTL:g}", "VISIBILITY": "3600"})


def lose(stage: Stage) -> None:
    """All messages are gone, those that had been delivered too."""
    with redis.Redis.from_url(stage.broker_url) as broker:
        broker.delete("unacked", "unacked_index", stage.queue)


def test_what_a_broker_has_lost_is_run_again_with_its_canvas(lossy_stage: Stage, name: str) -> None:
    """A killed worker's call in a chain, another in a chord, and one that was cooling; not one without the option."""
    stage, tasks = lossy_stage, lossy_stage.tasks
    gate = stage.gate()
    linked = chain(tasks.kept.s(f"{name}-chain", str(gate)), tasks.plain.s()).apply_async()
    members = [tasks.kept.s(f"{name}-{number}", str(gate)) for number in ("one", "two")]
    whole = chord(members)(tasks.plain.s())
    tasks.unkept.delay(f"{name}-unkept", str(gate))
    for which in ("chain", "one", "two", "unkept"):
        stage.wait_for("begin", name=f"{name}-{which}")
    stage.worker.kill()
    stage.worker.wait(20)
    lose(stage)
    stage.worker.start()
    cooled = tasks.kept.delay(f"{name}-cool", None, "cool")
    stage.wait_for_state("kept", f"kept:{name}-cool", "cooling")
    stage.worker.stop()
    lose(stage)
    for which in ("chain", "one", "two", "cool"):
        let_be_old(stage, f"{name}-{which}")
    let_be_old(stage, f"{name}-unkept", "unkept")
    wait_until(lambda: not stage.is_held("kept", f"kept:{name}-chain"), PATIENCE, "the leases to end")
    assert rescued(stage, name, dry_run=True) == 4
    assert not stage.left_over()
    assert rescued(stage, name) == 4
    gate.touch()
    stage.worker.start()
    chained = linked.parent.id
    assert linked.get(timeout=PATIENCE) == by(f"{name}-chain", chained)
    assert [answer.split(" by ")[0] for answer in whole.get(timeout=PATIENCE)] == [f"{name}-one", f"{name}-two"]
    assert cooled.get(timeout=PATIENCE) == by(f"{name}-cool", cooled.id)
    assert len(begins(stage, f"{name}-chain")) == 2
    assert len(begins(stage, f"{name}-unkept")) == 1
    stage.wait_until_drained()
    assert rescued(stage, name) == 0


def test_a_limit_below_one_is_refused(operator: Terminal) -> None:
    """By each command that has one."""
    for command in ("relay", "rescue", "list"):
        for limit in ("0", "-1"):
            done = operator.types(command, "--limit", limit)
            assert (done.returncode, "--limit" in done.stderr) == (2, True), command


# -- resolve -----------------------------------------------------------------------------------------------


def doubtful(stage: Stage, name: str) -> str:
    """A key that is uncertain."""
    with pytest.raises(Exception, match="is not known"):
        stage.tasks.order.delay(name, None, "doubt").get(timeout=PATIENCE)
    assert record(stage, name)["state"] == "uncertain"
    return f"order:{name}"


def test_an_operator_may_say_that_an_uncertain_key_is_done(stage: Stage, operator: Terminal, name: str) -> None:
    """By client and command; later callers get the result he gives, and nothing runs."""
    task = f"{ORDERING}.order"
    key = doubtful(stage, name)
    assert stage.client.resolve(key, "done", result={"charge": "ch_1"}, task=task).state == "done"
    assert stage.tasks.order.delay(name, None, "doubt").get(timeout=PATIENCE) == {"charge": "ch_1"}
    key = doubtful(stage, f"{name}-cli")
    assert operator.reads("resolve", key, "--done", "--result", '{"charge": "ch_2"}')["state"] == "done"
    assert stage.tasks.order.delay(f"{name}-cli", None, "doubt").get(timeout=PATIENCE) == {"charge": "ch_2"}
    key = doubtful(stage, f"{name}-none")
    operator.sees("resolve", key, "--task", task, "--done")
    assert stage.tasks.order.delay(f"{name}-none", None, "doubt").get(timeout=PATIENCE) is None
    assert len(begins(stage, name)) == len(begins(stage, f"{name}-cli")) == len(begins(stage, f"{name}-none")) == 1


def test_an_operator_may_let_an_uncertain_key_run_again(stage: Stage, operator: Terminal, name: str) -> None:
    """Nothing is queued by that, as he is told; the next call runs."""
    key = doubtful(stage, name)
    done = operator.types("resolve", key, "--retry")
    assert (done.returncode, "nothing is queued" in done.stderr) == (0, True)
    assert record(stage, name)["state"] == "pending"
    later = stage.tasks.order.delay(name, None, "doubt")
    assert later.get(timeout=PATIENCE) == by(name, later.id)


def test_a_live_lease_is_not_resolved_unless_forced(stage: Stage, name: str) -> None:
    """What its holder still says about the outcome is refused then: its caller gets the operator's answer."""
    gate = stage.gate()
    task, key = f"{ORDERING}.order", f"order:{name}"
    running = stage.tasks.order.delay(name, str(gate))
    stage.wait_for("begin", name=name)
    with pytest.raises(LeaseIsLive):
        stage.client.resolve(key, "done", result=1, task=task)
    with pytest.raises(LeaseIsLive):
        stage.client.resolve(key, "retry", task=task)
    assert stage.client.resolve(key, "done", result="by hand", task=task, force=True).state == "done"
    gate.touch()
    assert running.get(timeout=PATIENCE) == "by hand"
    with pytest.raises(AlreadyDone):
        stage.client.resolve(key, "done", task=task)
    with pytest.raises(AlreadyDone):
        stage.client.resolve(key, "retry", task=task)


def test_bad_words_to_resolve_are_refused(stage: Stage, operator: Terminal, name: str) -> None:
    """Unknown keys, outcomes and results that are no JSON; nothing is changed."""
    task, key = f"{ORDERING}.order", doubtful(stage, name)
    with pytest.raises(UnknownKey):
        stage.client.resolve("order:nobody", "done", task=task)
    with pytest.raises(UnknownKey):
        stage.client.resolve("order:nobody", "retry", task=task)
    with pytest.raises(ValueError, match="write 'done' or 'retry'"):
        stage.client.resolve(key, "finished", task=task)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="result_not_json"):
        stage.client.resolve(key, "done", result=object(), task=task)
    for words in ((), ("--done", "--retry"), ("--retry", "--result", "1"), ("--done", "--result", "{")):
        assert operator.types("resolve", key, *words).returncode == 2, words
    assert record(stage, name)["state"] == "uncertain"
