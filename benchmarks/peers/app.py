"""The tasks of all cases, made unique by the package in ``PEERS_PACKAGE``.

Bodies write their steps to a journal. With every package, tasks are acknowledged late and delivered
again when their process dies; otherwise a killed worker would lose them. Further settings are the
environment variables PEERS_BROKER and PEERS_LOCKS (URLs), PEERS_DIRECTORY, PEERS_LOCK_SECONDS and
PEERS_VISIBILITY.
"""

import importlib
import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import redis
from celery import Celery
from celery.exceptions import Ignore, Reject

DIRECTORY = Path(os.environ["PEERS_DIRECTORY"])
JOURNAL = DIRECTORY / "journal"
PATIENCE = 90.0

app = Celery("peers", broker=os.environ["PEERS_BROKER"], backend=os.environ["PEERS_BROKER"])
app.conf.update(
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    worker_prefetch_multiplier=1,
    broker_connection_retry_on_startup=True,
)
if "PEERS_VISIBILITY" in os.environ:
    app.conf.broker_transport_options = {
        "visibility_timeout": float(os.environ["PEERS_VISIBILITY"]),
        "unacked_restore_interval": 1,
        "unacked_restore_throttle": 1,
    }

package: Any = importlib.import_module(f"benchmarks.peers.packages.{os.environ['PEERS_PACKAGE']}")
seconds = os.environ.get("PEERS_LOCK_SECONDS")
package.configure(app, os.environ["PEERS_LOCKS"], float(seconds) if seconds else None)


def events() -> list[dict[str, Any]]:
    """The lines of the journal, the oldest first."""
    return (
        [json.loads(line) for line in JOURNAL.read_text().splitlines()] if JOURNAL.exists() else []
    )


def note(what: str, **more: object) -> None:
    """Append one event in one write, so that a killed process leaves whole lines."""
    line = json.dumps({"what": what, "pid": os.getpid(), "t": time.monotonic(), **more}) + "\n"
    descriptor = os.open(JOURNAL, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)


def begin(task: Any, name: object) -> int:
    """Write that a body begins; returns how many of this name have begun, including this one."""
    note("begin", name=name, id=task.request.id)
    return sum(event["what"] == "begin" and event["name"] == name for event in events())


def pass_group(gate: str | None, turn: int) -> None:
    """Wait until the gate is open for all bodies, or for the body of this turn."""
    until = time.monotonic() + PATIENCE
    while (
        gate
        and time.monotonic() < until
        and not any(Path(f"{gate}{end}").exists() for end in ("", f".{turn}"))
    ):
        time.sleep(0.02)


def worked(task: Any, name: object, gate: str | None, lasting: float) -> dict[str, Any]:
    """One run of a body, and what it returns."""
    turn = begin(task, name)
    pass_group(gate, turn)
    time.sleep(lasting)
    note("end", name=name, id=task.request.id, turn=turn)
    return {"name": name, "turn": turn}


@app.task(bind=True, **package.UNIQUE)
def work(self: Any, name: object, gate: str | None = None, lasting: float = 0.0) -> dict[str, Any]:
    """Work until *gate* is open, and then for *lasting* seconds."""
    return worked(self, name, gate, lasting)


@app.task(bind=True, **package.REFUSING)
def refuses(self: Any, name: object, gate: str | None = None) -> dict[str, Any]:
    """As :func:`work`; a duplicate is an error."""
    return worked(self, name, gate, 0.0)


@app.task(bind=True, **package.SKIPPING)
def skips(self: Any, name: object, gate: str | None = None) -> dict[str, Any]:
    """As :func:`work`; a duplicate ends without a result (plain Celery: a check in the body)."""
    if os.environ["PEERS_PACKAGE"] != "plain":
        return worked(self, name, gate, 0.0)
    with redis.Redis.from_url(os.environ["PEERS_LOCKS"]) as locks:
        if locks.get(f"done:{name}"):
            raise Ignore
        if not locks.set(f"lock:{name}", "1", nx=True, ex=60):
            raise Reject("somebody else is at work", requeue=False)
        value = worked(self, name, gate, 0.0)
        locks.set(f"done:{name}", "1")
        locks.delete(f"lock:{name}")
    return value


@app.task(bind=True, max_retries=5, **package.UNIQUE)
def retries(self: Any, name: object, times: int) -> dict[str, Any]:
    """Fail *times* times, each time with a retry of Celery."""
    begin(self, name)
    if self.request.retries < times:
        raise self.retry(countdown=0.5)
    return {"name": name}


@app.task(bind=True, time_limit=2, **package.UNIQUE)
def limited(self: Any, name: object) -> dict[str, Any]:
    """Exceed the hard time limit in its first run."""
    if begin(self, name) == 1:
        time.sleep(60)
    return {"name": name}


@app.task(bind=True, **package.UNIQUE)
def dies(self: Any, name: object) -> None:
    """Kill its own process in every run."""
    begin(self, name)
    os.kill(os.getpid(), 9)


@app.task(bind=True, **package.CHANGES)
def changes(self: Any, name: object, gate: str | None = None, version: int = 0) -> int:
    """Apply the change *version* of a thing, once *gate* is open."""
    note("begin", name=name, id=self.request.id, version=version)
    pass_group(gate, 1)
    return version


@app.task(bind=True, **package.LIMITED)
def limits(self: Any, name: object, gate: str | None = None) -> dict[str, Any]:
    """As :func:`work`; three may run at a time."""
    return worked(self, name, gate, 0.0)


@app.task(bind=True, **package.UNIQUE)
def unthinking(self: Any, name: object) -> None:
    """Beat calls it, and nobody has thought of that."""
    begin(self, name)


@app.task(bind=True, **package.PERIODIC)
def periodic(self: Any, name: object) -> None:
    """Beat calls it."""
    begin(self, name)


@app.task(bind=True, **package.REPEATING)
def repeats(self: Any, name: object) -> None:
    """Publish itself for a second later."""
    begin(self, name)
    with suppress(getattr(package, "DUPLICATE", KeyError)):
        repeats.apply_async((name,), countdown=1)


app.conf.beat_schedule = {
    each.name: {"task": each.name, "schedule": 1.0, "args": (each.name,)}
    for each in (unthinking, periodic)
}
"""Only the worker of one case runs a beat."""


@app.task
def asks(name: object, gate: str) -> str | None:
    """Call a duplicate in its body; returns the id of that call, if there is one."""
    result = refuses.delay(name, gate)
    return result.id if result is not None else None


@app.task
def plain(value: Any = None) -> Any:
    """A step that is not unique."""
    return value


@app.task
def gather(values: Any) -> Any:
    """The end of a chain or chord."""
    note("gather", values=values)
    return values
