"""Examines the set-up of an app: its settings, its tasks, and the servers that it uses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

from celery import Celery
from celery.backends.base import DisabledBackend

from celery_leases.attempt.process import Process
from celery_leases.errors import LeaseConfigurationError, StoreUnavailable
from celery_leases.ops.server_checks import StoreChecks
from celery_leases.ops.server_facts import ServerFacts
from celery_leases.outbox import calls as outbox
from celery_leases.record import Record
from celery_leases.record_filters import Order, RecordFilter
from celery_leases.text.cleaning import printable
from celery_leases.text.durations import in_words
from celery_leases.worker import processes
from celery_leases.worker.answering import WORKER_TIMEOUT, worker_answers
from celery_leases.worker.app_settings import leased_tasks
from celery_leases.worker.checks.periodic import all_entries, periodic_findings
from celery_leases.worker.checks.settings import (
    Finding,
    Severity,
    TimeLimits,
    findings_without_lease,
    greenlets_of,
    setting_findings,
)

RESCUE_ADVICE: Final = (
    "run `leases rescue` every few minutes, or let beat do it: app.conf.beat_schedule = "
    '{"rescue": {"task": "celery_leases.rescue", "schedule": 300.0}} with '
    '"celery_leases.builtin_tasks" in app.conf.include'
)
USUAL_EXPIRY: Final = 86_400.0
UNRESCUED = 2 * outbox.RESCUE_AFTER
"""Seconds after which a rescue that runs regularly would have published a message again."""
LOST_SHOWN = 100
SLOWEST = 200
"""How many records, those with the longest runs, are read for the longest run of each task."""


@dataclass(frozen=True, slots=True)
class Examination:
    """The servers that were examined, and the findings; none if nothing is wrong."""

    servers: Sequence[ServerFacts]
    findings: Sequence[Finding]

    @property
    def healthy(self) -> bool:
        """Whether all findings are notes."""
        return all(finding.severity is Severity.NOTE for finding in self.findings)

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "servers": [server.as_json() for server in self.servers],
            "findings": [finding.as_json() for finding in self.findings],
        }


def examine(app: Celery) -> Examination:
    """All findings about *app*, the most severe first. A check removes what it writes."""
    findings: list[Finding] = []
    try:
        tasks = leased_tasks(app)  # raises for a task with wrong options
        findings += findings_without_lease(app)
        process = processes.process_of(app, eager=False)
    except LeaseConfigurationError as error:
        return Examination([], [*findings, Finding("settings", Severity.ERROR, str(error), "")])
    checks = StoreChecks(process)
    checks.run()
    limits = TimeLimits(
        app.conf.task_soft_time_limit, app.conf.task_time_limit, _longest_runs(process)
    )
    greenlets = greenlets_of(app.conf.worker_pool, app.conf.worker_concurrency)
    of_settings = setting_findings(app, tasks, process.settings, limits, greenlets)
    findings += [
        *(*checks.findings, *of_settings, *_notes(app, tasks)),
        *periodic_findings(tasks, all_entries(app)),
        *_unserved_calls(app, process),
    ]
    order = [*Severity]
    return Examination(
        checks.servers, sorted(findings, key=lambda found: order.index(found.severity))
    )


def _notes(app: Celery, tasks: Mapping[str, Any]) -> Iterator[Finding]:
    """What a worker does not log."""
    if isinstance(app.backend, DisabledBackend) and any(
        not task.ignore_result for task in tasks.values()
    ):
        yield Finding(
            "no-result-backend",
            Severity.NOTE,
            "there is no result backend: get() of a result raises, chords do not work, and a task "
            "that replaces itself leaves no result",
            "write app.conf.result_backend, or ignore_result=True",
        )
    expires = app.conf.result_expires
    expires = expires.total_seconds() if isinstance(expires, timedelta) else expires
    retention = max((task.lease_options.retention for task in tasks.values()), default=0.0)
    if expires and float(expires) < min(retention, USUAL_EXPIRY):
        yield Finding(
            "short-result-expiry",
            Severity.NOTE,
            f"result_expires is {float(expires):g} s, and records store results for {retention:g} s: "
            "a call of a key whose task has replaced itself gets ResultMissing after that time",
            f"write app.conf.result_expires = {retention:.0f}",
        )
    storing = sorted(
        name
        for name, task in tasks.items()
        if task.lease_options.outbox == "store" or task.lease_options.queues_once
    )
    entries = dict(app.conf.beat_schedule or {}).values()
    if storing and not any(entry.get("task") == "celery_leases.rescue" for entry in entries):
        yield Finding(
            "no-rescue",
            Severity.NOTE,
            f"{', '.join(storing)} store the messages of their calls, and the beat_schedule has no rescue: a "
            "message that is lost, or that no worker could read, is not published again, and its key stays queued",
            RESCUE_ADVICE,
        )


def _unserved_calls(app: Celery, process: Process) -> Iterator[Finding]:
    """What keeps published calls from being run: no worker, or a lost message that nobody publishes
    again.
    """
    if worker_answers(app) is False:
        yield Finding(
            "no-worker",
            Severity.NOTE,
            f"no worker answered within {WORKER_TIMEOUT:g} s: published calls do not run",
            "start a worker; one with the pool solo does not answer while a body runs",
        )
    lost: list[Record] = []
    with suppress(StoreUnavailable, LeaseConfigurationError):
        lost = outbox.stranded_in(process, older=UNRESCUED, limit=LOST_SHOWN)
    if lost:
        first = f"{lost[0].task}, key {printable(lost[0].key)}, {lost[0].state.value}"
        more = f"{LOST_SHOWN} or more" if len(lost) == LOST_SHOWN else str(len(lost))
        yield Finding(
            "unrescued-calls",
            Severity.WARNING,
            f"{more} calls have not moved for {in_words(UNRESCUED)}, and their stored messages were not published "
            f"again: the keys stay as they are, the oldest is {first}",
            f"start a worker that knows the task, and {RESCUE_ADVICE}",
        )


def _longest_runs(process: Process) -> dict[str, float]:
    """The longest run of each task in seconds, as far as the slowest records show it."""
    found: dict[str, float] = {}
    try:
        records = process.records.find(
            RecordFilter(states=("done",)), order=Order.SLOWEST, limit=SLOWEST
        )
    except (StoreUnavailable, LeaseConfigurationError):
        return found
    for record in records:
        if record.finished_at is not None and not record.unrun:
            took = (record.finished_at - record.started_at) / 1e6
            found[record.task] = max(took, found.get(record.task, 0.0))
    return found
