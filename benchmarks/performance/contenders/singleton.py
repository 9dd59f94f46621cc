"""celery-singleton: a lock from publishing to the end of the run."""

from typing import Any

from celery import Celery
from celery_singleton import Singleton

from benchmarks.performance import settings
from benchmarks.performance.contenders.plain import prepare, run

__all__ = ["OPTIONS", "configure", "prepare", "run"]

OPTIONS: dict[str, Any] = {"base": Singleton, "unique_on": ["key"]}


def configure(app: Celery) -> None:
    """The lock lives in Redis."""
    app.conf.singleton_backend_url = settings.given(settings.LOCKS)
    app.conf.singleton_lock_expiry = settings.LOCK_SECONDS
    app.conf.singleton_raise_on_duplicate = True
