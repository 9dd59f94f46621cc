"""Decorators with ``functools.wraps`` that add or remove arguments: what is called counts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery

from celery_leases import Failures, LeaseClient, LeasedTask
from celery_leases.errors import KeyUnusable
from tests.unit.celery_apps import apps

__all__ = ["apps"]
pytestmark = pytest.mark.usefixtures("apps")
Call = tuple[tuple[Any, ...], dict[str, Any]]
BY_POSITION: Call = ((5,), {})
BY_NAME: Call = ((), {"number": 5})


def passes(function: Any) -> Any:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


def adds_first(function: Any) -> Any:
    """Adds the first argument, for calls with any."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function("session", *args, **kwargs)

    return wrapper


def adds_first_named(function: Any) -> Any:
    """Adds the first argument, and names the others."""

    @functools.wraps(function)
    def wrapper(number: int) -> Any:
        return function("session", number)

    return wrapper


def adds_keyword(function: Any) -> Any:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, session="session", **kwargs)

    return wrapper


def removes_keyword(function: Any) -> Any:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("tenant")
        return function(*args, **kwargs)

    return wrapper


def removes_first(function: Any) -> Any:
    @functools.wraps(function)
    def wrapper(tenant: str, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


def plain(number: int) -> int:
    """Gets the argument of the call."""
    return number


def with_session(session: str, number: int) -> int:
    return number


def with_keyword(number: int, *, session: str) -> int:
    return number


FORMS: dict[str, tuple[Callable[[Any], Any], Any, Call]] = {
    "passes": (passes, plain, BY_POSITION),
    "adds the first, named": (adds_first_named, with_session, BY_POSITION),
    "adds the first, by name": (adds_first, with_session, BY_NAME),
    "adds a keyword": (adds_keyword, with_keyword, BY_POSITION),
    "adds a keyword, by name": (adds_keyword, with_session, BY_NAME),
    "removes a keyword": (removes_keyword, plain, ((5,), {"tenant": "a"})),
    "removes the first, by name": (removes_first, plain, (("a",), {"number": 5})),
}
UNKNOWN: dict[str, tuple[Callable[[Any], Any], Any, Call]] = {
    "adds the first": (adds_first, with_session, BY_POSITION),
    "removes the first": (removes_first, plain, (("a", 5), {})),
}


def task_of(decorator: Any, function: Any, **options: Any) -> Any:
    """A leased task with the decorated body."""
    app = Celery("decorated", broker="memory://", set_as_current=False)
    named = {"base": LeasedTask, "name": "decorated", "shared": False, "lazy": False}
    return app.task(decorator(function), **named, **options)


@pytest.mark.parametrize(("decorator", "function", "call"), FORMS.values(), ids=FORMS)
def test_a_key_is_made_of_the_arguments_of_the_call(decorator, function, call) -> None:
    task = task_of(decorator, function, lease_key="n:{number}")
    assert task.apply(*call).get() == 5
    assert (
        LeaseClient.from_app(task.app, eager=True).status("n:5", task="decorated").state == "done"
    )


@pytest.mark.parametrize("call", [BY_POSITION, BY_NAME])
def test_a_decorator_may_get_the_task_itself_among_all_arguments(call: Call) -> None:
    def bound(self: Any, number: int) -> int:
        return number

    task = task_of(passes, bound, bind=True, lease_key="n:{number}")
    assert task.apply(*call).get() == 5
    assert (
        LeaseClient.from_app(task.app, eager=True).status("n:5", task="decorated").state == "done"
    )


@pytest.mark.parametrize(("decorator", "function", "call"), UNKNOWN.values(), ids=UNKNOWN)
def test_a_key_of_positions_that_nobody_knows_is_refused_with_what_to_write(
    decorator: Any, function: Any, call: Call
) -> None:
    """A key from a wrong argument would be worse. A callable gets the arguments of the call."""
    with pytest.raises(KeyUnusable, match="decorator of the body adds or removes arguments"):
        task_of(decorator, function, lease_key="n:{number}").apply(*call).get()
    task = task_of(decorator, function, lease_key=lambda *args: f"n:{args[-1]}")
    assert task.apply(*call).get() == 5


@pytest.mark.parametrize(
    ("decorator", "function", "call"), (FORMS | UNKNOWN).values(), ids=FORMS | UNKNOWN
)
def test_a_type_error_of_a_decorated_body_is_no_wrong_call(decorator, function, call) -> None:
    @functools.wraps(function)
    def fails(*_: Any, **__: Any) -> None:
        raise TypeError("in the body")

    task = task_of(decorator, fails, lease_failures=Failures(resume="never"))
    result = task.apply(*call)
    with pytest.raises(TypeError, match="in the body"):
        result.get()
    status = LeaseClient.from_app(task.app, eager=True).status(result.id, task="decorated")
    assert status.state == "cooling"
