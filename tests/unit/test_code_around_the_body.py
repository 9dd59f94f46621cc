"""The user's code around the body may raise what ends a process: as in the body, that fails the
call. Otherwise the process would end with each delivery, and nobody would count that.
"""

from __future__ import annotations

import signal
from typing import Any

import pytest
from celery import Celery

from celery_leases import LeaseClient, LeasedTask
from celery_leases.errors import KeyUnusable
from celery_leases.worker.headers import group_of, key_of

ENDS = pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])


def app() -> Celery:
    """An app that needs no server."""
    return Celery("around", broker="memory://", set_as_current=False)


def body() -> None:
    """The body of a task."""


@ENDS
@pytest.mark.parametrize("option", ["key", "fingerprint", "group"])
def test_a_function_of_the_arguments_that_ends_its_process_makes_no_key(error, option) -> None:
    def raises(name: str) -> str:
        raise error("no")

    options: dict[str, Any] = {"lease_key": "{name}", f"lease_{option}": raises}

    @app().task(base=LeasedTask, name="around", shared=False, **options)
    def around(name: str) -> None:
        """Never called."""

    def make() -> None:
        key_of(around, None, "id", ("a",), {}, 0)
        group_of(around, None, ("a",), {}, 0)

    with pytest.raises(KeyUnusable, match=f"raised {error.__name__}: no"):
        make()


def test_a_fingerprint_that_raises_is_named() -> None:
    @app().task(
        base=LeasedTask,
        name="around",
        shared=False,
        lease_key="{name}",
        lease_fingerprint=lambda name: 1 / len(name),
    )
    def around(name: str) -> None:
        """Never called."""

    with pytest.raises(KeyUnusable, match="lease_fingerprint raised TypeError"):
        key_of(around, None, "id", (1,), {}, 0)


@ENDS
@pytest.mark.parametrize(
    "hook", ["before_start", "on_success", "on_retry", "on_failure", "after_return"]
)
@pytest.mark.parametrize("kind", [lambda hook: hook, staticmethod], ids=["method", "static"])
def test_a_hook_that_ends_its_process_raises_an_error(error, hook, kind) -> None:
    def raises(*_: Any) -> None:
        raise error("no")

    task = app().task(
        base=type("Base", (LeasedTask,), {"abstract": True, hook: kind(raises)}),
        name="around",
        shared=False,
    )(body)
    with pytest.raises(RuntimeError, match=rf"{hook}\(\) raised {error.__name__}: no"):
        getattr(task, hook)("id", (), {})


def test_a_hook_is_ended_by_the_worker() -> None:
    class Base(LeasedTask):
        abstract = True

        def before_start(self, *_: Any) -> None:
            raise SystemExit(-(256 - signal.SIGTERM))

    task = app().task(base=Base, name="around", shared=False)(body)
    with pytest.raises(SystemExit):
        task.before_start("id", (), {})


@ENDS
def test_a_result_whose_methods_end_the_process_does_not_undo_success(error) -> None:
    class Result(dict[str, str]):
        def items(self) -> Any:
            raise error

    ours = app()

    @ours.task(base=LeasedTask, name="around", shared=False, lease_key="{name}")
    def around(name: str) -> Any:
        return Result(id="1")

    around.apply(("a",))
    status = LeaseClient.from_app(ours, eager=True).status("a", task="around")
    assert (status.state, status.reason) == ("done", "result_not_json")
    ours.close()
