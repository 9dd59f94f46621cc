"""The cold shutdown of a worker with greenlets: kills the bodies, and waits for the steps around
them.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from celery_leases.worker.interrupts import run_signal_handlers_outside_pool


def prepare(consumer: Any) -> None:
    """Let the pool of Celery's *consumer* shut down in this way, if its jobs run in greenlets."""
    if getattr(consumer.pool, "is_green", False):
        run_signal_handlers_outside_pool()
        consumer.pool.on_terminate = partial(_end_bodies, consumer)


def _end_bodies(consumer: Any) -> None:
    """Kill the bodies and stop the pool. Celery calls this in the main greenlet of the worker; its
    signal handler may have interrupted another greenlet.
    """
    # Celery 5.5 has another name for the method.
    cancel = (
        getattr(consumer, "cancel_active_requests", None) or consumer.cancel_all_unacked_requests
    )
    cancel()
    consumer.pool.on_stop()
