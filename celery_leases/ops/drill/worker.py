"""A worker process of a drill: ``python -m celery_leases.ops.drill.worker``, started by the drill.

Its configuration is in one environment variable. It kills itself and its pool as soon as the
drill's process has ended.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Self

from celery import Celery
from celery.app.utils import find_app
from celery.signals import worker_ready

from celery_leases import signals
from celery_leases.errors import LeaseLost
from celery_leases.options import Failures
from celery_leases.task import LeasedTask

HOSTNAME = "celery_leases_drill_"
"""How the host names of the workers of drills begin."""
TASK: Final = "celery_leases.ops.drill"
RETENTION: Final = "1h"
"""The retention of its records: if a drill is killed, workers delete them after this time."""
TIME_LIMIT: Final = 3600
VARIABLE: Final = "CELERY_LEASES_DRILL"
PIPE: Final = 0
"""The file descriptor of standard input."""
MAX_RUN_TIME: Final = 1800.0
"""Seconds after which the task ends by itself."""
_NOTED_SIGNALS: Final = (
    "call_rescheduled",
    "call_dropped",
    "result_replayed",
    "lease_lost",
    "outcome_refused",
    "attempt_settled",
    "crash_seen",
    "attempt_abandoned",
)


@dataclass(frozen=True, slots=True)
class Note:
    """An event of *key* at the time *at*, in seconds of this machine's monotonic clock.

    ``worker`` is the number of the drill's worker, 0 for the drill itself; ``pid`` is the process
    that wrote the note.
    """

    what: str
    at: float
    worker: int
    pid: int
    key: str = ""
    call: str = ""
    more: str = ""


class Notes:
    """A file that several processes append to.

    Each note is one write, so that a killed process does not leave half a line.
    """

    def __init__(self, path: Path, worker: int = 0) -> None:
        self._path = path
        self._worker = worker
        self._offset = 0
        self._notes: list[Note] = []

    def write(self, what: str, key: str = "", call: str = "", more: str = "") -> Note:
        """Append a note with the current time, and return it."""
        note = Note(what, time.monotonic(), self._worker, os.getpid(), key, call, more)
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(descriptor, json.dumps(asdict(note)).encode() + b"\n")
        finally:
            os.close(descriptor)
        return note

    def all(self) -> list[Note]:
        """All notes so far, in the order in which they were written."""
        self._notes.extend(self._read_new())
        return self._notes

    def _read_new(self) -> Iterator[Note]:
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            written = file.read()
        whole = written[: written.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            yield Note(**json.loads(line))


Body = Callable[[Any, str], None]


def register(app: Celery, ttl: float, body: Body) -> Any:
    """Register the drill's task with *app*; *body* gets the task and its key.

    A running body shows that its call has the key, because each call of the key runs its own body.
    Options that could change the measurement are set here, whatever the app's settings are.
    """
    app.conf.task_always_eager = False
    app.conf.task_create_missing_queues = True

    @app.task(
        base=LeasedTask,
        bind=True,
        name=TASK,
        shared=False,
        lazy=False,
        ignore_result=True,
        store_errors_even_if_ignored=False,
        send_events=False,
        rate_limit=None,
        time_limit=TIME_LIMIT,
        soft_time_limit=None,
        lease_key="{key}",
        lease_ttl=ttl,
        lease_runs="each",
        lease_on_busy="wait",
        lease_on_lost="interrupt",
        lease_renew=True,
        lease_outbox=False,
        lease_failures=Failures(crashes=10),
        lease_retention=RETENTION,
    )
    def drill(self: Any, key: str) -> None:
        body(self, key)

    return drill


def unused_body(_task: Any, _key: str) -> None:
    """The body in a process that only publishes."""
    raise AssertionError("only the workers of a drill run its task")


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """The configuration of a drill's worker; *app* is the value of ``celery -A``."""

    app: str
    directory: str
    number: int
    queues: list[str]
    ttl: float
    concurrency: int

    def as_text(self) -> str:
        """The value of the environment variable."""
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: str) -> Self:
        """The configuration in a value of :meth:`as_text`."""
        return cls(**json.loads(text))


def finish_file(directory: Path, key: str) -> Path:
    """The file whose existence ends the running calls of *key*."""
    return directory / f"finish-{key.rpartition(':')[2]}"


def _body(notes: Notes, directory: Path, task: Any, key: str) -> None:
    """Hold the lease until the drill creates the file of :func:`finish_file`."""
    call, finish = task.request.id, finish_file(directory, key)
    deadline = time.monotonic() + MAX_RUN_TIME
    try:
        notes.write("began", key, call, f"attempt {task.lease.attempt}, fence {task.lease.fence}")
        while not finish.exists() and time.monotonic() < deadline:
            task.lease.check()
            time.sleep(0.05)
    except LeaseLost:
        notes.write("lost", key, call)
        raise
    notes.write("returned", key, call)


def _listen(notes: Notes) -> None:
    def note(name: str, event: Any = None, **_: Any) -> None:
        if event is not None and event.task == TASK:
            more = getattr(event, "reason", None) or getattr(event, "ended", None) or ""
            notes.write(name, event.key, event.call_id, str(more))

    for name in _NOTED_SIGNALS:
        getattr(signals, name).connect(partial(note, name), weak=False)
    worker_ready.connect(lambda **_: notes.write("ready"), weak=False)


def _end_with_the_drill() -> None:
    """Kill this worker and its pool when the drill closes its end of the pipe or dies."""
    while os.read(PIPE, 1):  # not sys.stdin: pool processes would inherit its lock
        pass
    if os.getpgrp() == os.getpid():  # the group of this worker, and not the operator's
        os.killpg(os.getpid(), signal.SIGKILL)


def main() -> None:
    """Run the worker until it is killed."""
    config = WorkerConfig.read(os.environ[VARIABLE])
    threading.Thread(target=_end_with_the_drill, daemon=True).start()
    directory = Path(config.directory)
    notes = Notes(directory / "notes", config.number)
    app = find_app(config.app)
    app.loader.import_default_modules()
    register(app, config.ttl, partial(_body, notes, directory))
    # Remote control and monitoring of the operator's workers do not see this worker.
    app.conf.update(worker_enable_remote_control=False, worker_send_task_events=False)
    _listen(notes)
    app.worker_main(
        [
            "worker",
            *("--pool", "prefork", "--concurrency", str(config.concurrency)),
            *("--queues", ",".join(config.queues)),
            *("--hostname", f"{HOSTNAME}{config.number}_{os.getpid()}@%h"),
            *("--loglevel", "INFO"),
            *("--without-gossip", "--without-mingle", "--without-heartbeat"),
        ]
    )


if __name__ == "__main__":
    main()
