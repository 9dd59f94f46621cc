"""Advice about ``lease_ttl`` from the run times of tasks, their options and the broker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from celery import Celery

from celery_leases.options import DATABASE
from celery_leases.tuning import Delivery, RunTimes, unrenewed_ttl
from celery_leases.worker.app_settings import settings_of
from celery_leases.worker.checks.settings import redelivery_of


def delivery_of(app: Celery) -> Delivery:
    """How the broker redelivers messages of a dead worker to *app*."""
    return redelivery_of(app, settings_of(app).leases_url == DATABASE)


def advice_of(
    name: str,
    took: Sequence[float],
    known: Mapping[str, Any],
    delivery: Delivery,
    guard: float,
    jitter: float | None,
) -> dict[str, Any]:
    """The advice for a task from its run times, as plain values; times are seconds.

    *took* are the run times of the task, *known* the leased tasks of the app. *guard* and *jitter*
    are those of :func:`~celery_leases.tuning.unrenewed_ttl`.
    """
    found = RunTimes.of(took)
    task = known.get(name)
    ttl = task.lease_options.ttl if task is not None else None
    limit = (task.time_limit or task.app.conf.task_time_limit) if task is not None else None
    return {
        "task": name,
        "runs": found.count if found else 0,
        "p50": found.p50 if found else None,
        "p95": found.p95 if found else None,
        "p99": found.p99 if found else None,
        "longest": found.longest if found else None,
        "ttl": ttl,
        "key_free_within": delivery.key_free(ttl) if ttl is not None else None,
        "work_resumed_within": delivery.work_resumed(ttl) if ttl is not None else None,
        "unrenewed_ttl": unrenewed_ttl(found, guard, jitter) if found else None,
        "time_limit": limit,
    }
