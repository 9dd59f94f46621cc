"""One task that makes a real library fail in a worker, and returns how the rules classify it."""

import os
from typing import Any

from celery import Celery

from tests.clients.catalog import IN_A_WORKER
from tests.clients.expectations import Places, judged
from tests.support.workers import QUEUE_VARIABLE

app = Celery("clients")
app.conf.update(
    task_default_queue=os.environ.get(QUEUE_VARIABLE, "celery"),
    broker_connection_retry_on_startup=True,
    worker_prefetch_multiplier=1,
)


@app.task
def judge(name: str) -> dict[str, Any]:
    """Classify the error of one case before it is pickled."""
    return judged(IN_A_WORKER[name].raised(Places()))
