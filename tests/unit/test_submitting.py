"""A web request for the work of a key: when its call is published, and what is answered."""

from typing import Any

import pytest
from celery import Celery
from kombu.exceptions import OperationalError

from celery_leases import Failures, LeaseClient, LeasedTask, LeaseStatus, PermanentFailure
from celery_leases.errors import (
    AlreadyQueued,
    BrokerUnavailable,
    KeyReused,
    KeyUnusable,
    LeaseConfigurationError,
)
from celery_leases.web.http import answer
from celery_leases.web.submitting import query_of, submit
from tests.unit.celery_apps import apps

__all__ = ["apps"]

RAN: list[str] = []


@pytest.fixture
def app(apps: None) -> Any:
    """An app whose calls run eagerly, on stores in memory."""
    RAN.clear()
    made = Celery("shop", broker="memory://", set_as_current=False)
    made.conf.task_always_eager = True

    @made.task(
        base=LeasedTask,
        name="shop.order",
        lease_key="order:{key}",
        lease_failures=Failures(resume="never"),
    )
    def order(key, amount=1):
        RAN.append(key)
        if amount < 0:
            raise ValueError(key)
        if amount == 0:
            raise PermanentFailure("no such thing")
        return amount

    @made.task(base=LeasedTask, name="shop.sync", lease_key="sync:{key}", lease_runs="each")
    def sync(key):
        RAN.append(key)

    @made.task(base=LeasedTask, name="shop.index", lease_key="index:{key}", lease_runs="latest")
    def index(key, error=None):
        RAN.append(key)
        if error is not None:
            raise PermanentFailure(key) if error == "final" else ValueError(key)

    return made


def codes(task: Any, *calls: tuple[Any, ...], **given: Any) -> list[int]:
    """The status codes of requests with these arguments, one after the other."""
    return [submit(task, call, **given).status for call in calls]


def test_work_is_published_once_and_then_answered_with_its_result(app: Any) -> None:
    order = app.tasks["shop.order"]
    assert codes(order, ("a",), ("a",)) == [202, 200]
    assert codes(order, ("b",), ("b",), idempotent=True) == [202, 200]
    assert submit(order, (), {"key": "a"}).body["result"] == 1
    assert RAN == ["a", "b"]


def test_a_call_that_was_just_published_is_queued(app: Any, monkeypatch: Any) -> None:
    published: list[Any] = []
    monkeypatch.setattr(LeasedTask, "apply_async", lambda *given, **_: published.append(given))
    for idempotent in (False, True):
        sent = submit(app.tasks["shop.order"], ("a",), idempotent=idempotent)
        told = {name: sent.body[name] for name in ("state", "message", "message_code")}
        assert told == {"state": "pending", "message": "Queued", "message_code": "queued"}
        assert (sent.status, sent.headers["Retry-After"]) == (202, "2")
    assert len(published) == 2


def test_each_call_of_a_task_that_reruns_is_work_of_its_own(app: Any) -> None:
    assert codes(app.tasks["shop.sync"], ("a",), ("a",), ("a",)) == [202, 202, 202]
    assert RAN == ["a", "a", "a"]


def test_what_cools_down_or_has_failed_is_not_published(app, monkeypatch) -> None:
    order, published = app.tasks["shop.order"], []
    assert codes(order, ("a", -1), ("b", 0)) == [202, 202]
    monkeypatch.setattr(LeasedTask, "apply_async", lambda *given, **_: published.append(given))
    assert codes(order, ("a", -1), ("b", 0)) == [429, 409]
    assert published == []


@pytest.mark.parametrize("idempotent", [False, True])
def test_what_an_operator_has_freed_is_published_again(app: Any, idempotent: bool) -> None:
    order = app.tasks["shop.order"]
    codes(order, ("a", -1), idempotent=idempotent)
    LeaseClient.from_app(app).retry("order:a", task="shop.order")
    assert codes(order, ("a", -1), idempotent=idempotent) == [202]
    assert RAN == ["a", "a"]


def test_other_content_and_a_key_that_cannot_be_made_are_errors(app: Any) -> None:
    order = app.tasks["shop.order"]
    codes(order, ("a", 1))
    with pytest.raises(KeyReused):
        submit(order, ("a", 2))
    with pytest.raises(KeyUnusable):
        submit(order, ("\0",))
    assert RAN == ["a"]


