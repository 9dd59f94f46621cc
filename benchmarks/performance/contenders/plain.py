"""Plain Celery."""

from typing import Any

from celery import Celery

from benchmarks.performance.body import work

OPTIONS: dict[str, Any] = {}


def prepare() -> None:
    """Nothing to prepare."""


def configure(app: Celery) -> None:
    """Nothing to configure."""


def run(task: Any, key: str, seconds: float) -> object:
    """The body, with nothing around it."""
    return work(key, seconds)
