"""System checks for ``manage.py check``; a worker logs their warnings when it starts."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from celery import Celery, _state
from django.apps import apps as installed
from django.core.checks import CheckMessage, Error, Tags, Warning, register  # noqa: A004 - Django's name
from django.db import connections
from django.urls import get_resolver
from django.utils.module_loading import autodiscover_modules

from celery_leases.django import configuration, tables
from celery_leases.django.databases import IN_MEMORY
from celery_leases.django.early_calls import early_calls
from celery_leases.errors import (
    LeaseConfigurationError,
    LeasesError,
    SchemaOutdated,
    StoreUnavailable,
)
from celery_leases.settings import is_local
from celery_leases.stores.sql.schema import NEWEST
from celery_leases.stores.urls import display_url
from celery_leases.worker.app_settings import leased_tasks, settings_of
from celery_leases.worker.checks.periodic import (
    entries_in_settings,
    entries_in_tables,
    periodic_findings,
)
from celery_leases.worker.checks.settings import (
    Finding,
    TimeLimits,
    celery_findings,
    findings_without_lease,
    plain_task_findings,
)

TAG: Final = "celery_leases"
RELAY_TASKS: Final = frozenset({"celery_leases.relay", "celery_leases.rescue"})
_DELAY_IN_CALLS: Final = (b".delay_in(", b".apply_async_in(")
_NOT_IN_REQUESTS: Final = frozenset({"tasks", "management", "migrations", "celery", "apps"})
"""Modules whose functions run outside of requests."""
_BEAT: Final = "django_celery_beat"
_IDS: Final = {
    "plain-tasks-run-twice": "celery_leases.W002",
    "autoretry": "celery_leases.W003",
    "options-without-lease": "celery_leases.W004",
    "periodic-once": "celery_leases.W008",
}
"""The ids of checks that a worker makes too, by the codes of its findings."""

logger = logging.getLogger("celery_leases")


def register_all() -> None:
    """Register the checks of this module with Django."""
    register(check_settings, TAG)
    register(check_tasks, TAG)
    register(check_relay, TAG)
    register(check_periodic, TAG, Tags.database)
    register(check_early_calls, TAG)
    register(check_tables, Tags.database)
    register(check_scheduled_relay, Tags.database)


def check_settings(**_: Any) -> list[CheckMessage]:
    """E001 for wrong settings; W001, W002 and W005."""
    app = _app()
    try:
        ours = configuration.url_of_records()
        settings = settings_of(app) if app is not None else None
    except LeaseConfigurationError as error:
        return [_wrong(error)]
    if app is None or settings is None or not _has_tasks(app):
        return []
    found: list[CheckMessage] = []
    if settings.database_url != ours:
        alias = configuration.alias_of_records()
        found.append(
            Warning(
                f"The records are in {display_url(settings.database_url)}, not in DATABASES[{alias!r}]: the admin "
                "and the models do not show them, and delay_in() refuses Django's connection.",
                hint="Remove the setting LEASES_DATABASE_URL of the Celery app, or name the alias of that database: "
                'CELERY_LEASES = {"database": "<alias>"}.',
                id="celery_leases.W001",
            )
        )
    elif settings.database_schema is not None:
        found.append(
            Warning(
                f"The records are in the schema {settings.database_schema}, which Django's migrations and models "
                "do not use.",
                hint='Write the schema into the alias, "OPTIONS": {"options": "-c search_path=<schema>"}, and '
                "remove the setting LEASES_DATABASE_SCHEMA of the Celery app.",
                id="celery_leases.W001",
            )
        )
    found += _warnings(plain_task_findings(app, TimeLimits()))
    broker = app.conf.broker_write_url or ""
    broker = broker if isinstance(broker, str) else broker[0]
    if settings.database_url.startswith("sqlite") and broker and not is_local(broker):
        found.append(
            Warning(
                f"The broker {display_url(broker)} is on another machine, but the records are in a SQLite file on this "
                "one: workers on other machines would use other records.",
                hint="Use a database that all workers can connect to: CELERY_LEASES = "
                '{"database": "<alias>"}.',
                id="celery_leases.W005",
            )
        )
    return found


def check_tasks(**_: Any) -> list[CheckMessage]:
    """E001 for wrong options; W003 and W004."""
    app = _app()
    if app is None:
        return []
    try:
        leased = _tasks(app)
    except LeaseConfigurationError as error:
        return [_wrong(error)]
    return _warnings([*celery_findings(app, leased), *findings_without_lease(app)])


def check_relay(**_: Any) -> list[CheckMessage]:
    """W007, if beat uses Celery's own schedule."""
    app = _app()
    if app is None or installed.is_installed(_BEAT) or _is_scheduled(app):
        return []
    return _without_relay(app)


