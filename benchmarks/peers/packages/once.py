"""celery-once, as in its README: ``QueueOnce``, the setting ``ONCE``, and the option ``once``."""

from typing import Any

from celery import Celery
from celery_once import AlreadyQueued, QueueOnce

UNIQUE: dict[str, Any] = {"base": QueueOnce, "once": {"keys": ["name"]}}
REFUSING = UNIQUE  # AlreadyQueued is what it does by default
SKIPPING: dict[str, Any] = {"base": QueueOnce, "once": {"keys": ["name"], "graceful": True}}
CHANGES: dict[str, Any] = {
    "base": QueueOnce,
    "once": {"keys": ["name"], "unlock_before_run": True},
}
LIMITED = PERIODIC = UNIQUE
REPEATING = CHANGES  # a call that is queued while the body runs
DUPLICATE = AlreadyQueued


def configure(app: Celery, locks: str, seconds: float | None) -> None:
    """The lock's default is an hour."""
    settings = {"url": locks, "default_timeout": 60 * 60 if seconds is None else int(seconds)}
    app.conf.ONCE = {"backend": "celery_once.backends.Redis", "settings": settings}
