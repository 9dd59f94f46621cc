"""The parts of each Celery app in this process, and the check a worker makes before it starts."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final
from weakref import WeakKeyDictionary, ref

from celery import Celery, signals

from celery_leases.body.effects import Effects
from celery_leases.body.steps import Steps
from celery_leases.client import LeaseClient
from celery_leases.core.effects import scope_of
from celery_leases.core.endings import Returned
from celery_leases.core.errors import LeaseConfigurationError, LeasesError, StoreUnavailable
from celery_leases.core.options import ADVISED_TTL
from celery_leases.core.outcomes import after_run
from celery_leases.core.ports import Clock, EffectStore, MarkStore
from celery_leases.core.records import Outcome, Record
from celery_leases.core.results import encode
from celery_leases.core.verdicts import Call
from celery_leases.execution import Execution
from celery_leases.interruption.by_signal import shield_here
from celery_leases.renewal import Renewer
from celery_leases.seam.putback import Copies
from celery_leases.signals import Announcer, logger
from celery_leases.stores.claims import DATABASE
from celery_leases.stores.sql import SqlRecordStore
from celery_leases.stores.transactions import JoinedTransaction
from celery_leases.tenure import Tenure
from celery_leases.wiring import DEFAULT_DATABASE, IN_MEMORY, Parts, Settings, build, read_settings

Closed = Callable[[], AbstractContextManager[None]]

TIME_TO_END: Final = 1.0
"""Seconds a body needs that ends at its soft time limit, to clean up and have that written down."""


@dataclass
class AppParts:
    """The parts of one app in one process, and the copies it publishes."""

    parts: Parts
    copies: Copies

    @property
    def settings(self) -> Settings:
        """The app's settings."""
        return self.parts.settings

    @property
    def execution(self) -> Execution:
        """Runs its calls."""
        return self.parts.execution

    @property
    def records(self) -> SqlRecordStore:
        """Its records."""
        return self.parts.records

    @property
    def effects(self) -> EffectStore:
        """Effects and progress of its attempts."""
        return self.parts.effects

    @property
    def marks(self) -> MarkStore:
        """Its waiter and callback marks."""
        return self.parts.marks

    @property
    def renewer(self) -> Renewer:
        """Keeps its leases alive in this process."""
        return self.parts.renewer

    @property
    def clock(self) -> Clock:
        """The clock its deadlines are counted on."""
        return self.parts.execution.entry.clock

    @cached_property
    def client(self) -> LeaseClient:
        """A client on the same stores."""
        return LeaseClient.on(self.parts.leases, self.parts.records)

    def steps(self, call: Call, tenure: Tenure, record: Record, closed: Closed) -> Steps:
        """What the body of one attempt may do beside returning; *closed* keeps signals away from a step."""
        options = call.options
        effects = Effects(
            tenure=tenure,
            record=record,
            store=self.effects,
            clock=self.clock,
            judge=lambda error: options.rules.judge(error, time.time()),
            closed=closed,
            prefix=self.settings.prefix,
            scope=scope_of(record, rerun=options.rerun, retention=options.retention),
            patience=options.settle_timeout,
            result_max=options.result_max,
        )

        def completed(result: Any) -> Outcome:
            return after_run(call, record, Returned(result, *encode(result, options.result_max)))

        def joined(given: Any) -> JoinedTransaction:
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
    app = app._get_current_object() if hasattr(app, "_get_current_object") else app  # noqa: SLF001
    made = _parts.get(app, {}).get(eager)
    return made if made is not None else _make(app, eager=eager)


def settings_of(app: Celery, *, lenient: bool = False) -> Settings:
    """The ``leases_*`` settings of *app*; *lenient*: a missing database URL is left to the worker to complain about."""
    broker = app.conf.get("broker_write_url") or app.conf.get("broker_url") or "amqp://localhost//"
    conf = app.conf  # what was there before the first look may have been a mere promise of it
    namespace = (getattr(conf, "prefix", None) or "").lower()
    names = {str(name).lower().removeprefix(namespace) for name in conf}
    given = {name: conf[name] for name in names if name.startswith("leases_")}
    if lenient and not given.get("leases_database_url"):
        given["leases_database_url"] = "-"
    brokers = [broker] if isinstance(broker, str) else list(broker)
    broker_url = ";".join(brokers) if brokers[0].startswith("sentinel://") else brokers[0]
    options = dict(conf.get("broker_transport_options") or {})
    if tls := conf.get("broker_use_ssl"):
        options.setdefault("ssl", tls)
    return read_settings(given, broker_url, options)


