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
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Self

from celery.app.utils import find_app
from celery.signals import worker_ready

from celery_leases import signals
from celery_leases.errors import LeaseLost
from celery_leases.ops.drill.event_file import Notes
from celery_leases.ops.drill.task import TASK, register

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
            *("--hostname", f"celery_leases_drill_{config.number}_{os.getpid()}@%h"),
            *("--loglevel", "INFO"),
            *("--without-gossip", "--without-mingle", "--without-heartbeat"),
        ]
    )


if __name__ == "__main__":
    main()
