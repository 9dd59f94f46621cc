"""System checks: what ``manage.py check`` says of leases, and what a worker of the project logs
when it starts.
"""

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
from django.utils.module_loading import autodiscover_modules

from celery_leases.contrib.django import configuration, tables
from celery_leases.contrib.django.databases import IN_MEMORY
from celery_leases.errors import (
    LeaseConfigurationError,
    LeasesError,
    SchemaOutdated,
    StoreUnavailable,
)
from celery_leases.settings import is_local
from celery_leases.stores.sql.table_versions import NEWEST
from celery_leases.stores.urls import shown
from celery_leases.worker import setting_checks
from celery_leases.worker.app_settings import leased_tasks, settings_of

TAG: Final = "celery_leases"
RELAYS: Final = frozenset({"celery_leases.relay", "celery_leases.rescue"})
_WRITES: Final = (b".delay_in(", b".apply_async_in(")
_BEAT: Final = "django_celery_beat"

logger = logging.getLogger("celery_leases")


def register_all() -> None:
    """Have Django run the checks of this module."""
    register(check_settings, TAG)
    register(check_tasks, TAG)
    register(check_relay, TAG)
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
                f"The records are in {shown(settings.database_url)}, and not in DATABASES[{alias!r}]: the admin and "
                "the models do not see them, and delay_in() refuses Django's connection.",
                hint="Leave out the setting LEASES_DATABASE_URL of the Celery app, or name the alias of that database "
                'by CELERY_LEASES = {"database": "<alias>"}.',
                id="celery_leases.W001",
            )
        )
    elif settings.database_schema is not None:
        found.append(
            Warning(
                f"The records are in the schema {settings.database_schema}, where neither Django's migrations nor its "
                "models look.",
                hint='Write the schema into the alias, "OPTIONS": {"options": "-c search_path=<schema>"}, and leave '
                "out the setting LEASES_DATABASE_SCHEMA of the Celery app.",
                id="celery_leases.W001",
            )
        )
    if (slow := setting_checks.slow_redelivery(app)) is not None:
        text, value = slow
        line = f"Write CELERY_BROKER_TRANSPORT_OPTIONS = {value}"
        found.append(Warning(f"The setting {text}.", hint=line, id="celery_leases.W002"))
    broker = app.conf.broker_write_url or ""
    broker = broker if isinstance(broker, str) else broker[0]
    if settings.database_url.startswith("sqlite") and broker and not is_local(broker):
        found.append(
            Warning(
                f"The broker {shown(broker)} is on another machine, and the records are in a SQLite file of this one: "
                "workers of two machines would not know of each other's work.",
                hint="Keep the records in a database that all workers reach, by CELERY_LEASES = "
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
    found: list[CheckMessage] = [
        Warning(
            f"The leased task {name} has autoretry_for: each of its retries is a failure that the rules see too, with "
            "waits of its own.",
            hint="Leave autoretry_for out, and write lease_rules.",
            id="celery_leases.W003",
        )
        for name, task in sorted(leased.items())
        if getattr(task, "autoretry_for", None)
    ]
    found += [
        Warning(
            f"The task {name} has {', '.join(options)}, but runs without a lease.",
            hint="Write base=LeasedTask, or leave them out.",
            id="celery_leases.W004",
        )
        for name, options in setting_checks.bare_options(app)
    ]
    return found


def check_relay(**_: Any) -> list[CheckMessage]:
    """W007, where Celery's own schedule is the only one."""
    app = _app()
    if app is None or installed.is_installed(_BEAT) or _is_scheduled(app):
        return []
    return _without_relay(app)


def check_scheduled_relay(databases: Sequence[str] | None = None, **_: Any) -> list[CheckMessage]:
    """W007, where beat's schedule is in the database."""
    app = _app()
    if app is None or not databases or not installed.is_installed(_BEAT) or _is_scheduled(app):
        return []
    periodic: Any = installed.get_model(_BEAT, "PeriodicTask")
    try:
        if periodic.objects.filter(task__in=RELAYS, enabled=True).exists():
            return []
    except Exception:  # noqa: BLE001 - its own tables are not there yet
        return []
    return _without_relay(app)


def check_tables(databases: Sequence[str] | None = None, **_: Any) -> list[CheckMessage]:
    """W006, for the databases that are asked about."""
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
        return [Error(f"{str(error)[0].upper()}{str(error)[1:]}.", id="celery_leases.E002")]
    except (LeaseConfigurationError, StoreUnavailable) as error:
        return (
            [_wrong(error)] if isinstance(error, LeaseConfigurationError) else []
        )  # Django tells of that itself
    if version == NEWEST:
        return []
    state = (
        "missing"
        if version is None
        else f"of version {version}, and this release has version {NEWEST}"
    )
    return [
        Warning(
            f"The tables of celery_leases in DATABASES[{alias!r}] are {state}.",
            hint=f"Run: manage.py migrate celery_leases --database {alias}",
            id="celery_leases.W006",
        )
    ]


def log_in_worker(**_: Any) -> None:
    """Log what the checks find when a worker starts; Celery itself runs them and drops what they
    find.

    What each worker says by itself is left to it.
    """
    for check in (check_settings, check_tasks, check_relay):
        for message in check():
            if (
                message.id not in ("celery_leases.W002", "celery_leases.W004")
                and not message.is_silenced()
            ):
                logger.warning("%s (%s) %s", message.msg, message.id, message.hint or "")


def _app() -> Celery | None:
    """The project's Celery app; ``None`` where this process has not imported one."""
    return _state.get_current_app() if _state.default_app is not None else None


def _tasks(app: Celery) -> dict[str, Any]:
    """The leased tasks of the app, with those in the ``tasks`` modules of the installed apps."""
    try:
        autodiscover_modules("tasks")
    except LeasesError:
        raise
    except Exception as error:  # noqa: BLE001 - a worker tells of it, with its traceback
        logger.debug("a module of tasks cannot be imported: %s", error)
    return leased_tasks(app)


def _has_tasks(app: Celery) -> bool:
    try:
        return bool(_tasks(app))
    except LeaseConfigurationError:  # check_tasks tells of it
        return False


def _wrong(error: LeaseConfigurationError) -> CheckMessage:
    return Error(str(error), id="celery_leases.E001")


def _is_migrating() -> bool:
    """Whether the tables are about to be made by the very command that runs."""
    return sys.argv[1:2] == ["migrate"]


def _is_scheduled(app: Celery) -> bool:
    schedule = app.conf.beat_schedule or {}
    return any(entry.get("task") in RELAYS for entry in schedule.values())


def _without_relay(app: Celery) -> list[CheckMessage]:
    with suppress(LeaseConfigurationError):  # check_tasks tells of it
        _tasks(app)  # imports them, in whatever order Django runs the checks
    writing = next(_writing_modules(), None)
    if writing is None:
        return []
    return [
        Warning(
            f"{writing} calls delay_in() or apply_async_in(), and no relay is scheduled: a call whose process dies "
            "between its commit and its message is never published.",
            hint='Have beat run it, CELERY_BEAT_SCHEDULE = {"relay": {"task": "celery_leases.relay", "schedule": 60}} '
            'and CELERY_INCLUDE = ["celery_leases.builtin_tasks"]; or run `manage.py leases relay` '
            "each minute, and silence this check.",
            id="celery_leases.W007",
        )
    ]


def _writing_modules() -> Iterator[str]:
    """The modules of the project's apps, as far as they are imported, in whose source a call is
    written.
    """
    roots = [
        Path(config.path)
        for config in installed.get_app_configs()
        if not _is_from_elsewhere(config.path)
    ]
    for name, module in _imported(roots):
        file = getattr(module, "__file__", None)
        if (
            any(part.startswith("test") for part in name.split("."))
            or not file
            or not file.endswith(".py")
        ):
            continue
        try:
            source = Path(file).read_bytes()
        except OSError:
            continue
        if any(call in source for call in _WRITES):
            yield name


def _imported(roots: Iterable[Path]) -> list[tuple[str, ModuleType]]:
    places = tuple(f"{root}/" for root in roots)
    found = [
        (name, module)
        for name, module in list(sys.modules.items())
        if _file_of(module).startswith(places)
    ]
    return sorted(found, key=lambda pair: pair[0])


def _file_of(module: ModuleType | None) -> str:
    return str(getattr(module, "__file__", None) or "")


def _is_from_elsewhere(path: str) -> bool:
    """Whether an installed app is a package that was installed, and not the project's own; or this
    one.
    """
    return "site-packages" in path or "dist-packages" in path or Path(path) == Path(__file__).parent