def check_scheduled_relay(databases: Sequence[str] | None = None, **_: Any) -> list[CheckMessage]:
    """W007, if beat's schedule is in the database."""
    app = _app()
    if app is None or not databases or not installed.is_installed(_BEAT) or _is_scheduled(app):
        return []
    periodic: Any = installed.get_model(_BEAT, "PeriodicTask")
    try:
        if periodic.objects.filter(task__in=RELAY_TASKS, enabled=True).exists():
            return []
    except Exception:  # noqa: BLE001 - its tables may not exist yet
        return []
    return _without_relay(app)


def check_periodic(databases: Sequence[str] | None = None, **_: Any) -> list[CheckMessage]:
    """W008, for beat's schedule in the settings; with *databases* also for that in the tables."""
    app = _app()
    if app is None or not _has_tasks(app):
        return []
    entries = [*entries_in_settings(app)]
    if databases:
        with suppress(Exception):  # its tables may not exist yet
            entries += entries_in_tables(app)
    return _warnings(periodic_findings(leased_tasks(app), entries))


def check_early_calls(**_: Any) -> list[CheckMessage]:
    """W009, for the modules of the project that the URLs and the tasks import."""
    app = _app()
    if app is None or not _has_tasks(app):
        return []
    with suppress(Exception):  # Django has a check of its own for a wrong URLconf
        get_resolver().url_patterns  # noqa: B018 - imports the views
    atomic = any(connection.settings_dict["ATOMIC_REQUESTS"] for connection in connections.all())
    found: list[CheckMessage] = []
    for name, module, source in _project_modules():
        in_requests = atomic and _NOT_IN_REQUESTS.isdisjoint(name.split("."))
        calls = ", ".join(early_calls(module, source, in_requests=in_requests))
        if calls:
            found.append(
                Warning(
                    f"{name} publishes a call inside a transaction: {calls}. A worker may run it before the "
                    "commit, and not find its rows; after a rollback it runs all the same.",
                    hint="Write task.delay_on_commit(…), or task.delay_in(connection, …), which a crash does not lose. "
                    "In a function that no request calls, silence this check.",
                    id="celery_leases.W009",
                )
            )
    return found


def check_tables(databases: Sequence[str] | None = None, **_: Any) -> list[CheckMessage]:
    """W006 and E002, for the given databases."""
    try:
        alias = configuration.alias_of_records()
        if (
            alias not in (databases or ())
            or configuration.url_of_alias(alias) == IN_MEMORY
            or _is_migrating()
        ):
            return []
        version = tables.found(connections[alias])
    except SchemaOutdated as error:
        return [Error(_sentence(str(error)), id="celery_leases.E002")]
    except (LeaseConfigurationError, StoreUnavailable) as error:
        # Django itself reports a database that does not answer.
        return [_wrong(error)] if isinstance(error, LeaseConfigurationError) else []
    if version == NEWEST:
        return []
    state = (
        "missing"
        if version is None
        else f"of version {version}, but this release needs version {NEWEST}"
    )
    return [
        Warning(
            f"The tables of celery_leases in DATABASES[{alias!r}] are {state}.",
            hint=f"Run: manage.py migrate celery_leases --database {alias}",
            id="celery_leases.W006",
        )
    ]


