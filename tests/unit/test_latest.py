"""``lease_runs="latest"``: which call runs, who is answered by it, and no last change is lost."""

from __future__ import annotations

import socket
import time
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from celery.app.task import Context
from celery.exceptions import Ignore
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from celery_leases import LeasedTask
from celery_leases.attempt.run import Execution
from celery_leases.call import Call
from celery_leases.concurrency import os_threads, wait_limit
from celery_leases.decide.after_run import after_run
from celery_leases.decide.answers import Refusal
from celery_leases.decide.before_run import before_run
from celery_leases.decide.claim import claimed, decide, refusal
from celery_leases.decide.endings import ControlFlow, Lost, Returned
from celery_leases.decide.latest import PATIENCE, Burst, arrival_mark, until_turn
from celery_leases.decide.repairs import settled
from celery_leases.decide.verdicts import Facts, Raise, Reschedule, Return, Run
from celery_leases.errors import StoreUnavailable
from celery_leases.options import DATABASE, LeaseOptions
from celery_leases.outbox import in_order
from celery_leases.record import Ended, Record, State
from celery_leases.worker import processes
from celery_leases.worker.app_settings import settings_of
from celery_leases.worker.arrivals import Arrivals
from celery_leases.worker.delivery import Delivery
from celery_leases.worker.headers import ARRIVED, CAME, HEADER, ORDER, Header
from celery_leases.worker.publisher import Publisher
from celery_leases.worker.rescheduling import Rescheduling
from celery_leases.worker.routes import ORIGIN
from tests.unit.celery_apps import apps
from tests.unit.decision_inputs import KEY, NOW, OURS, SECOND, THEIRS, a_call, a_record
from tests.unit.memory_worker import SOON, Bench

__all__ = ["apps"]

OLDER, NEWER = NOW - SECOND, NOW


def latest(order: int, **changes: Any) -> Call:
    """A call of ours."""
    return a_call(**{"runs": "latest", "order": order} | changes)


