"""The test kit: leases in memory for tests of users' own tasks."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from sqlalchemy import create_engine
from sqlalchemy.orm import Session

from celery_leases import Cooldown, CoolingDown, LeaseClient, LeasedTask, LeaseLost, testing
from celery_leases.errors import LeaseHeld, Uncertain
from celery_leases.testing.kit import LeaseKit

ran: list[Any] = []


class Shop:
    """An app whose broker and database do not exist."""

    def __init__(self) -> None:
        self.app = app = Celery(
            "shop", broker="redis://127.0.0.1:1/0", backend="redis://127.0.0.1:1/0"
        )
        app.conf.leases_database_url = "postgresql+psycopg://nobody@127.0.0.1:1/nothing"
        self.ran: list[Any] = []
        self.charged: list[str] = []
        self.inside: Any = None

        @app.task(
            base=LeasedTask, bind=True, name="shop.pay", lease_key="pay:{order}", shared=False
        )
        def pay(task: Any, order: int, amount: int = 1) -> dict[str, Any]:
            self.ran.append(order)
            if self.inside is not None:
                self.inside(task.lease)
            reply = task.lease.effect("charge", self.charge, uncertain="rerun")
            return {"order": order, "reply": reply.value}

        @app.task(base=LeasedTask, name="shop.report", lease_key="report:{day}", shared=False)
        def report(day: str) -> str:
            self.ran.append(day)
            if self.inside is not None:
                self.inside(None)
            return day

        app.finalize()
        self.pay, self.report = app.tasks["shop.pay"], app.tasks["shop.report"]

    def charge(self, key: str) -> str:
        """The other side: it knows a repetition by its key."""
        if key not in self.charged:
            self.charged.append(key)
        return "ok"


@pytest.fixture
def shop() -> Shop:
    return Shop()


@pytest.fixture
def kit(shop: Shop) -> Iterator[LeaseKit]:
    with testing.leases(shop.app) as kit:
        yield kit


def test_a_call_runs_once_and_is_replayed(shop: Shop, kit: LeaseKit) -> None:
    with pytest.raises(AssertionError, match="was not published; published was nothing"):
        testing.assert_queued(shop.pay, 7)
    assert testing.status(shop.pay, 7).state == shop.pay.lease_status(7).state == "absent"
    assert shop.pay.delay(7).get() == {"order": 7, "reply": "ok"}
    testing.assert_ran_once(shop.pay, 7)
    with pytest.raises(AssertionError, match="was replayed; the key is done"):
        testing.assert_replayed(shop.pay, 7)
    assert shop.pay.delay(order=7).get() == {"order": 7, "reply": "ok"}
    testing.assert_replayed(shop.pay, 7)
    testing.assert_ran_once(shop.pay, 7)
    assert testing.assert_queued(shop.pay, 7, amount=1).kwargs == {"order": 7}
    with pytest.raises(AssertionError, match=r"shop.pay\(8\) has run 0 times"):
        testing.assert_ran_once(shop.pay, 8)
    assert testing.status("pay:7", task="shop.pay").result == {"order": 7, "reply": "ok"}
    assert LeaseClient.from_app(shop.app).status("pay:7", task="shop.pay").state == "done"
    testing.reset()
    assert testing.status(shop.pay, 7).state == "absent"
    assert shop.pay.delay(7).get()
    assert shop.ran == [7, 7]


def test_outside_of_the_block_the_app_is_as_it_was(shop: Shop) -> None:
    publish, always_eager = type(shop.app).send_task, shop.app.conf.task_always_eager
    with testing.leases(shop.app):
        shop.pay.delay(1)
    assert shop.app.conf.task_always_eager == always_eager is False
    assert shop.app.send_task.__func__ is publish
    with testing.leases(shop.app):
        assert testing.status(shop.pay, 1).state == "absent"
    with pytest.raises(AssertionError, match="with leases"):
        testing.status(shop.pay, 1)


def test_a_held_key_and_a_released_one(shop: Shop, kit: LeaseKit) -> None:
    with testing.hold(shop.pay, 7):
        assert isinstance(shop.pay.delay(7).result, LeaseHeld)
        assert testing.status(shop.pay, 7).state == "running"
        testing.tick("3h")
        assert isinstance(shop.pay.delay(7).result, LeaseHeld)
    assert testing.status(shop.pay, 7).state == "absent"
    with testing.hold("pay:8", task="shop.pay"):
        assert isinstance(shop.pay.delay(8).result, LeaseHeld)
    with pytest.raises(Exception, match="say whose key it is"), testing.hold("pay:8"):
        pass
    assert shop.pay.delay(7).successful()
    with pytest.raises(AssertionError, match="cannot be held"), testing.hold(shop.pay, 7):
        pass
    assert shop.ran == [7]


def test_a_key_that_is_lost_in_the_middle(shop: Shop, kit: LeaseKit) -> None:
    told: list[str] = []

    def inside(lease: Any) -> None:
        shop.inside = None
        try:
            testing.lose(shop.pay, 7)
            lease.check()
        except LeaseLost as lost:
            told.append(lost.reason)
            raise

    shop.inside = inside
    assert isinstance(shop.pay.delay(7).result, LeaseHeld)
    assert told
    assert shop.charged == []
    assert testing.status(shop.pay, 7).state == "pending"
    with pytest.raises(AssertionError, match="no body in this process runs pay:7"):
        testing.lose(shop.pay, 7)


def test_time_passes_when_it_is_moved(shop: Shop, kit: LeaseKit) -> None:
    def fail(_: Any) -> None:
        raise Cooldown("1h", reason="draft not ready")

    shop.inside = fail
    assert isinstance(shop.pay.delay(7).result, CoolingDown)
    assert testing.status(shop.pay, 7).message() == "Retry available in 60 minutes"
    testing.tick("59m")
    assert isinstance(shop.pay.delay(7).result, CoolingDown)
    assert testing.status(shop.pay, 7).retry_after == pytest.approx(60)

    def slow(lease: Any) -> None:
        testing.tick("1h")
        lease.check()

    shop.inside = slow
    testing.tick("1m")
    assert shop.pay.delay(7).successful()
    testing.tick("8d")
    assert testing.status(shop.pay, 7).state == "absent"


def test_a_date_of_the_server_counts_by_the_moved_clock(shop: Shop, kit: LeaseKit) -> None:
    testing.tick("2h")
    until = datetime.now(UTC) + timedelta(hours=2, minutes=10)

    def limited(_: Any) -> None:
        error = ConnectionError("slow down")
        error.response = SimpleNamespace(  # type: ignore[attr-defined]
            status_code=429, headers={"Retry-After": format_datetime(until, usegmt=True)}
        )
        raise error

    shop.inside = limited
    shop.report.delay("monday")
    assert testing.status(shop.report, "monday").retry_after == pytest.approx(600, abs=40)


def test_a_crash_after_the_charge_and_its_resumption(shop: Shop, kit: LeaseKit) -> None:
    dead = testing.crash(shop.pay, 7, at="after:charge")
    assert (dead.point, dead.points) == ("after:charge", ("before:charge", "after:charge"))
    assert testing.status(shop.pay, 7).state == "running"
    assert isinstance(shop.pay.delay(7).result, LeaseHeld)
    testing.tick("1m")
    assert testing.status(shop.pay, 7).state == "abandoned"
    assert dead.resume().get() == {"order": 7, "reply": "ok"}
    assert testing.status(shop.pay, 7).attempt == 2
    assert len(shop.charged) == 1
    with pytest.raises(AssertionError, match="has run 2 times"):
        testing.assert_ran_once(shop.pay, 7)
    with pytest.raises(
        AssertionError,
        match=r"without reaching 'after:refund'; its points are before:charge, after:ch",
    ):
        testing.crash(shop.pay, 8, at="after:refund")


@pytest.mark.parametrize(
    "point", ["before:charge", "saved:charge", "before:return", "after:return"]
)
def test_a_crash_anywhere_else(shop: Shop, kit: LeaseKit, point: str) -> None:
    assert testing.crash(shop.pay, 7, at=point).resume().get()["reply"] == "ok"
    assert len(shop.charged) == 1


def test_what_a_dead_process_still_does_reaches_no_store(shop: Shop, kit: LeaseKit) -> None:
    @shop.app.task(
        base=LeasedTask, bind=True, name="shop.tidy", lease_key="tidy:{number}", shared=False
    )
    def tidy(self: Any, number: int) -> None:
        try:
            self.lease.effect("one", lambda _: 1)
        finally:
            self.lease.effect("two", lambda _: shop.ran.append("two"))

    shop.app.finalize()
    task = shop.app.tasks["shop.tidy"]
    testing.crash(task, 1, at="before:one")
    assert shop.ran == []
    assert [effect.name for effect in testing.status(task, 1).effects] == ["one"]


def test_calls_are_queued_until_they_are_run(shop: Shop) -> None:
    engine = create_engine("sqlite://")
    with testing.leases(shop.app, eager=False) as kit:
        result = shop.pay.delay(7)
        shop.report.apply_async(("monday",), countdown=5)
        shop.app.send_task("shop.report", ("tuesday",))
        shop.app.send_task("elsewhere.work", (1,))
        with pytest.raises(TypeError):
            shop.pay.delay()
        with Session(engine) as session:
            shop.report.delay_in(session, "wednesday")
            assert [call.args for call in kit.published] == [(7,), ("monday",), ("tuesday",), (1,)]
            session.commit()
        assert testing.assert_queued(shop.pay, 7).id == result.id
        assert testing.assert_queued(shop.report, "monday").options["countdown"] == 5
        testing.assert_queued("elsewhere.work", 1)
        testing.assert_queued(shop.report, "wednesday")
        assert testing.status(shop.report, "wednesday").state == "pending"
        assert shop.ran == []
        assert [found.get() for found in testing.run_queued()][1:] == [
            "monday",
            "tuesday",
            "wednesday",
        ]
        assert shop.ran == [7, "monday", "tuesday", "wednesday"]
        assert testing.run_queued() == []
        assert testing.status(shop.pay, 7).call_id == result.id
    engine.dispose()


def test_errors_are_classified_by_the_rules_of_the_task(shop: Shop, kit: LeaseKit) -> None:
    assert testing.classify(ConnectionRefusedError()).rule == "connect-phase"
    assert testing.classify(KeyError("x"), shop.pay).rule == testing.classify(KeyError("x")).rule


def test_the_plugin_has_one_fixture_and_loads_nothing(pytester: pytest.Pytester) -> None:
    code = "import sys, celery_leases.testing.pytest_plugin; sys.exit('celery' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    pytester.makeconftest('pytest_plugins = ["celery_leases.testing.pytest_plugin"]')
    pytester.makepyfile(
        """
        import pytest
        from celery import Celery
        from celery_leases import LeasedTask, testing

        app = Celery("shop", set_as_current=False)

        @app.task(base=LeasedTask, lease_key="work:{number}", name="work", shared=False)
        def work(number):
            return number

        @pytest.fixture
        def leases_app():
            return app

        @pytest.mark.parametrize("time", range(2))
        def test_one(leases, time):
            assert work.delay(1).get() == 1
            leases.assert_ran_once(work, 1)
            testing.assert_ran_once(work, 1)

        def test_without():
            assert not app.conf.task_always_eager
        """
    )
    # A process of its own, as this one has the plugin's fixtures by other names.
    pytester.runpytest_subprocess("-q", "-p", "no:cacheprovider").assert_outcomes(passed=3)


def test_an_effect_in_doubt_stops_for_an_operator(shop: Shop, kit: LeaseKit) -> None:
    @shop.app.task(
        base=LeasedTask, bind=True, name="shop.wire", lease_key="wire:{number}", shared=False
    )
    def wire(self: Any, number: int) -> Any:
        return self.lease.effect("wire", lambda _: number).value

    shop.app.finalize()
    task = shop.app.tasks["shop.wire"]
    assert isinstance(testing.crash(task, 1, at="after:wire").resume().result, Uncertain)
    assert testing.status(task, 1).state == "uncertain"
    assert "after:wire" in testing.assert_survives_crashes(task, 2)
