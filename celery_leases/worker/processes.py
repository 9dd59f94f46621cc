"""What this process has for each Celery app, made on first use; and its worker."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from typing import Any, Final
from weakref import WeakKeyDictionary, ref

from celery import Celery

from celery_leases.attempt.process import Process, host_here, open_process
from celery_leases.errors import StoreUnavailable
from celery_leases.options import DATABASE, DEFAULT_TTL
from celery_leases.settings import IN_MEMORY, Settings
from celery_leases.signals import Announcer
from celery_leases.stores.interfaces import Observer
from celery_leases.text.notices import logger
from celery_leases.worker.app_settings import leased_tasks, settings_of
from celery_leases.worker.interrupts import interrupt_guard_here
from celery_leases.worker.publisher import Publisher

METRICS_DIRECTORY: Final = "PROMETHEUS_MULTIPROC_DIR"
"""If this environment variable is set, :mod:`celery_leases.ops.metrics` counts events."""

_opened: WeakKeyDictionary[Celery, dict[bool, Process]] = WeakKeyDictionary()
_prepared: WeakKeyDictionary[Celery, Process] = WeakKeyDictionary()
_substitutes: dict[Celery, Process] = {}
_lock = threading.Lock()
_worker: ref[Any] | None = None
_worker_pid = 0


def process_of(app: Celery, *, eager: bool | None = None) -> Process:
    """What this process has for *app*, made on first use.

    *eager* calls use stores in the memory of this process, unless ``leases_eager_stores`` is set.
    If *eager* is ``None``, ``task_always_eager`` decides, so that code that publishes calls or
    reads their status uses the same stores as the calls. A worker's deliveries are never eager.
    """
    if eager is None:
        eager = bool(app.conf.task_always_eager)
    try:
        made = _opened.get(app)
    except TypeError:  # a proxy such as Celery's current_app allows no weak reference
        app = app._get_current_object()  # noqa: SLF001
        made = _opened.get(app)
    if _substitutes and (substitute := _substitutes.get(app)) is not None:
        return substitute
    return made[eager] if made is not None and eager in made else _make(app, eager=eager)


def _make(app: Celery, *, eager: bool) -> Process:
    with _lock:
        made = _opened.setdefault(app, {})
        if eager not in made:
            settings = settings_of(app, lenient=eager)
            prepared = None if eager else _prepared_for(app, settings)
            if eager:
                in_memory = replace(settings, leases_url=DATABASE, database_url=IN_MEMORY)
                settings = settings_of(app) if settings.eager_stores else in_memory
            # In the worker's own process, bodies run in threads or greenlets.
            many = not eager and current_worker() is not None
            process = prepared or open_for(app, settings, Announcer(app.tasks), shares_trips=many)
            if eager and settings.eager_stores:
                process.records.check()  # an eager call cannot wait until the tables exist
            elif not process.records.database.dialect.has_server:
                # If the database cannot be reached now, deliveries are rescheduled.
                with suppress(StoreUnavailable):
                    if eager:
                        from celery_leases.stores import memory

                        memory.prepare(process.records)
                    else:
                        process.records.check()
            made[eager] = process
            if METRICS_DIRECTORY in os.environ:
                _count_events()
        return made[eager]


def prepare_forks(app: Celery) -> None:
    """Open what a pool process has for *app*, for those that are forked later: each takes it at its
    first use. The main process never uses it, so it has no connections and no threads, and its
    locks are free.
    """
    _prepared[app] = open_for(app, settings_of(app), Announcer(app.tasks))


def _prepared_for(app: Celery, settings: Settings) -> Process | None:
    """What the main process has prepared for this fork, unless the settings have changed."""
    process = _prepared.pop(app, None) if os.getpid() != _worker_pid else None
    if process is None or process.settings != settings:
        return None
    process.host = host_here()
    return process


def _count_events() -> None:
    try:
        import_module("celery_leases.ops.metrics").count_events()
    except (ImportError, OSError) as error:
        logger.warning(
            "%s is set, but nothing is counted: %s",
            METRICS_DIRECTORY,
            error,
            code="metrics-not-counted",
        )


def open_for(app: Celery, settings: Settings, observer: Observer, **given: Any) -> Process:
    """See :func:`~celery_leases.attempt.process.open_process`, which gets *given*."""
    shortest = min(
        (task.lease_options.ttl for task in leased_tasks(app).values()), default=DEFAULT_TTL
    )

    def stopping() -> bool:
        return interrupt_guard_here(os.getpid()).stopping

    process = open_process(settings, observer, shortest, stopping, **given)
    process.app, process.publisher = app, Publisher(app)
    return process


def use(app: Celery, process: Process | None) -> Process | None:
    """Use *process* for *app*, for eager calls and all others; ``None``: use its own again, which
    exists meanwhile.

    Returns what was used instead of its own before.
    """
    before = _substitutes.pop(app, None)
    if process is not None:
        _substitutes[app] = process
    return before


def made_here() -> list[Process]:
    """What this process has for all apps, without eager calls."""
    return [made[False] for made in list(_opened.values()) if False in made]


def set_current_worker(worker: Any) -> None:
    """Remember Celery's worker, in its main process."""
    global _worker, _worker_pid
    _worker, _worker_pid = ref(worker), os.getpid()


def current_worker() -> Any:
    """Celery's worker, in its main process; ``None`` in a pool child and elsewhere."""
    return _worker() if _worker is not None and _worker_pid == os.getpid() else None


def close_all(*, inherited: bool = False) -> None:
    """Close and forget what this process has for all apps; *inherited*: the parent process made it
    and still uses its connections.
    """
    global _lock  # noqa: PLW0603 - a lock held while forking stays locked in the child for ever
    _lock = threading.Lock()
    for made in list(_opened.values()):
        for process in made.values():
            process.close(inherited=inherited)
    _opened.clear()
    if not inherited:
        _prepared.clear()


def close_if_other_database(database_url: str) -> None:
    """Close and forget what this process has for all apps, if any of them uses another database
    than *database_url*.
    """
    given = {
        process.settings.database_url
        for made in list(_opened.values())
        for process in made.values()
    }
    if given - {database_url, IN_MEMORY}:
        close_all()


os.register_at_fork(after_in_child=lambda: close_all(inherited=True))
