"""Rows of the table of peer cases (docs/explanation/comparison.md): what other packages get wrong,
and what must happen here.

Every row is a test whose name begins with it: ``grep -rn test_m4 tests``. Those with kills are in
``tests/crash``.
"""

import pickle
from datetime import timedelta
from uuid import uuid4

import pytest
from celery import beat, chain, chord
from celery.schedules import schedule
from kombu.exceptions import OperationalError

from celery_leases.errors import AlreadyDone, KeyReused, LeaseHeld
from tests.integration.conftest import MakeStage
from tests.integration.cooldowns import COOLING, OK, status
from tests.integration.deployments import (
    RABBIT_DATABASE_POSTGRES,
    REDIS_DATABASE_SQLITE,
    REDIS_REDIS_POSTGRES,
    Stage,
    got,
    imported_anew,
    until,
)
from tests.support.servers import PostgresServer, RedisServer
from tests.support.servers.local import free_port


@pytest.mark.parametrize("task", ["retries", "auto"])
def test_m1_a_body_that_fails_twice_is_retried(stage: Stage, name: str, task: str) -> None:
    result = stage.send(task, name, 2)
    assert got(result) == {"name": name, "retries": 2}
    begun = stage.events("begin", name=name)
    assert [event["retries"] for event in begun] == [0, 1, 2]
    assert [event["attempt"] for event in begun] == [1, 2, 3]
    assert {event["id"] for event in begun} == {result.id}
    key = f"{task}:{name}"
    row = stage.row(task, key)
    assert (row["state"], row["failures"], row["crashes"]) == ("done", 0, 0)
    assert not stage.is_held(task, key)


def test_m2_a_second_copy_of_a_running_call_is_rescheduled(stage: Stage, name: str) -> None:
    gate, call = stage.gate(), str(uuid4())
    first = stage.send("work", name, 0.0, str(gate), task_id=call)
    stage.wait_for("begin", name=name)
    stage.send("work", name, 0.0, str(gate), task_id=call)
    stage.wait_for_log(call, "rescheduled in")
    gate.touch()
    value = got(first)
    stage.wait_for_log(call, "answered with the saved result")
    assert got(first) == value
    assert len(stage.events("begin", name=name)) == 1


def test_m3_a_call_by_name_or_beat_is_protected(stage: Stage, name: str) -> None:
    gate = stage.gate()
    options = {"name": name, "gate": str(gate)}
    entry = beat.ScheduleEntry(
        name="tick",
        task=f"{stage.tasks.__name__}.work",
        schedule=schedule(timedelta(hours=1)),
        kwargs=options,
    )
    first = stage.tasks.work.delay(**options)
    stage.wait_for("begin", name=name)
    results = [
        stage.app.send_task(f"{stage.tasks.__name__}.work", kwargs=options),
        beat.Scheduler(stage.app, lazy=True).apply_async(entry, advance=False),
    ]
    for result in results:
        stage.wait_for_log(result.id, "another call holds the key")
    gate.touch()
    value = got(first)
    assert [got(result) for result in results] == [value, value]
    assert len(stage.events("begin", name=name)) == 1


def test_m5_a_call_that_could_not_be_published_holds_nothing(stage: Stage, name: str) -> None:
    nowhere = f"{'amqp' if stage.broker == 'rabbit' else 'redis'}://127.0.0.1:{free_port()}//"
    tasks = imported_anew("tests.apps.leased", stage.env | {"CELERY_BROKER_URL": nowhere})
    tasks.app.conf.update(
        broker_url=nowhere, broker_transport_options={"max_retries": 1, "interval_start": 0}
    )
    with pytest.raises(OperationalError):
        tasks.work.apply_async((name,), retry=False)
    tasks.app.close()
    stage.app.set_current()
    assert stage.find_row("work", f"work:{name}") is None
    assert not stage.is_held("work", f"work:{name}")
    assert got(stage.tasks.work.delay(name))["name"] == name
    assert len(stage.events("begin", name=name)) == 1


