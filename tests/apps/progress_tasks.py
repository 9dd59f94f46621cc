"""Loops whose processes die at some item; each item is a line in the file ``items.<name>``."""

import os
import signal
import time
from pathlib import Path

from celery_leases import Failures, LeasedTask, RetryLater
from celery_leases.rules import CooldownPolicy
from tests.apps.failpoints import reach_for
from tests.apps.leased import app, note, wait_for

__all__ = ["app"]

SOON = CooldownPolicy(0.2, jitter=0)


def items_of(name):
    """The file with the processed items: process, number, time."""
    return Path(os.environ["JOURNAL"]).with_name(f"items.{name}")


class Items:
    """Writes items, each with one call, so that a killed process leaves whole lines."""

    def __init__(self, name):
        self.fd = os.open(items_of(name), os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def add(self, item):
        """Write that this item is being processed."""
        os.write(self.fd, f"{os.getpid()} {item} {time.monotonic():.4f}\n".encode())

    def close(self):
        os.close(self.fd)


@app.task(
    base=LeasedTask,
    bind=True,
    lease_key="loops:{name}",
    lease_failures=Failures(cooldown=SOON, resume="always"),
)
def loops(self, name, count, every=None, pace=0.0, fails_at=(), waits_at=None, gate=None):
    """Process *count* items; a test arms ``item n`` to kill the process there."""
    note("begin", name=name, attempt=self.lease.attempt, id=self.request.id, crashes=_crashes(self))
    items = Items(name)
    try:
        for item in self.lease.each(range(count), every=every):
            reach_for(f"item {item}", name)
            _fail_once(self, name, item, fails_at)
            items.add(item)
            if item == waits_at and gate:
                note("waits", name=name, item=item)
                wait_for(gate)
            time.sleep(pace)
    except BaseException as error:
        note("raised", name=name, error=type(error).__name__)
        raise
    finally:
        items.close()
    note("end", name=name)
    return {"name": name, "count": count}


@app.task(base=LeasedTask, bind=True, lease_key="pages:{name}", lease_failures=Failures(crashes=2))
def pages(self, name, count):
    """Read *count* pages, and die after each."""
    page = (self.lease.progress or {}).get("page", 0)
    note(
        "begin",
        name=name,
        page=page,
        attempt=self.lease.attempt,
        id=self.request.id,
        crashes=_crashes(self),
    )
    if page < count:
        self.lease.save_progress({"page": page + 1})
        os.kill(os.getpid(), signal.SIGKILL)
    return {"name": name, "pages": page}


def _crashes(task):
    return task.lease._record.crashes


def _fail_once(task, name, item, fails_at):
    marker = items_of(name).with_suffix(f".{name}.failed.{item}")
    if item in fails_at and not marker.exists():
        marker.touch()
        raise RetryLater(0.1) if item % 2 else ValueError(item)
