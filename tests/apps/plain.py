"""A plain Celery app without leases, for tests of the test tools."""

import os

from celery import Celery

from tests.support.workers import QUEUE_VARIABLE

app = Celery("plain")
app.conf.update(
    task_default_queue=os.environ.get(QUEUE_VARIABLE, "celery"),
    broker_connection_retry_on_startup=True,
    worker_prefetch_multiplier=1,
)


@app.task
def add(x: int, y: int) -> int:
    return x + y
