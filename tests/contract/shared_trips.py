"""Steps that are made to come at the same moment."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from celery_leases.concurrency import shared_trips
from celery_leases.concurrency.shared_trips import SharedTrips
from celery_leases.testing.waits import wait_until


@contextmanager
def trip_under_way(trips: SharedTrips[Any, Any] | None) -> Iterator[SharedTrips[Any, Any]]:
    """A trip that ends with the block, and is not late however long that takes."""
    assert trips is not None
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(shared_trips, "PATIENCE", 30.0)
        own = shared_trips._Step[Any, Any](None)
        trips._under_way = own.trip = [own]
        try:
            yield trips
        finally:
            trips._go_on(own, trips._end(own, own.trip))


def at_once(
    trips: SharedTrips[Any, Any] | None, steps: Sequence[Callable[[], object]]
) -> list[Any]:
    """What the *steps* return or raise, if they begin in one trip."""

    def answer(step: Callable[[], object]) -> object:
        try:
            return step()
        except Exception as error:  # noqa: BLE001 - the test looks at it
            return error

    with ThreadPoolExecutor(len(steps)) as threads:
        with trip_under_way(trips) as shared:
            answers = threads.map(answer, steps)
            wait_until(lambda: len(shared._waiting) == len(steps), 20, "all to wait")
        return list(answers)
