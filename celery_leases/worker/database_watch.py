"""In the worker's main process: sees for how long the database of the leases has been answering.

A pool child that finds an expired lease waits until it has seen enough itself, unless its call has
a short time limit: then it cannot wait, and the next child would begin anew.
"""

from __future__ import annotations

from functools import partial
from typing import Final

from celery import Celery

from celery_leases.concurrency import greenlets, os_threads
from celery_leases.errors import StoreUnavailable
from celery_leases.options import DATABASE
from celery_leases.worker import processes
from celery_leases.worker.app_settings import settings_of

INTERVAL: Final = 0.5
"""Seconds between two questions."""
WATCH_FOR: Final = 30.0
"""Seconds for which the database is watched after a delivery that may take over a row."""

_until: dict[int, float] = {}


def watch(app: Celery, longest_wait: float) -> None:
    """Watch the database for a while, if it has the leases of *app*, and a delivery that may wait
    *longest_wait* seconds would hardly see enough.
    """
    if settings_of(app).leases_url != DATABASE:
        return
    from celery_leases.stores.sql.database import GRACE

    if longest_wait > 2 * GRACE:
        return
    running = id(app) in _until
    _until[id(app)] = os_threads.boot_clock() + WATCH_FOR
    if not running:
        greenlets.start(partial(_watch, app))


def _watch(app: Celery) -> None:
    try:
        process = processes.process_of(app, eager=False)
        records, clock = process.records, process.clock
        while clock.now() < _until[id(app)]:
            sent = clock.now()
            try:
                now = records.now()
            except StoreUnavailable:
                records.availability.failed(clock.now())
            else:
                records.availability.answered(sent, clock.now(), now)
                records.availability.share()
            clock.sleep(INTERVAL)
    finally:
        del _until[id(app)]
