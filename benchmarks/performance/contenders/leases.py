"""celery_leases with Redis leases and PostgreSQL records; all options but the key are the
defaults.
"""

from typing import Any

from celery import Celery

from benchmarks.performance import body, settings
from benchmarks.performance.contenders.plain import run
from benchmarks.performance.journal import PUT_BACK
from celery_leases import LeasedTask, signals
from celery_leases.worker.headers import TASK_EVENTS, TOKEN, new_token

__all__ = ["OPTIONS", "configure", "in_request", "prepare", "run"]

OPTIONS: dict[str, Any] = {"base": LeasedTask, "lease_key": "{key}"}


def prepare() -> None:
    """Create the tables, as an operator does."""
    from benchmarks.performance.app import app

    app.start(["leases", "migrate"])


def configure(app: Celery, leases_url: str = "") -> None:
    """Name the two stores, and add a mutex: a task that each call runs once, one after the
    other.
    """
    app.conf.leases_url = leases_url or settings.given(settings.LOCKS)
    app.conf.leases_database_url = settings.given(settings.DATABASE)
    app.task(name="mutex", base=LeasedTask, lease_key="{key}", lease_runs="each")(_mutex)
    if PUT_BACK in body.writer.wanted:
        signals.call_rescheduled.connect(_reschedule, weak=False)


def in_request() -> dict[str, object]:
    """What the worker's main process adds to a request before it hands it to a pool child."""
    return {TOKEN: new_token(), TASK_EVENTS: False}


def _mutex(key: str, seconds: float) -> int:
    return body.work(key, seconds)


def _reschedule(event: Any, **_: object) -> None:
    body.writer.note(PUT_BACK, event.call_id)