def test_m10_a_held_step_of_a_chain_waits_and_goes_on(stage: Stage, name: str) -> None:
    gate, holder = stage.hold("work", name)
    held = stage.tasks.work.si(name, gate=str(gate))
    result = chain(stage.tasks.plain.s("before"), held, stage.tasks.gather.s())()
    stage.wait_for_log(result.parent.id, "another call holds the key")
    assert result.parent.parent.state == "SUCCESS"
    gate.touch()
    value = got(holder)
    assert got(result) == value
    assert got(result.parent) == value
    assert result.parent.parent.state == "SUCCESS"
    assert len(stage.events("begin", name=name)) == 1


def test_m11_a_duplicate_in_a_chord_gets_the_result(stage: Stage, name: str) -> None:
    gate = stage.gate()
    members = [stage.tasks.work.s(name, gate=str(gate)) for _ in range(2)]
    result = chord(members, stage.tasks.gather.s())()
    stage.wait_for_log(f"work:{name}", "another call holds the key")
    gate.touch()
    one, other = got(result)
    assert one == other
    assert one["name"] == name
    assert len(stage.events("begin", name=name)) == 1
    assert len(stage.events("gather", id=result.id)) == 1


def test_m12_an_argument_json_turns_into_a_list_is_one_key(stage: Stage, name: str) -> None:
    first = got(stage.tasks.work.delay((1, name), answer=(1, 2)))
    assert got(stage.tasks.work.delay([1, name], answer=[1, 2])) == first == [1, 2]
    assert len(stage.events("begin", name=[1, name])) == 1
    for spelled in ((1, name), [1, name]):
        status = stage.tasks.work.lease_status(spelled, answer=(1, 2))
        assert (status.state, status.result, status.holder) == ("done", [1, 2], None)


@pytest.mark.parametrize("kind", ["redis", "database"])
def test_m13_a_call_survives_an_outage(stage_factory: MakeStage, name: str, kind: str) -> None:
    if kind == "redis":
        server: RedisServer | PostgresServer = RedisServer().start()
        stage = stage_factory(REDIS_REDIS_POSTGRES, env={"LEASES_URL": server.url})
    else:
        server = PostgresServer().start()
        stage = stage_factory(RABBIT_DATABASE_POSTGRES, urls={"postgres": server.new_database()})
    try:
        assert got(stage.tasks.keyless.delay(f"{name}-before"))
        server.kill()
        result = stage.tasks.work.delay(name)
        stage.wait_for_log(result.id, "rescheduled in")
        assert stage.events("begin", name=name) == []
        server.start()
        assert got(result)["name"] == name
        row = stage.row("work", f"work:{name}")
        assert (row["state"], row["attempt"], row["crashes"]) == ("done", 1, 0)
        assert len(stage.events("begin", name=name)) == 1
        stage.wait_until_drained()
    finally:
        stage.close()
        server.stop()


def test_m14_errors_of_duplicates_arrive_with_their_details(stage: Stage, name: str) -> None:
    gate, holder = stage.hold("refuses", name)
    with pytest.raises(LeaseHeld, match=f"refuses:{name} is held by call {holder.id}") as held:
        got(stage.tasks.refuses.delay(name, gate=str(gate)))
    assert held.value.key == f"refuses:{name}"
    assert 0 < held.value.remaining <= 3
    assert "/" in held.value.holder
    gate.touch()
    got(holder)
    with pytest.raises(AlreadyDone, match=f"refuses:{name} was done by call {holder.id}") as done:
        got(stage.tasks.refuses.delay(name, gate=str(gate)))
    assert (done.value.key, done.value.call_id) == (f"refuses:{name}", holder.id)
    with pytest.raises(KeyReused, match="differ in gate") as reused:
        got(stage.tasks.refuses.delay(name))
    assert reused.value.differing == ["gate"]
    for error in (held.value, done.value, reused.value):
        twin = pickle.loads(pickle.dumps(error))  # noqa: S301 - what we just pickled
        assert (type(twin), twin.args, twin.__dict__.keys()) == (
            type(error),
            error.args,
            error.__dict__.keys(),
        )
    assert not stage.log("WorkerLostError")


