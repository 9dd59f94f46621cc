"""Run times: a histogram for each task, with its ttl and time limits, as ``leases tune`` sees
them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from celery_leases.board.application import Answer, Asked
from celery_leases.board.cached_reads import value_of
from celery_leases.board.charts import histogram
from celery_leases.board.views.overview import SOON, trouble_of
from celery_leases.client import LeaseClient
from celery_leases.errors import StoreUnavailable
from celery_leases.protocol.tuning import (
    FEW,
    SHORTEST_GUARD,
    RunTimes,
    Standstill,
    advised,
    safe_guard,
    shortest_ttl,
)
from celery_leases.worker.app_settings import leased_tasks
from celery_leases.worker.setting_checks import TimeLimits
from celery_leases.worker.ttl_advice import advice_of, delivery_of

ROUNDS: Final = 30
NOTHING: Final[dict[str, Any]] = {
    **dict.fromkeys(("ttl", "store_p99", "database_p99", "standstill", "trouble")),
    "guard": SHORTEST_GUARD,
}


def runtimes(asked: Asked) -> Answer:
    """The page; it says so while the records are still read."""
    shared = asked.board.shared("runtimes", lambda: _read(asked.board.client()), 60.0)
    read = shared.look(SOON)
    if read is None:
        return Answer(
            "runtimes.html",
            {"tasks": [], "advice": NOTHING, "reading": True, "at": None, "few": FEW},
        )
    times, advice = value_of(read)
    tasks = [*_tasks(asked.board.app, times, advice)]
    context = {"tasks": tasks, "advice": advice, "reading": False, "at": read.at, "few": FEW}
    return Answer("runtimes.html", context)


def _read(client: LeaseClient) -> tuple[Mapping[str, Sequence[float]], dict[str, Any]]:
    """The run times, and the shortest safe ttl as far as the stores tell."""
    times = client.run_times()
    try:
        asked = [RunTimes.of(each) for each in client.latencies(ROUNDS)]
    except StoreUnavailable as error:
        return times, NOTHING | {"trouble": trouble_of(error)}
    in_store, in_database = (each.p99 for each in asked if each is not None)
    standstill = Standstill.of(client.lateness())
    return times, NOTHING | {
        "ttl": advised(shortest_ttl(in_store, standstill.seconds)),
        "store_p99": in_store,
        "database_p99": in_database,
        "standstill": standstill,
        "guard": safe_guard(in_store, standstill.seconds),
    }


def _tasks(
    app: Any, times: Mapping[str, Sequence[float]], found_out: Mapping[str, Any]
) -> list[dict[str, Any]]:
    known, delivery = leased_tasks(app), delivery_of(app)
    limits = TimeLimits(app.conf.task_soft_time_limit, app.conf.task_time_limit)
    found = []
    for name in sorted({*times, *known}):
        took, task = times.get(name, ()), known.get(name)
        advice = advice_of(name, took, known, delivery, found_out["guard"], None)
        soft = limits.soft_of(task) if task is not None else None
        hard = limits.hard_of(task) if task is not None else None
        marks = (
            ("p99", "p99", advice["p99"]),
            ("shortest", "shortest safe ttl", found_out["ttl"]),
            ("ttl", "ttl now", advice["ttl"]),
            ("soft", "soft time limit", soft),
            ("hard", "time limit", hard),
        )
        found.append(advice | {"picture": histogram(took, marks) if took else None, "hard": hard})
    return found
