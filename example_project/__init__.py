"""A small billing application whose invoices are safe to send twice: ``celery -A example_project
worker``.

Everything comes from the environment, with defaults for a Redis on this machine.
"""

from __future__ import annotations

import os

from celery import Celery

app = Celery("example_project", include=["example_project.tasks"])
app.conf.update(
    broker_url=os.environ.get("CELERY_BROKER_URL", "redis://localhost:6379/0"),
    result_backend=os.environ.get("CELERY_RESULT_BACKEND", "redis://localhost:6379/1"),
    broker_connection_retry_on_startup=True,
    # Each worker reserves only messages that it can run now, so a killed worker delays few.
    worker_prefetch_multiplier=1,
    # If these are unset, leases are in the broker's Redis, and records in a SQLite file in the
    # working directory.
    leases_url=os.environ.get("LEASES_URL"),
    leases_database_url=os.environ.get("LEASES_DATABASE_URL"),
    leases_ttl=float(os.environ.get("LEASES_TTL", "15")),
)
if app.conf.broker_url.startswith(("redis", "sentinel")):
    app.conf.broker_transport_options = {
        # The broker redelivers a dead worker's messages after this many seconds. A copy that is
        # delivered while the body still runs does no harm to a leased task.
        "visibility_timeout": float(os.environ.get("VISIBILITY_TIMEOUT", "90")),
        # kombu 5.7+ looks for such messages every 5 s. The default, which older versions always
        # use, is 100 s.
        "unacked_restore_interval": float(os.environ.get("RESTORE_INTERVAL", "5")),
        "unacked_restore_throttle": 1,
    }
