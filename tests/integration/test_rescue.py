"""``rescue`` for records whose work has stopped, and ``resolve`` for keys that are uncertain."""

import pytest
import redis
from billiard.exceptions import TimeLimitExceeded
from celery import chain, chord
from celery.exceptions import TaskRevokedError
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.orm import Session
from sqlalchemy.pool import NullPool

from celery_leases.errors import AlreadyDone, LeaseIsLive, UnknownKey
from celery_leases.keys import stored_key
from celery_leases.outbox import calls as outbox
from celery_leases.stores.sql.outbox import Outbox
from celery_leases.worker import processes
from tests.integration.conftest import MakeStage
from tests.integration.deployments import Stage, got, until
from tests.integration.outbox_helpers import (
    ORDERING,
    PG_REDIS,
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
    rescued,
)
from tests.integration.terminal import Terminal

__all__ = ["driver", "engine", "module_stage", "operator"]


def test_what_was_published_and_never_delivered_is_rescued(
    stage: Stage, engine: Engine, operator: Terminal, name: str
) -> None:
    with engine.begin() as connection:
        handle = stage.tasks.order.delay_in(connection, name)
    change(stage, name, "publish_at = NULL")
    assert rescued(stage, name) == 0  # it has only just begun to wait
    let_be_old(stage, name, "order")
    told = operator.sees("rescue", "--dry-run")
    assert f"order:{name}" in told
    assert "would be published" in told
    assert not begins(stage, name)
    assert f"order:{name}" not in operator.sees("rescue", "--dry-run", "--older", "2h")
    assert f"order:{name}" in operator.sees("rescue")
    assert got(handle) == by(name, handle.id)
    let_be_old(stage, name, "order")
    assert rescued(stage, name) == 0
    assert begins(stage, name) == [handle.id]


def test_two_rescues_publish_a_message_once(stage: Stage, engine: Engine, name: str) -> None:
    with engine.begin() as connection:
        handle = stage.tasks.order.delay_in(connection, name)
    let_be_old(stage, name, "order")
    assert sum(at_once(*[lambda: rescued(stage, name)] * 3)) >= 1
    assert got(handle) == by(name, handle.id)
    stage.wait_until_drained()
    assert begins(stage, name) == [handle.id]


def test_a_key_in_a_backlog_gets_a_copy_each_time(stage_factory: MakeStage, name: str) -> None:
    stage = stage_factory(PG_REDIS, home=ORDERING, start=False, env={"TTL": f"{TTL:g}"})
    made = create_engine(stage.database_url, poolclass=NullPool)
    with Session(made) as session, session.begin():
        stage.tasks.order.delay_in(session, name)
    assert (rescued(stage, name), stage.left_over()["queue"]) == (0, 1)
    for copies in (2, 3):
        let_be_old(stage, name, "order")
        outbox = Outbox(processes.process_of(stage.app).records)
        (read,) = outbox.stranded(60, 1000)
        assert [rescued(stage, name) for _ in range(3)] == [1, 0, 0]
        assert stage.left_over()["queue"] == copies
        assert not outbox.publish_again(read)  # another rescue that has read the row before


def test_what_a_rescue_could_not_publish_is_not_counted_and_the_next_one_does(
    stage: Stage, engine: Engine, operator: Terminal, name: str
) -> None:
    with engine.begin() as connection:
        handle = stage.tasks.order.delay_in(connection, name)
    change(stage, name, "publish_at = NULL")
    let_be_old(stage, name, "order")
    away = f"{stage.broker_url.split(':', maxsplit=1)[0]}://127.0.0.1:1"
    done = Terminal(ORDERING, {**stage.env, "CELERY_BROKER_URL": away}).types("rescue")
    assert (done.returncode, done.stdout.strip()) == (1, "0 published")
    assert "1 could not be published" in done.stderr
    let_be_due(stage, name)
    assert f"order:{name}" in operator.sees("rescue", "--dry-run")
    assert f"order:{name}" in operator.sees("rescue")
    assert rescued(stage, name) == 0
    assert got(handle) == by(name, handle.id)
    assert begins(stage, name) == [handle.id]


def test_what_a_killed_rescue_marked_is_published(stage: Stage, engine: Engine, name: str) -> None:
    with engine.begin() as connection:
        handle = stage.tasks.order.delay_in(connection, name)
    change(stage, name, "publish_at = NULL")
    let_be_old(stage, name, "order")
    outbox = Outbox(processes.process_of(stage.app).records)
    (read,) = [row for row in outbox.stranded(60, 1000) if name in row.key]
    assert outbox.publish_again(read)
    assert [rescued(stage, name, dry_run=True), rescued(stage, name), rescued(stage, name)] == [
        1,
        1,
        0,
    ]
    assert got(handle) == by(name, handle.id)