class TestItsTurn:
    def test_the_newest_call_runs_at_once(self) -> None:
        assert until_turn(latest(NEWER), Burst(NOW, NEWER, OLDER), 0.5) is None
        assert until_turn(latest(NEWER), Burst(NOW), 0.5) is None
        assert until_turn(latest(0, arrived=NEWER), Burst(NOW, NEWER, OLDER), 0.5) is None

    @pytest.mark.parametrize(
        ("changes", "rand", "delay"),
        [
            *(({"reschedules": n}, 1.0, d) for n, d in enumerate((1.0, 2.0, 4.0, 8.0, 10.0, 10.0))),
            ({"reschedules": 2}, 0.0, 3.0),
            ({"starts_when_free": True}, 0.0, 45.0),
        ],
    )
    def test_an_older_call_waits_for_the_newer_one(self, changes, rand, delay) -> None:
        again = until_turn(latest(OLDER, **changes), Burst(NOW, NEWER, OLDER), rand)
        assert again is not None
        assert (again.delay, again.event_type, again.held) == (delay, "held", True)
        assert again.waited_for_newer == 0.001
        assert "newer call" in again.reason

    @pytest.mark.parametrize("waited", [PATIENCE - 0.001, PATIENCE])
    def test_it_runs_itself_if_the_newer_one_does_not_come(self, waited: float) -> None:
        call = latest(OLDER, waited_for_newer=waited)
        again = until_turn(call, Burst(NOW + 60 * SECOND, NEWER, OLDER), 0.5)
        assert (again is None) is (waited == PATIENCE)
        assert again is None or again.waited_for_newer == waited

    def test_the_time_for_which_no_worker_had_its_message_does_not_count(self) -> None:
        """An outage of all workers: the newer one may be the next message."""
        delivery: Any = object.__new__(Delivery)
        came = os_threads.boot_clock() - 2.0
        for waited, fields, known in (
            (3.0, {CAME: came}, 5.0),
            (3.0, {}, 3.0),
            (3.0, {CAME: came + 60.0}, 3.0),
        ):
            delivery.header = Header("billing.send", OURS, waited_for_newer=waited)
            delivery.request = SimpleNamespace(**fields)
            delivery.process = SimpleNamespace(clock=SimpleNamespace(now=lambda: came + 2.0))
            assert delivery._waited_for_newer() == pytest.approx(known, abs=0.1)

    @pytest.mark.usefixtures(apps.__name__)
    @pytest.mark.parametrize("rand", [0.0, 0.5, 1.0])
    @pytest.mark.parametrize("queue_type", ["quorum", "classic"])
    def test_the_countdown_of_a_copy_counts_if_it_waits_at_the_broker(
        self, monkeypatch: pytest.MonkeyPatch, queue_type: str, rand: float
    ) -> None:
        """Else in the worker, as it passes. The broker rounds it up, and never counts less."""
        app = Celery("latest", broker="amqp://")
        app.conf.task_default_queue_type = queue_type
        sent: list[dict[str, Any]] = []
        monkeypatch.setattr(app, "send_task", lambda *_, **options: sent.append(options))
        producer = SimpleNamespace(
            connection=SimpleNamespace(transport=SimpleNamespace(driver_type="amqp")),
            channel=SimpleNamespace(queue_bind=lambda **_: None),
        )
        marks: Any = SimpleNamespace(mark=lambda *_: None, swap_mark=lambda *_: True)
        publisher = Publisher(app)
        monkeypatch.setattr(publisher, "_producer", lambda: nullcontext(producer))

        @app.task(name="billing.send", shared=False)
        def task() -> None: ...

        task.push_request(id=OURS, **{ORIGIN: {"queue": "celery"}})
        header, passed = Header(task.name, OURS), 0.0
        for number in range(4):
            call = latest(OLDER, reschedules=number, waited_for_newer=header.waited_for_newer)
            again = until_turn(call, Burst(NOW + 60 * SECOND, NEWER, OLDER), rand)
            assert again is not None
            header = replace(header, waited_for_newer=again.waited_for_newer)
            publisher.reschedule(task, header, again.delay, marks, KEY.stored, 15.0)
            header = Header.read(sent[-1]["headers"][HEADER])
            passed += again.delay
            at_broker = queue_type == "quorum"
            assert ("countdown" in sent[-1]) is not at_broker
            assert header.waited_for_newer == pytest.approx(0.001 + passed * at_broker)
        call = latest(OLDER, waited_for_newer=header.waited_for_newer)
        again = until_turn(call, Burst(NOW + 60 * SECOND, NEWER, OLDER), rand)
        assert (again is None) is (queue_type == "quorum")

    def test_its_patience_begins_again_with_each_newer_call(self) -> None:
        now = NOW + 20 * SECOND
        call = latest(OLDER, waited_for_newer=20.0)
        for ago in (SECOND, 0):
            assert until_turn(call, Burst(now, now - ago, OLDER), 0.5) is not None

    @pytest.mark.parametrize(
        ("state", "idle", "waits"),
        [(State.DONE, PATIENCE - 1, True), (State.DONE, PATIENCE, False), (State.RUNNING, 0, False)],
    )  # fmt: skip
    def test_its_patience_begins_when_a_run_has_ended(self, state, idle, waits) -> None:
        """The newer one could not begin before. The row of a dead process says nothing."""
        ended = None if state is State.RUNNING else NOW - round(idle * SECOND)
        row = a_record(state, THEIRS, order=OLDER - 1, finished_at=ended)
        call = latest(OLDER, waited_for_newer=60.0)
        burst = Burst(NOW + 60 * SECOND, NEWER, OLDER)
        assert (until_turn(call, burst, 0.5, row) is not None) is waits

    def test_no_call_waits_until_a_clock_that_was_set_back_has_caught_up(self) -> None:
        ahead = NOW + 3600 * SECOND
        assert until_turn(latest(ahead, debounce=5.0), Burst(NOW, ahead, ahead), 0.5) is None
        behind = Burst(NOW, ahead + 1, ahead)
        assert until_turn(latest(ahead), behind, 0.5) is not None
        assert until_turn(latest(ahead, waited_for_newer=PATIENCE), behind, 0.5) is None

    @pytest.mark.parametrize(
        ("newest", "first", "left"),
        [(NOW, NOW, 5.0), (NOW, NOW - 26 * SECOND, 4.0), (NOW - 2 * SECOND, NOW - 9 * SECOND, 3.0),
         (NOW, NOW - 30 * SECOND, None), (NOW - 5 * SECOND, NOW - 6 * SECOND, None), (NOW, 0, 5.0),
         (NOW + 5 * SECOND, NOW, 10.0), (NOW + 6 * SECOND, NOW, None)],
    )  # fmt: skip
    def test_a_debounced_run_begins_after_the_burst(self, newest, first, left) -> None:
        call = latest(newest, debounce=5.0, debounce_max=30.0)
        again = until_turn(call, Burst(NOW, newest, first), 0.5)
        assert (again and (again.delay, again.event_type)) == (left and (left, ""))

    def test_ten_times_the_debounce_is_the_longest_wait_by_default(self) -> None:
        for longer, ends in ((49, False), (50, True)):
            burst = Burst(NOW, NOW, NOW - longer * SECOND)
            assert (until_turn(latest(NOW, debounce=5.0), burst, 0.5) is None) is ends

    @pytest.mark.parametrize(
        ("first", "newest", "behind", "idle", "waits"),
        [(11, 0.1, 0.5, None, False), (9, 0.1, 0.5, None, True), (11, 1.0, 0.0, None, True),
         (10, 0.1, 0.9, None, False), (11, 0.1, 2.5, None, True), (13, 0.1, 2.5, None, False),
         (60, 0.1, 0.5, 0.5, True), (60, 0.1, 0.5, 1.5, False)],
    )  # fmt: skip
    def test_of_calls_that_come_all_the_time_one_runs_at_last(
        self, first, newest, behind, idle, waits
    ) -> None:
        """Although a newer one has come before it could begin."""

        def ago(seconds: float) -> int:
            return NOW - round(seconds * SECOND)

        burst = Burst(NOW, ago(newest), ago(first))
        row = a_record(State.DONE, THEIRS, finished_at=ago(idle)) if idle is not None else None
        again = until_turn(latest(ago(newest + behind + 0.1)), burst, 0.5, row)
        assert (again is not None) is waits

    def test_an_eager_call_does_not_wait(self) -> None:
        call = latest(OLDER, debounce=5.0, reschedulable=False)
        assert until_turn(call, Burst(NOW, NEWER, OLDER), 0.5) is None