def test_c1_a_replayed_member_of_a_chord_is_never_ignored(stage: Stage, name: str) -> None:
    for task in ("work", "ignores"):
        leased = getattr(stage.tasks, task)
        value = got(leased.delay(name))
        result = chord(
            [leased.s(name), leased.s(name), stage.tasks.plain.s(1)], stage.tasks.gather.s()
        )()
        assert got(result) == [value, value, 1]
    assert len(stage.events("begin", name=name)) == 2


def test_c2_a_copy_of_a_running_member_never_fails_it(stage: Stage, name: str) -> None:
    side, gate = stage.side_queue(), stage.gate()
    member = stage.tasks.ignores.s(name, gate=str(gate)).set(queue=side)
    result = chord([member, stage.tasks.plain.s(1)], stage.tasks.gather.s())()
    (call,) = stage.forward(side, copies=2)
    stage.wait_for_log(call, "a copy of this call is running")
    stage.wait_for_log(call, "] rescheduled")
    assert stage.app.AsyncResult(call).state == "PENDING"
    gate.touch()
    assert got(result)[0]["name"] == name
    assert stage.app.AsyncResult(call).state == "SUCCESS"
    stage.wait_until_drained()
    assert len(stage.events("begin", name=name)) == 1


def test_r3_each_call_of_beat_runs_where_each_should(stage: Stage, name: str) -> None:
    """With the same arguments each time; see tests/unit/test_periodic.py for a warning."""
    task = f"{stage.tasks.__name__}.rerun"
    entry = beat.ScheduleEntry(name="tick", task=task, schedule=schedule(1), args=(name,))
    scheduler = beat.Scheduler(stage.app, lazy=True)
    for runs in (1, 2, 3):
        got(scheduler.apply_async(entry, advance=False))
        assert len(stage.events("begin", name=name)) == runs


def test_r4_a_number_and_its_text_are_one_call(stage: Stage, name: str) -> None:
    number = int(uuid4().hex[:12], 16)
    first = got(stage.tasks.work.delay(number))
    assert got(stage.tasks.work.delay(str(number))) == first
    assert len(stage.events("begin", name=number)) == 1
    assert stage.events("begin", name=str(number)) == []


def test_r5_extra_copies_of_a_task_that_publishes_itself_end(stage: Stage, name: str) -> None:
    """One goes on: each body that begins is the one that the body before it has published."""
    stop = stage.gate()
    tasks = stage.tasks
    calls = [tasks.repeats.delay(name, str(stop))]
    calls += [stage.app.send_task(tasks.repeats.name, (name, str(stop))) for _ in range(10)]
    for call in calls:
        got(call)

    def one_goes_on() -> bool:
        begun = stage.events("begin", name=name)[-5:]
        follows = [event["follows"] for event in begun]
        return len(begun) == 5 and [event["id"] for event in begun[1:]] == follows[:-1]

    until(one_goes_on, "the copies to end")
    stop.touch()
    stage.wait_until_drained()


def test_x4_a_connection_error_is_not_kept_for_ever(stage_factory: MakeStage, name: str) -> None:
    stage = stage_factory(REDIS_DATABASE_SQLITE, home=COOLING)
    script = [["raise", "ConnectionError", "gone"], OK]
    with pytest.raises(ConnectionError, match="gone"):
        got(stage.tasks.stops.delay(name, script))
    assert status(stage, "stops", name).state == "cooling"
    assert 0 < (status(stage, "stops", name).retry_after or 0) <= 60
    stage.client.retry(f"stops:{name}", task=f"{COOLING}.stops")
    assert got(stage.tasks.stops.delay(name, script)) == {"name": name, "paid": 2}
