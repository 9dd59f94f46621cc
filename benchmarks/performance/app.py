"""The Celery app of the contender in ``BENCH_CONTENDER``, with late acks and without results."""

import importlib
from typing import Any

from celery import Celery
from celery.signals import task_postrun

from benchmarks.performance import body, settings
from benchmarks.performance.journal import ANSWERED

contender: Any = importlib.import_module(
    f"benchmarks.performance.contenders.{settings.given(settings.CONTENDER)}"
)

app = Celery("bench", broker=settings.given(settings.BROKER))
app.conf.update(
    task_acks_late=True,
    task_ignore_result=True,
    broker_connection_retry_on_startup=True,
    broker_transport_options={"visibility_timeout": 3600, "max_connections": 200},
)
contender.configure(app)


@app.task(name="job", bind=True, max_retries=None, **contender.OPTIONS)
def job(self: Any, key: str, seconds: float = 0.0) -> object:
    """The task that is measured."""
    return contender.run(self, key, seconds)


@app.task(name="other")
def other(key: str) -> int:
    """Another task of the same queue, plain on every contender."""
    return body.work(key, 0.0)


def _answered(args: Any = (), state: str = "", **_: object) -> None:
    if state == "SUCCESS":
        body.writer.note(ANSWERED, args[0])


if ANSWERED in body.writer.wanted:
    task_postrun.connect(_answered, weak=False)
