"""Waiting in tests for what happens in other processes."""

from __future__ import annotations

import time
from collections.abc import Callable

POLL = 0.02
"""Seconds between two looks at first; later looks are rarer, up to :data:`POLL_LATER`."""
POLL_LATER = 0.1


def pause(waited: float) -> float:
    """Seconds until the next look, after a wait of *waited* seconds."""
    return min(max(POLL, waited / 20), POLL_LATER)


def wait_until(seen: Callable[[], bool], timeout: float, what: str) -> None:
    """Return when ``seen()`` is true.

    Raises TimeoutError, naming ``what`` was waited for, after ``timeout`` seconds.
    """
    began = time.monotonic()
    while not seen():
        waited = time.monotonic() - began
        if waited > timeout:
            raise TimeoutError(f"waited {timeout:g} s for {what}")
        time.sleep(pause(waited))
