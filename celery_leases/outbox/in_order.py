"""Publishes the calls of tasks with ``lease_runs="latest"``, with their order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final
from uuid import uuid4

from celery.result import AsyncResult
from celery.utils.time import maybe_make_aware

from celery_leases.attempt.process import Process
from celery_leases.concurrency import os_threads, wait_limit
from celery_leases.decide.latest import PATIENCE
from celery_leases.errors import LeasesError
from celery_leases.keys import call_key
from celery_leases.outbox.calls import arguments_of, headers_of, is_published_before
from celery_leases.text.notices import logger
from celery_leases.worker import processes
from celery_leases.worker.arrivals import COMPARE_EVERY
from celery_leases.worker.headers import ORDER, call_id_of

LONGEST_WAIT: Final = 1.0
"""Seconds for which a publisher waits for the lease store."""


def publish(
    task: Any,
    publish: Callable[..., AsyncResult],
    positional: Sequence[Any],
    named: Mapping[str, Any],
) -> AsyncResult:
    """Publish a call of *task* by *publish*, Celery's own ``apply_async``, with its order among the
    calls of its key, for which the lease store is asked once.

    The store notes a call with a countdown of more than :data:`PATIENCE` as the newest when that is
    over: until then an older one need not wait for it.

    If that fails, the order is an estimate; see :func:`_estimate`. The time of its arrival at a
    worker would be later than that of calls published while it was queued.
    """
    given = arguments_of(positional, named)
    if task.app.conf.task_always_eager or is_published_before(task, given):
        return publish(*positional, **named)
    args, kwargs = tuple(given.pop("args", None) or ()), dict(given.pop("kwargs", None) or {})
    if check := getattr(task, "__header__", None):
        check(*args, **kwargs)  # as apply_async does
    task_id = given.pop("task_id", None) or str(uuid4())
    call_id = call_id_of(task_id, given.get("replaced_task_nesting"))
    process: Process | None = None
    try:
        options, headers = task.lease_options, None
        if options.tenant is not None:
            headers = headers_of(task, args, kwargs, given.get("headers"))
        key = call_key(task.name, options, task.lease_signature, call_id, args, kwargs, headers)
        with wait_limit.within(LONGEST_WAIT):
            process = processes.process_of(task.app)
            if _delay(task, given) > PATIENCE:
                burst = process.leases.burst(key.stored)
                order = max(burst.now, burst.newest + 1)
            else:
                order = process.leases.new_order(key.stored)
        process.last_order = order, _local_time()
    except LeasesError as error:
        order = _estimate(task.app, process)
        logger.warning(
            "%s[%s] is published in the order of this machine's clock: %s",
            task.name,
            task_id,
            error,
            code="order-of-own-clock",
        )
    given["headers"] = {**(given.get("headers") or {}), ORDER: [call_id, order]}
    return publish(args, kwargs, task_id=task_id, **given)


def _estimate(app: Any, process: Process | None) -> int:
    """The order of a call without an answer of the lease store: the last order that the store has
    given to this process, and the time since then. If there was none, or long ago, the wall clock
    of this machine counts, which may differ from that of the store.
    """
    order, given_at = process.last_order if process is not None else (0, 0)
    since = _local_time() - given_at
    if order and since < COMPARE_EVERY * 1e6:
        return order + max(1, since)
    return int(app.now().timestamp() * 1e6)


def _local_time() -> int:
    return round(os_threads.boot_clock() * 1e6)


def _delay(task: Any, given: Mapping[str, Any]) -> float:
    """Seconds until a call is due; what is not a time is refused by Celery."""
    countdown, eta = given.get("countdown"), given.get("eta")
    if isinstance(countdown, int | float):
        return countdown
    if isinstance(eta, datetime):
        due, now = maybe_make_aware(eta, task.app.timezone), task.app.now()
        return float((due - now).total_seconds())
    return 0.0
