"""Plain Celery: it has no keys, so duplicates always run."""

from typing import Any

from celery import Celery

UNIQUE: dict[str, Any] = {}
REFUSING = UNIQUE
SKIPPING = UNIQUE
CHANGES = LIMITED = PERIODIC = REPEATING = UNIQUE


def configure(app: Celery, locks: str, seconds: float | None) -> None:
    """Nothing to configure."""
