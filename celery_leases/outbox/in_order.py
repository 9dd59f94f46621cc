"""Publishes the calls of tasks with ``lease_runs="latest"``, with their order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from uuid import uuid4

from celery.result import AsyncResult

from celery_leases.errors import LeasesError
from celery_leases.keys import call_key
from celery_leases.outbox.calls import arguments_of, headers_of, is_published_before
from celery_leases.signals import logger
from celery_leases.worker import processes
from celery_leases.worker.headers import ORDER, call_id_of


def publish(
    task: Any,
    publish: Callable[..., AsyncResult],
    positional: Sequence[Any],
    named: Mapping[str, Any],
) -> AsyncResult:
    """Publish a call of *task* by *publish*, Celery's own ``apply_async``, with its order among the
    calls of its key, for which the lease store is asked once.

    If that fails, the call is published without: a worker gives it an order when it arrives.
    """
    given = arguments_of(positional, named)
    if task.app.conf.task_always_eager or is_published_before(task, given):
        return publish(*positional, **named)
    args, kwargs = tuple(given.pop("args", None) or ()), dict(given.pop("kwargs", None) or {})
    if check := getattr(task, "__header__", None):
        check(*args, **kwargs)  # as apply_async does
    task_id = given.pop("task_id", None) or str(uuid4())
    call_id = call_id_of(task_id, given.get("replaced_task_nesting"))
    try:
        options, headers = task.lease_options, None
        if options.tenant is not None:
            headers = headers_of(task, args, kwargs, given.get("headers"))
        key = call_key(task.name, options, task.lease_signature, call_id, args, kwargs, headers)
        order = processes.process_of(task.app).leases.new_order(key.stored)
    except LeasesError as error:
        logger.warning("%s[%s] is published without its order: %s", task.name, task_id, error)
    else:
        given["headers"] = {**(given.get("headers") or {}), ORDER: [call_id, order]}
    return publish(args, kwargs, task_id=task_id, **given)
