"""The checks of a worker before it starts. An error stops the worker and says what to write."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from celery_leases.attempt.process import Process
from celery_leases.errors import LeaseConfigurationError, LeasesError, StoreUnavailable
from celery_leases.settings import IN_MEMORY
from celery_leases.text.notices import logger
from celery_leases.worker import processes
from celery_leases.worker.app_settings import leased_tasks
from celery_leases.worker.arrivals import arrivals
from celery_leases.worker.checks import relay
from celery_leases.worker.checks.periodic import all_entries, periodic_findings
from celery_leases.worker.checks.settings import (
    TimeLimits,
    findings_without_lease,
    greenlets_of,
    setting_findings,
)


def check_before_work(sender: Any) -> None:
    """Stop a worker that could not keep the guarantees, and warn of questionable settings; create
    the tables on SQLite.
    """
    for finding in findings_without_lease(sender.app):
        logger.warning("%s", finding.text)
    tasks = leased_tasks(sender.app)
    if not tasks:
        return
    try:
        process = processes.process_of(sender.app, eager=False)
        if process.settings.database_url == IN_MEMORY and "prefork" in str(sender.pool_cls):
            raise LeaseConfigurationError(
                f"leases_database_url={IN_MEMORY!r} gives each pool child records of its own; name a file or a server"
            )
        if "prefork" not in str(sender.pool_cls):
            _refuse_kill_option(tasks)
        _check_records(process)
        _check_lease_store(
            process, latest=any(each.lease_options.latest_runs for each in tasks.values())
        )
    except LeasesError as error:
        raise SystemExit(f"celery_leases: {error}") from None
    limits = TimeLimits(
        getattr(sender, "soft_time_limit", None), getattr(sender, "time_limit", None)
    )
    greenlets = greenlets_of(sender.pool_cls, getattr(sender, "concurrency", None))
    for finding in (
        *setting_findings(sender.app, tasks, process.settings, limits, greenlets),
        *periodic_findings(tasks, all_entries(sender.app)),
    ):
        logger.warning("%s", finding.text)
    processes.close_all()
    if "prefork" in str(sender.pool_cls):
        processes.prepare_forks(sender.app)


def _check_records(process: Process) -> None:
    from celery_leases.stores.database_write_check import check_writes

    try:
        process.records.check()
        check_writes(process.records)
        relay.warn_of_waiting(process.records)
        # Once for all pool children, which are forked later.
        process.records.identity()
        process.share_statements()
    except StoreUnavailable as error:
        if process.settings.database_url.startswith("sqlite") and error.executed is not False:
            raise LeaseConfigurationError(f"the records file cannot be used: {error}") from None
        logger.warning("the records database does not answer yet: %s", error, code="records-away")


def _check_lease_store(process: Process, *, latest: bool) -> None:
    try:
        if warning := process.leases.check():
            logger.warning("%s", warning, code="lease-store-warning")
        if latest:
            arrivals.compare(process)
    except StoreUnavailable as error:
        logger.warning("the lease store does not answer yet: %s", error, code="lease-store-away")


def _refuse_kill_option(tasks: Mapping[str, Any]) -> None:
    """Refuse ``lease_on_lost="kill"`` in a pool where the process runs other bodies too, or is the
    worker itself.
    """
    killing = sorted(name for name, task in tasks.items() if task.lease_options.on_lost == "kill")
    if killing:
        raise LeaseConfigurationError(
            f"lease_on_lost='kill' ends the whole process, and only prefork has one process for each body: "
            f"{', '.join(killing)}; start the worker with --pool prefork, or write lease_on_lost='interrupt'"
        )
