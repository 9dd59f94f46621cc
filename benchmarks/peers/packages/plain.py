"""Celery alone: it has no keys, so nothing keeps two calls apart."""

from typing import Any

from celery import Celery

UNIQUE: dict[str, Any] = {}
REFUSING = UNIQUE
SKIPPING = UNIQUE


def configure(app: Celery, locks: str, seconds: float | None) -> None:
    """Nothing to be configured."""
