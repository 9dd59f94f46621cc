"""The parts of each Celery app in this process, and the check a worker makes before it starts."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

from celery import Celery, signals

from celery_leases.client import LeaseClient
from celery_leases.core.errors import LeasesError, StoreUnavailable
from celery_leases.core.options import ADVISED_TTL
from celery_leases.core.ports import Clock, MarkStore
from celery_leases.execution import Execution
from celery_leases.interruption import shield_here
from celery_leases.putback import Copies
from celery_leases.renewal import Renewer
from celery_leases.signals import Announcer, logger
from celery_leases.stores.claims import DATABASE
from celery_leases.stores.sql import SqlRecordStore
from celery_leases.wiring import DEFAULT_DATABASE, IN_MEMORY, Parts, Settings, build, read_settings


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

    def client(self) -> LeaseClient:
        """A client on the same stores."""
        return LeaseClient.on(self.parts.leases, self.parts.records)


_parts: WeakKeyDictionary[Celery, dict[bool, AppParts]] = WeakKeyDictionary()
_lock = threading.Lock()


def parts_of(app: Celery, *, eager: bool = False) -> AppParts:
    """The parts of *app* in this process, made when first asked for.

    An *eager* call has stores of its own in memory, unless ``leases_eager_stores`` says otherwise.
    """
    app = app._get_current_object() if hasattr(app, "_get_current_object") else app  # noqa: SLF001
    made = _parts.get(app, {}).get(eager)
    return made if made is not None else _make(app, eager=eager)


def settings_of(app: Celery, *, lenient: bool = False) -> Settings:
    """The ``leases_*`` settings of *app*; *lenient*: a missing database URL is left to the worker to complain about."""
    conf: Mapping[str, Any] = app.conf
    broker = conf.get("broker_write_url") or conf.get("broker_url") or "amqp://localhost//"
    if lenient and not conf.get("leases_database_url"):
        conf = {**{name: conf[name] for name in conf if str(name).startswith("leases_")}, "leases_database_url": "-"}
    return read_settings(conf, broker[0] if isinstance(broker, list) else broker)


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
                parts.records.check()
            made[eager] = AppParts(parts, Copies(app))
        return made[eager]


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
    tasks = leased_tasks(sender.app)
    if not tasks:
        return
    try:
        parts = parts_of(sender.app)
        parts.records.check()
    except StoreUnavailable as error:
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
    forget()
