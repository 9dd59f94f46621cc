"""Steps that are made to come at the same moment."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from celery_leases.concurrency.shared_trips import SharedTrips
from celery_leases.testing.waits import wait_until


def at_once(
    trips: SharedTrips[Any, Any] | None, steps: Sequence[Callable[[], object]]
) -> list[Any]:
    """What the *steps* return or raise, if one goes first and all others in the next trip."""
    assert trips is not None
    together, first = trips._together, True

    def begun(given: Sequence[Any]) -> Sequence[Any]:
        nonlocal first
        if first:
            first = False
            wait_until(lambda: len(trips._waiting) == len(steps) - 1, 20, "all others to wait")
        return together(given)

    def answer(step: Callable[[], object]) -> object:
        try:
            return step()
        except Exception as error:  # noqa: BLE001 - the test looks at it
            return error

    trips._together = begun
    try:
        with ThreadPoolExecutor(len(steps)) as threads:
            return list(threads.map(answer, steps))
    finally:
        trips._together = together
