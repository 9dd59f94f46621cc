"""Leased tasks for tests with real workers. Each body writes its steps to a journal.

The settings are environment variables: JOURNAL (a file), LEASES_URL, LEASES_DATABASE_URL, TTL,
VISIBILITY, BROKER_OPTIONS (further transport options, as JSON), QUORUM (the type of the exchange of
a quorum queue, "topic" or "direct"), SIDE_QUEUE (the name of another queue), and
IGNORE_SIGINT_AT_EXIT.
"""

import asyncio
import atexit
import json
import os
import signal
import sys
import time
from pathlib import Path

from celery import Celery
from celery.exceptions import Ignore, Reject, WorkerShutdown, WorkerTerminate
from celery.signals import worker_init, worker_ready
from celery.worker.request import Request
from kombu import Exchange, Queue

from celery_leases import Failures, LeasedTask, PermanentFailure, Snooze, current_lease
from celery_leases.decide import after_run
from tests.support.workers import QUEUE_VARIABLE

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
if "RESULTS_AWAY" in os.environ:
    app.loader.override_backends = {"redis": "tests.apps.results_away:Results"}
if "QUORUM" in os.environ:
    app.conf.update(
        task_default_queue_type="quorum", task_default_exchange_type=os.environ["QUORUM"]
    )
if "SIDE_QUEUE" in os.environ:
    app.conf.task_queues = [
        Queue(
            name,
            Exchange(name, os.environ["QUORUM"]),
            name,
            queue_arguments={"x-queue-type": "quorum"},
        )
        for name in (app.conf.task_default_queue, os.environ["SIDE_QUEUE"])
    ]
if "SOFT_SHUTDOWN" in os.environ:
    app.conf.worker_soft_shutdown_timeout = float(os.environ["SOFT_SHUTDOWN"])
if "VISIBILITY" in os.environ:
    # On RabbitMQ, too, a call waits for half of it at a time.
    app.conf.broker_transport_options = {
        "consumer_timeout": 1.5 * float(os.environ["VISIBILITY"]),
        "visibility_timeout": float(os.environ["VISIBILITY"]),
        "unacked_restore_interval": 1,
        "unacked_restore_throttle": 1,
    }


@worker_init.connect(weak=False)
def _settle_sooner(**_: object) -> None:
    """In the worker only: the process of the tests imports this module too."""
    if "SETTLE_TIMEOUT" in os.environ:
        vars(after_run)["SETTLE_TIMEOUT"] = float(os.environ["SETTLE_TIMEOUT"])


@worker_init.connect(weak=False)
def _ignore_signals_at_exit(**_: object) -> None:
    """A test that sends SIGINT until the worker ends does not know when that has begun to end."""
    if "IGNORE_SIGINT_AT_EXIT" in os.environ:
        atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)


if "BROKER_OPTIONS" in os.environ:
    app.conf.broker_transport_options |= json.loads(os.environ["BROKER_OPTIONS"])


