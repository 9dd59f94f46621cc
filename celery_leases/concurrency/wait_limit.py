"""Until when the steps of a delivery may wait for a store in this thread or greenlet.

A body has what its time limit leaves after the library's own waits, so these end early. Everything
that waits asks here: for a connection of the pool, to connect, for a reply.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

from celery_leases.concurrency import os_threads

SHORTEST: Final = 0.2
"""Seconds that a store gets to answer when the time is over: the delivery must still be
rescheduled, which takes some more steps.
"""

until: Final[ContextVar[float]] = ContextVar("celery_leases_wait_until", default=math.inf)
"""The time on :func:`~celery_leases.concurrency.os_threads.boot_clock`; infinite: no limit."""

in_use = False
"""Whether this process has had a delivery with a limit. Before, nothing needs to ask."""


def set_seconds(seconds: float) -> None:
    """Let the waits that follow in this thread or greenlet end *seconds* from now."""
    global in_use  # noqa: PLW0603 - once in a process
    in_use = True
    until.set(seconds if seconds == math.inf else os_threads.boot_clock() + seconds)


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Let the waits of the enclosed code end *seconds* from now, if they do not end sooner."""
    before = until.get()
    set_seconds(min(seconds, before - os_threads.boot_clock()))
    try:
        yield
    finally:
        until.set(before)


def bounded(seconds: float) -> float:
    """*seconds*, or as many as are left, but at least :data:`SHORTEST`."""
    limit = until.get()
    if limit == math.inf:
        return seconds
    return min(seconds, max(SHORTEST, limit - os_threads.boot_clock()))
