"""The components of each Celery app in this process."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

from celery import Celery

from celery_leases.attempt.effects import Effects
from celery_leases.attempt.held_lease import HeldLease
from celery_leases.attempt.lease_services import Steps
from celery_leases.composition import Parts, build
from celery_leases.errors import StoreUnavailable
from celery_leases.protocol.body_endings import Returned
from celery_leases.protocol.effects import scope_of
from celery_leases.protocol.options import DATABASE, DEFAULT_TTL
from celery_leases.protocol.ports import Clock
from celery_leases.protocol.records import Outcome, Record
from celery_leases.protocol.results import encode
from celery_leases.protocol.settlement import after_run
from celery_leases.protocol.verdicts import Call
from celery_leases.settings import IN_MEMORY
from celery_leases.signals import Announcer
from celery_leases.worker.app_settings import leased_tasks, settings_of
from celery_leases.worker.pools.signals import interrupt_guard_here
from celery_leases.worker.reschedule import Copies

if TYPE_CHECKING:
    from celery_leases.stores.sql.transactions import JoinedTransaction

Closed = Callable[[], AbstractContextManager[None]]


class AppParts(Parts):
    """The components of one app in one process, and the copies it publishes."""

    def __init__(self, app: Celery, parts: Parts, copies: Copies) -> None:
        super().__init__(**vars(parts))
        self._app = ref(app)
        #: The ``LeaseClient`` on the same stores, once it has been used.
        self.client: Any = None
        self.copies = copies
        self._checked = False
        #: The clock of its deadlines.
        self.clock: Clock = parts.context.clock

    def check_once(self) -> None:
        """Raise :class:`~celery_leases.errors.SchemaOutdated` unless the tables are known.

        Later calls ask nothing.
        """
        if not self._checked:
            self.records.check()
            self._checked = True

    @property
    def in_memory(self) -> bool:
        """Whether the records are in the memory of this process, which is so for eager
        calls only.
        """
        return self.settings.database_url == IN_MEMORY

    @property
    def app(self) -> Celery:
        """The app they belong to."""
        app = self._app()
        if app is None:
            raise ReferenceError("the Celery app was deleted")
        return app

    def steps(self, call: Call, held_lease: HeldLease, record: Record, closed: Closed) -> Steps:
        """The steps of one attempt's lease object; *closed* defers signals during a step."""
        options = call.options
        effects = Effects(
            held_lease=held_lease,
            record=record,
            store=self.effects,
            clock=self.clock,
            classify=lambda error: options.classifier.classify(
                error, self.context.wall_time(), time.monotonic
            ),
            closed=closed,
            prefix=self.settings.prefix,
            scope=scope_of(record, rerun=options.rerun, retention=options.retention),
            patience=options.settle_timeout,
            result_max=options.result_max,
        )

        def completed(result: Any) -> Outcome:
            return after_run(call, record, Returned(result, *encode(result, options.result_max)))

        def joined(given: Any) -> JoinedTransaction:
            from celery_leases.stores.sql.transactions import JoinedTransaction

            return JoinedTransaction(given, self.records)

        def detached(given: Any) -> JoinedTransaction | None:
            from celery_leases.stores.eager_transactions import (
                EagerTransaction,
                commit_is_observable,
            )

            return EagerTransaction(given, self.records) if commit_is_observable(given) else None

        # Records in this process's memory cannot commit together with other rows; there they follow
        # the commit.
        return Steps(
            self.renewer,
            self.effects,
            effects,
            closed,
            detached if self.in_memory else joined,
            completed,
        )


_parts: WeakKeyDictionary[Celery, dict[bool, AppParts]] = WeakKeyDictionary()
_used: dict[Celery, AppParts] = {}
_lock = threading.Lock()
_worker: ref[Any] | None = None
_worker_pid = 0


def parts_of(app: Celery, *, eager: bool | None = None) -> AppParts:
    """The components of *app* in this process, made on first use.

    An *eager* call has stores of its own in memory, unless ``leases_eager_stores`` is set. If
    *eager* is ``None``, ``task_always_eager`` decides: code that publishes calls, or reads their
    status, uses the same stores as the calls. A worker's deliveries are not eager, whatever that
    setting says.
    """
    if eager is None:
        eager = bool(app.conf.task_always_eager)
    try:
        made = _parts.get(app)
    except TypeError:  # a proxy such as Celery's current_app, which cannot be referred to
        app = app._get_current_object()  # noqa: SLF001
        made = _parts.get(app)
    if _used and (used := _used.get(app)) is not None:
        return used
    return made[eager] if made is not None and eager in made else _make(app, eager=eager)


def _make(app: Celery, *, eager: bool) -> AppParts:
    with _lock:
        made = _parts.setdefault(app, {})
        if eager not in made:
            settings = settings_of(app, lenient=eager)
            if eager:
                in_memory = replace(settings, leases_url=DATABASE, database_url=IN_MEMORY)
                settings = settings_of(app) if settings.eager_stores else in_memory
            shortest = min(
                (task.lease_options.ttl for task in leased_tasks(app).values()), default=DEFAULT_TTL
            )
            parts = build(
                settings,
                Announcer(app.tasks),
                shortest,
                lambda: interrupt_guard_here(os.getpid()).stopping,
            )
            if eager and settings.eager_stores:
                parts.records.check()  # an eager call cannot wait until the tables exist
            elif parts.records.database.host_clock:
                with suppress(StoreUnavailable):  # a delivery that cannot reach it is rescheduled
                    parts.records.check()
                    if eager and settings.database_url == IN_MEMORY:
                        from celery_leases.stores.eager_eviction import limit_records

                        limit_records(parts.records)
            made[eager] = AppParts(app, parts, Copies(app))
        return made[eager]


def use(app: Celery, parts: AppParts | None) -> AppParts | None:
    """Use *parts* instead of those of *app*, for its eager calls and all others, until ``None`` is
    given.

    Returns the replaced value. The components of the app itself are kept meanwhile.
    """
    before = _used.pop(app, None)
    if parts is not None:
        _used[app] = parts
    return before


def note_worker(worker: Any) -> None:
    """Remember Celery's worker, in its main process."""
    global _worker, _worker_pid
    _worker, _worker_pid = ref(worker), os.getpid()


def worker_here() -> Any:
    """Celery's worker, in its main process; ``None`` in a pool child and elsewhere."""
    return _worker() if _worker is not None and _worker_pid == os.getpid() else None


def forget(*, inherited: bool = False) -> None:
    """Drop the components of all apps in this process; *inherited*: the parent process made them
    and still uses them.
    """
    global _lock  # noqa: PLW0603 - a lock held while forking stays locked in the child for ever
    _lock = threading.Lock()
    for made in list(_parts.values()):
        for parts in made.values():
            parts.close(inherited=inherited)
    _parts.clear()


def forget_others(database_url: str) -> None:
    """Drop the parts of all apps in this process, if some of them are on another database than
    *database_url*.
    """
    given = {
        parts.settings.database_url for made in list(_parts.values()) for parts in made.values()
    }
    if given - {database_url, IN_MEMORY}:
        forget()


os.register_at_fork(after_in_child=lambda: forget(inherited=True))
