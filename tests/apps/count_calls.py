"""Counts the function calls of a leased task: ``python -m tests.apps.count_calls FIRST|REPLAY``.

It runs the task through Celery's tracer in this process, and prints on one line of JSON how many
Python and built-in calls one task makes, as counted by cProfile. The stores are those of
``LEASES_URL`` and ``LEASES_DATABASE_URL``. Tasks are warmed up first, so the numbers are exact.
"""

from __future__ import annotations

import cProfile
import json
import logging
import os
import sys
from collections.abc import Callable
from typing import Any
from uuid import uuid4

from celery import Celery
from celery.app.trace import build_tracer, setup_worker_optimizations

from celery_leases import LeasedTask
from celery_leases.worker.app_settings import leased_tasks
from celery_leases.worker.headers import TASK_EVENTS, TOKEN, new_token
from celery_leases.worker.processes import process_of

TASKS = 64
WARM_UP = 32

app = Celery("counted", broker="memory://")
app.conf.update(
    task_ignore_result=True,
    leases_url=os.environ.get("LEASES_URL"),
    leases_database_url=os.environ.get("LEASES_DATABASE_URL"),
)


@app.task(name="counted", base=LeasedTask, lease_key="{key}")
def leased(key: str) -> int:
    return len(key)


@app.task(name="plain")
def plain(key: str) -> int:
    return len(key)


def counts(replay: bool) -> dict[str, float]:
    """Function calls of a leased and of a plain task."""
    logging.basicConfig(level=logging.WARNING)
    app.finalize()
    setup_worker_optimizations(app)
    assert leased_tasks(app)
    process_of(app).records.migrate()
    return {name: _counted(name, replay) for name in ("plain", "counted")}


def _counted(name: str, replay: bool) -> float:
    run = runner(name)
    keys = iter([f"{number}-{uuid4().hex}" for number in range(WARM_UP + TASKS)])
    same = next(keys)
    for _ in range(WARM_UP - 1):
        run(same if replay else next(keys))
    profile = cProfile.Profile()
    for _ in range(TASKS):
        key = same if replay else next(keys)
        profile.runcall(run, key)
    # ``runcall`` itself is one call.
    return sum(entry.callcount for entry in profile.getstats()) / TASKS - 1


def runner(name: str, *, succeeds: bool = True) -> Callable[[str], Any]:
    """Runs a task with a key as a pool process does."""
    task = app.tasks[name]
    tracer = build_tracer(name, task, app=app)

    def run(key: str) -> Any:
        request = {
            "id": str(uuid4()),
            "task": name,
            "lang": "py",
            "argsrepr": "()",
            "kwargsrepr": "{}",
            "retries": 0,
            "timelimit": [None, None],
            "expires": None,
            "eta": None,
            "group": None,
            "chain": None,
            "chord": None,
            "callbacks": None,
            "errbacks": None,
            "root_id": "r",
            "parent_id": None,
            "ignore_result": True,
            "args": [key],
            "kwargs": {},
            "is_eager": False,
            "called_directly": False,
            "hostname": "here",
            "delivery_info": {
                "exchange": "",
                "routing_key": "celery",
                "priority": 0,
                "redelivered": False,
            },
            TOKEN: new_token(),
            TASK_EVENTS: False,
            "replaced_task_nesting": 0,
        }
        traced = tracer(request["id"], request["args"], {}, request)
        if (traced.info is None) is not succeeds:
            raise AssertionError(f"the task did not end as it should: {traced}")
        return traced

    return run


if __name__ == "__main__":
    print(json.dumps(counts(sys.argv[1] == "REPLAY")), flush=True)
    os._exit(0)  # without waiting for the renewing threads
