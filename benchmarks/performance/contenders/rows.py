"""A handwritten lease in the row of its PostgreSQL record, as fast as possible; never renewed."""

import os
from typing import Any

import psycopg
from celery import Celery

from benchmarks.performance import settings
from benchmarks.performance.body import work
from benchmarks.performance.contenders import handwritten
from benchmarks.performance.contenders.handwritten import SETTLE, prepare

__all__ = ["OPTIONS", "configure", "prepare", "run"]

OPTIONS: dict[str, Any] = {}
CLAIM = handwritten.CLAIM.format(
    free=f"AND job_record.claimed_at < now() - interval '{settings.LOCK_SECONDS} s'"
)


class Process:
    """The connection of one process."""

    current: "Process | None" = None

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.cursor: psycopg.Cursor[Any] = handwritten.connected().cursor()

    @classmethod
    def of_this(cls) -> "Process":
        """The connection of this process, opened at its first task."""
        if cls.current is None or cls.current.pid != os.getpid():
            cls.current = cls()
        return cls.current


def configure(app: Celery) -> None:
    """Nothing to configure."""


def run(task: Any, key: str, seconds: float) -> object:
    """Claim, run, settle."""
    cursor, token = Process.of_this().cursor, os.urandom(16).hex()
    if cursor.execute(CLAIM, (key, token), prepare=True).fetchone() is None:
        raise task.retry(countdown=1)
    value = work(key, seconds)
    if cursor.execute(SETTLE, (key, token), prepare=True).rowcount != 1:
        raise RuntimeError("the lease was lost")
    return value
