"""Chores as Celery tasks, for beat: add this module to ``app.conf.include`` and the tasks to
``beat_schedule``.

``celery_leases.relay`` and ``celery_leases.rescue`` do what the commands of that name do; both are
harmless to run at once on any number of workers.
"""

from __future__ import annotations

from celery import current_app, shared_task

from celery_leases.worker import outbox


@shared_task(name="celery_leases.relay", ignore_result=True)
def relay(limit: int = outbox.RELAY_AT_ONCE) -> int:
    """Publish enqueued messages whose own process died after its commit."""
    return len(outbox.relay(current_app._get_current_object(), limit).published)  # noqa: SLF001 - how Celery unwraps its proxy


@shared_task(name="celery_leases.rescue", ignore_result=True)
def rescue(older: float = outbox.RESCUE_AFTER, limit: int = outbox.RELAY_AT_ONCE) -> int:
    """Publish the kept messages of records whose work has stopped."""
    done = outbox.rescue(current_app._get_current_object(), older=older, limit=limit)  # noqa: SLF001 - as above
    return len(done.published)