def test_a_call_that_has_waited_for_a_long_run_lets_the_newest_run() -> None:
    """The message of the newest one has come, to another worker."""
    bench = Bench()

    def publish(call_id: str) -> Call:
        order = bench.stores.new_order(KEY.stored)
        return bench.call(call_id=call_id, runs="latest", group=None, order=order)

    later: list[Call] = []

    def during(_: object) -> None:
        older, newest = publish("older"), publish("newest")
        again = Execution(bench.process, older).acquire()
        assert isinstance(again, Reschedule)
        copy = bench.again(older, started=False, waited_for_newer=60.0)
        later.extend([copy, newest])
        bench.clock.sleep(60.0)

    first = publish("first")
    bench.run(first, during=during)
    copy, newest = later
    assert isinstance(bench.run(copy), Reschedule)
    assert isinstance(bench.run(newest), Return)
    assert isinstance(bench.run(copy), Return)
    assert bench.ran == [first.token, newest.token]


def test_the_newest_call_stays_the_newest_during_a_long_run() -> None:
    """An older one that has waited for long finds the key held."""
    bench, left = Bench(), []

    def during(_: object) -> None:
        orders = [bench.stores.new_order(KEY.stored) for _ in range(2)]
        older = bench.call(call_id="older", runs="latest", group=None, order=orders[0])
        again = Execution(bench.process, older).acquire()
        bench.clock.sleep(PATIENCE + 0.001)
        assert isinstance(again, Reschedule)
        copy = bench.again(older, started=False, waited_for_newer=PATIENCE)
        assert isinstance(Execution(bench.process, copy).acquire(), Reschedule)
        left.append(bench.stores.burst(KEY.stored).newest - orders[1])

    bench.run(bench.call(runs="latest", group=None, order=1), during=during)
    assert left == [0]


