"""Repeats a step of a store that may not answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from celery_leases.errors import StoreUnavailable
from celery_leases.protocol.ports import Clock
from celery_leases.protocol.settlement import settle_pause

T = TypeVar("T")


def retrying(
    step: Callable[[], T],
    until: Callable[[], float],
    clock: Clock,
    *,
    errors: type[Exception] = StoreUnavailable,
    repeatable: Callable[[Any, int], bool] | None = None,
) -> T:
    """The result of *step*, which is called again after each of *errors*, until the moment that
    *until* gives, by *clock*.

    The pauses grow up to two seconds. *repeatable* is called after each failure, with the error and
    the number of earlier failures. If it returns false, or if the next pause would end after
    that moment, the last error is raised. *until* is called after each failure, as a renewal may
    have moved the end of a lease meanwhile.
    """
    tries = 0
    while True:
        try:
            return step()
        except errors as error:
            pause = settle_pause(tries)
            if repeatable is not None and not repeatable(error, tries):
                raise
            if clock.now() + pause > until():
                raise
            tries += 1
        clock.sleep(pause)
