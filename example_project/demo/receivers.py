"""Writes the events of a demo's worker into the journal; workers ``--include`` this module.

With leases it receives the signals of celery_leases, otherwise those of Celery.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from celery.signals import task_postrun, task_prerun

from celery_leases import signals
from celery_leases.task import LeasedMixin
from example_project.celery import app
from example_project.demo import journal


def _receive(event: Any, **_: Any) -> None:
    journal.write(type(event).__name__, **asdict(event))


def _begin(
    sender: Any, task_id: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], **_: Any
) -> None:
    sender.request.began = time.monotonic()
    journal.write("LeaseAcquired", key=_key(args, kwargs), call_id=task_id, attempt=None)


def _end(
    sender: Any, task_id: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], **_: Any
) -> None:
    runtime = time.monotonic() - sender.request.began
    journal.write(
        "AttemptSettled", key=_key(args, kwargs), call_id=task_id, state="done", runtime=runtime
    )


def _key(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    customer, month = args or (kwargs["customer_id"], kwargs["month"])
    return f"invoice:{customer}:{month}"


if os.environ.get(journal.WITHOUT_LEASES):
    # The same tasks on plain Celery: late acknowledgement, and no protection against duplicates.
    LeasedMixin.__call__ = lambda self, *args, **kwargs: self.run(*args, **kwargs)  # type: ignore[method-assign]
    # Otherwise the messages of a dead worker would come back after an hour.
    app.conf.broker_transport_options = {
        "visibility_timeout": 6,
        "unacked_restore_interval": 1,
        "unacked_restore_throttle": 1,
    }
    task_prerun.connect(_begin, weak=False)
    task_postrun.connect(_end, weak=False)
else:
    for happened in (
        signals.lease_acquired,
        signals.attempt_settled,
        signals.call_rescheduled,
        signals.call_dropped,
        signals.call_refused,
        signals.result_replayed,
        signals.crash_seen,
        signals.attempt_abandoned,
        signals.lease_lost,
        signals.outcome_refused,
        signals.group_closed,
        signals.group_opened,
    ):
        happened.connect(_receive, weak=False)
