"""``lease_outbox="once"``: publishing a call writes its record, and a second one is not sent."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery, chain, chord, group
from celery.contrib.testing.worker import start_worker
from celery.exceptions import Ignore, Reject, TaskRevokedError
from celery.signals import before_task_publish
from celery.worker.state import revoked
from kombu.transport.virtual import Transport
from sqlalchemy import create_engine
from sqlalchemy.orm import Session

from celery_leases import Cooldown, LeaseClient, LeasedTask, testing
from celery_leases.concurrency import os_threads
from celery_leases.decide.after_run import FINISHED_CALLS_MAX
from celery_leases.decide.endings import ExitCause
from celery_leases.errors import (
    AlreadyQueued,
    CoolingDown,
    KeyReused,
    KeyUnusable,
    LeaseConfigurationError,
    StoreUnavailable,
    ValueRefused,
)
from celery_leases.options import gather
from celery_leases.outbox import calls as outbox
from celery_leases.record import Record
from celery_leases.stores.sql.outbox import Outbox
from celery_leases.testing.kit import LeaseKit
from celery_leases.web.http import public
from celery_leases.worker import child_exit, processes
from celery_leases.worker.child_exit import EndedDelivery

PATIENCE = 60.0


class Shop:
    """An app whose messages stay in this process, with records in a file."""

    def __init__(self, directory: Path, **conf: Any) -> None:
        self.app = app = Celery("shop", broker="memory://", backend="cache+memory://")
        app.conf.update(
            leases_url="database", leases_database_url=f"sqlite:///{directory}/records.db", **conf
        )
        # A worker looks for messages in memory once a second by default.
        app.conf.broker_transport_options = {"polling_interval": 0.01}
        # Messages in memory are those of the whole process.
        app.conf.task_default_queue = f"queue-{directory.name}"
        self.published: list[str] = []
        self.ran: list[Any] = []
        self.inside: Any = None

        def work(task: Any, number: int, to: str = "home") -> Any:
            self.ran.append(number)
            if self.inside is not None:
                self.inside(task)
            return {"number": number, "to": to}

        named: dict[str, Any] = {"base": LeasedTask, "bind": True, "shared": False}
        once: dict[str, Any] = named | {"lease_outbox": "once"}
        app.task(work, name="work", lease_key="work:{number}", **once)
        app.task(work, name="strict", lease_key="s:{number}", lease_on_busy="raise", **once)
        app.task(work, name="again", lease_key="a:{number}", lease_runs="each", **once)
        app.task(work, name="plain", lease_key="p:{number}", **named)
        app.finalize()
        self.work, self.strict = app.tasks["work"], app.tasks["strict"]
        self.again, self.plain = app.tasks["again"], app.tasks["plain"]
        # Before 5.6 Celery knew a bound method by the id of an object that is gone at once.
        before_task_publish.connect(self.note, weak=False, dispatch_uid=str(directory))

    def note(self, headers: Any = None, **_: Any) -> None:
        """A message is on its way."""
        self.published.append(headers["id"])

    def client(self) -> LeaseClient:
        return LeaseClient.from_app(self.app)


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    shop = Shop(tmp_path)
    yield shop
    before_task_publish.disconnect(dispatch_uid=str(tmp_path))
    processes.close_all()


@pytest.fixture
def worker(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A worker in this process, which leaves the logging of the tests as it was."""
    drain = Transport.drain_events

    def drain_soon(transport: Transport, connection: Any, timeout: float) -> Any:
        return drain(transport, connection, timeout=min(timeout, 0.05))

    # A worker that waits for messages looks whether it should stop every two seconds.
    monkeypatch.setattr(Transport, "drain_events", drain_soon)
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    with start_worker(shop.app, pool="solo", perform_ping_check=False, shutdown_timeout=PATIENCE):
        yield
    root.setLevel(level)
    for added in [handler for handler in root.handlers if handler not in handlers]:
        root.removeHandler(added)


