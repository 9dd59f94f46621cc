"""Leased tasks as ``link_error``: they are published, and run under their leases."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery, signals
from celery.app.task import Context

from celery_leases import LeasedTask
from tests.unit.celery_apps import apps

__all__ = ["apps"]

pytestmark = pytest.mark.usefixtures("apps")


class Refused(Exception):
    """An error of the test's own."""


@pytest.fixture
def ran() -> list[tuple[Any, ...]]:
    """What the bodies of errbacks got."""
    return []


@pytest.fixture
def app(ran: list[tuple[Any, ...]]) -> Celery:
    """An app with errbacks of each kind."""
    made = Celery("billing", broker="memory://", backend="cache+memory://")
    made.conf.update(leases_database_url="sqlite://", leases_url="database")

    @made.task(base=LeasedTask, name="refund", lease_key="refund:{order}")
    def refund(request: Any, exc: Any, traceback: Any, order: int) -> None:
        ran.append(("refund", request.id, request.args, exc, traceback, order))

    @made.task(base=LeasedTask, name="of_failed", lease_key="{request.args[0]}")
    def of_failed(request: Any, exc: Any, traceback: Any) -> None:
        ran.append(("of_failed", request.args))

    @made.task(base=LeasedTask, name="immutable", lease_key="{order}")
    def immutable(order: int, amount: int) -> None:
        ran.append(("immutable", order, amount))

    @made.task(base=LeasedTask, name="bound", bind=True, lease_key="{order}")
    def bound(self: Any, call: str, order: int) -> None:
        ran.append(("bound", order))

    @made.task(name="plain")
    def plain(request: Any, exc: Any, traceback: Any) -> None:
        ran.append(("plain", request.id, exc))

    @made.task(name="fails")
    def fails(order: int) -> None:
        raise Refused("no", {order})

    return made


def errbacks(app: Celery) -> list[Any]:
    tasks = app.tasks
    return [
        tasks["refund"].s(order=7), tasks["of_failed"].s(), tasks["immutable"].si(7, 5),
        tasks["bound"].s(7), tasks["plain"].s(),
    ]  # fmt: skip


def test_the_leased_errback_of_two_failed_calls_runs_once(app, ran) -> None:
    app.conf.task_always_eager = True
    calls = [app.tasks["fails"].apply((order,), link_error=errbacks(app)) for order in (1, 2)]
    assert sorted(one[0] for one in ran) == [
        *("bound", "immutable", "of_failed", "of_failed", "plain", "plain", "refund")
    ]
    (_, call, args, error, traceback, order) = next(one for one in ran if one[0] == "refund")
    assert (call, list(args), order) == (calls[0].id, [1], 7)
    assert type(error) is Refused
    assert error.args == ("no", "{1}")  # a set has no JSON form
    assert "Refused" in traceback


def test_a_worker_publishes_leased_errbacks_and_calls_the_others(app, ran) -> None:
    published: dict[str, Any] = {}

    def note(sender: str, body: Any, headers: Any, **_: Any) -> None:
        published[sender] = (body, headers["parent_id"], headers["root_id"])

    signals.before_task_publish.connect(note)
    request = Context(
        id="call", root_id="root", task="fails", args=(object(),), delivery_info={}, errbacks=[]
    )
    given = [app.tasks["refund"].s(order=object()), *errbacks(app)]
    request.errbacks = [dict(errback) for errback in given]
    error = Refused("no")
    app.backend.mark_as_failure("call", error, "Traceback", request=request)
    assert request.errbacks == [dict(errback) for errback in given]
    assert ran == [("plain", "call", error)]
    assert published.keys() == {"refund", "of_failed", "immutable", "bound"}
    assert all(origin == ["call", "root"] for _, *origin in published.values())
    assert published["immutable"][0][0] == (7, 5)
    (seen, exception, traceback), named, _ = published["refund"][0]
    assert (seen["id"], named) == ("call", {"order": 7})
    assert "args" not in seen  # they have no JSON form
    assert exception["exc_type"] == "Refused"
    assert traceback["text"] == "Traceback"
