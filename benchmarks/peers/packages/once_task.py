"""celery-once-task, as in its README: ``OnceTask``, ``configure()``, its signals and its boot
step.
"""

from typing import Any

from celery import Celery
from celery_once_task import OnceTask, OnceTaskUnlockBootStep, setup_once_task_signals
from celery_once_task import configure as configure_once_task

UNIQUE: dict[str, Any] = {"base": OnceTask}
REFUSING = UNIQUE
SKIPPING = UNIQUE
CHANGES = LIMITED = PERIODIC = REPEATING = UNIQUE  # all arguments are its key


def configure(app: Celery, locks: str, seconds: float | None) -> None:
    """The default of both locks is an hour."""
    lasting = 60 * 60 if seconds is None else int(seconds)
    configure_once_task(redis_url=locks, queue_lock_timeout=lasting, running_lock_timeout=lasting)
    setup_once_task_signals()
    app.steps["worker"].add(OnceTaskUnlockBootStep)