def test_one_call_waits_in_vain_for_a_message_that_never_comes() -> None:
    """Its publisher has died. The other calls that wait run at once, the newest of them last."""
    bench = Bench()
    orders = [bench.stores.new_order(KEY.stored) for _ in range(5)]
    calls = [
        bench.call(call_id=f"call-{n}", runs="latest", group=None, order=orders[n])
        for n in range(4)
    ]

    def copy_of(call: Call) -> Call:
        again = Execution(bench.process, call).acquire()
        assert isinstance(again, Reschedule)
        return bench.again(call, started=False, waited_for_newer=PATIENCE)

    copies = [copy_of(call) for call in calls]
    bench.clock.sleep(PATIENCE + 0.001)
    assert isinstance(bench.run(copies[1]), Return)
    assert isinstance(bench.run(copies[0]), Return)
    assert isinstance(bench.run(copies[3]), Return)
    assert isinstance(bench.run(copies[2]), Return)
    assert bench.ran == [copies[1].token, copies[3].token]
    late = bench.call(call_id="late", runs="latest", group=None, order=orders[4])
    assert isinstance(bench.run(late), Return)
    assert bench.ran[-1] == late.token


@pytest.mark.parametrize(
    ("changes", "noted"),
    [
        ({}, True),
        ({"repeat": True}, True),
        ({"reschedulable": False}, False),
        ({"reschedules": 1, "arrived": 5}, False),
        ({"order": 7}, False),
    ],
)
def test_the_first_arrival_of_a_call_without_an_order_is_noted_for_a_week(changes, noted) -> None:
    """Its message may be delivered again, or a rescue may publish it again."""
    bench = Bench()
    call = bench.call(**({"runs": "latest", "group": None} | changes))
    came = bench.stores.burst(KEY.stored).now
    Execution(bench.process, call).acquire()
    assert call.arrived == changes.get("arrived", came)
    assert bench.stores.burst(KEY.stored).newest == changes.get("order", 0)
    mark = bench.stores.mark(KEY.stored, arrival_mark(OURS))
    assert mark == (str(came) if noted else None)
    bench.clock.sleep(6 * 86_400.0)
    now = bench.stores.burst(KEY.stored).now
    for again, known in (({"repeat": True}, True), ({"message": "{}"}, True), ({}, False)):
        fields: dict[str, Any] = {"repeat": False, "arrived": 0, "reschedulable": True} | again
        copy = replace(call, token=str(again), **fields)
        Execution(bench.process, copy).acquire()
        if noted:
            assert copy.arrived == (came if known else now)
    bench.clock.sleep(86_401.0)
    assert not noted or bench.stores.mark(KEY.stored, arrival_mark(OURS)) is None


@pytest.mark.parametrize(
    ("changes", "newest", "first"),
    [
        ({"order": 7}, 7, 0), ({"order": 3}, 5, 5), ({"order": 0}, 5, 0),
        ({"order": 3, "reschedulable": False}, 5, 1000 * SECOND),
        ({"order": 0, "waited_for_newer": PATIENCE}, 5, 0),
    ],
)  # fmt: skip
def test_a_note_that_the_store_has_lost_is_written_again(changes, newest, first) -> None:
    """A run begins the next burst, unless a newer call is noted. No call without an order replaces
    the newest one.
    """
    bench = Bench()
    bench.stores.note_order(KEY.stored, 5)
    Execution(bench.process, bench.call(runs="latest", group=None, **changes)).acquire()
    burst = bench.stores.burst(KEY.stored)
    assert (burst.newest, burst.first) == (newest, first)


@pytest.mark.parametrize(("before", "delay"), [(None, 5.0), (20.0, 2.0)])
def test_a_call_without_an_order_is_debounced_from_its_arrival(before, delay) -> None:
    bench = Bench()
    if before is not None:
        bench.stores.new_order(KEY.stored)
        bench.clock.sleep(before)
    call = bench.call(runs="latest", group=None, debounce=5.0, debounce_max=22.0)
    again = Execution(bench.process, call).acquire()
    assert isinstance(again, Reschedule)
    assert again.delay == pytest.approx(delay)
    assert bench.stores.burst(KEY.stored).newest == call.arrived


@pytest.mark.parametrize("debounce", [None, 0.5])
def test_calls_that_come_all_the_time_do_not_keep_their_key_from_running(
    debounce: float | None,
) -> None:
    """Each of them is replaced before a worker has it."""
    bench = Bench()
    longest = 5.0 if debounce else PATIENCE
    before: Call | None = None
    for number in range(200):
        order = bench.stores.new_order(KEY.stored)
        options = {"runs": "latest", "group": None, "debounce": debounce}
        newest = bench.call(call_id=f"call-{number}", order=order, **options)
        if before is not None:
            bench.run(before)
        before = newest
        bench.clock.sleep(0.1)
    assert len(bench.ran) == pytest.approx(20.0 / longest, abs=1)


