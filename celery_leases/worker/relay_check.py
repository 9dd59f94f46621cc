"""A worker's check for messages that wait for a relay: it warns if no relay seems to run."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from celery import Celery

from celery_leases.common.durations import in_words
from celery_leases.common.texts import printable
from celery_leases.errors import LeasesError
from celery_leases.settings import IN_MEMORY
from celery_leases.signals import logger
from celery_leases.worker.app_settings import leased_tasks, settings_of

if TYPE_CHECKING:
    from celery_leases.stores.sql.records import SqlRecordStore

WAITED: Final = 300.0
"""Seconds for which a message has been due when the worker warns; a relay should run about once a
minute.
"""
LOOK_EVERY: Final = 300.0
"""Seconds from one check to the next."""
MICROSECONDS: Final = 1e6
_CONNECTIONS: Final = 1

_watches: dict[int, threading.Event] = {}


def watch(worker: Any) -> None:
    """Check now and then, in a thread of the worker's main process, until :func:`end`; a receiver
    of Celery's ``worker_ready``.

    The first check is before the worker starts, see :mod:`celery_leases.worker.startup_checks`.
    """
    app = worker.app
    if id(app) in _watches:  # the worker is ready again after each loss of its broker
        return
    if not leased_tasks(app) or settings_of(app).database_url == IN_MEMORY:
        return
    over = _watches[id(app)] = threading.Event()
    threading.Thread(
        target=_look_until, args=(app, over), name="celery_leases unrelayed", daemon=True
    ).start()


def end(worker: Any) -> None:
    """Stop checking; a receiver of Celery's ``worker_shutdown``."""
    if over := _watches.pop(id(worker.app), None):
        over.set()


def _look_until(app: Celery, over: threading.Event) -> None:
    while not over.wait(LOOK_EVERY):
        with suppress(LeasesError):  # an unavailable database is reported by the steps that need it
            _look(app)


def _look(app: Celery) -> None:
    from celery_leases.composition import open_records

    records = open_records(settings_of(app), _CONNECTIONS)
    try:
        tell_of_waiting(records)
    finally:
        records.database.close()


def tell_of_waiting(records: SqlRecordStore) -> None:
    """Warn of messages that have been due for five minutes; raises ``StoreUnavailable``."""
    from celery_leases.stores.sql.outbox import Outbox

    oldest = Outbox(records).oldest_due(WAITED)
    if oldest is not None and oldest.publish_at is not None:
        logger.warning(
            "messages that delay_in() has written wait for a relay, the oldest for %s (%s, key %s): run `leases relay` "
            'every minute, or have beat do it: app.conf.beat_schedule = {"relay": {"task": "celery_leases.relay", '
            '"schedule": 60.0}} with "celery_leases.builtin_tasks" in app.conf.include',
            in_words((oldest.now - oldest.publish_at) / MICROSECONDS),
            oldest.task,
            printable(oldest.key),
        )