def test_an_enqueued_record_knows_its_retention(stage: Stage, engine: Engine, name: str) -> None:
    with engine.begin() as connection:
        stage.tasks.order.delay_in(connection, name)
    assert record(stage, name)["retention"] == stage.tasks.order.lease_options.retention
    stage.client.forget(f"order:{name}", task=f"{ORDERING}.order")


def test_a_call_enqueued_after_the_key_was_reset_stays_until_it_is_published(
    stage: Stage, engine: Engine, name: str
) -> None:
    with engine.begin() as connection:
        stage.tasks.order.delay_in(connection, name)
    stage.client.forget(f"order:{name}", task=f"{ORDERING}.order")
    assert record(stage, name)["expires_at"]
    with Session(engine) as session, session.begin():
        handle = stage.tasks.order.delay_in(session, name)
        asked = text(
            "SELECT count(*) FROM celery_leases_records WHERE call_id = :id AND expires_at IS NULL"
        )
        assert session.execute(asked, {"id": handle.id}).scalar_one() == 1
    assert got(handle) == by(name, handle.id)


def test_nothing_is_rescued_while_its_lease_lives(stage: Stage, name: str) -> None:
    gate = stage.gate()
    result = stage.tasks.kept.delay(name, str(gate))
    stage.wait_for("begin", name=name)
    let_be_old(stage, name)
    assert rescued(stage, name, dry_run=True) == rescued(stage, name) == 0
    change(stage, name, "publish_at = 1", "kept")
    assert rescued(stage, name, dry_run=True) == rescued(stage, name) == 0
    change(stage, name, "publish_at = NULL", "kept")
    gate.touch()
    assert got(result) == by(name, result.id)


def test_a_lost_message_of_a_key_whose_last_call_had_failed_is_rescued(
    stage: Stage, engine: Engine, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Exception, match="Retry available"):
        got(stage.tasks.order.delay(name, None, "cool"))
    with monkeypatch.context() as lossy:
        lossy.setattr(processes.process_of(stage.app).publisher, "publish", lambda _: None)
        with Session(engine) as session, session.begin():
            handle = stage.tasks.order.delay_in(session, name, None, "cool")
    assert record(stage, name)["publish_at"] is None
    with Session(engine) as session, session.begin():  # it may still be queued
        assert stage.tasks.order.delay_in(session, name, None, "cool").id == handle.id
    assert rescued(stage, name) == 0
    let_be_old(stage, name, "order")
    assert rescued(stage, name) == 1
    assert got(handle) == by(name, handle.id)
    assert begins(stage, name)[1:] == [handle.id]


@pytest.mark.every_argument
@pytest.mark.parametrize("how", ["revoked", "hard time limit"])
def test_a_call_that_celery_has_ended_is_left(stage: Stage, name: str, how: str) -> None:
    limit = {} if how == "revoked" else {"time_limit": 1}
    result = stage.tasks.kept.apply_async((name, str(stage.gate())), **limit)
    stage.wait_for("begin", name=name)
    if how == "revoked":
        result.revoke(terminate=True)
    with pytest.raises((TaskRevokedError, TimeLimitExceeded)):
        got(result)
    until(lambda: record(stage, name, "kept")["reason"] == how, "the end of the attempt")
    let_be_old(stage, name)
    assert rescued(stage, name, dry_run=True) == rescued(stage, name) == 0


def test_live_ones_do_not_hide_a_stranded_one(
    stage: Stage, engine: Engine, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox, "READ_AT_ONCE", 1)
    gate = stage.gate()
    results = [stage.tasks.kept.delay(f"{name}-live-{number}", str(gate)) for number in range(2)]
    for number in range(2):
        stage.wait_for("begin", name=f"{name}-live-{number}")
        let_be_old(stage, f"{name}-live-{number}")
    with engine.begin() as connection:
        stage.tasks.order.delay_in(connection, f"{name}-stranded")
    change(stage, f"{name}-stranded", "publish_at = NULL")
    let_be_old(stage, f"{name}-stranded", "order")
    assert rescued(stage, name, dry_run=True) == 1
    gate.touch()
    for result in results:
        got(result)


@pytest.mark.only(database="postgres")  # there are no row locks on SQLite
def test_a_rescue_skips_a_locked_record(stage: Stage, engine: Engine, name: str) -> None:
    with engine.begin() as connection:
        handles = [
            stage.tasks.order.delay_in(connection, f"{name}-{number}") for number in range(2)
        ]
    for number in range(2):
        let_be_old(stage, f"{name}-{number}", "order")
    lock = text("SELECT 1 FROM celery_leases_records WHERE stored_key = :key FOR UPDATE")
    key = {"key": stored_key(f"{ORDERING}.order", f"order:{name}-0")}
    with engine.begin() as connection:
        connection.execute(lock, key)
        assert rescued(stage, name) == 1
    assert rescued(stage, f"{name}-0") == 1
    for number, handle in enumerate(handles):
        assert got(handle) == by(f"{name}-{number}", handle.id)