@pytest.mark.parametrize("slow", ["end_burst", "note_order"])
def test_no_body_begins_after_its_lease_because_the_store_was_slow_to_note_its_run(
    monkeypatch: pytest.MonkeyPatch, slow: str
) -> None:
    bench = Bench()
    monkeypatch.setattr(bench.stores, slow, lambda *_: bench.clock.sleep(60.0))
    order = bench.stores.new_order(KEY.stored)
    bench.stores.new_order(KEY.stored)  # a newer call, which never comes
    bench.clock.sleep(60.0)
    call = bench.call(runs="latest", group=None, order=order, waited_for_newer=PATIENCE)
    assert isinstance(bench.run(call), Reschedule)
    assert bench.ran == []


def test_a_message_of_a_finished_call_that_comes_again_does_not_run() -> None:
    """Also if a newer call has failed meanwhile, and will run again."""
    bench = Bench()
    calls = [bench.call(call_id=f"call-{n}", runs="latest", group=None, order=n) for n in (1, 2)]
    bench.run(calls[0])
    bench.run(calls[1], SOON)
    bench.clock.sleep(60.0)
    again = bench.again(calls[0], waited_for_newer=60.0, started=False)
    assert isinstance(bench.run(again), Return)
    assert bench.ran == [call.token for call in calls]


def test_calls_that_arrive_while_the_lease_store_is_down_keep_their_order() -> None:
    """Their copies may arrive in another order."""

    class Delivery(Rescheduling):
        process = Bench().process
        request = SimpleNamespace(is_eager=False, headers=None)
        header, header_unreadable, time_limits = Header("billing.send", OURS), False, None

        def _publish(self, *_: object) -> bool:
            return True

    delivery = Delivery()
    again = Reschedule(1.0, "the store does not answer", event_type="", unavailable=True)
    with pytest.raises(Ignore):
        delivery._reschedule(latest(0, arrived=NOW), again)
    assert delivery.header.arrived == NOW


@pytest.mark.usefixtures("apps")
@pytest.mark.parametrize(
    ("redelivered", "order", "arrived"), [(False, 5, 9), (True, 5, 5), (True, 0, 9)]
)
def test_a_call_that_comes_again_counts_from_its_publication(redelivered, order, arrived) -> None:
    """Its first arrival, before that of calls without an order that came meanwhile, is unknown."""
    app = Celery(set_as_current=False)
    app.conf.update(leases_url="memory://", leases_database_url="memory://")

    @app.task(base=LeasedTask, lease_key="k", lease_runs="latest", name="sync")
    def task() -> None:
        pass

    headers = {"id": "c", ORDER: ["c", order]} if order else {"id": "c"}
    request = Context(headers, delivery_info={"redelivered": redelivered}, **{ARRIVED: 9})
    delivery = Delivery(task, request, (), {}, int)
    delivery.process = replace(Bench().process, settings=settings_of(app))
    assert delivery._call().arrived == delivery.header.arrived == arrived


