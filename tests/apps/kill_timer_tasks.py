"""The tasks of :mod:`tests.apps.leased`, and tasks that the kill timer ends."""

import os
import re
import time
from contextlib import suppress
from pathlib import Path

from celery_leases import Failures, LeasedTask
from tests.apps.leased import *  # noqa: F403
from tests.apps.leased import app, note

PULSE = 0.02


@app.task(
    base=LeasedTask,
    bind=True,
    lease_key="pulses:{name}",
    lease_on_lost="kill",
    lease_failures=Failures(crashes=100),
)
def pulses(self, name, gate):
    """Run until *gate* exists; the first attempt makes effects and never checks the lease."""
    note("begin", name=name, attempt=self.lease.attempt, id=self.request.id)
    while not Path(gate).exists():
        if self.lease.attempt == 1:
            note("pulse", name=name)
        time.sleep(PULSE)
    note("end", name=name, id=self.request.id)
    return {"name": name, "fence": self.lease.fence}


@app.task(base=LeasedTask, bind=True, lease_key="clings:{name}", lease_on_lost="kill")
def clings(self, name):
    """The first attempt makes effects and catches every exception."""
    note("begin", name=name, attempt=self.lease.attempt, id=self.request.id)
    first = self.lease.attempt == 1
    while first and not Path(self.lease.key).exists():
        with suppress(BaseException):
            note("pulse", name=name)
            time.sleep(PULSE)
    note("end", name=name, id=self.request.id)
    return {"name": name, "fence": self.lease.fence}


@app.task(base=LeasedTask, bind=True, lease_key="hogs:{name}", lease_on_lost="kill")
def hogs(self, name, letters=40):
    """The first attempt holds the GIL in one call for minutes."""
    note("begin", name=name, attempt=self.lease.attempt, id=self.request.id)
    if self.lease.attempt == 1:
        re.match(r"(a+)+b", "a" * letters)
    note("end", name=name, id=self.request.id)
    return {"name": name, "fence": self.lease.fence}


@app.task(base=LeasedTask, bind=True, lease_key="lasts:{name}", lease_on_lost="kill")
def lasts(self, name, seconds):
    """Work for longer than the ttl, with renewals; then write how many timers the process has."""
    note("begin", name=name, attempt=self.lease.attempt, id=self.request.id)
    time.sleep(seconds)
    note("end", name=name, id=self.request.id, timers=timers())
    return {"name": name, "timers": timers()}


@app.task(base=LeasedTask, bind=True, lease_key="counts:{name}")
def counts(self, name, gate=None):
    """Once *gate* exists, write how many timers the process has whose body needs none."""
    note("count", name=name)
    while gate is not None and not Path(gate).exists():
        time.sleep(PULSE)
    return {"pid": os.getpid(), "timers": timers()}


@app.task(base=LeasedTask, bind=True, lease_key="nests:{name}", lease_on_lost="kill")
def nests(self, name, gate):
    """Run another leased task, then wait for *gate* without checks of the lease."""
    inside = counts.apply((name,)).result["timers"]
    note(
        "begin",
        name=name,
        attempt=self.lease.attempt,
        id=self.request.id,
        inside=inside,
        after=timers(),
    )
    while not Path(gate).exists():
        time.sleep(PULSE)
    note("end", name=name, id=self.request.id)
    return {"name": name, "fence": self.lease.fence}


def timers():
    """How many POSIX timers this process has."""
    return sum(
        line.startswith("ID:") for line in Path("/proc/self/timers").read_text().splitlines()
    )
