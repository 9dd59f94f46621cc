"""A worker process of a drill: ``python -m celery_leases.drill.worker``, started by the drill.

It reads what it needs from one variable of its environment. It ends itself, with its pool, as soon
as the drill's process is gone.
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
from celery_leases.drill.notes import Notes
from celery_leases.drill.task import TASK, register
from celery_leases.errors import LeaseLost

VARIABLE: Final = "CELERY_LEASES_DRILL"
PIPE: Final = 0
"""The file descriptor of standard input."""
LONGEST_BODY: Final = 1800.0
"""Seconds after which a body ends by itself."""
_HEARD: Final = (
    "call_rescheduled",
    "call_dropped",
    "result_replayed",
    "lease_lost",
    "outcome_refused",
    "attempt_settled",
    "crash_seen",
)


@dataclass(frozen=True, slots=True)
class Orders:
    """What a worker of a drill is to do: *app* is the word behind ``celery -A``."""

    app: str
    directory: str
    number: int
    queues: list[str]
    ttl: float
    concurrency: int

    def as_text(self) -> str:
        """As a value of the environment."""
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: str) -> Self:
        """From :meth:`as_text`."""
        return cls(**json.loads(text))


def finish_file(directory: Path, key: str) -> Path:
    """The file that ends the bodies of *key* when it exists."""
    return directory / f"finish-{key.rpartition(':')[2]}"


def _body(notes: Notes, directory: Path, task: Any, key: str) -> None:
    """Hold the lease until the drill says that it is enough."""
    call, finish = task.request.id, finish_file(directory, key)
    give_up = time.monotonic() + LONGEST_BODY
    try:
        notes.write("began", key, call, f"attempt {task.lease.attempt}, fence {task.lease.fence}")
        while not finish.exists() and time.monotonic() < give_up:
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

    for name in _HEARD:
        getattr(signals, name).connect(partial(note, name), weak=False)
    worker_ready.connect(lambda **_: notes.write("ready"), weak=False)


def _end_with_the_drill() -> None:
    """Kill this worker and its pool when the drill has closed its end of the pipe, or has died."""
    while os.read(PIPE, 1):  # not by sys.stdin, whose lock the processes of the pool would inherit
        pass
    if os.getpgrp() == os.getpid():  # no other process was put into this group
        os.killpg(os.getpid(), signal.SIGKILL)


def main() -> None:
    """Run the worker until it is killed."""
    orders = Orders.read(os.environ[VARIABLE])
    threading.Thread(target=_end_with_the_drill, daemon=True).start()
    directory = Path(orders.directory)
    notes = Notes(directory / "notes", orders.number)
    app = find_app(orders.app)
    app.loader.import_default_modules()
    register(app, orders.ttl, partial(_body, notes, directory))
    # It answers no remote control, and no monitoring sees it.
    app.conf.update(
        worker_enable_remote_control=False, worker_send_task_events=False, leases_metrics=False
    )
    _listen(notes)
    app.worker_main(
        [
            "worker",
            *("--pool", "prefork", "--concurrency", str(orders.concurrency)),
            *("--queues", ",".join(orders.queues)),
            *("--hostname", f"celery_leases_drill_{orders.number}_{os.getpid()}@%h"),
            *("--loglevel", "INFO"),
            *("--without-gossip", "--without-mingle", "--without-heartbeat"),
        ]
    )


if __name__ == "__main__":
    main()