def note(what: str, **more: object) -> None:
    """Append one event to the journal in one write, so that a killed process leaves whole lines."""
    lease = current_lease
    event = {
        "what": what,
        "pid": os.getpid(),
        "t": time.monotonic(),
        "key": lease.key,
        "fence": lease.fence,
    } | more
    fd = os.open(os.environ["JOURNAL"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(fd, (json.dumps(event) + "\n").encode())
    finally:
        os.close(fd)


def _begun(name: str) -> list[dict[str, object]]:
    events = map(json.loads, Path(os.environ["JOURNAL"]).read_text().splitlines())
    return [event for event in events if event["what"] == "begin" and event.get("name") == name]


def wait_for(path: str, seconds: float = 60.0) -> None:
    """Wait for a file that a test creates to let a body continue."""
    deadline = time.monotonic() + seconds
    while not Path(path).exists() and time.monotonic() < deadline:
        time.sleep(0.02)


def begins(task, name, **more):
    """Write that the body of *task* begins."""
    note("begin", name=name, attempt=task.lease.attempt, id=task.request.id, **more)


def ends(task, name):
    note("end", name=name, id=task.request.id)


@app.task(base=LeasedTask, bind=True, lease_key="work:{name}")
def work(self, name, seconds=0.0, gate=None, answer=None, other=None):
    """Work for *seconds*, or until *gate* exists; returns *answer* or the call that ran."""
    begins(self, name, previous=_ended(self.lease.previous))
    if gate:
        wait_for(gate)
    time.sleep(seconds)
    ends(self, name)
    return answer if answer is not None else {"name": name, "fence": self.lease.fence}


@app.task(base=LeasedTask, lease_key="/ours/shared:{name}")
def shared(name):
    """Has keys that other tasks may share."""
    return {"name": name}


class AuditedRequest(Request):
    """A request class of the user."""

    def on_accepted(self, pid, time_accepted):
        print(f"audited {self.id}", flush=True)
        return super().on_accepted(pid, time_accepted)


@app.task(base=LeasedTask, bind=True, lease_key="audited:{name}", Request=AuditedRequest)
def audited(self, name, gate):
    """As :func:`work`, with a request class of the user."""
    begins(self, name)
    wait_for(gate)
    return {"name": name}


@app.task(base=LeasedTask, bind=True, lease_key="rerun:{name}", lease_runs="each")
def rerun(self, name, seconds=0.0, gate=None):
    """As :func:`work`; each call runs."""
    return _working(self, name, seconds, gate)


@app.task(base=LeasedTask, bind=True, lease_key="newest:{name}", lease_runs="latest")
def newest(self, name, number, gate=None, seconds=0.0, how=None):
    """As :func:`work`; of the calls that wait, only the newest runs. Returns *number*."""
    begins(self, name, number=number)
    if gate:
        wait_for(gate)
    time.sleep(seconds)
    if how == "retry" and not self.request.retries:
        raise self.retry(countdown=1.0)
    if how == "fail":
        raise PermanentFailure(f"number {number} is wrong")
    ends(self, name)
    return number


@app.task(
    base=LeasedTask,
    bind=True,
    lease_key="quiet:{name}",
    lease_runs="latest",
    lease_debounce=1.0,
    lease_debounce_max=3.0,
)
def quiet(self, name, number):
    """As :func:`newest`, once no newer call has come for a second."""
    begins(self, name, number=number)
    return number


@app.task(base=LeasedTask, bind=True, lease_key="repeats:{name}", lease_runs="latest")
def repeats(self, name, stop):
    """Publish itself for a moment later, until the file *stop* exists."""
    follows = None
    if not Path(stop).exists():
        follows = repeats.apply_async((name, stop), countdown=0.3).id
    begins(self, name, follows=follows)


@app.task(base=LeasedTask, bind=True)
def keyless(self, name, seconds=0.0, gate=None):
    """As :func:`work`; its key is the call id."""
    return _working(self, name, seconds, gate)


@app.task(base=LeasedTask, bind=True, lease_key="snoozes:{name}")
def snoozes(self, name, *delays):
    """Snooze for each of *delays* in turn, then return the routing of the message."""
    number = len(_begun(name))
    info = self.request.delivery_info
    note(
        "begin",
        name=name,
        id=self.request.id,
        host=self.request.hostname,
        priority=info["priority"],
    )
    if number < len(delays):
        raise Snooze(delays[number])
    return {"name": name, "host": self.request.hostname}


@app.task(base=LeasedTask, bind=True, lease_key="checks:{name}")
def checks(self, name, gate=None, stop=None):
    """Check the lease in a loop until it is lost, or *stop* exists."""
    try:
        begins(self, name)
        if gate and self.lease.attempt > 1:
            return {"name": name, "fence": self.lease.fence}
        while not (stop and Path(stop).exists()):
            self.lease.check()
            time.sleep(0.02)
    except BaseException as error:
        note("lost", name=name, error=type(error).__name__, id=self.request.id)
        raise
    ends(self, name)
    return {"name": name, "fence": self.lease.fence}


@app.task(base=LeasedTask, bind=True, lease_key="sleeps:{name}")
def sleeps(self, name, seconds):
    """Sleep without checks of the lease, and write how that ended."""
    try:
        begins(self, name)
        time.sleep(seconds)
    except BaseException as error:
        note("lost", name=name, error=type(error).__name__, id=self.request.id)
        raise
    ends(self, name)
    return {"name": name, "fence": self.lease.fence}


@app.task(base=LeasedTask, bind=True, lease_key="dies:{name}")
def dies(self, name, times=100):
    """Kill its own process in the first *times* attempts."""
    begins(self, name)
    if self.lease.attempt <= times:
        os.kill(os.getpid(), 9)
    ends(self, name)
    return {"name": name, "fence": self.lease.fence}


@app.task(
    base=LeasedTask,
    bind=True,
    lease_key="fails:{name}",
    lease_failures=Failures(cooldown="1s", resume="never"),
)
def fails(self, name):
    begins(self, name, previous=_ended(self.lease.previous))
    raise ValueError(f"no luck with {name}")


@app.task(base=LeasedTask, lease_key="refunds:{name}")
def refunds(request, exc, traceback, name):
    """An errback of failed calls."""
    note("refund", name=name, error=repr(exc), traceback=bool(traceback), id=request.id)


@app.task(base=LeasedTask, bind=True, lease_key="retries:{name}", max_retries=5)
def retries(self, name, times, countdown=0.2):
    """Raise ``self.retry()`` *times* times, then succeed."""
    begins(self, name, retries=self.request.retries)
    if self.request.retries < times:
        raise self.retry(countdown=countdown)
    return {"name": name, "retries": self.request.retries}


@app.task(base=LeasedTask, bind=True, lease_key="exports:{name}:{ids}", max_retries=5)
def exports(self, name, ids, gate=None):
    """Retry once, then wait for *gate*: the key is as long as the list of *ids*."""
    note(
        "begin",
        name=name,
        retries=self.request.retries,
        id=self.request.id,
        length=len(self.lease.key),
    )
    if not self.request.retries:
        raise self.retry(countdown=0.1)
    if gate:
        wait_for(gate)
    return len(ids)


@app.task(base=LeasedTask, bind=True, lease_key="passes:{name}")
def passes(self, name, how):
    """End with one of Celery's control flow exceptions."""
    begins(self, name)
    if how == "ignore":
        raise Ignore
    if how == "reject":
        raise Reject("no", requeue=False)
    if how == "requeue" and self.lease.attempt == 1:
        raise Reject("again", requeue=True)
    if how == "retry and return" and not self.request.retries:
        self.retry(countdown=0.1, throw=False)
    if how == "publish itself" and self.lease.attempt == 1:
        self.apply_async((name, how), task_id=self.request.id)
    if how == "replace":
        raise self.replace(plain.s(name))
    if how.startswith("/"):
        raise self.replace(opened.s(how, name) | plain.s())
    return {"name": name}


@app.task(base=LeasedTask, bind=True, lease_key="limited:{name}", time_limit=2)
def limited(self, name, seconds=30.0):
    """Exceed the hard time limit in the first attempt."""
    begins(self, name)
    if self.lease.attempt == 1:
        time.sleep(seconds)
    ends(self, name)
    return {"name": name}


def prepares(task_id, args, kwargs):
    """Take as long as the second argument says, before the lease is acquired."""
    time.sleep(args[1] if len(args) > 1 else 0)


@app.task(
    base=LeasedTask,
    bind=True,
    lease_key="prepared:{name}",
    lease_outbox="once",
    lease_fingerprint=None,
    before_start=staticmethod(prepares),
)
def prepared(self, name, seconds=0.0):
    """Has a ``before_start``, which runs before the lease is acquired."""
    begins(self, name)
    return {"name": name}


@app.task(base=LeasedTask, bind=True, lease_key="swallows:{name}")
def swallows(self, name, stop):
    """The first attempt catches every ``Exception`` until *stop* exists."""
    first = not Path(f"{stop}.first").exists()
    Path(f"{stop}.first").touch()
    try:
        begins(self, name)
        while first and not Path(stop).exists():
            try:
                time.sleep(0.05)
                self.lease.check()
            except Exception as error:  # noqa: BLE001 - that is the point
                note("swallowed", name=name, error=type(error).__name__)
    except BaseException as error:
        note("lost", name=name, error=type(error).__name__, id=self.request.id)
        raise
    ends(self, name)
    return {"name": name, "fence": self.lease.fence}


@app.task(base=LeasedTask, bind=True, lease_key="goes_on:{name}", lease_on_lost="flag")
def goes_on(self, name, gate, error=None):
    """Continue without checks until the gate of its attempt exists; the first may raise."""
    begins(self, name)
    wait_for(f"{gate}.{self.lease.attempt}")
    note("end", name=name, attempt=self.lease.attempt, id=self.request.id)
    if error and self.lease.attempt == 1:
        raise ValueError(error)
    return {"name": name, "fence": self.lease.fence}


@app.task(base=LeasedTask, bind=True, lease_key="tidies:{name}")
def tidies(self, name, gate, tidying=0.3):
    """Wait for *gate*; take *tidying* seconds to clean up, however it ends."""
    try:
        begins(self, name, previous=_ended(self.lease.previous))
        wait_for(gate)
    finally:
        note("tidying", name=name, id=self.request.id)
        time.sleep(tidying)
        note("tidied", name=name, id=self.request.id)
    ends(self, name)
    return {"name": name, "fence": self.lease.fence}


@app.task(base=LeasedTask, bind=True, lease_key="exits:{name}", lease_failures=Failures(crashes=2))
def exits(self, name, how, times=100):
    """End its own process in the first *times* attempts: ``sys.exit(3)`` or ``os._exit(3)``."""
    begins(self, name, previous=_ended(self.lease.previous))
    if self.lease.attempt <= times:
        sys.exit(3) if how == "sys" else os._exit(3)
    ends(self, name)
    return {"name": name}


class GreenletExit(BaseException):
    """A class of the user that is named like the exception that kills greenlets."""


STOPS: dict[str, type[BaseException]] = {
    "interrupt": KeyboardInterrupt,
    "shutdown": WorkerShutdown,
    "terminate": WorkerTerminate,
    "exit": SystemExit,
    "named": GreenletExit,
    "cancelled": asyncio.CancelledError,
}
"""Exceptions that end workers, processes, greenlets or coroutines."""


@app.task(
    base=LeasedTask,
    bind=True,
    lease_key="stops:{name}:{how}",
    lease_failures=Failures(crashes=2, resume="never"),
)
def stops(self, name, how):
    """Raise an exception of :data:`STOPS`, or greenlet's own ``GreenletExit``."""
    begins(self, name, how=how)
    raise STOPS[how] if how in STOPS else sys.modules["greenlet"].GreenletExit


def ends_process(*_):
    """Raise what ends the process: as ``lease_key``, or as a hook of Celery."""
    raise SystemExit


class EndsBefore(LeasedTask):
    """Its hook ends the process before the body."""

    abstract = True
    before_start = ends_process


class EndsAfter(LeasedTask):
    """Its hook ends the process after the body."""

    abstract = True
    on_success = ends_process


@app.task(base=LeasedTask, lease_key=ends_process)
def keyed(name):
    """Never called."""


@app.task(base=EndsBefore, bind=True, lease_key="unprepared:{name}")
def unprepared(self, name):
    """Never called."""


@app.task(base=EndsAfter, bind=True, lease_key="followed:{name}")
def followed(self, name):
    begins(self, name)
    return name


class EndsWhenRead(dict):
    """A result that ends the process that reads it."""

    items = ends_process


@app.task(base=LeasedTask, bind=True, lease_key="unread:{name}")
def unread(self, name):
    """Return a value that cannot be read."""
    begins(self, name)
    return EndsWhenRead(name=name)


@app.task(base=LeasedTask, bind=True, lease_key="often:{name}", lease_failures=Failures(crashes=4))
def often(self, name):
    """Kill its own process in every attempt."""
    begins(self, name)
    os.kill(os.getpid(), 9)


@app.task(
    base=LeasedTask,
    bind=True,
    lease_key="ignores:{name}",
    lease_on_busy="ignore",
    lease_on_done="ignore",
)
def ignores(self, name, seconds=0.0, gate=None):
    """As :func:`work`; another call is dropped."""
    return _working(self, name, seconds, gate)


@app.task(
    base=LeasedTask,
    bind=True,
    lease_key="refuses:{name}",
    lease_on_busy="raise",
    lease_on_done="raise",
)
def refuses(self, name, seconds=0.0, gate=None):
    """As :func:`work`; another call gets an error."""
    return _working(self, name, seconds, gate)


@app.task(
    base=LeasedTask,
    bind=True,
    lease_key="auto:{name}",
    lease_failures=Failures(resume="never"),
    autoretry_for=(ValueError,),
    retry_kwargs={"max_retries": 3, "countdown": 0.1},
)
def auto(self, name, times):
    """Fail *times* times, with ``autoretry_for``."""
    begins(self, name, retries=self.request.retries)
    if self.request.retries < times:
        raise ValueError(f"not yet: {name}")
    return {"name": name, "retries": self.request.retries}


@app.task(base=LeasedTask, bind=True, lease_key="recursive:{name}")
def recursive(self, name, depth):
    """Call itself inside the body."""
    note("begin", name=name, depth=depth, held=self.lease.held, id=self.request.id)
    below = recursive(name, depth - 1) if depth else []
    note("end", name=name, depth=depth, held=self.lease.held, id=self.request.id)
    return [depth, *below]


@app.task(base=LeasedTask, bind=True, lease_key="calls:{name}")
def calls(self, name):
    """Call other leased tasks directly, and through ``map`` in its body."""
    note("begin", name=name, held=self.lease.held, key_before=self.lease.key, id=self.request.id)
    direct = square(3)
    note("end", name=name, held=self.lease.held, key_after=self.lease.key, id=self.request.id)
    return {"direct": direct, "map": [square(number) for number in (1, 2)]}


@app.task(base=LeasedTask, lease_key="square:{number}")
def square(number):
    """Not bound; reads ``current_lease``."""
    note("square", number=number, held=current_lease.held)
    return number * number


def _working(self, name, seconds, gate):
    begins(self, name)
    if gate:
        wait_for(gate)
    time.sleep(seconds)
    ends(self, name)
    return {"name": name, "fence": self.lease.fence}


@app.task(base=LeasedTask, bind=True, lease_key="link:{value}")
def leased_link(self, value):
    note("leased_link", id=self.request.id)
    return value


@app.task(bind=True)
def plain(self, value=None):
    note("plain", id=self.request.id)
    return value


@app.task
def opened(gate, value):
    """Return *value* once *gate* exists, or raise the error that it contains."""
    wait_for(gate)
    if said := Path(gate).read_text():
        raise ValueError(said)
    return value


@app.task(bind=True)
def gather(self, values):
    note("gather", id=self.request.id, values=values)
    return values


def _ended(attempt):
    return attempt.ended if attempt else None


@worker_ready.connect
def _ready(**_):
    note("ready")
