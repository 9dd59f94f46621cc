"""``leases relay`` and ``leases rescue`` as Celery tasks, for beat: add this module to
``app.conf.include`` and the tasks to ``beat_schedule``.

Several workers may run them at the same time.
"""

from __future__ import annotations

from celery import current_app, shared_task

from celery_leases.outbox import calls as outbox


@shared_task(name="celery_leases.relay", ignore_result=True)
def relay(limit: int = outbox.RELAY_AT_ONCE) -> int:
    """Publish enqueued messages whose own process died after the commit; returns their number."""
    return len(outbox.relay(current_app._get_current_object(), limit).published)  # noqa: SLF001 - how Celery unwraps its proxy


@shared_task(name="celery_leases.rescue", ignore_result=True)
def rescue(older: float = outbox.RESCUE_AFTER, limit: int = outbox.RELAY_AT_ONCE) -> int:
    """Publish the stored messages of records whose work has stopped; returns their number."""
    done = outbox.rescue(current_app._get_current_object(), older=older, limit=limit)  # noqa: SLF001 - as above
    return len(done.published)
