"""The tasks of :mod:`tests.apps.leased`, and bodies that block or fork their process."""

import gc
import math
import os
import re
import sys
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from celery_leases import Failures, LeasedTask, LeaseLost
from celery_leases.concurrency import os_threads
from tests.apps.leased import *  # noqa: F403
from tests.apps.leased import app, note

STEP = 0.02


@app.task
def collects():
    """Collect garbage: Celery's result backends of greenlets are in reference cycles."""
    gc.collect()


@contextmanager
def _told(task, name):
    """Write to the journal that the body noticed the loss of its lease."""
    try:
        yield
    except LeaseLost:
        note("lost", name=name, error="LeaseLost", id=task.request.id)
        raise


@app.task(base=LeasedTask, bind=True, lease_key="stands:{name}")
def stands(self, name, gate, checks=False):
    """Wait for *gate*, with *checks* of the lease or without; write how that ended."""
    previous = self.lease.previous.ended if self.lease.previous else None
    note("begin", name=name, attempt=self.lease.attempt, id=self.request.id, previous=previous)
    with _told(self, name):
        while not Path(gate).exists():
            if checks:
                self.lease.check()
            time.sleep(STEP)
    note("end", name=name, id=self.request.id)
    return {"name": name, "fence": self.lease.fence}


@app.task(
    base=LeasedTask,
    bind=True,
    lease_key="hangs:{name}",
    lease_failures=Failures(failures=1),
)
def hangs(self, name):
    """Never end, and never check the lease."""
    note("begin", name=name, attempt=self.lease.attempt, id=self.request.id)
    with _told(self, name):
        while True:
            time.sleep(STEP)


# As a time_limit of four seconds, which the pool does not enforce.
hangs.__class__.lease_options = replace(hangs.lease_options, max_hold=4.0)


@app.task(base=LeasedTask, bind=True, lease_key="hogs:{name}")
def hogs(self, name, once, seconds, checks=False):
    """Hold the GIL for *seconds* in one call, in the first run only; then wait for the loss."""
    note("begin", name=name, attempt=self.lease.attempt, id=self.request.id)
    with _told(self, name):
        if not Path(once).exists():
            Path(once).touch()
            _hold(name, seconds)
            while True:
                if checks:
                    self.lease.check()
                time.sleep(STEP)
    note("end", name=name, id=self.request.id)
    return {"name": name, "fence": self.lease.fence}


def _hold(name, seconds):
    """Match a regular expression for at least *seconds*; each letter doubles the time."""
    letters, took = 16, 0.0
    while took < seconds / 20:
        took = _match(letters)
        letters += 1
    letters += math.ceil(math.log2(seconds / took))
    began = time.monotonic()
    try:
        _match(letters)
    finally:
        held = time.monotonic() - began
        try:
            note("held", name=name, seconds=held)
        except BaseException:  # the loss may be raised as soon as the GIL is released
            note("held", name=name, seconds=held)
            raise


def _match(letters):
    began = time.monotonic()
    re.match(r"(a+)+b", "a" * letters)
    return time.monotonic() - began


@app.task(base=LeasedTask, bind=True, lease_key="blocks:{name}")
def blocks(self, name, seconds):
    """Block the hub of the process for *seconds*, in a call that lets other threads run."""
    note("begin", name=name, attempt=self.lease.attempt, id=self.request.id)
    lock = os_threads.allocate_lock()
    lock.acquire()
    lock.acquire(timeout=seconds)
    note("end", name=name, held=self.lease.held, id=self.request.id)
    return {"name": name, "fence": self.lease.fence}


@app.task(base=LeasedTask, bind=True, lease_key="forks:{name}")
def forks(self, name, how):
    """Fork; the child leaves the body as *how* says, and the parent writes how the child ended."""
    note("begin", name=name, attempt=self.lease.attempt, id=self.request.id)
    child = os.fork()
    if child == 0:
        if how == "raises":
            raise ValueError(name)
        if how == "exits":
            sys.exit(3)
        return "the child's"
    _, status = os.waitpid(child, 0)
    note(
        "end",
        name=name,
        child=os.waitstatus_to_exitcode(status),
        held=self.lease.held,
        id=self.request.id,
    )
    return {"name": name, "fence": self.lease.fence}
