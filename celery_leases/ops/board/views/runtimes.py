"""Run times: a histogram for each task, with its ttl and time limits, as in ``leases tune``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from celery_leases.client import LeaseClient
from celery_leases.errors import StoreUnavailable
from celery_leases.ops.board.application import HtmlPage, ViewRequest
from celery_leases.ops.board.cached_reads import value_of
from celery_leases.ops.board.charts import histogram
from celery_leases.ops.board.views.overview import READ_TIMEOUT, trouble_of
from celery_leases.tuning import (
    ENOUGH_MEASUREMENTS,
    SHORTEST_GUARD,
    ProcessPause,
    RunTimes,
    advised,
    safe_guard,
    shortest_ttl,
)
from celery_leases.worker.app_settings import leased_tasks
from celery_leases.worker.checks.settings import TimeLimits
from celery_leases.worker.ttl_advice import advice_of, delivery_of

LATENCY_SAMPLES: Final = 30
NO_ADVICE: Final[dict[str, Any]] = {
    **dict.fromkeys(("ttl", "store_p99", "database_p99", "pause", "trouble")),
    "guard": SHORTEST_GUARD,
}


def runtimes(request: ViewRequest) -> HtmlPage:
    """The page; while the records are being read it says so."""
    cached = request.board.cached("runtimes", lambda: _read(request.board.client()), 60.0)
    read = cached.get(READ_TIMEOUT)
    if read is None:
        return HtmlPage(
            "runtimes.html",
            {
                "tasks": [],
                "advice": NO_ADVICE,
                "reading": True,
                "at": None,
                "few": ENOUGH_MEASUREMENTS,
            },
        )
    times, advice = value_of(read)
    tasks = [*_tasks(request.board.app, times, advice)]
    context = {
        "tasks": tasks,
        "advice": advice,
        "reading": False,
        "at": read.at,
        "few": ENOUGH_MEASUREMENTS,
    }
    return HtmlPage("runtimes.html", context)


def _read(client: LeaseClient) -> tuple[Mapping[str, Sequence[float]], dict[str, Any]]:
    """The run times, and the shortest safe ttl if the stores answer."""
    times = client.run_times()
    try:
        latencies = [RunTimes.of(each) for each in client.latencies(LATENCY_SAMPLES)]
    except StoreUnavailable as error:
        return times, NO_ADVICE | {"trouble": trouble_of(error)}
    in_store, in_database = (each.p99 for each in latencies if each is not None)
    pause = ProcessPause.of(client.lateness())
    return times, NO_ADVICE | {
        "ttl": advised(shortest_ttl(in_store, pause.seconds)),
        "store_p99": in_store,
        "database_p99": in_database,
        "pause": pause,
        "guard": safe_guard(in_store, pause.seconds),
    }


def _tasks(
    app: Any, times: Mapping[str, Sequence[float]], advised_values: Mapping[str, Any]
) -> list[dict[str, Any]]:
    known, delivery = leased_tasks(app), delivery_of(app)
    limits = TimeLimits(app.conf.task_soft_time_limit, app.conf.task_time_limit)
    found = []
    for name in sorted({*times, *known}):
        took, task = times.get(name, ()), known.get(name)
        advice = advice_of(name, took, known, delivery, advised_values["guard"], None)
        soft = limits.soft_of(task) if task is not None else None
        hard = limits.hard_of(task) if task is not None else None
        marks = (
            ("p99", "p99", advice["p99"]),
            ("shortest", "shortest safe ttl", advised_values["ttl"]),
            ("ttl", "ttl now", advice["ttl"]),
            ("soft", "soft time limit", soft),
            ("hard", "time limit", hard),
        )
        found.append(advice | {"picture": histogram(took, marks) if took else None, "hard": hard})
    return found
