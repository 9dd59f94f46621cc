"""Examines the set-up of an app: its settings, its tasks, and the servers that it uses."""

from __future__ import annotations

from celery import Celery

from celery_leases.errors import LeaseConfigurationError, StoreUnavailable
from celery_leases.protocol.findings import Examination, Finding, Severity
from celery_leases.protocol.record_filters import Order, RecordFilter
from celery_leases.worker import app_components
from celery_leases.worker.app_settings import leased_tasks
from celery_leases.worker.checks.servers import StoreChecks
from celery_leases.worker.checks.settings import (
    TimeLimits,
    findings_without_lease,
    greenlets_of,
    setting_findings,
)

SLOWEST = 200
"""How many records, those with the longest runs, are read for the longest run of each task."""


def examine(app: Celery) -> Examination:
    """All findings about *app*, the most severe first. A check removes what it writes."""
    findings: list[Finding] = []
    try:
        tasks = leased_tasks(app)  # raises for a task with wrong options
        findings += findings_without_lease(app)
        components = app_components.components_of(app, eager=False)
    except LeaseConfigurationError as error:
        return Examination([], [*findings, Finding("settings", Severity.ERROR, str(error), "")])
    checks = StoreChecks(components)
    checks.run()
    limits = TimeLimits(
        app.conf.task_soft_time_limit, app.conf.task_time_limit, _longest_runs(components)
    )
    greenlets = greenlets_of(app.conf.worker_pool, app.conf.worker_concurrency)
    of_settings = setting_findings(app, tasks, components.settings, limits, greenlets)
    findings += [*checks.findings, *of_settings]
    order = [*Severity]
    return Examination(
        checks.servers, sorted(findings, key=lambda found: order.index(found.severity))
    )


def _longest_runs(components: app_components.AppComponents) -> dict[str, float]:
    """The longest run of each task in seconds, as far as the slowest records show it."""
    found: dict[str, float] = {}
    try:
        records = components.records.find(
            RecordFilter(states=("done",)), order=Order.SLOWEST, limit=SLOWEST
        )
    except (StoreUnavailable, LeaseConfigurationError):
        return found
    for record in records:
        if record.finished_at is not None and not record.unrun:
            took = (record.finished_at - record.started_at) / 1e6
            found[record.task] = max(took, found.get(record.task, 0.0))
    return found
