"""What happens in the demo's workers, as one JSON line per event: receivers of celery_leases' signals, and a reader.

A worker of the demo imports this module (``--include example_project.journal``). Times are seconds of the clock that
all processes of one machine share.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from celery.signals import task_postrun, task_prerun

from celery_leases import signals
from celery_leases.task import LeasedMixin

FILE = "DEMO_JOURNAL"
WORKER = "DEMO_WORKER"
WITHOUT_LEASES = "DEMO_WITHOUT_LEASES"


def write(what: str, **fields: Any) -> None:
    """Append one event, in one write: a process that is killed leaves a whole line or none."""
    event = {"t": time.monotonic(), "what": what, "pid": os.getpid(), "worker": os.environ.get(WORKER), **fields}
    journal = os.open(os.environ[FILE], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(journal, json.dumps(event, default=str).encode() + b"\n")
    finally:
        os.close(journal)


class Journal:
    """Reads the journal as it grows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = 0
        self.events: list[Mapping[str, Any]] = []

    def news(self) -> list[Mapping[str, Any]]:
        """The events written since the last look, in the order of their times."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as journal:
            journal.seek(self._read)
            lines = journal.read().splitlines(keepends=True)
        whole = [line for line in lines if line.endswith(b"\n")]
        self._read += sum(len(line) for line in whole)
        found = sorted((json.loads(line) for line in whole), key=lambda event: float(event["t"]))
        self.events += found
        return found


def _receive(event: Any, **_: Any) -> None:
    write(type(event).__name__, **asdict(event))


def _begin(sender: Any, task_id: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], **_: Any) -> None:
    sender.request.began = time.monotonic()
    write("LeaseAcquired", key=_key(args, kwargs), call_id=task_id, attempt=None)


def _end(sender: Any, task_id: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], **_: Any) -> None:
    runtime = time.monotonic() - sender.request.began
    write("AttemptSettled", key=_key(args, kwargs), call_id=task_id, state="done", runtime=runtime)


def _key(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    customer, month = args or (kwargs["customer_id"], kwargs["month"])
    return f"invoice:{customer}:{month}"


if os.environ.get(WITHOUT_LEASES):
    # The same tasks on plain Celery: late acknowledgement, and nothing that knows of duplicates.
    LeasedMixin.__call__ = lambda self, *args, **kwargs: self.run(*args, **kwargs)  # type: ignore[method-assign]
    task_prerun.connect(_begin, weak=False)
    task_postrun.connect(_end, weak=False)
elif WORKER in os.environ:  # not in the demo itself, which only reads
    for happened in (
        signals.lease_acquired,
        signals.attempt_settled,
        signals.call_put_back,
        signals.call_dropped,
        signals.call_refused,
        signals.result_replayed,
        signals.crash_seen,
        signals.lease_lost,
        signals.outcome_refused,
    ):
        happened.connect(_receive, weak=False)
