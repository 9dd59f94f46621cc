"""celery-singleton, as in its README: ``Singleton`` with ``unique_on``; its locks never expire by
default.
"""

from typing import Any

from celery import Celery
from celery_singleton import DuplicateTaskError, Singleton

UNIQUE: dict[str, Any] = {"base": Singleton, "unique_on": ["name"]}
REFUSING: dict[str, Any] = {**UNIQUE, "raise_on_duplicate": True}
SKIPPING = UNIQUE  # a duplicate gets the result of the first
CHANGES = LIMITED = PERIODIC = REPEATING = UNIQUE
DUPLICATE = DuplicateTaskError


def configure(app: Celery, locks: str, seconds: float | None) -> None:
    """The settings of its README."""
    app.conf.singleton_backend_url = locks
    if seconds is not None:
        app.conf.singleton_lock_expiry = int(seconds)
