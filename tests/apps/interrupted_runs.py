"""Eager runs in this process that are interrupted by signals.

``python -m tests.apps.interrupted_runs <what>`` prints JSON.
"""

import json
import logging
import os
import random
import signal
import sys
import threading
import time
from collections import Counter

from billiard.common import reset_signals
from billiard.pool import soft_timeout_sighandler
from celery import Celery

from celery_leases import LeasedTask, stores
from celery_leases.errors import LeaseHeld
from celery_leases.worker.processes import process_of

app = Celery("interrupted", broker="memory://", backend="cache+memory://")
app.conf.leases_url = "database"
FINISHED: list[str] = []


@app.task(base=LeasedTask, lease_key="{name}")
def body(name, seconds=0.0):
    """Work in small steps, as bytecode."""
    over = time.perf_counter() + seconds
    while time.perf_counter() < over:
        pass
    FINISHED.append(name)
    return name


def race(runs=300, seconds=0.01):
    """Lose the lease at about the time the body ends; counts how the runs ended."""
    sys.setswitchinterval(1e-4)
    logging.disable()
    body.apply(("warm",))
    renewer = process_of(app, eager=True).renewer
    ended: Counter[str] = Counter()
    for number in range(runs):
        done = threading.Event()
        thread = threading.Thread(target=_lose, args=(renewer, seconds, done))
        try:
            thread.start()
            ended[_outcome(f"race{number}", seconds)] += 1
            done.set()
            for _ in range(1000):
                pass
        except BaseException as error:  # noqa: BLE001 - whatever strays is to be counted
            ended[f"stray {type(error).__name__}"] += 1
        done.set()
        thread.join()
    return dict(ended)


def _lose(renewer, seconds, done):
    while not renewer._held_leases and not done.is_set():
        pass
    over = time.perf_counter() + seconds * random.uniform(0.7, 1.2)
    while time.perf_counter() < over:
        pass
    for held_lease in list(renewer._held_leases.values()):
        renewer.lose(held_lease, "the test said so")


def _outcome(name, seconds=0.0):
    try:
        result = body.apply((name, seconds))
    except LeaseHeld:
        return "lost"
    if result.state == "SUCCESS":
        return "done"
    return "lost" if isinstance(result.result, LeaseHeld) else type(result.result).__name__


def step(signum, where):
    """Send *signum* to this process during the step *where*, before its statement."""
    body.apply(("warm",))
    records = stores.sql.records.SqlRecordStore
    real = getattr(records, where)
    sent = []

    def interrupted(self, *args, **kwargs):
        if not sent:
            sent.append(where)
            os.kill(os.getpid(), signum)
        return real(self, *args, **kwargs)

    setattr(records, where, interrupted)
    exits, outcome = None, None
    try:
        outcome = _outcome("stepped")
    except SystemExit as error:
        exits = error.code
    row = process_of(app, eager=True).records.read("t:interrupted.body|stepped")
    return {
        "outcome": outcome,
        "exits": exits,
        "sent": bool(sent),
        "ran": "stepped" in FINISHED,
        "state": row.state if row else None,
        "crashes": row.crashes if row else None,
    }


if __name__ == "__main__":
    reset_signals()
    signal.signal(signal.SIGUSR1, soft_timeout_sighandler)
    what, *rest = sys.argv[1:]
    print(
        json.dumps(race() if what == "race" else step(getattr(signal, rest[0]), rest[1])),
        flush=True,
    )