def test_options_go_to_the_call_and_the_place_into_the_answer(app, monkeypatch) -> None:
    order, published = app.tasks["shop.order"], []

    def publish(self: Any, *given: Any, **options: Any) -> None:
        published.append((given, options))

    monkeypatch.setattr(LeasedTask, "apply_async", publish)
    monkeypatch.setattr(LeasedTask, "apply_async_in", publish)
    sent = submit(order, ("a",), location=lambda status: f"/at/{status.key}", countdown=3)
    assert sent.headers["Location"] == "/at/order:a"
    session = object()
    submit(order, ("b",), {"amount": 2}, session=session, queue="q")
    assert published == [
        ((("a",), {}), {"countdown": 3}),
        ((session, ("b",), {"amount": 2}), {"queue": "q"}),
    ]


@pytest.mark.parametrize(("idempotent", "code"), [(False, 202), (True, 409)])
def test_a_request_that_comes_second_gets_the_answer_of_an_outstanding_call(
    app: Any, monkeypatch: pytest.MonkeyPatch, idempotent: bool, code: int
) -> None:
    order = app.tasks["shop.order"]
    looks = [LeaseStatus("order:a", "shop.order", state) for state in ("absent", "pending")]
    monkeypatch.setattr(LeasedTask, "lease_status", lambda *_, **__: looks.pop(0))

    def publish(*_: Any, **__: Any) -> None:
        raise AlreadyQueued("too late", "order:a", "c", "pending")

    monkeypatch.setattr(LeasedTask, "apply_async", publish)
    assert submit(order, ("a",), idempotent=idempotent).status == code
    assert looks == []


def test_what_is_queued_once_is_published_once(app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    @app.task(base=LeasedTask, name="shop.once", lease_key="once:{key}", lease_outbox="once")
    def once(key):
        RAN.append(key)

    monkeypatch.setattr(Celery, "send_task", lambda *given, **_: made.append(given))
    app.conf.task_always_eager = False
    app.conf.leases_database_url, app.conf.leases_url = "sqlite://", "database"
    assert codes(once, ("a",), ("a",)) == [202, 202]
    assert codes(once, ("a",), idempotent=True) == [409]
    assert len(made) == 1


def test_a_task_without_a_lease_is_refused(app: Any) -> None:
    """It has no status that could be answered with."""

    @app.task(name="shop.plain")
    def plain():
        raise AssertionError

    with pytest.raises(LeaseConfigurationError, match="base=LeasedTask"):
        submit(plain)


def test_an_outage_of_the_broker_is_an_error_of_celery_leases(app, monkeypatch) -> None:
    def away(*_: Any, **__: Any) -> None:
        raise OperationalError("Error 111 connecting to amqp://user:hunter2@host//")

    monkeypatch.setattr(LeasedTask, "apply_async", away)
    with pytest.raises(BrokerUnavailable, match="order:a: the broker") as caught:
        submit(app.tasks["shop.order"], ("a",))
    assert caught.value.key == "order:a"
    assert "hunter2" not in str(caught.value)
    sent = answer(caught.value)
    assert (sent.status, sent.headers["Retry-After"]) == (503, "5")


def test_each_call_of_a_key_whose_calls_run_is_published(app: Any) -> None:
    """Also if the last one has failed for good. With "latest" a call of a cooling key waits."""
    index, sync = app.tasks["shop.index"], app.tasks["shop.sync"]
    assert codes(sync, ("1",), ("1",)) == [202, 202]
    assert codes(index, ("2",), ("2", "final"), ("2",), ("2", "cooling")) == [202] * 4
    assert len(RAN) == 6
    assert codes(index, ("2",)) == [202]


def test_the_status_of_a_call_that_may_be_replaced_is_asked_for_by_its_id(app: Any) -> None:
    index, order, asked = app.tasks["shop.index"], app.tasks["shop.order"], []

    def location(task: Any) -> Any:
        return lambda status: asked.append(query_of(status, task))

    sent: list[Any] = []
    submit(index, ("1",), location=location(index), publish=lambda *_, **given: sent.append(given))
    assert asked[-1] == {"task": "shop.index", "call": sent[-1]["task_id"]}
    submit(order, ("1",), location=location(order))
    assert asked[-1] == {"task": "shop.order"}
