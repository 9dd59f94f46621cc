"""Leased tasks that fail by a script.

Run number n of a name plays step n; later runs play the last step.

A step is a list: a name from :data:`STEPS` and its arguments. Each run first writes ``paid`` to the
journal.
"""

import builtins
import json
import os
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from celery import current_task
from celery.exceptions import Ignore, Reject

from celery_leases import Cooldown, Failures, LeasedTask, PermanentFailure, RetryLater, Snooze
from celery_leases.rules import CooldownPolicy, Rules, cooldown, permanent, retry
from tests.apps.leased import app, gather, note, plain, wait_for
from tests.integration.rate_limited_server import Answered

__all__ = ["app", "gather", "plain"]


def _exactly(seconds):
    return CooldownPolicy(seconds, jitter=0)


def _paid(name):
    lines = (
        Path(os.environ["JOURNAL"]).read_text().splitlines()
        if Path(os.environ["JOURNAL"]).exists()
        else []
    )
    return sum(
        event["what"] == "paid" and event.get("name") == name for event in map(json.loads, lines)
    )


def _play(self, name, script):
    run, lease = _paid(name), self.lease
    step = script[min(run, len(script) - 1)]
    previous = asdict(lease.previous) if lease.previous else None
    seen = {
        "attempt": lease.attempt,
        "retries": self.request.retries,
        "held": lease.held,
        "previous": previous,
    }
    note("paid", name=name, id=self.request.id, wall=time.time(), **seen)
    value = _step(step)
    return value if value is not None else {"name": name, "paid": run + 1}


def _step(step):
    word, *arguments = step
    return STEPS[word](*arguments)


def _raise(kind, *arguments):
    raise kind(*arguments)


def _when(gate, *step):
    wait_for(gate)
    return _step(step)


def _read_timeout():
    """Raise a real read timeout: the server accepts the connection and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        urlopen(f"http://127.0.0.1:{server.getsockname()[1]}/", timeout=0.2)


def _retry(seconds):
    raise current_task.retry(countdown=seconds, max_retries=100)


STEPS: dict[str, Callable[..., Any]] = {
    "ok": lambda: None,
    "when": _when,
    "answer": partial(_raise, Answered),
    "raise": lambda kind, *arguments: _raise(getattr(builtins, kind), *arguments),
    "read timeout": _read_timeout,
    "sleep": time.sleep,
    "cooldown": lambda seconds, why=None, scope="key": _raise(Cooldown, seconds, why, None, scope),
    "later": partial(_raise, RetryLater),
    "snooze": partial(_raise, Snooze),
    "permanent": partial(_raise, PermanentFailure),
    "retry": _retry,
    "ignore": partial(_raise, Ignore),
    "reject": lambda: _raise(Reject, "no", False),
    "requeue": lambda: _raise(Reject, "again", True),
    "die": lambda: os.kill(os.getpid(), 9),
}


def _task(name, **options):
    @app.task(
        base=LeasedTask, bind=True, name=f"{__name__}.{name}", lease_key=name + ":{name}", **options
    )
    def play(self, name, script, group="nobody"):
        return _play(self, name, script)

    return play


_CONFLICT = Rules.default().on(
    status=409, to=retry("400ms", max=2, factor=1, jitter=0), name="taken"
)
_BUSY = Rules.default().on(status=429, to=cooldown("1.5s", scope="group", jitter=0), name="busy")
_ALWAYS = Failures(_BUSY, cooldown=_exactly(1.5), resume="always")
_GROUPED = {"lease_group": "{group}"}

resumes = _task("resumes", lease_failures=Failures(cooldown=_exactly(3), resume="always"))
usual = _task("usual", lease_failures=Failures(cooldown=_exactly(3)))
stops = _task("stops", lease_failures=Failures(cooldown=_exactly(3), resume="never"))
slow = _task("slow", lease_failures=Failures(cooldown=_exactly(300), resume="never"))
firm = _task(
    "firm",
    lease_failures=Failures(
        Rules.default().on(exc=ValueError, to=permanent(), name="no such document")
    ),
)
breaks = _task("breaks", lease_failures=Failures(cooldown=_exactly(1), failures=2, resume="always"))
quick = _task(
    "quick", lease_failures=Failures(_CONFLICT, cooldown=_exactly(3), crashes=1, resume="always")
)
auto = _task(
    "auto",
    autoretry_for=(Answered,),
    retry_kwargs={"max_retries": 2, "countdown": 0.1},
    lease_failures=Failures(resume="never"),
)
limited = _task(
    "limited", soft_time_limit=1, lease_failures=Failures(cooldown=_exactly(3), resume="never")
)
repeatable = _task("repeatable", lease_failures=Failures(idempotent=True))
refuses = _task("refuses", lease_failures=Failures(cooldown=_exactly(3)), lease_on_busy="raise")
waits = _task("waits", lease_failures=Failures(cooldown=_exactly(3)), lease_on_busy="wait")
ignores = _task("ignores", lease_failures=Failures(cooldown=_exactly(3)), lease_on_busy="ignore")
grouped = _task("grouped", lease_on_busy="wait", lease_failures=_ALWAYS, **_GROUPED)
visits = _task(
    "visits", lease_on_busy="wait", lease_failures=replace(_ALWAYS, resume="never"), **_GROUPED
)
shared = _task("shared", lease_group="{group}")
shut_out = _task("shut_out", lease_group="{group}", lease_on_busy="raise")
tracked = _task("tracked", track_started=True)
gated = _task(
    "gated", lease_failures=replace(_ALWAYS, resume="never"), lease_on_busy="raise", **_GROUPED
)


@app.task(base=LeasedTask, name=f"{__name__}.unkeyed")
def unkeyed(name):
    """Has no key; fails like a call with wrong arguments."""
    raise TypeError(f"no {name}")


@app.task(name=f"{__name__}.failed")
def failed(call):
    note("errback", id=call)


@app.task(base=LeasedTask, bind=True, lease_key="asks:{number}", lease_on_busy="wait")
def asks(self, number, url):
    """Call the rate limited server; each key cools down by itself."""
    return _ask(number, url)


@app.task(
    base=LeasedTask,
    bind=True,
    lease_key="asks:{number}",
    lease_on_busy="wait",
    lease_group="{url}",
)
def asks_together(self, number, url):
    """Call the rate limited server; all keys are in one cooldown group."""
    return _ask(number, url)


def _ask(number, url):
    with urlopen(url, timeout=10):  # noqa: S310 - the test's own server
        return number
