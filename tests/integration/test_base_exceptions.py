"""A body may end with an exception that is no ``Exception``: only the worker's own end is an interruption."""

import asyncio
from typing import Any

import pytest
from celery import Celery

from celery_leases import LeasedTask, apps


class Stop(BaseException):
    """One of the user's."""


@pytest.mark.parametrize(
    "error", [asyncio.CancelledError(), Stop("enough"), GeneratorExit()], ids=["asyncio", "own", "generator"]
)
def test_it_is_a_failure_like_any_other_and_counts(error: BaseException) -> None:
    """Taken for an interruption it would run again with each delivery, and be paid for each time."""
    app = Celery("ends", broker="memory://", set_as_current=False)

    @app.task(base=LeasedTask, bind=True, lease_key="ends:{name}", name="ends", lease_after_cooldown="stop")
    def ends(self: Any, name: str) -> None:
        raise error

    with pytest.raises(type(error)):
        ends.apply(args=("a",))
    status = apps.parts_of(app, eager=True).client.status("ends:a", task="ends")
    assert (status.state, status.attempt, status.failures, status.resumes) == ("cooling", 1, 1, False)
    assert status.error is not None
    assert status.error.type.endswith(type(error).__name__)
    app.close()
