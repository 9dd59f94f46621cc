"""Waits in tests for events in other processes."""

from __future__ import annotations

import time
from collections.abc import Callable

POLL = 0.02
"""The first pauses between two checks, in seconds. Later ones grow up to :data:`POLL_LATER`."""
POLL_LATER = 0.1


def pause(waited: float) -> float:
    """Seconds until the next check, after a wait of *waited* seconds."""
    return min(max(POLL, waited / 20), POLL_LATER)


def wait_until(seen: Callable[[], bool], timeout: float, what: str) -> None:
    """Return as soon as ``seen()`` is true.

    Raises TimeoutError, whose message contains ``what``, after ``timeout`` seconds.
    """
    began = time.monotonic()
    while not seen():
        waited = time.monotonic() - began
        if waited > timeout:
            raise TimeoutError(f"waited {timeout:g} s for {what}")
        time.sleep(pause(waited))
