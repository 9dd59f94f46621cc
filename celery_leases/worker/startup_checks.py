"""What a worker checks and warns of before it starts; what stops it names the line to write."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from celery_leases.errors import LeaseConfigurationError, LeasesError, StoreUnavailable
from celery_leases.protocol.findings import Severity
from celery_leases.settings import IN_MEMORY
from celery_leases.signals import logger
from celery_leases.worker import app_components, relay_check
from celery_leases.worker.app_components import AppParts
from celery_leases.worker.app_settings import leased_tasks
from celery_leases.worker.setting_checks import (
    TimeLimits,
    bare_findings,
    greenlets_of,
    setting_findings,
)


def check_before_work(sender: Any) -> None:
    """Stop a worker that could not keep its promises, with the line to write; create the tables on
    SQLite.
    """
    for finding in bare_findings(sender.app):
        logger.warning("%s", finding.text)
    tasks = leased_tasks(sender.app)
    if not tasks:
        return
    try:
        parts = app_components.parts_of(sender.app, eager=False)
        if parts.settings.database_url == IN_MEMORY and "prefork" in str(sender.pool_cls):
            raise LeaseConfigurationError(
                f"leases_database_url={IN_MEMORY!r} gives each pool child records of its own; name a file or a server"
            )
        if "prefork" not in str(sender.pool_cls):
            _refuse_to_kill(tasks)
        _check_records(parts)
        _check_lease_store(parts)
    except LeasesError as error:
        raise SystemExit(f"celery_leases: {error}") from None
    limits = TimeLimits(
        getattr(sender, "soft_time_limit", None), getattr(sender, "time_limit", None)
    )
    greenlets = greenlets_of(sender.pool_cls, getattr(sender, "concurrency", None))
    for finding in setting_findings(sender.app, tasks, parts.settings, limits, greenlets):
        if finding.severity is not Severity.NOTE:
            logger.warning("%s", finding.text)
    app_components.forget()


def _check_records(parts: AppParts) -> None:
    from celery_leases.stores.write_preflight import check_writes

    try:
        parts.records.check()
        check_writes(parts.records)
        relay_check.tell_of_waiting(parts.records)
        parts.records.identity()  # known to the pool children that are forked later
    except StoreUnavailable as error:
        if parts.settings.database_url.startswith("sqlite") and error.executed is not False:
            raise LeaseConfigurationError(f"the records file cannot be used: {error}") from None
        logger.warning("the records database does not answer yet: %s", error)


def _check_lease_store(parts: AppParts) -> None:
    try:
        if warning := parts.leases.check():
            logger.warning("%s", warning)
    except StoreUnavailable as error:
        logger.warning("the lease store does not answer yet: %s", error)


def _refuse_to_kill(tasks: Mapping[str, Any]) -> None:
    """Refuse to kill a process that runs other bodies too, or is the worker itself."""
    killing = sorted(name for name, task in tasks.items() if task.lease_options.on_lost == "kill")
    if killing:
        raise LeaseConfigurationError(
            f"lease_on_lost='kill' ends the whole process, and only prefork has one process for each body: "
            f"{', '.join(killing)}; start the worker with --pool prefork, or write lease_on_lost='interrupt'"
        )
