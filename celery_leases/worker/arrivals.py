"""The order of calls with ``lease_runs="latest"`` to which their publisher has given none: that of
their arrival, in the worker's main process.
"""

from __future__ import annotations

from typing import Any, Final

from celery_leases.attempt.process import Process
from celery_leases.concurrency import greenlets, os_threads
from celery_leases.errors import LeasesError
from celery_leases.signals import logger
from celery_leases.worker import processes

COMPARE_EVERY: Final = 600.0
"""Seconds after which the clock is compared with that of the lease store again."""


class Arrivals:
    """Gives each call that arrives a later time than the one before, by the clock of the lease
    store.
    """

    def __init__(self) -> None:
        self._ahead: int | None = None
        self._compared_at = self._last = 0

    def compare(self, process: Process) -> None:
        """Compare the clock of the lease store with the local one. Raises ``StoreUnavailable``."""
        sent = round(os_threads.boot_clock() * 1e6)
        # Counted from before the request, so a call never seems to have arrived earlier.
        self._ahead = process.leases.burst("").now - sent

    def order(self, app: Any) -> int:
        """The order of a call that has just arrived, in microseconds; 0 if the clock of the lease
        store is not known yet.
        """
        now = round(os_threads.boot_clock() * 1e6)
        if now - self._compared_at > COMPARE_EVERY * 1e6:
            self._compared_at = now
            ask = os_threads.start_thread if not os_threads.uses_greenlets() else greenlets.spawn
            ask(lambda: self._compare(app))  # the worker's loop must not wait for the store
        if self._ahead is None:
            return 0
        self._last = max(now + self._ahead, self._last + 1)
        return self._last

    def _compare(self, app: Any) -> None:
        try:
            self.compare(processes.process_of(app, eager=False))
        except LeasesError as error:
            logger.debug("cannot read the clock of the lease store: %s", error)


arrivals: Final = Arrivals()
"""The arrivals of this process."""