@pytest.fixture
def lossy_stage(stage_factory: MakeStage) -> Stage:
    """A worker whose broker forgets everything when :func:`lose` is called."""
    return stage_factory(PG_REDIS, home=ORDERING, env={"TTL": f"{TTL:g}", "VISIBILITY": "3600"})


def lose(stage: Stage) -> None:
    with redis.Redis.from_url(stage.broker_url) as broker:
        keys = broker.keys(f"{stage.queue}*")  # that a worker fetches is in one of a priority
        broker.delete("unacked", "unacked_index", *keys)


def test_what_a_broker_lost_runs_again_with_its_canvas(lossy_stage: Stage, name: str) -> None:
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
    until(lambda: not stage.is_held("kept", f"kept:{name}-chain"), "the leases to end")
    assert rescued(stage, name, dry_run=True) == 4
    assert not stage.left_over()
    assert rescued(stage, name) == 4
    gate.touch()
    stage.worker.start()
    chained = linked.parent.id
    assert got(linked) == by(f"{name}-chain", chained)
    assert [answer.split(" by ")[0] for answer in got(whole)] == [f"{name}-one", f"{name}-two"]
    assert got(cooled) == by(f"{name}-cool", cooled.id)
    assert len(begins(stage, f"{name}-chain")) == 2
    assert len(begins(stage, f"{name}-unkept")) == 1
    stage.wait_until_drained()
    assert rescued(stage, name) == 0


def test_a_limit_below_one_is_refused(operator: Terminal) -> None:
    for command in ("relay", "rescue", "list"):
        for limit in ("0", "-1"):
            done = operator.types(command, "--limit", limit)
            assert (done.returncode, "--limit" in done.stderr) == (2, True), command


def test_an_operator_may_resolve_as_done(stage: Stage, operator: Terminal, name: str) -> None:
    task = f"{ORDERING}.order"
    key = doubtful(stage, name)
    assert stage.client.resolve(key, "done", result={"charge": "ch_1"}, task=task).state == "done"
    assert got(stage.tasks.order.delay(name, None, "doubt")) == {"charge": "ch_1"}
    key = doubtful(stage, f"{name}-cli")
    assert (
        operator.reads("resolve", key, "--done", "--result", '{"charge": "ch_2"}')["state"]
        == "done"
    )
    assert got(stage.tasks.order.delay(f"{name}-cli", None, "doubt")) == {"charge": "ch_2"}
    key = doubtful(stage, f"{name}-none")
    operator.sees("resolve", key, "--task", task, "--done")
    assert got(stage.tasks.order.delay(f"{name}-none", None, "doubt")) is None
    assert (
        len(begins(stage, name))
        == len(begins(stage, f"{name}-cli"))
        == len(begins(stage, f"{name}-none"))
        == 1
    )


def test_an_operator_may_let_a_key_run_again(stage: Stage, operator: Terminal, name: str) -> None:
    key = doubtful(stage, name)
    done = operator.types("resolve", key, "--retry")
    assert (done.returncode, "no message was published" in done.stderr) == (0, True)
    assert record(stage, name)["state"] == "pending"
    later = stage.tasks.order.delay(name, None, "doubt")
    assert got(later) == by(name, later.id)


def test_a_live_lease_is_not_resolved_unless_forced(stage: Stage, name: str) -> None:
    gate = stage.gate()
    task, key = f"{ORDERING}.order", f"order:{name}"
    running = stage.tasks.order.delay(name, str(gate))
    stage.wait_for("begin", name=name)
    with pytest.raises(LeaseIsLive):
        stage.client.resolve(key, "done", result=1, task=task)
    with pytest.raises(LeaseIsLive):
        stage.client.resolve(key, "retry", task=task)
    assert (
        stage.client.resolve(key, "done", result="by hand", task=task, force=True).state == "done"
    )
    gate.touch()
    assert got(running) == "by hand"
    with pytest.raises(AlreadyDone):
        stage.client.resolve(key, "done", task=task)
    with pytest.raises(AlreadyDone):
        stage.client.resolve(key, "retry", task=task)


def test_bad_words_to_resolve_are_refused(stage: Stage, operator: Terminal, name: str) -> None:
    task, key = f"{ORDERING}.order", doubtful(stage, name)
    with pytest.raises(UnknownKey):
        stage.client.resolve("order:nobody", "done", task=task)
    with pytest.raises(UnknownKey):
        stage.client.resolve("order:nobody", "retry", task=task)
    with pytest.raises(ValueError, match="write 'done' or 'retry'"):
        stage.client.resolve(key, "finished", task=task)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="result_not_json"):
        stage.client.resolve(key, "done", result=object(), task=task)
    for words in (
        (),
        ("--done", "--retry"),
        ("--retry", "--result", "1"),
        ("--done", "--result", "{"),
    ):
        assert operator.types("resolve", key, *words).returncode == 2, words
    assert record(stage, name)["state"] == "uncertain"
