"""What a task costs in Python: calls of functions and built-ins as cProfile counts them, which
repeat exactly.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

BUDGETS = {
    ("FIRST", "redis"): 596,
    ("FIRST", "database"): 479,
    ("REPLAY", "redis"): 593,
    ("REPLAY", "database"): 477,
}
"""At most so many calls for one task, those of Celery's own tracer (some 180) included. Lower them
when they fall.
"""
PLAIN = 185
"""The same for a task without a lease in the same app: what celery_leases costs it is nothing."""


@pytest.mark.every_argument
@pytest.mark.parametrize(("run", "leases"), BUDGETS)
def test_a_task_stays_within_its_budget_of_calls(
    run: str, leases: str, leases_redis_url: str, leases_postgres_url: str
) -> None:
    urls = {"LEASES_URL": leases_redis_url if leases == "redis" else "database"}
    command = [sys.executable, "-m", "tests.apps.count_calls", run]
    env = {**os.environ, **urls, "LEASES_DATABASE_URL": leases_postgres_url}
    done = subprocess.run(command, env=env, check=True, capture_output=True, text=True)
    counted = json.loads(done.stdout.splitlines()[-1])
    assert counted["plain"] <= PLAIN
    # The mean of many runs: rare work, such as a purge, does not belong to each task.
    assert PLAIN < int(counted["counted"]) <= BUDGETS[run, leases]
