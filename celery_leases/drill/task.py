"""The task of the drill. It is registered in the processes of a drill only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from celery import Celery

from celery_leases.task import LeasedTask

TASK: Final = "celery_leases.drill"
KEPT: Final = "1h"
"""The retention of its records: workers delete those that a killed drill leaves behind."""
TIME_LIMIT: Final = 3600

Body = Callable[[Any, str], None]


def register(app: Celery, ttl: float, body: Body) -> Any:
    """Register the drill's task with *app*; *body* gets the task and its key.

    Each call runs once, one after the other, so that a body shows that its call has the key. What
    the app sets for all tasks does not count for what the drill measures.
    """
    app.conf.task_always_eager = False
    app.conf.task_create_missing_queues = True

    @app.task(
        base=LeasedTask,
        bind=True,
        name=TASK,
        shared=False,
        lazy=False,
        ignore_result=True,
        store_errors_even_if_ignored=False,
        send_events=False,
        rate_limit=None,
        time_limit=TIME_LIMIT,
        soft_time_limit=None,
        lease_key="{key}",
        lease_ttl=ttl,
        lease_on_held="reschedule",
        lease_on_done="rerun",
        lease_on_lost="interrupt",
        lease_wait=0.001,  # none; 0 is refused
        lease_renew=True,
        lease_queue_once=False,
        lease_store_arguments=False,
        lease_allow_loss=False,
        lease_max_crashes=10,
        lease_retention=KEPT,
    )
    def drill(self: Any, key: str) -> None:
        body(self, key)

    return drill


def never(_task: Any, _key: str) -> None:
    """The body in a process that only publishes."""
    raise AssertionError("the drill's task runs in the workers of a drill only")
