"""A handwritten Redis lease with an owner token and a PostgreSQL record, as fast as possible.

One thread renews all leases of a process. Nothing is classified, counted, logged or rescheduled. If
a key is held, Celery retries the task after a second.
"""

import os
import threading
import time
from typing import Any

import redis
from celery import Celery

from benchmarks.performance import settings
from benchmarks.performance.body import work
from benchmarks.performance.contenders import handwritten
from benchmarks.performance.contenders.handwritten import SETTLE, prepare

__all__ = ["OPTIONS", "configure", "prepare", "run"]

OPTIONS: dict[str, Any] = {}
RELEASE = (
    "if redis.call('get', KEYS[1]) == ARGV[1] then return redis.call('del', KEYS[1]) end return 0"
)
RENEW = "if redis.call('get', KEYS[1]) == ARGV[1] then return redis.call('pexpire', KEYS[1], ARGV[2]) end return 0"
CLAIM = handwritten.CLAIM.format(free="")
MILLISECONDS = settings.LOCK_SECONDS * 1000


class Process:
    """The connections of one process, and the leases it holds."""

    current: "Process | None" = None

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.held: dict[str, str] = {}
        self.redis = redis.Redis.from_url(
            settings.given(settings.LOCKS), single_connection_client=True
        )
        self.renewing = redis.Redis.from_url(settings.given(settings.LOCKS))
        self.release = str(self.redis.script_load(RELEASE))
        self.cursor = handwritten.connected().cursor()
        threading.Thread(target=self._renew, daemon=True).start()

    @classmethod
    def of_this(cls) -> "Process":
        """That of this process, made at its first task."""
        if cls.current is None or cls.current.pid != os.getpid():
            cls.current = cls()
        return cls.current

    def _renew(self) -> None:
        script = str(self.renewing.script_load(RENEW))
        while True:
            time.sleep(settings.LOCK_SECONDS / 3)
            if self.held:
                pipeline = self.renewing.pipeline(transaction=False)
                for key, token in list(self.held.items()):
                    pipeline.evalsha(script, 1, key, token, MILLISECONDS)
                pipeline.execute(raise_on_error=False)


def configure(app: Celery) -> None:
    """Nothing to configure."""


def run(task: Any, key: str, seconds: float) -> object:
    """Acquire, claim, run, settle, release."""
    process, lease, token = Process.of_this(), f"lease:{key}", os.urandom(16).hex()
    if not process.redis.set(lease, token, nx=True, px=MILLISECONDS):
        raise task.retry(countdown=1)
    process.held[lease] = token
    try:
        if process.cursor.execute(CLAIM, (key, token), prepare=True).fetchone() is None:
            return "done before"
        value = work(key, seconds)
        if process.cursor.execute(SETTLE, (key, token), prepare=True).rowcount != 1:
            raise RuntimeError("the lease was lost")
        return value
    finally:
        process.held.pop(lease, None)
        process.redis.evalsha(process.release, 1, lease, token)
