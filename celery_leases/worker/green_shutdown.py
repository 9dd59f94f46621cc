"""The cold shutdown of a worker of greenlets: it kills the bodies, and waits for the steps around
them.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from celery_leases.worker.pools.greenlets import keep_signals_out


def prepare(consumer: Any) -> None:
    """Have the pool of Celery's *consumer* end so, if its jobs run in greenlets."""
    if getattr(consumer.pool, "is_green", False):
        keep_signals_out()
        consumer.pool.on_terminate = partial(_end_bodies, consumer)


def _end_bodies(consumer: Any) -> None:
    """Called in the worker's own greenlet: the handler of the signal may have been interrupted in
    another greenlet.
    """
    # Celery 5.5 has another name for it.
    cancel = (
        getattr(consumer, "cancel_active_requests", None) or consumer.cancel_all_unacked_requests
    )
    cancel()
    consumer.pool.on_stop()
