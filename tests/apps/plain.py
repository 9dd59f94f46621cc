"""A plain Celery app without leases, for tests of the test tools."""

import os
import time

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
    """Add two numbers."""
    return x + y


@app.task
def child_pid() -> int:
    """Process id of the pool child that runs this."""
    return os.getpid()


@app.task(acks_late=True, reject_on_worker_lost=True)
def hang(seconds: float) -> str:
    """Work for *seconds*."""
    print(f"hanging in {os.getpid()}", flush=True)
    time.sleep(seconds)
    return "done"
