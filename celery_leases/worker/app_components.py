"""The components that run an app's leased tasks in this process, for each Celery app."""

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

from celery_leases.attempt.held_lease import HeldLease
from celery_leases.body.effects import Effects
from celery_leases.body.lease_services import LeaseServices
from celery_leases.call import Call
from celery_leases.components import Components, build
from celery_leases.decide.after_run import after_run
from celery_leases.decide.endings import Returned
from celery_leases.effect import scope_of
from celery_leases.errors import StoreUnavailable
from celery_leases.options import DATABASE, DEFAULT_TTL
from celery_leases.record import Outcome, Record
from celery_leases.results import encode
from celery_leases.settings import IN_MEMORY
from celery_leases.signals import Announcer
from celery_leases.stores.interfaces import Clock
from celery_leases.worker.app_settings import leased_tasks, settings_of
from celery_leases.worker.pools.os_signal_guard import interrupt_guard_here
from celery_leases.worker.reschedule import Publisher

if TYPE_CHECKING:
    from celery_leases.stores.sql.transactions import JoinedTransaction

InterruptsDeferred = Callable[[], AbstractContextManager[None]]


class AppComponents(Components):
    """The components of one app in one process, and the publisher of its messages."""

    def __init__(self, app: Celery, components: Components, publisher: Publisher) -> None:
        super().__init__(**vars(components))
        self._app = ref(app)
        self.publisher = publisher
        self._checked = False
        #: The clock of its deadlines.
        self.clock: Clock = components.context.clock

    def check_once(self) -> None:
        """Raise :class:`~celery_leases.errors.SchemaOutdated` unless this release knows the tables.

        After the first success nothing is checked again.
        """
        if not self._checked:
            self.records.check()
            self._checked = True

    @property
    def in_memory(self) -> bool:
        """Whether the records are in the memory of this process, as they are for eager calls."""
        return self.settings.database_url == IN_MEMORY

    @property
    def app(self) -> Celery:
        """The app that these components belong to."""
        app = self._app()
        if app is None:
            raise ReferenceError("the Celery app was deleted")
        return app

    def lease_services(
        self,
        call: Call,
        held_lease: HeldLease,
        record: Record,
        interrupts_deferred: InterruptsDeferred,
    ) -> LeaseServices:
        """The services of one attempt's lease object; *interrupts_deferred* defers signals during a
        step.
        """
        options = call.options
        effects = Effects(
            held_lease=held_lease,
            record=record,
            store=self.effects,
            clock=self.clock,
            classify=lambda error: options.failures.classifier.classify(
                error, self.context.wall_time(), time.monotonic
            ),
            interrupts_deferred=interrupts_deferred,
            prefix=self.settings.prefix,
            scope=scope_of(record, rerun=options.rerun, retention=options.retention),
            settle_timeout=options.settle_timeout,
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

        # Records in memory cannot be committed together with rows of a database, so they are
        # written after the commit.
        return LeaseServices(
            self.renewer,
            self.effects,
            effects,
            interrupts_deferred,
            detached if self.in_memory else joined,
            completed,
        )


_components: WeakKeyDictionary[Celery, dict[bool, AppComponents]] = WeakKeyDictionary()
_substitutes: dict[Celery, AppComponents] = {}
_lock = threading.Lock()
_worker: ref[Any] | None = None
_worker_pid = 0


def components_of(app: Celery, *, eager: bool | None = None) -> AppComponents:
    """The components of *app* in this process, made on first use.

    *eager* calls use stores in the memory of this process, unless ``leases_eager_stores`` is set.
    If *eager* is ``None``, ``task_always_eager`` decides, so that code that publishes calls or
    reads their status uses the same stores as the calls. A worker's deliveries are never eager.
    """
    if eager is None:
        eager = bool(app.conf.task_always_eager)
    try:
        made = _components.get(app)
    except TypeError:  # a proxy such as Celery's current_app allows no weak reference
        app = app._get_current_object()  # noqa: SLF001
        made = _components.get(app)
    if _substitutes and (substitute := _substitutes.get(app)) is not None:
        return substitute
    return made[eager] if made is not None and eager in made else _make(app, eager=eager)


def _make(app: Celery, *, eager: bool) -> AppComponents:
    with _lock:
        made = _components.setdefault(app, {})
        if eager not in made:
            settings = settings_of(app, lenient=eager)
            if eager:
                in_memory = replace(settings, leases_url=DATABASE, database_url=IN_MEMORY)
                settings = settings_of(app) if settings.eager_stores else in_memory
            shortest = min(
                (task.lease_options.ttl for task in leased_tasks(app).values()), default=DEFAULT_TTL
            )
            components = build(
                settings,
                Announcer(app.tasks),
                shortest,
                lambda: interrupt_guard_here(os.getpid()).stopping,
            )
            if eager and settings.eager_stores:
                components.records.check()  # an eager call cannot wait until the tables exist
            elif not components.records.database.dialect.has_server:
                # If the database cannot be reached now, deliveries are rescheduled.
                with suppress(StoreUnavailable):
                    components.records.check()
                    if eager and settings.database_url == IN_MEMORY:
                        from celery_leases.stores.eager_record_limit import limit_records

                        limit_records(components.records)
            made[eager] = AppComponents(app, components, Publisher(app))
        return made[eager]


def use(app: Celery, components: AppComponents | None) -> AppComponents | None:
    """Use *components* as the components of *app*, for eager calls and all others; ``None``: use
    its own again, which exist meanwhile.

    Returns what was used instead of the app's own before.
    """
    before = _substitutes.pop(app, None)
    if components is not None:
        _substitutes[app] = components
    return before


def made_here() -> list[AppComponents]:
    """The components of all apps in this process, without those of eager calls."""
    return [made[False] for made in list(_components.values()) if False in made]


def set_current_worker(worker: Any) -> None:
    """Remember Celery's worker, in its main process."""
    global _worker, _worker_pid
    _worker, _worker_pid = ref(worker), os.getpid()


def current_worker() -> Any:
    """Celery's worker, in its main process; ``None`` in a pool child and elsewhere."""
    return _worker() if _worker is not None and _worker_pid == os.getpid() else None


def close_all(*, inherited: bool = False) -> None:
    """Close and forget the components of all apps in this process; *inherited*: the parent process
    made them and still uses their connections.
    """
    global _lock  # noqa: PLW0603 - a lock held while forking stays locked in the child for ever
    _lock = threading.Lock()
    for made in list(_components.values()):
        for components in made.values():
            components.close(inherited=inherited)
    _components.clear()


def close_if_other_database(database_url: str) -> None:
    """Close and forget the components of all apps in this process, if any of them uses another
    database than *database_url*.
    """
    given = {
        components.settings.database_url
        for made in list(_components.values())
        for components in made.values()
    }
    if given - {database_url, IN_MEMORY}:
        close_all()


os.register_at_fork(after_in_child=lambda: close_all(inherited=True))
