"""Repeats a call of a store that may not answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from celery_leases.decide.after_run import settle_pause
from celery_leases.errors import StoreUnavailable
from celery_leases.stores.interfaces import Clock

T = TypeVar("T")


def retrying(
    step: Callable[[], T],
    until: Callable[[], float],
    clock: Clock,
    *,
    errors: type[Exception] = StoreUnavailable,
    repeatable: Callable[[Any, int], bool] | None = None,
) -> T:
    """Call *step*, and again after each of *errors*, until the time that *until* returns, by
    *clock*; return its result.

    The pauses grow up to two seconds. *repeatable* is called after each failure, with the error and
    the number of earlier failures. The last error is raised if *repeatable* returns false, or if
    the next pause would end after the time of *until*. *until* is called after each failure,
    because a renewal may have extended a lease meanwhile.
    """
    failures = 0
    while True:
        try:
            return step()
        except errors as error:
            pause = settle_pause(failures)
            if repeatable is not None and not repeatable(error, failures):
                raise
            if clock.now() + pause > until():
                raise
            failures += 1
        clock.sleep(pause)
