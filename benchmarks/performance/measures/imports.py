"""The cost of ``import celery_leases`` in a process that already uses Celery with Redis."""

import subprocess
from collections import defaultdict
from pathlib import Path

from benchmarks.environments import ROOT, interpreter
from benchmarks.performance import roster
from benchmarks.performance.bench import Bench
from benchmarks.performance.figures import figure, ratio
from benchmarks.performance.findings import Finding

CELERY = "from celery import Celery, Task; import kombu.transport.redis"
STATEMENTS = {
    "celery": ("Celery with its Redis transport", CELERY),
    "task": ("the same, and `LeasedTask`", f"{CELERY}; from celery_leases import LeasedTask"),
    "client": ("`LeaseClient` alone", "from celery_leases import LeaseClient"),
}
CLOCKED = "import time; begun = time.process_time(); {}; print(time.process_time() - begun)"
FULL = 20
QUICK = 3
"""Rounds."""


def measure(bench: Bench, quick: bool) -> Finding:
    """Each statement in its own process, in turns."""
    rounds = QUICK if quick else FULL
    python = interpreter(roster.LEASES.environment)
    made: dict[str, list[float]] = defaultdict(list)
    for _ in range(rounds):
        for name, (_, statement) in STATEMENTS.items():
            command: list[str | Path] = [python, "-W", "ignore", "-c", CLOCKED.format(statement)]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
            made[name].append(float(done.stdout))
    rows = [["import of", "CPU, ms", "times Celery's"]]
    facts = {}
    for name, (title, _) in STATEMENTS.items():
        mine = made[name]
        times = ratio(mine, made["celery"])
        facts[f"import {name}"] = times
        rows.append([title, figure(1000 * each for each in mine).shown(0), times.shown()])
    text = f"{rounds} rounds."
    return Finding("imports", [rows], text, facts)