def test_a_queued_key_has_its_time_and_is_not_published_twice(shop: Shop) -> None:
    assert shop.work.lease_status(7).state == "absent"
    first = shop.work.delay(7)
    status = shop.work.lease_status(7)
    assert (status.state, status.call_id, status.message()) == ("pending", first.id, "Queued")
    assert status.queued_at == status.created_at
    assert status.started_at is None
    assert public(status)["queued_at"] == status.queued_at.isoformat()
    assert shop.work.delay(7).id == shop.work.delay("7").id == first.id
    assert shop.work.apply_async((), {"number": 7}, countdown=5).id == first.id
    other = shop.work.delay(8)
    assert shop.published == [first.id, other.id]
    with pytest.raises(KeyReused, match="a text; in the earlier call not given, or its default"):
        shop.work.delay(7, "office")
    with pytest.raises(TypeError):
        shop.work.delay()
    assert len(shop.published) == 2


def test_other_tasks_publish_as_ever_and_ask_nothing(shop, monkeypatch) -> None:
    monkeypatch.setattr(outbox, "publish_once", None)
    shop.plain.delay(7)
    shop.plain.delay(7)
    assert len(shop.published) == 2
    assert shop.plain.lease_status(7).state == "absent"


def test_the_setting_counts_for_tasks_with_a_key(tmp_path: Path) -> None:
    shop = Shop(tmp_path, leases_outbox="once")
    assert shop.plain.delay(7).id == shop.plain.delay(7).id

    def nothing() -> None:
        """A body."""

    keyless = shop.app.task(nothing, base=LeasedTask, name="keyless", shared=False)
    assert keyless.delay().id != keyless.delay().id
    with pytest.raises(LeaseConfigurationError, match="needs a lease_key"):
        gather("t", {"outbox": "once"}, {}, [])
    processes.close_all()


def test_a_queued_key_can_be_refused(shop: Shop) -> None:
    first = shop.strict.delay(7)
    with pytest.raises(
        AlreadyQueued, match=f"s:7 is pending, and belongs to call {first.id}"
    ) as told:
        shop.strict.delay(7)
    assert (told.value.key, told.value.call_id, told.value.state) == ("s:7", first.id, "pending")
    assert shop.published == [first.id]


def test_a_worker_runs_it_and_the_done_key_is_not_published_again(shop: Shop, worker: None) -> None:
    seen: list[str] = []
    shop.inside = lambda task: seen.append(task.delay(7).id)
    first = shop.work.delay(7)
    assert first.get(timeout=PATIENCE) == {"number": 7, "to": "home"}
    assert seen == [first.id]  # from inside of it, too
    assert shop.work.lease_status(7).state == "done"
    assert shop.work.lease_status(7).queued_at is None
    assert shop.work.lease_status(7).started_at is not None
    again = shop.work.delay(7)
    assert (again.id, again.get(timeout=PATIENCE)["number"]) == (first.id, 7)
    assert shop.ran == [7]
    assert shop.published == [first.id]


def test_a_mutex_is_queued_again_once_it_has_ended(tmp_path: Path) -> None:
    shop = Shop(tmp_path)
    with testing.leases(shop.app, eager=False) as kit:
        first = shop.again.delay(7)
        assert shop.again.delay(7).id == first.id
        kit.run_queued()
        second = shop.again.delay(7)
        assert second.id != first.id
        assert kit.status(shop.again, 7).message() == "Queued"
        # A copy of the first message, which comes late, is answered and does not run.
        assert shop.again.apply((7,), task_id=first.id).get() == {"number": 7, "to": "home"}
        assert shop.ran == [7]
        kit.run_queued()
        assert shop.ran == [7, 7]
        assert kit.status(shop.again, 7).attempt == 1


