"""Eager runs in greenlets that lose their leases.

``python -m tests.apps.greenlet_runs gevent <what>`` prints JSON.
"""

import sys

if sys.argv[1] == "gevent":
    from gevent import monkey

    monkey.patch_all()
    from gevent import GreenletExit, kill, spawn
else:
    import eventlet

    eventlet.monkey_patch()
    from eventlet import kill, spawn
    from eventlet.support.greenlets import GreenletExit

import json
import logging
import random
import select
import socket
import subprocess
import threading
import time
from collections import Counter
from contextlib import suppress
from functools import partial

from celery import Celery

from celery_leases import LeasedTask, LeaseLost
from celery_leases.concurrency import os_threads
from celery_leases.errors import LeaseHeld
from celery_leases.stores.sql.effects import SqlEffectStore
from celery_leases.stores.sql.records import SqlRecordStore
from celery_leases.worker.processes import process_of

GREENLETS = 20
RUNS = 30
SECONDS = 0.02
REASON = "the test said so"

app = Celery("greens", broker="memory://", backend="cache+memory://")
app.conf.leases_url = "database"
SEEN: Counter[str] = Counter()
TOLD: dict[str, float] = {}
LOST_AT: dict[str, float] = {}


@app.task(base=LeasedTask, bind=True, lease_key="{name}")
def body(self, name, seconds=0.0, saves=False):
    """Work in small steps, each of which lets other greenlets run; some save progress."""
    over = time.perf_counter() + seconds
    while time.perf_counter() < over:
        time.sleep(random.uniform(0, 0.002))
        if saves:
            self.lease.save_progress(time.perf_counter())
    return name


@app.task(base=LeasedTask, bind=True, lease_key="{name}")
def blocked(self, name, how):
    """Wait for an event that never happens."""
    try:
        WAITS[how]()
    except LeaseLost:
        TOLD[name] = time.perf_counter()
        raise


@app.task(base=LeasedTask, bind=True, lease_key="{name}")
def cleaning(self, name, seconds):
    """Clean up for *seconds* after the loss, count the interruptions, and continue to wait."""
    try:
        time.sleep(60)
    except LeaseLost:
        SEEN["told"] += 1
        try:
            time.sleep(seconds)
            SEEN["cleaned"] += 1
        except LeaseLost:
            SEEN["told while cleaning"] += 1
        raise


@app.task(base=LeasedTask, bind=True, lease_key="{name}")
def asking(self, name, seconds):
    """Block the hub until the lease is lost; then check it, and clean up for *seconds*."""
    while not self.lease.lost:
        pass
    try:
        self.lease.check()
    finally:
        SEEN["told"] += 1
        time.sleep(seconds)
        SEEN["cleaned"] += 1


@app.task(base=LeasedTask, bind=True, lease_key="{name}", lease_on_lost="flag")
def flagged(self, name):
    """Sleep while the lease is lost."""
    while not self.lease.lost:
        time.sleep(0.01)
    time.sleep(1)
    SEEN["slept on"] += 1


@app.task(base=LeasedTask, bind=True, lease_key="{name}")
def outer(self, name, seconds):
    """Call another leased task eagerly, in this very greenlet."""
    inner = body.apply((f"{name} inside", seconds))
    SEEN[f"inner {inner.state}"] += 1
    time.sleep(60)


def _receives():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.recv(1)


def _joins():
    thread = threading.Thread(target=time.sleep, args=(60,), daemon=True)
    thread.start()
    thread.join()


WAITS = {
    "sleep": lambda: time.sleep(60),
    "recv": _receives,
    "event": lambda: threading.Event().wait(60),
    "lock": lambda: [lock := threading.Lock(), lock.acquire(), lock.acquire(timeout=60)],
    "select": lambda: select.select([], [], [], 60),
    "subprocess": lambda: subprocess.run(["sleep", "60"], check=True),
    "join": _joins,
}


def race():
    """Bodies lose their leases at about the time they end; returns how the runs ended."""
    ended: Counter[str] = Counter()
    renewer = _warm()
    for store, step in (
        (SqlRecordStore, "insert_or_read"),
        (SqlRecordStore, "settle"),
        (SqlEffectStore, "save_progress"),
    ):
        _yielding(store, step, ended)
    os_threads.start_thread(partial(_lose_all, renewer, SECONDS))
    greenlets = [spawn(_runs, f"race{number}", ended) for number in range(GREENLETS)]
    _wait_for(greenlets)
    return dict(ended)


