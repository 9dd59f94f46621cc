"""Whether any worker answers."""

from __future__ import annotations

from typing import Final

from celery import Celery

BROKER_TIMEOUT: Final = 5.0
WORKER_TIMEOUT: Final = 1.0
NO_WORKER: Final = "none answers: no call runs until a worker is started"


def worker_answers(app: Celery) -> bool | None:
    """Whether a worker of the app's broker answers within a second; ``None``: that cannot be found
    out.

    A worker with the pool solo does not answer while a body runs.
    """
    try:
        with app.connection_for_write() as connection:
            if connection.transport_cls == "memory":
                return None
            connection.ensure_connection(max_retries=1, interval_start=0, timeout=BROKER_TIMEOUT)
            answers = app.control.ping(timeout=WORKER_TIMEOUT, limit=1, connection=connection)
            return bool(answers)
    except Exception:  # noqa: BLE001 - whatever the broker's client raises
        return None
