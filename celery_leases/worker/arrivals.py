"""The order of calls with ``lease_runs="latest"`` to which their publisher has given none: that of
their arrival, in the worker's main process.
"""

from __future__ import annotations

from typing import Any, Final

from celery_leases.attempt.process import Process
from celery_leases.concurrency import greenlets, os_threads
from celery_leases.errors import LeasesError
from celery_leases.text.notices import logger
from celery_leases.worker import processes

COMPARE_EVERY: Final = 600.0
"""Seconds after which the clock is compared with that of the lease store again: they drift."""
TRY_EVERY: Final = 1.0
"""Seconds between two tries while that clock is not known."""
REQUESTS: Final = 3
"""How often the lease store is asked then."""


class Arrivals:
    """Gives each call that arrives a later time than the one before, by the clock of the lease
    store.
    """

    def __init__(self) -> None:
        #: How far the clock of the store is ahead of the local one, and until when that is known.
        self._ahead = self._known_until = 0
        self._tried_at = self._last = 0

    def compare(self, process: Process) -> None:
        """Compare the clock of the lease store with the local one. Raises ``StoreUnavailable``."""
        # Counted from before each request, so a call never seems to have arrived earlier. The
        # quickest request counts: after a slow one, calls would seem to have arrived much later.
        self._ahead = min(
            -round(os_threads.boot_clock() * 1e6) + process.leases.burst("").now
            for _ in range(REQUESTS)
        )
        self._known_until = round((os_threads.boot_clock() + COMPARE_EVERY) * 1e6)

    def order(self, app: Any) -> int:
        """The order of a call that has just arrived, in microseconds; by the clock of this machine
        if that of the lease store is not known: it does not answer, or was compared long ago.
        """
        now = round(os_threads.boot_clock() * 1e6)
        ahead = self._ahead
        if now >= self._known_until:
            ahead = round(app.now().timestamp() * 1e6) - now
            if now - self._tried_at > TRY_EVERY * 1e6:
                self._tried_at = now
                # The worker's loop must not wait for the store.
                greenlets.start(lambda: self._compare(app))
        self._last = max(now + ahead, self._last + 1)
        return self._last

    def _compare(self, app: Any) -> None:
        try:
            self.compare(processes.process_of(app, eager=False))
        except LeasesError as error:
            logger.debug("cannot read the clock of the lease store: %s", error)


arrivals: Final = Arrivals()
"""The arrivals of this process."""
