"""celery-heimdall, as in its README: ``HeimdallTask`` with ``unique``, and ``setup_redis``."""

from typing import Any

import redis
from celery import Celery
from celery_heimdall import AlreadyQueuedError, HeimdallTask


class Task(HeimdallTask):
    """Its locks are in the Redis for locks."""

    abstract = True

    def setup_redis(self) -> redis.Redis:
        """As its documentation shows for a Redis that is not Celery's."""
        return redis.Redis.from_url(self.app.conf.redis_of_locks)


UNIQUE: dict[str, Any] = {"base": Task, "heimdall": {"unique": True}}
REFUSING: dict[str, Any] = {"base": Task, "heimdall": {"unique": True, "unique_raises": True}}
SKIPPING = UNIQUE  # a duplicate gets the result of the first
CHANGES: dict[str, Any] = {
    "base": Task,
    "heimdall": {"unique": True, "key": lambda args, _: str(args[0])},
}
LIMITED = PERIODIC = REPEATING = UNIQUE
DUPLICATE = AlreadyQueuedError


def configure(app: Celery, locks: str, seconds: float | None) -> None:
    """The lock's default is an hour."""
    app.conf.redis_of_locks = locks
    if seconds is not None:
        app.conf.heimdall_unique_timeout = int(seconds)
