"""The parts of each Celery app in this process."""

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

from celery_leases.body.effects import Effects
from celery_leases.body.steps import Steps
from celery_leases.core.effects import scope_of
from celery_leases.core.endings import Returned
from celery_leases.core.errors import StoreUnavailable
from celery_leases.core.options import DATABASE
from celery_leases.core.outcomes import after_run
from celery_leases.core.ports import Clock, EffectStore, MarkStore
from celery_leases.core.records import Outcome, Record
from celery_leases.core.results import encode
from celery_leases.core.verdicts import Call
from celery_leases.execution import Execution
from celery_leases.interruption.by_signal import shield_here
from celery_leases.renewal import Renewer
from celery_leases.seam.app_settings import leased_tasks, settings_of
from celery_leases.seam.putback import Copies
from celery_leases.settings import IN_MEMORY, Settings
from celery_leases.signals import Announcer
from celery_leases.tenure import Tenure
from celery_leases.wiring import Parts, build

if TYPE_CHECKING:
    from celery_leases.stores.sql import SqlRecordStore
    from celery_leases.stores.transactions import JoinedTransaction

Closed = Callable[[], AbstractContextManager[None]]


class AppParts:
    """The parts of one app in one process, and the copies it publishes."""

    def __init__(self, app: Celery, parts: Parts, copies: Copies) -> None:
        self._app = ref(app)
        self.parts = parts
        #: The ``LeaseClient`` on the same stores, once somebody has asked for it.
        self.client: Any = None
        self.copies = copies
        #: The app's settings.
        self.settings: Settings = parts.settings
        #: Runs its calls.
        self.execution: Execution = parts.execution
        #: Its records.
        self.records: SqlRecordStore = parts.records
        #: Effects and progress of its attempts.
        self.effects: EffectStore = parts.effects
        #: Its waiter and callback marks.
        self.marks: MarkStore = parts.marks
        #: Keeps its leases alive in this process.
        self.renewer: Renewer = parts.renewer
        #: The clock its deadlines are counted on.
        self.clock: Clock = parts.execution.entry.clock

    @property
    def app(self) -> Celery:
        """The app they belong to."""
        app = self._app()
        if app is None:
            raise ReferenceError("the Celery app of these parts is gone")
        return app

    def steps(self, call: Call, tenure: Tenure, record: Record, closed: Closed) -> Steps:
        """What the body of one attempt may do beside returning; *closed* keeps signals away from a step."""
        options = call.options
        effects = Effects(
            tenure=tenure,
            record=record,
            store=self.effects,
            clock=self.clock,
            judge=lambda error: options.classifier.judge(error, time.time(), time.monotonic),
            closed=closed,
            prefix=self.settings.prefix,
            scope=scope_of(record, rerun=options.rerun, retention=options.retention),
            patience=options.settle_timeout,
            result_max=options.result_max,
        )

        def completed(result: Any) -> Outcome:
            return after_run(call, record, Returned(result, *encode(result, options.result_max)))

        def joined(given: Any) -> JoinedTransaction:
            from celery_leases.stores.transactions import JoinedTransaction

            return JoinedTransaction(given, self.records)

        # Nothing commits together with records in this process's memory, which only eager calls have.
        in_memory = self.settings.database_url == IN_MEMORY
        return Steps(self.renewer, self.effects, effects, closed, None if in_memory else joined, completed)


_parts: WeakKeyDictionary[Celery, dict[bool, AppParts]] = WeakKeyDictionary()
_lock = threading.Lock()
_worker: ref[Any] | None = None
_worker_pid = 0


def parts_of(app: Celery, *, eager: bool = False) -> AppParts:
    """The parts of *app* in this process, made when first asked for.

    An *eager* call has stores of its own in memory, unless ``leases_eager_stores`` says otherwise.
    """
    try:
        made = _parts.get(app)
    except TypeError:  # a proxy such as Celery's current_app, which cannot be referred to
        app = app._get_current_object()  # noqa: SLF001
        made = _parts.get(app)
    return made[eager] if made is not None and eager in made else _make(app, eager=eager)


def _make(app: Celery, *, eager: bool) -> AppParts:
    with _lock:
        made = _parts.setdefault(app, {})
        if eager not in made:
            settings = settings_of(app, lenient=eager)
            if eager:
                in_memory = replace(settings, leases_url=DATABASE, database_url=IN_MEMORY)
                settings = settings_of(app) if settings.eager_stores else in_memory
            shortest = min((task.lease_options.ttl for task in leased_tasks(app).values()), default=15.0)
            parts = build(settings, Announcer(app.tasks), shortest, lambda: shield_here(os.getpid()).hurried)
            if parts.records.database.host_clock:
                with suppress(StoreUnavailable):  # a delivery that cannot reach it is put back
                    parts.records.check()
                    if eager and settings.database_url == IN_MEMORY:
                        from celery_leases.stores.forgetful import keep_the_latest

                        keep_the_latest(parts.records)
            made[eager] = AppParts(app, parts, Copies(app))
        return made[eager]


def note_worker(worker: Any) -> None:
    """Remember Celery's worker, in its main process."""
    global _worker, _worker_pid
    _worker, _worker_pid = ref(worker), os.getpid()


def worker_here() -> Any:
    """Celery's worker, in its main process; ``None`` in a pool child and elsewhere."""
    return _worker() if _worker is not None and _worker_pid == os.getpid() else None


def forget(*, inherited: bool = False) -> None:
    """Drop the parts of all apps in this process; *inherited*: they were made by the parent, and are still its own."""
    global _lock  # noqa: PLW0603 - a lock held while forking stays locked in the child for ever
    _lock = threading.Lock()
    for made in list(_parts.values()):
        for parts in made.values():
            parts.parts.close(inherited=inherited)
    _parts.clear()


os.register_at_fork(after_in_child=lambda: forget(inherited=True))
