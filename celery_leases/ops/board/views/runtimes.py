"""Run times: a histogram for each task, with its ttl and time limits, as in ``leases tune``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from celery_leases.errors import StoreUnavailable
from celery_leases.ops.board.application import HtmlPage, ViewRequest
from celery_leases.ops.board.cached_reads import value_of
from celery_leases.ops.board.charts import histogram
from celery_leases.ops.board.views.overview import READ_TIMEOUT, trouble_of
from celery_leases.ops.client import OperatorClient
from celery_leases.ops.tuning import (
    ENOUGH_MEASUREMENTS,
    SHORTEST_GUARD,
    Delivery,
    Measured,
    advice_of,
)
from celery_leases.worker.app_settings import leased_tasks
from celery_leases.worker.checks.settings import TimeLimits

LATENCY_SAMPLES: Final = 30
RunTimesByTask = Mapping[str, Sequence[float]]


def runtimes(request: ViewRequest) -> HtmlPage:
    """The page; while the records are being read it says so."""
    board = request.board
    read = board.cached("runtimes", lambda: _read(board.client()), 60.0).get(READ_TIMEOUT)
    times, measured, trouble = value_of(read) if read is not None else ({}, None, None)
    context = {
        "tasks": [*_tasks(board.app, times, measured)] if read is not None else [],
        "measured": measured,
        "trouble": trouble,
        "reading": read is None,
        "at": read.at if read is not None else None,
        "few": ENOUGH_MEASUREMENTS,
    }
    return HtmlPage("runtimes.html", context)


def _read(client: OperatorClient) -> tuple[RunTimesByTask, Measured | None, str | None]:
    """The run times, and what was measured of the stores, or why they do not answer."""
    times = client.run_times()
    try:
        return times, Measured.of(client.latencies(LATENCY_SAMPLES), client.lateness()), None
    except StoreUnavailable as error:
        return times, None, trouble_of(error)


def _tasks(app: Any, times: RunTimesByTask, measured: Measured | None) -> list[dict[str, Any]]:
    known, delivery = leased_tasks(app), Delivery.of(app)
    limits = TimeLimits(app.conf.task_soft_time_limit, app.conf.task_time_limit)
    guard = measured.guard if measured is not None else SHORTEST_GUARD
    found = []
    for name in sorted({*times, *known}):
        took, task = times.get(name, ()), known.get(name)
        advice = advice_of(name, took, known, delivery, guard)
        hard = limits.hard_of(task) if task is not None else None
        marks = (
            ("p99", "p99", advice["p99"]),
            ("shortest", "shortest safe ttl", measured.ttl if measured is not None else None),
            ("ttl", "ttl now", advice["ttl"]),
            ("soft", "soft time limit", limits.soft_of(task) if task is not None else None),
            ("hard", "time limit", hard),
        )
        found.append(advice | {"picture": histogram(took, marks) if took else None, "hard": hard})
    return found
