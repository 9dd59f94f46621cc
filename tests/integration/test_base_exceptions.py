"""A body may end with an exception that is no ``Exception``: only the worker's own end is an
interruption.
"""

import asyncio
from typing import Any

import pytest
from celery import Celery

from celery_leases import Failures, LeaseClient, LeasedTask
from celery_leases.errors import LeaseHeld
from tests.support.records import assert_has


class Stop(BaseException):
    """One of the user's."""


@pytest.mark.parametrize(
    "error",
    [asyncio.CancelledError(), Stop("enough"), GeneratorExit()],
    ids=["asyncio", "own", "generator"],
)
def test_it_is_a_failure_like_any_other_and_counts(error: BaseException) -> None:
    """Taken for an interruption it would be paid for with each delivery."""
    app = Celery("ends", broker="memory://", set_as_current=False)

    @app.task(
        base=LeasedTask,
        bind=True,
        lease_key="ends:{name}",
        name="ends",
        lease_failures=Failures(resume="never"),
    )
    def ends(self: Any, name: str) -> None:
        raise error

    with pytest.raises(type(error)):
        ends.apply(args=("a",))
    status = LeaseClient.from_app(app, eager=True).status("ends:a", task="ends")
    assert_has(status, state="cooling", attempt=1, failures=1, resumes=False)
    assert status.error is not None
    assert status.error.type.endswith(type(error).__name__)
    app.close()


def test_what_a_body_raises_after_its_lease_is_lost_is_no_failure() -> None:
    app = Celery("lost", broker="memory://", set_as_current=False)

    @app.task(
        base=LeasedTask, bind=True, lease_key="lost:{name}", name="lost", lease_on_lost="flag"
    )
    def lost(self: Any, name: str) -> None:
        self.lease._held_lease.lost = "held by another owner"
        raise asyncio.CancelledError

    with pytest.raises(LeaseHeld, match="the lease was lost"):
        lost.apply(args=("a",)).get()
    status = LeaseClient.from_app(app, eager=True).status("lost:a", task="lost")
    assert (status.state, status.reason, status.failures) == ("pending", "lost", 0)
    app.close()
