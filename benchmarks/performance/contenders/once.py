"""celery-once: a lock from publishing to the end of the run."""

from typing import Any

from celery import Celery
from celery_once import QueueOnce

from benchmarks.performance import settings
from benchmarks.performance.contenders.plain import prepare, run

__all__ = ["OPTIONS", "configure", "prepare", "run"]

OPTIONS: dict[str, Any] = {"base": QueueOnce, "once": {"keys": ["key"]}}


def configure(app: Celery) -> None:
    """The lock lives in Redis."""
    redis = {"url": settings.given(settings.LOCKS), "default_timeout": settings.LOCK_SECONDS}
    app.conf.ONCE = {"backend": "celery_once.backends.Redis", "settings": redis}