def log_in_worker(**_: Any) -> None:
    """Log the warnings of the checks when a worker starts; Celery runs the checks and drops them.

    Warnings that every worker logs by itself are left out.
    """
    for check in (check_settings, check_tasks, check_relay):
        for message in check():
            if message.id not in _IDS.values() and not message.is_silenced():
                logger.warning("%s (%s) %s", message.msg, message.id, message.hint or "")


def _warnings(findings: Iterable[Finding]) -> list[CheckMessage]:
    """The checks among the *findings* of a worker."""
    return [
        Warning(_sentence(each.problem), hint=_sentence(each.advice), id=_IDS[each.code])
        for each in findings
        if each.code in _IDS
    ]


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _app() -> Celery | None:
    """The project's Celery app; ``None`` if this process has not imported one."""
    return _state.get_current_app() if _state.default_app is not None else None


def _tasks(app: Celery) -> dict[str, Any]:
    """The leased tasks of the app, including the ``tasks`` modules of the installed apps."""
    try:
        autodiscover_modules("tasks")
    except LeasesError:
        raise
    except Exception as error:  # noqa: BLE001 - a worker reports it, with its traceback
        logger.debug("a module of tasks cannot be imported: %s", error)
    return leased_tasks(app)


def _has_tasks(app: Celery) -> bool:
    try:
        return bool(_tasks(app))
    except LeaseConfigurationError:  # check_tasks reports it
        return False


def _wrong(error: LeaseConfigurationError) -> CheckMessage:
    return Error(str(error), id="celery_leases.E001")


def _is_migrating() -> bool:
    """Whether the running command is ``migrate``, which creates the tables."""
    return sys.argv[1:2] == ["migrate"]


def _is_scheduled(app: Celery) -> bool:
    schedule = app.conf.beat_schedule or {}
    return any(entry.get("task") in RELAY_TASKS for entry in schedule.values())


def _without_relay(app: Celery) -> list[CheckMessage]:
    with suppress(LeaseConfigurationError):  # check_tasks reports it
        _tasks(app)  # imports their modules, whatever check Django runs first
    modules = _project_modules()
    calling = next(
        (name for name, _, source in modules if any(call in source for call in _DELAY_IN_CALLS)),
        None,
    )
    if calling is None:
        return []
    return [
        Warning(
            f"{calling} calls delay_in() or apply_async_in(), but no relay is scheduled: if a process dies between "
            "its commit and the publication of the message, the call is never published.",
            hint='Schedule the relay with beat, CELERY_BEAT_SCHEDULE = {"relay": {"task": "celery_leases.relay", '
            '"schedule": 60}} and CELERY_INCLUDE = ["celery_leases.builtin_tasks"]; or run '
            "`manage.py leases relay` each minute, and silence this check.",
            id="celery_leases.W007",
        )
    ]


def _project_modules() -> Iterator[tuple[str, ModuleType, bytes]]:
    """The imported modules of the project's apps but tests, with their names and sources."""
    roots = [
        Path(config.path)
        for config in installed.get_app_configs()
        if not _is_third_party(config.path)
    ]
    for name, module in _imported_modules(roots):
        file = getattr(module, "__file__", None)
        if (
            any(part.startswith("test") for part in name.split("."))
            or not file
            or not file.endswith(".py")
        ):
            continue
        with suppress(OSError):
            yield name, module, Path(file).read_bytes()


def _imported_modules(roots: Iterable[Path]) -> list[tuple[str, ModuleType]]:
    places = tuple(f"{root}/" for root in roots)
    found = [
        (name, module)
        for name, module in list(sys.modules.items())
        if _file_of(module).startswith(places)
    ]
    return sorted(found, key=lambda pair: pair[0])


def _file_of(module: ModuleType | None) -> str:
    return str(getattr(module, "__file__", None) or "")


def _is_third_party(path: str) -> bool:
    """Whether an installed app is not the project's own."""
    return "site-packages" in path or "dist-packages" in path or Path(path) == Path(__file__).parent
