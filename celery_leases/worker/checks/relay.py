"""A check that each worker makes: it warns if messages are due and no relay seems to run."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from celery import Celery

from celery_leases.errors import LeasesError
from celery_leases.settings import IN_MEMORY
from celery_leases.text.cleaning import printable
from celery_leases.text.durations import in_words
from celery_leases.text.notices import logger
from celery_leases.worker.app_settings import leased_tasks, settings_of

if TYPE_CHECKING:
    from celery_leases.stores.sql.records import SqlRecordStore

WAITING_TOO_LONG: Final = 300.0
"""The worker warns of a message that has been due for this many seconds. A relay should run about
once a minute.
"""
CHECK_EVERY: Final = 300.0
"""Seconds from one check to the next."""
MICROSECONDS: Final = 1e6
_CONNECTIONS: Final = 1

_watches: dict[int, threading.Event] = {}


def watch(worker: Any) -> None:
    """Start the checks, in a thread of the worker's main process that runs until :func:`stop`; a
    receiver of Celery's ``worker_ready``.

    The first check is made before the worker starts, by
    :mod:`celery_leases.worker.checks.startup`.
    """
    app = worker.app
    if id(app) in _watches:  # Celery sends the signal after each reconnect to the broker
        return
    if not leased_tasks(app) or settings_of(app).database_url == IN_MEMORY:
        return
    stopped = _watches[id(app)] = threading.Event()
    threading.Thread(
        target=_check_until, args=(app, stopped), name="celery_leases unrelayed", daemon=True
    ).start()


def stop(worker: Any) -> None:
    """Stop checking; a receiver of Celery's ``worker_shutdown``."""
    if stopped := _watches.pop(id(worker.app), None):
        stopped.set()


def _check_until(app: Celery, stopped: threading.Event) -> None:
    while not stopped.wait(CHECK_EVERY):
        with suppress(LeasesError):  # the deliveries report an unavailable database
            _check(app)


def _check(app: Celery) -> None:
    from celery_leases.attempt.process import open_records

    records = open_records(settings_of(app), _CONNECTIONS)
    try:
        warn_of_waiting(records)
    finally:
        records.database.close()


def warn_of_waiting(records: SqlRecordStore) -> None:
    """Warn of messages that have been due for five minutes; raises ``StoreUnavailable``."""
    from celery_leases.stores.sql.outbox import Outbox

    oldest = Outbox(records).oldest_due(WAITING_TOO_LONG)
    if oldest is not None and oldest.publish_at is not None:
        logger.warning(
            "messages that delay_in() has written wait for a relay, the oldest for %s (%s, key %s): run "
            "`leases relay` every minute, or let beat do it: app.conf.beat_schedule = "
            '{"relay": {"task": "celery_leases.relay", "schedule": 60.0}} with '
            '"celery_leases.builtin_tasks" in app.conf.include',
            in_words((oldest.now - oldest.publish_at) / MICROSECONDS),
            oldest.task,
            printable(oldest.key),
            code="no-relay",
        )
