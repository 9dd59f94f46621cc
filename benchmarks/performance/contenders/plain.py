"""Celery alone."""

from typing import Any

from celery import Celery

from benchmarks.performance.body import work

OPTIONS: dict[str, Any] = {}


def prepare() -> None:
    """There is nothing to be made."""


def configure(app: Celery) -> None:
    """There is nothing to be configured."""


def run(task: Any, key: str, seconds: float) -> object:
    """The body, with nothing around it."""
    return work(key, seconds)