def leased_tasks(app: Celery) -> dict[str, Any]:
    """The registered tasks of *app* that run under leases, by name."""
    return {name: task for name, task in app.tasks.items() if hasattr(task, "lease_options")}


def _make(app: Celery, *, eager: bool) -> AppParts:
    with _lock:
        made = _parts.setdefault(app, {})
        if eager not in made:
            settings = settings_of(app)
            if eager and not settings.eager_stores:
                settings = replace(settings, leases_url=DATABASE, database_url=IN_MEMORY)
            shortest = min((task.lease_options.ttl for task in leased_tasks(app).values()), default=15.0)
            parts = build(settings, Announcer(), shortest, lambda: shield_here(os.getpid()).hurried)
            if parts.records.database.host_clock:
                with suppress(StoreUnavailable):  # a delivery that cannot reach it is put back
                    parts.records.check()
            made[eager] = AppParts(parts, Copies(app))
        return made[eager]


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


@signals.worker_init.connect(weak=False)
def _check_before_work(sender: Any, **_: Any) -> None:
    """Stop a worker that could not keep its promises, with the line to write; create the tables on SQLite."""
    global _worker, _worker_pid
    _worker, _worker_pid = ref(sender), os.getpid()
    tasks = leased_tasks(sender.app)
    if not tasks:
        return
    try:
        parts = parts_of(sender.app)
        if parts.settings.database_url == IN_MEMORY and "prefork" in str(sender.pool_cls):
            raise LeaseConfigurationError(
                f"leases_database_url={IN_MEMORY!r} gives each pool child records of its own; name a file or a server"
            )
        if "prefork" not in str(sender.pool_cls):
            _refuse_to_kill(tasks)
        parts.records.check()
    except StoreUnavailable as error:
        if settings_of(sender.app).database_url.startswith("sqlite"):
            raise SystemExit(f"celery_leases: the records file cannot be used: {error}") from None
        logger.warning("the records database does not answer yet: %s", error)
        return
    except LeasesError as error:
        raise SystemExit(f"celery_leases: {error}") from None
    if parts.settings.database_url == DEFAULT_DATABASE:
        logger.warning(
            "records are kept in %s in the working directory; set leases_database_url for more than one machine",
            DEFAULT_DATABASE.removeprefix("sqlite:///"),
        )
    short = {name: task.lease_options.ttl for name, task in tasks.items() if task.lease_options.ttl < ADVISED_TTL}
    if short:
        logger.warning(
            "lease_ttl is below the advised %g s, so a process that pauses that long loses its lease: %s",
            ADVISED_TTL,
            ", ".join(f"{name} ({ttl:g} s)" for name, ttl in sorted(short.items())),
        )
    if tight := sorted(name for name, task in tasks.items() if _leaves_no_time(task, sender)):
        logger.warning(
            "soft_time_limit is not %g s below time_limit: a caller may be told of a failure whose call comes back: %s",
            TIME_TO_END,
            ", ".join(tight),
        )
    forget()


def _leaves_no_time(task: Any, worker: Any) -> bool:
    """Whether a pool child may be killed while it writes down that the soft limit has ended its body."""
    soft = task.soft_time_limit or getattr(worker, "soft_time_limit", None)
    hard = task.time_limit or getattr(worker, "time_limit", None)
    return bool(soft and hard and hard - soft < TIME_TO_END)


def _refuse_to_kill(tasks: Mapping[str, Any]) -> None:
    """A process that runs other bodies too, or is the worker itself, must not be killed for one of them."""
    killing = sorted(name for name, task in tasks.items() if task.lease_options.on_lost == "kill")
    if killing:
        raise LeaseConfigurationError(
            f"lease_on_lost='kill' ends the whole process, which only prefork has for each body: {', '.join(killing)}; "
            "start the worker with --pool prefork, or write lease_on_lost='interrupt'"
        )
