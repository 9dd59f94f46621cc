"""Celery could not store an outcome: its message is returned to the broker, or left to Celery."""

from __future__ import annotations

from types import TracebackType
from typing import Any
from uuid import uuid4

import pytest
from celery import Celery
from celery.exceptions import Reject

from celery_leases import LeasedTask
from celery_leases.worker import requeue


@pytest.fixture
def task(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr("time.sleep", lambda _: None)
    app = Celery("unstored", broker="memory://", set_as_current=False)

    @app.task(base=LeasedTask, name="unstored", shared=False)
    def unstored() -> None:
        """Never called."""

    yield app.tasks[unstored.name]
    app.close()


def mark_as_done(error: Exception) -> TracebackType | None:
    """Raise *error* where Celery stores an outcome; returns its traceback."""
    try:
        raise error
    except type(error) as raised:
        return raised.__traceback__


def returned(task: Any, error: Exception, **fields: Any) -> bool:
    """Whether a delivery is returned because of *error*, which Celery got while it stored an
    outcome.
    """
    given = {"id": "a", "is_eager": False, "delivery_info": {}} | fields
    requeue.return_unstored(task, given, error, mark_as_done(error))
    try:
        raise error
    except type(error):
        sees = task.backend
    if not hasattr(error, requeue.UNSTORED):
        assert sees is task.app.backend
        return False
    reject = sees.prepare_exception(error, "pickle")
    assert isinstance(reject, Reject)
    assert reject.requeue
    assert task.backend is task.app.backend  # once the error is handled
    return True


def test_a_backend_that_does_not_answer_returns_the_delivery_each_time(task: Any) -> None:
    """However long it takes; nothing else would store the outcome."""
    name = uuid4().hex
    assert all(returned(task, ConnectionError("away"), id=name) for _ in range(50))


def test_an_outcome_that_the_backend_refuses_is_left_to_celery_in_the_end(task: Any) -> None:
    name = uuid4().hex
    tries = [returned(task, ArithmeticError("too wide"), id=name) for _ in range(5)]
    assert tries == [True, True, True, False, False]


def test_an_eager_call_has_no_message_to_return(task: Any) -> None:
    assert not returned(task, ConnectionError("away"), is_eager=True)


def test_other_errors_outside_of_the_body_are_left_to_celery(task: Any) -> None:
    """A hook that raises would raise with each delivery."""
    error = ConnectionError("of a hook")
    try:
        raise error
    except ConnectionError:
        requeue.return_unstored(task, {"id": "a", "is_eager": False}, error, error.__traceback__)
    assert not hasattr(error, requeue.UNSTORED)
