"""Which tasks of beat would run once and then never again."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from celery import Celery, chain, chord, group
from celery.beat import BeatLazyFunc, Scheduler, _evaluate_entry_kwargs
from celery.schedules import BaseSchedule, crontab, solar

from celery_leases import LeasedTask
from celery_leases.worker.checks.periodic import all_entries, periodic_findings
from celery_leases.worker.checks.settings import Finding, Severity

TODAY = BeatLazyFunc(lambda: datetime.now(UTC).date().isoformat())


SUNRISE: Any = solar.__new__(solar)
BaseSchedule.__init__(SUNRISE)
"""To make it as one should, Celery needs another package."""


class Clocked(BaseSchedule):
    """A schedule of a type that the check does not know."""


def app_with(entry: dict[str, Any] | None = None, **options: Any) -> Celery:
    app = Celery("periodic", broker="memory://", set_as_current=False)
    app.conf.beat_schedule = {"nightly": {"task": "report", "schedule": 60.0} | (entry or {})}

    @app.task(base=LeasedTask, name="report", shared=False, **{"lease_key": "report"} | options)
    def report(region: Any = "eu", day: Any = None, **more: Any) -> None:
        """Do nothing."""

    @app.task(name="plain", shared=False)
    def plain() -> None:
        """Do nothing."""

    app.finalize()
    return app


def found(entry: dict[str, Any] | None = None, **options: Any) -> list[Finding]:
    app = app_with(entry, **options)
    tasks = {name: task for name, task in app.tasks.items() if hasattr(task, "lease_options")}
    return periodic_findings(tasks, all_entries(app))


@pytest.mark.parametrize(
    ("entry", "options"),
    [
        ({}, {}),
        ({"schedule": crontab(minute=0, hour=3)}, {}),
        ({"schedule": crontab(minute=0, hour=0, day_of_week=1)}, {}),
        ({"args": ("us",)}, {"lease_key": "report:{region}"}),
        ({}, {"lease_key": "report:{region}"}),
        ({"kwargs": {"day": TODAY}}, {"lease_key": "report:{region}"}),
        ({"kwargs": {"other": TODAY}}, {"lease_key": "report:{region}"}),
        ({"schedule": timedelta(days=6)}, {}),
        ({"schedule": SUNRISE}, {}),
        ({}, {"lease_on_done": "ignore"}),
    ],
)
def test_a_key_that_is_the_same_each_time_is_found(entry, options) -> None:
    [finding] = found(entry, **options)
    assert (finding.code, finding.severity) == ("periodic-once", Severity.WARNING)
    assert "beat calls report with the same key each time (lease_key=" in finding.problem
    assert "schedule: nightly" in finding.problem
    assert "nothing runs for 168 hours (lease_retention)" in finding.problem
    assert 'lease_runs="each", or "latest"' in finding.advice


@pytest.mark.parametrize(
    ("entry", "options"),
    [
        ({}, {"lease_runs": "each"}),
        ({}, {"lease_key": None}),
        ({}, {"lease_key": lambda **_: "report"}),
        ({"kwargs": {"day": TODAY}}, {"lease_key": "report:{day}"}),
        ({"args": ("eu", TODAY)}, {"lease_key": "report:{region}:{day:>9}"}),
        ({"kwargs": {"other": TODAY}}, {"lease_key": "report:{other}"}),
        ({"task": "plain"}, {}),
        ({"task": "elsewhere"}, {}),
        ({"schedule": timedelta(days=8)}, {}),
        ({}, {"lease_retention": 30}),
        ({"schedule": crontab(minute=0, hour=0, day_of_month=1)}, {}),
        ({"schedule": Clocked()}, {}),
        ({"schedule": None, "shedule": 60}, {}),
    ],
)
def test_any_other_is_not(entry, options) -> None:
    assert found(entry, **options) == []


@pytest.mark.parametrize(
    ("make", "key", "is_found"),
    [
        (lambda report, plain: chain(report.si(), plain.si()), "report", True),
        (lambda report, plain: chain(plain.si(), report.s()), "report", True),
        (lambda report, plain: chain(plain.si(), report.s()), "report:{region}", False),
        (lambda report, plain: chain(plain.si(), report.si("us")), "report:{region}", True),
        (lambda report, plain: chain(plain.si(), report.s("day")), "report:{day}", True),
        (lambda report, plain: group(plain.si(), report.si()), "report", True),
        (lambda report, plain: chord([report.s()], plain.s()), "report:{region}", True),
        (lambda report, plain: chord([plain.s()], report.s()), "report:{region}", False),
        (lambda report, plain: chord([plain.s()], report.si()), "report:{region}", True),
        (lambda report, plain: plain.s().set(link=report.s()), "report", True),
        (lambda report, plain: plain.s().set(link=report.s()), "report:{region}", False),
        (lambda report, plain: group(plain.si(), chain(plain.si(), report.si())), "report", True),
    ],
)
def test_the_parts_of_a_canvas_are_looked_at(make, key, is_found) -> None:
    """The result of another call may change the key."""
    app = app_with(lease_key=key)
    app.conf.beat_schedule = {}
    app.add_periodic_task(60.0, make(app.tasks["report"], app.tasks["plain"]), name="canvas")
    findings = periodic_findings({"report": app.tasks["report"]}, all_entries(app))
    assert ["schedule: canvas" in each.problem for each in findings] == [True] * is_found


@pytest.mark.parametrize("name", ["celery.chain", "celery.group", "celery.chord"])
def test_an_incomplete_canvas_has_no_parts(name: str) -> None:
    assert found({"task": name}) == []
    assert found({"task": name, "kwargs": {"tasks": ["report"], "header": [1]}}) == []


def test_what_the_advice_says_gives_each_day_a_key_of_its_own() -> None:
    """With the arguments that Celery's beat makes of it."""
    [finding] = found()
    assert '"kwargs": {"day": BeatLazyFunc(' in finding.advice
    app = app_with({"kwargs": {"day": TODAY}}, lease_key="report:{day}")
    entry = Scheduler(app, lazy=True)._maybe_entry("nightly", app.conf.beat_schedule["nightly"])
    status = app.tasks["report"].lease_status(**_evaluate_entry_kwargs(entry.kwargs))
    assert status.key == f"report:{datetime.now(UTC).date().isoformat()}"


def test_tasks_are_named_once_with_all_their_entries() -> None:
    app = app_with()
    app.conf.beat_schedule["hourly\n"] = {"task": "report", "schedule": 3600}
    [finding] = periodic_findings({"report": app.tasks["report"]}, all_entries(app))
    assert "schedule: nightly, hourly\\n)" in finding.problem