def test_a_run_of_another_call_leaves_a_queued_call_its_place(tmp_path: Path) -> None:
    """So of many copies of a task that publishes itself when it has ended, one stays."""
    shop = Shop(tmp_path)
    with testing.leases(shop.app, eager=False) as kit:
        queued = shop.again.delay(7)
        for copies in range(1, 4):  # they were published without the record
            shop.again.apply((7,))
            assert shop.ran == [7] * copies
            assert shop.again.delay(7).id == queued.id
        assert len(kit.published) == 1
        kit.run_queued()
        assert shop.ran == [7] * 4
        for _ in range(FINISHED_CALLS_MAX + 1):  # until the record has forgotten it
            shop.again.apply((7,))
        following = shop.again.delay(7)  # the queued call has begun, so its place is free
        assert following.id != queued.id
        assert shop.again.delay(7).id == following.id


def test_of_a_task_that_publishes_itself_ten_extra_copies_decay_to_one(
    shop: Shop, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = 30

    def on_success(*_: Any) -> None:
        if len(shop.ran) < runs:
            shop.again.delay(7)

    monkeypatch.setattr(type(shop.again), "on_success", staticmethod(on_success))
    shop.again.delay(7)
    for _ in range(10):
        shop.app.send_task("again", (7,))
    request.getfixturevalue("worker")
    deadline = time.monotonic() + PATIENCE
    while len(shop.ran) < runs and time.monotonic() < deadline:
        time.sleep(0.05)
    shop.plain.delay(1).get(timeout=PATIENCE)  # the worker is past all others
    assert shop.ran == [7] * runs + [1]  # with ten copies, more would have been on their way


def test_a_revoked_call_leaves_the_place_that_another_run_has_left_it(tmp_path: Path) -> None:
    shop = Shop(tmp_path)
    with testing.leases(shop.app, eager=False):
        queued = shop.again.delay(7)
        shop.again.apply((7,))
        records = processes.process_of(shop.app).records
        for call_id in ("another", queued.id):
            assert shop.again.delay(7).id == queued.id
            Outbox(records).forget_message("t:again|a:7", call_id)
        assert shop.again.delay(7).id != queued.id


def test_a_call_that_failed_is_queued_again_when_its_key_has_cooled_down(tmp_path: Path) -> None:
    shop = Shop(tmp_path)
    with testing.leases(shop.app, eager=False) as kit:

        def fail(_: Any) -> None:
            raise Cooldown("1h")

        shop.inside = fail
        first = shop.work.delay(7)
        kit.run_queued()
        assert kit.status(shop.work, 7).state == "cooling"
        assert shop.work.delay(7).id == first.id
        assert len(kit.published) == 1
        kit.tick("1h")
        second = shop.work.delay(7, "office")
        assert second.id != first.id
        status = kit.status(shop.work, 7)
        assert (status.state, status.message(), status.failures) == ("pending", "Queued", 1)
        assert shop.work.delay(7, "office").id == second.id
        shop.inside = None
        assert kit.run_queued()[0].get()["to"] == "office"
        assert kit.status(shop.work, 7).state == "done"


def test_a_failed_key_is_published_after_an_operators_retry(tmp_path: Path) -> None:
    shop = Shop(tmp_path)
    with testing.leases(shop.app, eager=False) as kit:

        def fail(_: Any) -> None:
            raise Cooldown("1h")

        shop.inside = fail
        first = shop.again.delay(7)
        kit.run_queued()
        client = shop.client()
        client.retry("a:7", task="again")
        second = shop.again.delay(7)
        assert second.id not in (first.id, shop.work.delay(7).id)
        assert shop.again.delay(7).id == second.id
        client.forget("a:7", task="again")
        assert shop.again.delay(7).id != second.id


def test_a_crash_between_the_row_and_the_message_is_mended_by_the_relay(shop, monkeypatch) -> None:
    class Killed(BaseException):
        pass

    def killed(*_: Any, **__: Any) -> Any:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(shop.app.amqp, "send_task_message", killed)
        patched.setattr("celery_leases.stores.sql.outbox.Outbox.withdraw", killed)
        with pytest.raises(Killed):
            shop.work.delay(7)
    waiting = shop.work.lease_status(7)
    assert waiting.state == "pending"
    assert shop.work.delay(7).id == waiting.call_id
    assert shop.published == []
    monkeypatch.setattr("celery_leases.stores.sql.outbox.Outbox.due", lambda *_: ["t:work|work:7"])
    take = Outbox.take  # as if the grace of its own process were over
    monkeypatch.setattr(Outbox, "take", lambda outbox, stored_key, **_: take(outbox, stored_key))
    assert [record.key for record in shop.client().relay().published] == ["work:7"]
    assert shop.published == [waiting.call_id]
    assert not shop.client().relay()


def test_a_message_that_the_broker_does_not_take_leaves_the_key_free(shop, monkeypatch) -> None:
    with monkeypatch.context() as patched:

        def refuse(*_: Any, **__: Any) -> Any:
            raise ConnectionError("no broker")

        patched.setattr(shop.app.amqp, "send_task_message", refuse)
        with pytest.raises(ConnectionError):
            shop.work.delay(7)
    assert shop.work.lease_status(7).state == "absent"
    first = shop.work.delay(7)
    assert shop.published == [first.id]
    assert shop.work.lease_status(7).call_id == first.id


def test_a_caller_that_meets_a_withdrawn_call_publishes_its_own(shop, monkeypatch) -> None:
    """Another caller takes the key between the read and the write of this one, and its message is
    not accepted: this caller depends on nobody, and publishes.
    """

    def fail() -> None:
        def refuse(*_: Any, **__: Any) -> Any:
            raise ConnectionError("no broker")

        with monkeypatch.context() as patched:
            patched.setattr(shop.app.amqp, "send_task_message", refuse)
            with pytest.raises(ConnectionError):
                shop.work.delay(7)

    fail()  # the row stays, and belongs to no call
    reassign, others = Outbox.reassign_writes, ["another"]

    def between(outbox: Outbox, *args: Any, **named: Any) -> Any:
        writes = reassign(outbox, *args, **named)
        if others and others.pop():
            fail()
        return writes

    monkeypatch.setattr(Outbox, "reassign_writes", between)
    call = shop.work.delay(7)
    assert not others
    assert call.id
    assert shop.published == [call.id]


@pytest.mark.parametrize("relayed", [False, True])
def test_a_call_that_another_caller_has_got_is_published_although_its_publisher_fails(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, relayed: bool
) -> None:
    """The other caller was told that the work is queued. The relay may have tried it meanwhile."""
    others: list[Any] = []

    def refuse(*_: Any, **__: Any) -> Any:
        if not others:
            others.append(shop.work.delay(7))
            assert not relayed or shop.client().relay().refused
        raise ConnectionError("no broker")

    with monkeypatch.context() as patched:
        patched.setattr(shop.app.amqp, "send_task_message", refuse)
        with pytest.raises(ConnectionError):
            shop.work.delay(7)
    assert shop.work.lease_status(7).call_id == others[0].id
    if relayed:  # it tries again after a minute
        monkeypatch.setattr(Outbox, "due", lambda *_: ["t:work|work:7"])
        take = Outbox.take
        monkeypatch.setattr(Outbox, "take", lambda outbox, key, **_: take(outbox, key))
    assert shop.client().relay()
    assert shop.published == [others[0].id]


def test_a_published_call_is_not_published_by_the_relay(shop: Shop) -> None:
    shop.work.delay(7)
    record = processes.process_of(shop.app).records.read("t:work|work:7")
    assert record is not None
    assert (record.publish_at, record.published_at is None) == (None, False)
    assert record.message is not None
    assert not shop.client().relay()


def test_calls_that_other_tasks_wait_for_are_always_published(shop: Shop, worker: None) -> None:
    """A group and a link would hang; a retry is the same call."""
    first = shop.work.delay(7)
    results = group(shop.work.s(7), shop.work.s(8))()
    assert [found["number"] for found in results.get(timeout=PATIENCE)] == [7, 8]
    assert first.get(timeout=PATIENCE)["number"] == 7
    assert shop.ran.count(7) == 1
    assert len(shop.published) == 3
    tries: list[int] = []

    def retry_once(task: Any) -> None:
        tries.append(task.request.retries)
        if not task.request.retries:
            raise task.retry(countdown=0.1)

    shop.inside = retry_once
    assert shop.work.delay(9).get(timeout=PATIENCE)["number"] == 9
    assert tries == [0, 1]


@pytest.mark.parametrize("kind", ["chain", "link", "chord"])
def test_the_last_step_of_a_canvas_is_always_published(shop: Shop, worker: None, kind: str) -> None:
    """Its options name nothing that follows it; the step before it must not fail either."""
    shop.strict.delay(7).get(timeout=PATIENCE)
    before = len(shop.published)
    step, last = shop.plain.s(1), shop.strict.si(7)
    if kind == "chain":
        assert chain(step, last)().get(timeout=PATIENCE)["number"] == 7
    elif kind == "chord":
        first = shop.plain.si(2)
        assert chord([step, first])(last).get(timeout=PATIENCE)["number"] == 7
    else:
        assert step.apply_async(link=last).get(timeout=PATIENCE)["number"] == 1
    assert len(shop.published) == before + (3 if kind == "chord" else 2)
    assert shop.ran.count(7) == 1


def test_a_plain_call_in_a_body_is_queued_once(shop: Shop, worker: None) -> None:
    seen: list[str] = []

    def call_twice(task: Any) -> None:
        if task.name == "plain":
            seen.extend((shop.work.delay(7).id, shop.work.s(7).apply_async().id))

    shop.inside = call_twice
    shop.plain.delay(1).get(timeout=PATIENCE)
    assert seen[0] == seen[1]
    assert shop.published.count(seen[0]) == 1


def test_arguments_that_a_record_cannot_store_are_refused(shop: Shop) -> None:
    with pytest.raises(LeaseConfigurationError, match="lease_outbox='once' does not take these"):
        shop.again.apply_async((7, (1, 2)), serializer="pickle")
    assert shop.again.lease_status(7).state == "absent"
    assert shop.published == []


def test_a_task_id_of_ones_own_is_returned_whole(shop: Shop) -> None:
    calls = [shop.work.apply_async((7,), task_id="job~2026"), shop.work.delay(7)]
    assert [call.id for call in calls] == ["job~2026", "job~2026"]
    with pytest.raises(LeaseConfigurationError, match="255"):
        shop.work.apply_async((8,), task_id="x" * 256)


def test_a_value_that_the_database_refuses_is_an_error_of_the_call(shop, monkeypatch) -> None:
    """As in a worker: it is no outage, after which the caller would try again."""

    def refuse(*_: Any) -> None:
        raise ValueRefused("the database refuses a value", False)

    records = processes.process_of(shop.app).records
    monkeypatch.setattr(records.database, "touch", refuse)
    with pytest.raises(KeyUnusable, match="refuses a value"):
        shop.work.delay(7)
    assert shop.published == []


def test_a_database_that_does_not_answer_raises_in_the_caller(shop: Shop) -> None:
    shop.app.conf.leases_database_url = "sqlite:////nowhere/at/all.db"
    with pytest.raises(StoreUnavailable):
        shop.work.delay(7)
    assert shop.published == []


def test_eager_calls_are_in_the_same_world(tmp_path: Path) -> None:
    shop = Shop(tmp_path, task_always_eager=True)
    seen: list[Any] = []
    shop.inside = lambda task: seen.append(task.delay(7).id)
    first = shop.work.delay(7)
    assert first.get() == {"number": 7, "to": "home"}
    assert seen == [first.id]
    shop.inside = None
    assert shop.work.delay(7).get() == first.get()
    assert shop.work.lease_status(7).call_id == first.id
    assert shop.strict.delay(8).get()["number"] == 8
    with pytest.raises(AlreadyQueued, match="is done"):
        shop.strict.delay(8)
    assert shop.again.delay(9).get() == shop.again.delay(9).get()
    assert shop.ran == [7, 8, 9, 9]
    processes.close_all()


def test_a_revoked_call_frees_its_key(shop, request, monkeypatch) -> None:
    monkeypatch.setattr(
        child_exit, "close_ended", child_exit._close_ended
    )  # in the worker's thread
    first = shop.work.delay(7)
    revoked.add(first.id)
    request.getfixturevalue("worker")
    with pytest.raises(TaskRevokedError):
        first.get(timeout=PATIENCE)
    shop.plain.delay(1).get(timeout=PATIENCE)  # the worker is past the first
    assert shop.work.lease_status(7).message() == "Cancelled: start it again if it is needed"
    record = processes.process_of(shop.app).records.read("t:work|work:7")
    assert record is not None
    assert record.message is None  # which a rescue would publish
    assert shop.work.delay(7).get(timeout=PATIENCE)["number"] == 7
    assert shop.ran == [1, 7]


@pytest.mark.parametrize(
    ("cause", "said"),
    [
        (ExitCause.REVOKED, "Cancelled: start it again if it is needed"),
        (ExitCause.TIME_LIMIT, "The last attempt failed; start it again if it does not begin"),
    ],
)
def test_a_call_that_celery_ends_after_its_process_died_is_closed_once_its_lease_has_ended(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, cause: ExitCause, said: str
) -> None:
    """Otherwise it would seem to run until the next call of its key. The delivery that Celery has
    ended is another one than that of the process.
    """
    process = processes.process_of(shop.app)
    who = ("call", "a-1", None, (7,), {}, 0, 0, cause, True)
    ended = EndedDelivery(shop.plain, *who)
    dead = replace(ended.call(), token="dead-1")
    process.records.claim(dead, "database")
    states: list[str] = []

    def wait(seconds: float) -> None:
        states.append(read().state)
        passed = read().now + round(seconds * 1e6)
        monkeypatch.setattr(process.records.database, "host_now", lambda: passed)

    def read() -> Record:
        record = process.records.read(dead.key.stored)
        assert record is not None
        return record

    monkeypatch.setattr(os_threads, "Wakeup", lambda: SimpleNamespace(wait=wait))
    child_exit._close_ended(ended)
    record = read()
    assert (states, record.state, record.ended) == (["running"], "pending", "terminated")
    assert not record.resumes
    assert shop.plain.lease_status(7).message() == said


@pytest.mark.every_argument
@pytest.mark.parametrize(
    "error",
    [RuntimeError("no tenant"), Ignore("no tenant"), Reject("no tenant", requeue=False)],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("task", ["work", "plain"])
def test_a_call_that_celery_ends_before_its_lease_is_closed_in_its_record(
    shop: Shop,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    task: str,
) -> None:
    monkeypatch.setattr(child_exit, "close_ended", child_exit._close_ended)
    called = getattr(shop, task)
    tenants: list[int] = []

    def before_start(*_: Any) -> None:
        if not tenants:
            raise error

    monkeypatch.setattr(type(called), "before_start", staticmethod(before_start))
    engine = create_engine(shop.app.conf.leases_database_url)
    LeaseClient.from_app(shop.app)  # creates the tables
    processes.process_of(shop.app).records.check()
    if task == "work":
        first = called.delay(7)
    else:  # its record was written by delay_in()
        with Session(engine) as session, session.begin():
            first = called.delay_in(session, 7)
    request.getfixturevalue("worker")
    shop.strict.delay(1).get(timeout=PATIENCE)  # the worker is past the first
    record = processes.process_of(shop.app).records.read(
        f"t:{task}|{'work' if task == 'work' else 'p'}:7"
    )
    assert record is not None
    assert (record.state, record.ended, record.reason) == (
        "pending",
        "failed",
        "an error outside of its body",
    )
    assert record.failure is not None
    assert "no tenant" in record.failure.message
    assert (record.message, record.resumes) == (None, False)
    if isinstance(error, RuntimeError):
        with pytest.raises(RuntimeError, match="no tenant"):
            first.get(timeout=PATIENCE)
    tenants.append(7)
    again = called.delay(7)
    assert again.id != first.id
    assert again.get(timeout=PATIENCE)["number"] == 7
    assert shop.ran == [1, 7]
    engine.dispose()


def test_an_eager_call_of_a_key_that_cools_down_is_answered(tmp_path: Path) -> None:
    shop = Shop(tmp_path, task_always_eager=True)

    def fail(_: Any) -> None:
        raise Cooldown("1h")

    shop.inside = fail
    assert shop.work.delay(7).state == "FAILURE"
    assert shop.work.lease_status(7).state == "cooling"
    with pytest.raises(CoolingDown):
        shop.work.delay(7).get(timeout=PATIENCE)
    assert shop.ran == [7]
    processes.close_all()


def test_calls_in_an_eager_body_of_a_stored_message_are_queued_once(tmp_path: Path) -> None:
    shop = Shop(tmp_path, task_always_eager=True)
    shop.strict.delay(7)
    refused: list[str] = []

    def call(task: Any) -> None:
        if task.name == "plain":
            for _ in range(2):
                with pytest.raises(AlreadyQueued) as told:
                    shop.strict.delay(7)
                refused.append(told.value.state)

    shop.inside = call
    engine = create_engine(f"sqlite:///{tmp_path}/records.db")
    with Session(engine) as session:
        shop.plain.delay_in(session, 1)
        session.commit()
    engine.dispose()
    assert shop.ran == [7, 1]
    assert refused == ["done", "done"]
    processes.close_all()


def test_a_call_that_expired_in_the_queue_frees_its_key(tmp_path: Path) -> None:
    """By the clock of the records; a worker would discard its message."""
    shop = Shop(tmp_path)
    with testing.leases(shop.app, eager=False) as kit:
        kit.tick("1h")
        first = shop.work.apply_async((7,), expires=60)
        assert shop.work.delay(7).id == first.id
        kit.tick("61s")
        assert shop.work.delay(7).id != first.id


def test_a_call_that_expired_before_it_was_published_is_revoked(tmp_path, monkeypatch) -> None:
    """Another caller relies on it, and no worker will ever discard its message."""
    shop = Shop(tmp_path)
    with testing.leases(shop.app, eager=False) as kit:
        with monkeypatch.context() as patched:
            patched.setattr(Outbox, "sent", lambda *_: None)  # its publisher dies before that
            shop.work.apply_async((7,), expires=60)
        relies = shop.work.delay(7)
        assert relies.state == "PENDING"
        kit.tick("61s")
        assert shop.work.delay(7).id != relies.id
        assert relies.state == "REVOKED"


@pytest.mark.parametrize("state", ["queued", "running", "done"])
def test_the_test_kit_sees_a_key_that_is_queued(tmp_path: Path, state: str) -> None:
    shop = Shop(tmp_path)
    with LeaseKit(shop.app, eager=False) as kit:
        if state == "running":
            with kit.hold(shop.work, 7):
                assert shop.work.delay(7).id.startswith("held-")
            assert kit.published == []
            return
        first = shop.work.delay(7)
        if state == "done":
            kit.run_queued()
        assert shop.work.delay(7).id == first.id
        assert len(kit.published) == 1
