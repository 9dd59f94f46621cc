"""The task of the drill, which only the processes of a drill register."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from celery import Celery

from celery_leases.options import Failures
from celery_leases.task import LeasedTask

TASK: Final = "celery_leases.ops.drill"
RETENTION: Final = "1h"
"""The retention of its records: if a drill is killed, workers delete them after this time."""
TIME_LIMIT: Final = 3600

Body = Callable[[Any, str], None]


def register(app: Celery, ttl: float, body: Body) -> Any:
    """Register the drill's task with *app*; *body* gets the task and its key.

    A running body shows that its call has the key, because each call of the key runs its own body.
    Options that could change the measurement are set here, whatever the app's settings are.
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
        lease_runs="each",
        lease_on_busy="wait",
        lease_on_lost="interrupt",
        lease_renew=True,
        lease_queue_once=False,
        lease_store_arguments=False,
        lease_allow_loss=False,
        lease_failures=Failures(crashes=10),
        lease_retention=RETENTION,
    )
    def drill(self: Any, key: str) -> None:
        body(self, key)

    return drill


def unused_body(_task: Any, _key: str) -> None:
    """The body in a process that only publishes."""
    raise AssertionError("only the workers of a drill run its task")
