"""Leased tasks for tests with real workers. Each body writes what it does into a journal before it does more.

Everything comes from the environment: JOURNAL (a file), LEASES_URL, LEASES_DATABASE_URL, TTL, VISIBILITY.
"""

import json
import os
import time

from celery import Celery
from celery.exceptions import Ignore, Reject
from celery.signals import worker_ready

from celery_leases import LeasedTask, current_lease
from celery_leases.testing.workers import QUEUE_VARIABLE

TTL = float(os.environ.get("TTL", "3"))

app = Celery("leased")
app.conf.update(
    task_default_queue=os.environ.get(QUEUE_VARIABLE, "celery"),
    broker_connection_retry_on_startup=True,
    worker_prefetch_multiplier=int(os.environ.get("PREFETCH", "4")),
    worker_cancel_long_running_tasks_on_connection_loss=False,
    leases_url=os.environ.get("LEASES_URL"),
    leases_database_url=os.environ.get("LEASES_DATABASE_URL"),
    leases_ttl=TTL,
    task_default_retry_delay=1,
)
if "VISIBILITY" in os.environ:
    app.conf.broker_transport_options = {
        "visibility_timeout": float(os.environ["VISIBILITY"]),
        "unacked_restore_interval": 1,
        "unacked_restore_throttle": 1,
    }


def note(what: str, **more: object) -> None:
    """Append one event to the journal, in one write, so that a killed process leaves whole lines."""
    lease = current_lease
    event = {"what": what, "pid": os.getpid(), "t": time.monotonic(), "key": lease.key, "fence": lease.fence} | more
    fd = os.open(os.environ["JOURNAL"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(fd, (json.dumps(event) + "\n").encode())
    finally:
        os.close(fd)


def wait_for(path: str, seconds: float = 60.0) -> None:
    """Wait for a file to appear: how a test lets a body go on."""
    deadline = time.monotonic() + seconds
    while not os.path.exists(path) and time.monotonic() < deadline:
        time.sleep(0.02)


@app.task(base=LeasedTask, bind=True, lease_key="work:{name}")
def work(self, name, seconds=0.0, gate=None, answer=None, other=None):
    """Work for so many seconds, or until *gate* exists; returns *answer* or who did it."""
    note("begin", name=name, attempt=self.lease.attempt, id=self.request.id, previous=_ended(self.lease.previous))
    if gate:
        wait_for(gate)
    time.sleep(seconds)
    note("end", name=name, id=self.request.id)
    return answer if answer is not None else {"name": name, "fence": self.lease.fence}


@app.task(base=LeasedTask, bind=True, lease_key="rerun:{name}", lease_on_done="rerun")
def rerun(self, name, seconds=0.0, gate=None):
    """As :func:`work`, anew for each call."""
    note("begin", name=name, attempt=self.lease.attempt, id=self.request.id)
    if gate:
        wait_for(gate)
    time.sleep(seconds)
    note("end", name=name, id=self.request.id)
    return {"name": name, "fence": self.lease.fence}


@app.task(base=LeasedTask, bind=True)
def keyless(self, name, seconds=0.0, gate=None):
    """As :func:`work`, keyed by the call."""
    note("begin", name=name, attempt=self.lease.attempt, id=self.request.id)
    if gate:
        wait_for(gate)
    time.sleep(seconds)
    note("end", name=name, id=self.request.id)
    return {"name": name, "fence": self.lease.fence}


@app.task(base=LeasedTask, bind=True, lease_key="checks:{name}")
def checks(self, name, gate=None, stop=None):
    """Check the lease in a loop until it is lost, or *stop* exists."""
    note("begin", name=name, attempt=self.lease.attempt, id=self.request.id)
    if gate and self.lease.attempt > 1:
        return {"name": name, "fence": self.lease.fence}
    try:
        while not (stop and os.path.exists(stop)):
            self.lease.check()
            time.sleep(0.02)
    except BaseException as error:
        note("lost", name=name, error=type(error).__name__, id=self.request.id)
        raise
    note("end", name=name, id=self.request.id)
    return {"name": name, "fence": self.lease.fence}


@app.task(base=LeasedTask, bind=True, lease_key="sleeps:{name}")
def sleeps(self, name, seconds):
    """Sleep without looking at the lease, and tell how that ended."""
    note("begin", name=name, attempt=self.lease.attempt, id=self.request.id)
    try:
        time.sleep(seconds)
    except BaseException as error:
        note("lost", name=name, error=type(error).__name__, id=self.request.id)
        raise
    note("end", name=name, id=self.request.id)
    return {"name": name, "fence": self.lease.fence}


@app.task(base=LeasedTask, bind=True, lease_key="dies:{name}")
def dies(self, name, times=100):
    """Kill the own process in the first so many attempts."""
    note("begin", name=name, attempt=self.lease.attempt, id=self.request.id)
    if self.lease.attempt <= times:
        os.kill(os.getpid(), 9)
    note("end", name=name, id=self.request.id)
    return {"name": name, "fence": self.lease.fence}


@app.task(base=LeasedTask, bind=True, lease_key="fails:{name}")
def fails(self, name):
    """Raise."""
    note("begin", name=name, attempt=self.lease.attempt, id=self.request.id, previous=_ended(self.lease.previous))
    raise ValueError(f"no luck with {name}")


@app.task(base=LeasedTask, bind=True, lease_key="retries:{name}", max_retries=5)
def retries(self, name, times, countdown=0.2):
    """Raise ``self.retry()`` so many times, then succeed."""
    note("begin", name=name, attempt=self.lease.attempt, retries=self.request.retries, id=self.request.id)
    if self.request.retries < times:
        raise self.retry(countdown=countdown)
    return {"name": name, "retries": self.request.retries}


@app.task(base=LeasedTask, bind=True, lease_key="passes:{name}")
def passes(self, name, how):
    """End by Celery's own control flow."""
    note("begin", name=name, attempt=self.lease.attempt, id=self.request.id)
    if how == "ignore":
        raise Ignore
    if how == "reject":
        raise Reject("no", requeue=False)
    if how == "requeue" and self.lease.attempt == 1:
        raise Reject("again", requeue=True)
    if how == "replace":
        raise self.replace(plain.s(name))
    return {"name": name}


@app.task(base=LeasedTask, bind=True, lease_key="limited:{name}", time_limit=2)
def limited(self, name, seconds=30.0):
    """Run into the hard limit in the first attempt."""
    note("begin", name=name, attempt=self.lease.attempt, id=self.request.id)
    if self.lease.attempt == 1:
        time.sleep(seconds)
    note("end", name=name, id=self.request.id)
    return {"name": name}


@app.task(base=LeasedTask, bind=True, lease_key="link:{value}")
def leased_link(self, value):
    """A leased callback."""
    note("leased_link", id=self.request.id)
    return value


@app.task(bind=True)
def plain(self, value=None):
    """A callback without a lease."""
    note("plain", id=self.request.id)
    return value


@app.task(bind=True)
def gather(self, values):
    """The body of a chord."""
    note("gather", id=self.request.id, values=values)
    return values


def _ended(attempt):
    return attempt.ended if attempt else None


@worker_ready.connect
def _ready(**_):
    note("ready")
