"""celery_leases, with Redis leases and its records in a SQLite file; ``UNIQUE`` has the defaults of
all options but the key.
"""

import os
from typing import Any

from celery import Celery

from celery_leases import Group, LeasedTask
from celery_leases.errors import LeaseHeld

UNIQUE: dict[str, Any] = {"base": LeasedTask, "lease_key": "{name}"}
REFUSING: dict[str, Any] = {**UNIQUE, "lease_on_busy": "raise"}
SKIPPING: dict[str, Any] = {**UNIQUE, "lease_on_busy": "ignore", "lease_on_done": "ignore"}
CHANGES: dict[str, Any] = {**UNIQUE, "lease_runs": "latest"}
LIMITED: dict[str, Any] = {**UNIQUE, "lease_group": Group("tenant", limit=3)}
PERIODIC: dict[str, Any] = {**UNIQUE, "lease_runs": "each"}
REPEATING = CHANGES
DUPLICATE = LeaseHeld


def configure(app: Celery, locks: str, seconds: float | None) -> None:
    """The ttl is renewed while the body runs; its default is 15 seconds."""
    app.conf.leases_url = locks
    app.conf.leases_database_url = f"sqlite:///{os.environ['PEERS_DIRECTORY']}/records.db"
    if seconds is not None:
        app.conf.leases_ttl = seconds