@pytest.mark.usefixtures("apps")
def test_without_the_lease_store_a_call_is_published_in_the_order_of_the_local_clock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By its arrival it could look newer than the calls that are published while it is queued."""
    app = Celery("unpublished", set_as_current=False)
    options = {"base": LeasedTask, "lease_key": "k", "lease_runs": "latest"}

    @app.task(name="newest", **options)  # type: ignore[untyped-decorator]
    def task() -> None:
        pass

    published: list[dict[str, Any]] = []

    def away(_: object) -> None:
        raise StoreUnavailable("away")

    monkeypatch.setattr(processes, "process_of", away)
    before = time.time()
    in_order.publish(task, lambda *_, **given: published.append(given), (), {"task_id": "a"})
    call_id, order = published[0]["headers"][ORDER]
    assert call_id == "a"
    assert before <= order / 1e6 + 1e-6 <= time.time() + 1e-5


@pytest.mark.usefixtures("apps")
@pytest.mark.parametrize(
    ("waits", "countdown", "order"),
    [(0.0, 0, NOW + 1), (599.0, 0, NOW + 599 * SECOND), (599.0, 60, NOW + 600 * SECOND)],
)
def test_without_the_lease_store_a_publisher_goes_on_from_the_last_order(
    monkeypatch: pytest.MonkeyPatch, waits: float, countdown: int, order: int
) -> None:
    """The clock of this machine may differ from that of the store. It counts after ten minutes."""
    app = Celery("unpublished", set_as_current=False)

    @app.task(base=LeasedTask, lease_key="k", lease_runs="latest", name="newest")
    def task() -> None:
        pass

    now, process, published = [10.0], Bench().process, []

    def publish(countdown: int = 0) -> int:
        given = {"countdown": countdown}
        in_order.publish(task, lambda *_, **given: published.append(given), (), given)
        return int(published[-1]["headers"][ORDER][1])

    def away(_: str) -> int:
        raise StoreUnavailable("away")

    monkeypatch.setattr(processes, "process_of", lambda _: process)
    monkeypatch.setattr(os_threads, "boot_clock", lambda: now[0])
    monkeypatch.setattr(process.leases, "new_order", lambda _: NOW, raising=False)
    monkeypatch.setattr(process.leases, "burst", lambda _: Burst(NOW + SECOND), raising=False)
    publish(countdown)
    for name in ("new_order", "burst"):
        monkeypatch.setattr(process.leases, name, away)
    now[0] += waits
    assert publish() == order
    now[0] += 601.0
    assert abs(publish() / SECOND - time.time()) < 10.0


@pytest.mark.usefixtures("apps")
def test_a_frozen_lease_store_delays_a_publisher_no_longer_than_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without the limit it takes the timeout of a request, 2 s."""
    monkeypatch.setattr(in_order, "LONGEST_WAIT", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as frozen:
        app = Celery("frozen", set_as_current=False)
        app.conf.leases_url = f"redis://127.0.0.1:{frozen.getsockname()[1]}/0"
        app.conf.leases_database_url = "sqlite:///never-opened.db"

        @app.task(base=LeasedTask, lease_key="k", lease_runs="latest")
        def task() -> None:
            pass

        published: list[dict[str, Any]] = []
        until, taken = wait_limit.until.get(), []
        for _ in range(3):  # the first one imports much
            began = time.monotonic()
            in_order.publish(task, lambda *_, **given: published.append(given), (), {})
            taken.append(time.monotonic() - began)
        assert 0.1 <= min(taken) < 1.5
    assert published[0]["headers"][ORDER][1] > 0
    assert wait_limit.until.get() == until


def test_the_clock_of_the_lease_store_is_read_again_soon_if_that_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A call without an order counts from its arrival, until then by the local clock."""
    now, asked = [10.0], []
    app = SimpleNamespace(now=lambda: datetime.fromtimestamp(1000.0 + now[0], UTC))
    monkeypatch.setattr(os_threads, "boot_clock", lambda: now[0])
    monkeypatch.setattr(os_threads, "start_thread", asked.append)
    arrivals = Arrivals()
    for moment in (10.0, 10.5, 11.5):
        now[0] = moment
        assert arrivals.order(app) == (1000 + moment) * SECOND
    assert len(asked) == 2
    arrivals.compare(SimpleNamespace(leases=SimpleNamespace(burst=lambda _: Burst(NOW))))  # type: ignore[arg-type]
    now[0] = 100.0
    assert arrivals.order(None) > NOW
    assert len(asked) == 2


def test_a_clock_that_was_compared_long_ago_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clocks drift, and a worker may get no call for a day."""
    now, asked = [10.0], []
    app = SimpleNamespace(now=lambda: datetime.fromtimestamp(1000.0 + now[0], UTC))
    monkeypatch.setattr(os_threads, "boot_clock", lambda: now[0])
    monkeypatch.setattr(os_threads, "start_thread", asked.append)
    arrivals = Arrivals()
    arrivals.compare(SimpleNamespace(leases=SimpleNamespace(burst=lambda _: Burst(5_000_000))))  # type: ignore[arg-type]
    for moment, order in ((609.9, 604.9), (610.1, 1610.1)):
        now[0] = moment
        assert arrivals.order(app) == round(order * SECOND)
    assert len(asked) == 1


def test_a_slow_request_does_not_make_arrivals_look_late(monkeypatch: pytest.MonkeyPatch) -> None:
    now, delays = [10.0], iter([0.5, 2.0, 0.001])

    def burst(_: str) -> Burst:
        now[0] += next(delays)
        return Burst(NOW + round(now[0] * SECOND))

    process: Any = SimpleNamespace(leases=SimpleNamespace(burst=burst))
    monkeypatch.setattr(os_threads, "boot_clock", lambda: now[0])
    arrivals = Arrivals()
    arrivals.compare(process)
    assert arrivals.order(None) == NOW + round(now[0] * SECOND) + 1_000


class TestTheRow:
    @pytest.mark.parametrize(
        ("state", "changes", "older", "newer"),
        [
            (State.DONE, {}, Refusal.DONE, None),
            (State.FAILED, {}, Refusal.FAILED, None),
            (State.UNCERTAIN, {}, Refusal.FAILED, Refusal.FAILED),
            (State.COOLING, {"ended": Ended.FAILED}, Refusal.REPORTED, None),
            (State.COOLING, {"ended": Ended.FAILED, "resumes": True}, None, None),
            (State.PENDING, {"ended": Ended.LOST}, None, None),
        ],
    )
    def test_a_run_answers_the_calls_that_are_not_newer(self, state, changes, older, newer) -> None:
        row = a_record(state, THEIRS, order=NEWER, **changes)
        assert [refusal(row, latest(order)) for order in (OLDER, NEWER)] == [older, older]
        assert refusal(row, latest(NEWER + 1)) is newer

    def test_another_call_has_a_generation_of_its_own(self) -> None:
        row = a_record(State.COOLING, THEIRS, order=OLDER, failures=3, attempt=4, generation=7)
        new = claimed(row, latest(NEWER), DATABASE, NOW)
        assert (new.order, new.generation, new.attempt, new.failures) == (NEWER, 8, 1, 0)
        again = claimed(replace(row, call_id=OURS), latest(NEWER), DATABASE, NOW)
        assert (again.generation, again.attempt, again.failures) == (7, 5, 3)

    @pytest.mark.parametrize(("state", "kept"), [(State.DONE, NEWER), (State.PENDING, 0)])
    def test_a_run_of_another_task_that_shares_the_key_leaves_the_order(self, state, kept) -> None:
        """An older call must not run after the newest, and one that will be retried must."""
        row = a_record(state, THEIRS, order=NEWER)
        assert claimed(row, a_call(runs="each"), DATABASE, NOW).order == kept

    def test_a_call_of_a_cooling_key_waits(self) -> None:
        """An error would lose the change."""
        row = a_record(State.COOLING, THEIRS, order=OLDER, retry_at=NOW + 60 * SECOND)
        for on_busy in (None, "raise", "ignore"):
            verdict = before_run(latest(NEWER, on_busy=on_busy), Facts(record=row))
            assert isinstance(verdict, Reschedule)


@dataclass
class Message:
    """A message in the broker."""

    call: Call
    due: int


@dataclass
class Began:
    """A body that has begun."""

    place: int
    at: int


class Key(RuleBasedStateMachine):
    """One key with its publishers, broker and workers. Any of them may die at any step."""

    def __init__(self) -> None:
        super().__init__()
        self.now = NOW
        self.burst = Burst(NOW)
        self.row: Record | None = None
        #: In the order in which they were published; each arrives before the next one.
        self.queue: list[Call] = []
        self.messages: list[Message] = []
        #: By call: its place among all calls, and when it was published.
        self.published: dict[str, tuple[int, int]] = {}
        self.runs: list[Began] = []
        self.running: tuple[Message, Began] | None = None
        self.answered: set[str] = set()

    @rule(message=st.booleans(), ordered=st.booleans())
    def publish(self, message: bool, ordered: bool) -> None:
        """Without a message the publisher has died between the two. Another one does not know of
        orders.
        """
        order = max(self.now, self.burst.newest + 1) if ordered else 0
        if ordered:
            self.burst = Burst(self.now, order, self.burst.first or order)
        self.pass_time(1)
        if message:
            place = len(self.published)
            self.published[f"call-{place}"] = place, self.now
            options = LeaseOptions(key="k:{id}", runs="latest")
            call = a_call(call_id=f"call-{place}", options=options, order=order)
            self.queue.append(call)

    @precondition(lambda self: self.queue)
    @rule()
    def arrive(self) -> None:
        """The next message arrives at a worker."""
        self.pass_time(1)
        self.messages.append(Message(replace(self.queue.pop(0), arrived=self.now), self.now))

    @rule(microseconds=st.sampled_from([1, SECOND, 9 * SECOND, 30 * SECOND]))
    def pass_time(self, microseconds: int) -> None:
        """All clocks are one. The lease of a body that runs is renewed."""
        self.now += microseconds
        if self.row is not None:
            renewed = self.now + 15 * SECOND if self.running else self.row.lease_until
            self.row = replace(self.row, now=self.now, lease_until=renewed)
        self.burst = replace(self.burst, now=self.now)

    @precondition(lambda self: any(each.due <= self.now for each in self.messages))
    @rule(data=st.data())
    def deliver(self, data: Any) -> None:
        """Any message that is due."""
        due = [each for each in self.messages if each.due <= self.now]
        self.handle(due[data.draw(st.integers(0, len(due) - 1))])

    def handle(self, message: Message) -> None:
        call = replace(message.call, token=f"t-{self.now}")
        self.messages.remove(message)
        again = until_turn(call, self.burst, 0.5)
        if again is not None or call.repeat:
            verdict = before_run(call, Facts(record=self.row, rand=0.5))
            if not isinstance(verdict, Run):
                return self.end(call, verdict)
        if again is not None:
            return self.end(call, again)
        if call.repeat and (again := until_turn(call, self.burst, 0.5, self.row)) is not None:
            return self.end(call, again)
        if decide(self.row, call, DATABASE) is not None:
            return self.end(call, before_run(call, Facts(record=self.row, rand=0.5)))
        self.row = claimed(self.row, call, DATABASE, self.now)
        self.burst = replace(self.burst, first=self.now * (self.burst.newest > call.order))
        began = Began(self.published[call.call_id][0], self.now)
        self.runs.append(began)
        self.running = Message(call, self.now), began
        return None

    def end(self, call: Call, verdict: Any) -> None:
        if isinstance(verdict, Return | Raise):
            assert self.row is not None
            place, at = self.published[call.call_id]
            # A run with these arguments, or newer ones, began after the call was published.
            assert any(run.place >= place and run.at >= at for run in self.runs)
            if isinstance(verdict, Return):
                assert int(verdict.value) >= place
            self.answered.add(call.call_id)
            return
        assert isinstance(verdict, Reschedule), verdict
        copied = replace(
            call,
            repeat=True,
            reschedules=call.reschedules + 1,
            started=call.started or verdict.started,
            waited_for_newer=verdict.waited_for_newer and verdict.waited_for_newer + verdict.delay,
        )
        self.messages.append(Message(copied, self.now + round(verdict.delay * SECOND)))

    @precondition(lambda self: self.running is not None)
    @rule(how=st.sampled_from(["return", "retry", "lost", "crash"]))
    def finish(self, how: str) -> None:
        """The body that runs ends."""
        assert self.running is not None
        assert self.row is not None
        (message, began), self.running = self.running, None
        call = replace(message.call, repeat=True, started=True)
        if how == "crash":
            self.messages.append(Message(call, self.now))
            return
        ending: Any = Returned(began.place, str(began.place))
        if how == "retry":
            ending = ControlFlow(RuntimeError(), runs_again=True, delay=2.0)
            call = replace(call, retries=call.retries + 1)
        if how == "lost":
            ending = Lost("it was")
        if not self.row.is_attempt(State.RUNNING, message.call.token):
            self.messages.append(Message(call, self.now))  # another attempt has the key
            return
        self.row = settled(self.row, after_run(message.call, self.row, ending), self.now)
        if how == "return":
            self.answered.add(call.call_id)
        else:
            self.messages.append(Message(call, self.now + 2 * SECOND))

    def teardown(self) -> None:
        """Without further faults all calls are answered, the last one by a run of its own."""
        while self.queue:
            self.arrive()
        for _ in range(100 * (len(self.messages) + 1)):
            if self.running is not None:
                self.finish("return")
            elif due := [each for each in self.messages if each.due <= self.now]:
                self.handle(due[0])
            elif self.messages:
                self.pass_time(min(each.due for each in self.messages) - self.now)
        assert not self.messages
        assert self.answered == set(self.published)
        if self.published:
            place, at = max(self.published.values())
            assert any(run.place >= place and run.at >= at for run in self.runs)
            assert self.runs[-1].place == place


TestKey = Key.TestCase
TestKey.settings = settings(
    max_examples=40, stateful_step_count=25, deadline=None, phases=(Phase.generate,)
)