def _runs(name, ended):
    for number in range(RUNS):
        try:
            ended[_outcome(body, f"{name}-{number}", SECONDS, bool(number % 2))] += 1
            time.sleep(random.uniform(0, 0.005))
        except BaseException as error:  # noqa: BLE001 - whatever strays is to be counted
            ended[f"stray {type(error).__name__}"] += 1


def _yielding(store, step, ended):
    """Make a step of the protocol let other greenlets run before and after its statement."""
    real = getattr(store, step)

    def slow(self, *args, **kwargs):
        try:
            time.sleep(random.uniform(0, 0.003))
            try:
                return real(self, *args, **kwargs)
            finally:
                time.sleep(random.uniform(0, 0.003))
        except BaseException as error:
            ended[f"{type(error).__name__} inside {step}"] += 1
            raise

    setattr(store, step, slow)


def _lose_all(renewer, seconds):
    """In an OS thread: take each lease away at about the time its body ends."""
    due: dict[str, float] = {}
    pause = os_threads.allocate_lock()
    pause.acquire()
    while True:
        for token, held_lease in list(renewer._held_leases.items()):
            at = due.setdefault(token, time.perf_counter() + seconds * random.uniform(0.5, 1.5))
            if time.perf_counter() >= at:
                renewer.lose(held_lease, REASON)
        pause.acquire(timeout=0.0005)


def reach():
    """For each way to wait: after how many seconds the body noticed the loss of its lease."""
    renewer = _warm()
    greenlets = [spawn(_outcome, blocked, how, how) for how in WAITS]
    time.sleep(0.5)
    os_threads.start_thread(partial(_lose_now, renewer))
    _wait_for(greenlets)
    return {how: TOLD[how] - LOST_AT[how] for how in WAITS}


def _lose_now(renewer):
    for held_lease in list(renewer._held_leases.values()):
        LOST_AT[held_lease.call.key.key] = time.perf_counter()
        renewer.lose(held_lease, REASON)


def _lose_soon(renewer, key):
    """In an OS thread: take the lease of *key* away shortly after it was acquired."""
    pause = os_threads.allocate_lock()
    pause.acquire()
    while not (
        found := [
            held_lease
            for held_lease in list(renewer._held_leases.values())
            if held_lease.call.key.key == key
        ]
    ):
        pause.acquire(timeout=0.001)
    pause.acquire(timeout=0.2)
    renewer.lose(found[0], REASON)


def other(task, *args):
    """One body of *task* that loses its lease; returns how it ended and what it has noticed."""
    renewer = _warm()
    ended: list[str] = []
    os_threads.start_thread(partial(_lose_soon, renewer, task))
    greenlet = spawn(lambda: ended.append(_outcome(globals()[task], task, *map(float, args))))
    _wait_for([greenlet])
    rows = {"lost": f"t:greens.{task}|{task}", "inside": f"t:greens.body|{task} inside"}
    read = process_of(app, eager=True).records.read
    states = {what: row.state for what, key in rows.items() if (row := read(key)) is not None}
    return {"ended": ended, "seen": dict(SEEN), "states": states}


def killed():
    """A body that is killed, and another greenlet that continues afterwards."""
    _warm()
    ended: list[str] = []
    greenlet = spawn(lambda: ended.append(_outcome(blocked, "killed", "sleep")))
    time.sleep(0.2)
    kill(greenlet)
    _wait_for([greenlet])
    row = process_of(app, eager=True).records.read("t:greens.blocked|killed")
    return {"ended": ended, "state": row and row.state, "crashes": row and row.crashes}


def _warm():
    logging.disable()
    body.apply(("warm",))
    return process_of(app, eager=True).renewer


def _stay_awake():
    while True:
        time.sleep(0.05)


def _wait_for(greenlets):
    # As in a worker, the hub always has an event to wait for. gevent ends a greenlet that waits
    # only for another OS thread, for example for a lock, because it takes that for a deadlock.
    spawn(_stay_awake)
    for greenlet in greenlets:
        with suppress(GreenletExit):
            greenlet.join() if sys.argv[1] == "gevent" else greenlet.wait()


def _outcome(task, *args):
    try:
        result = task.apply(args)
    except LeaseHeld:
        return "lost"
    if result.state == "SUCCESS":
        return "done"
    return "lost" if isinstance(result.result, LeaseHeld) else type(result.result).__name__


if __name__ == "__main__":
    _, _, what, *rest = sys.argv
    found = {"race": race, "reach": reach, "killed": killed}.get(what) or partial(other, what)
    print(json.dumps(found(*rest)), flush=True)
