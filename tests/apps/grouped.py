"""Tasks of groups with a limit or a rate; see :mod:`tests.apps.leased` for the settings."""

import os
import time

from celery_leases import Group, LeasedTask
from tests.apps.leased import app, begins, ends

__all__ = ["app"]

LIMIT = int(os.environ.get("LIMIT", "3"))
RATE = os.environ.get("RATE", "20/s")


@app.task(
    base=LeasedTask, bind=True, lease_key="limited:{name}", lease_group=Group("g", limit=LIMIT)
)
def limited(self, name, seconds=0.5):
    """Work in a group with a limit."""
    begins(self, name)
    time.sleep(seconds)
    ends(self, name)
    return name


@app.task(base=LeasedTask, bind=True, lease_key="rated:{name}", lease_group=Group("r", rate=RATE))
def rated(self, name):
    """Work in a group with a rate."""
    begins(self, name)
    return name


@app.task(base=LeasedTask, bind=True, lease_key="free:{name}")
def free(self, name):
    """Work in no group."""
    begins(self, name)
    return name
