"""Seeds of the simulator in ``make test``; ``make simulate`` runs more of them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import celery_leases
from tests.simulation import planted
from tests.simulation.regressions import REGRESSIONS
from tests.simulation.search import first_failure, run, shrunk
from tests.simulation.story import story

SEEDS_AT_ONCE = 30


@pytest.mark.parametrize("first", range(1, 300, SEEDS_AT_ONCE))
def test_no_promise_is_broken(first: int) -> None:
    found = first_failure(range(first, first + SEEDS_AT_ONCE))
    assert found is None, story(shrunk(found))


def test_what_was_mended_stays_mended() -> None:
    for seed, without in REGRESSIONS:
        found = run(seed, frozenset(without))
        assert found is None, story(found)


def test_a_seed_has_the_same_history_in_each_process() -> None:
    def told(order: str, first: str) -> str:
        code = (
            "import sys\nfrom tests.simulation.search import run\nfrom tests.simulation.world import World\n"
            f"run({first})\nprint(*(note for seed in (4, 7, 25) for note in World(seed).run()), sep='\\n')"
        )
        changed = {**os.environ, "PYTHONHASHSEED": order}
        done = subprocess.run(
            [sys.executable, "-c", code], env=changed, capture_output=True, text=True, check=True
        )
        return done.stdout

    assert told("1", "3") == told("2", "13") != ""


STEPS_OF_A_CALL = ("attempt", "body", "decide", "outbox", "worker", "concurrency", "stores/sql")
OTHER_CLOCKS = (
    *(
        r"\btime\.(time|monotonic|perf_counter|clock_gettime)\(",
        r"from time import",
        r"\bnow\(UTC\)",
    ),
    *(r"\bthreading\.(Thread|Event|Timer|Condition)\b", r"import boot_clock"),
)
"""What the simulator could not replace."""
NOT_SIMULATED = (
    *("stores/sql/dialects", "stores/sql/migrations", "stores/sql/conn"),
    *("worker/checks", "worker/fetching"),
)


def test_the_steps_of_a_call_read_only_clocks_that_can_be_replaced() -> None:
    """Those of their process, and ``os_threads.boot_clock`` before there is one."""
    root = Path(celery_leases.__file__).parent
    found = [
        f"{path.relative_to(root)}: {line.strip()}"
        for folder in STEPS_OF_A_CALL
        for path in sorted((root / folder).rglob("*.py"))
        if not path.relative_to(root).as_posix().startswith(NOT_SIMULATED)
        for line in path.read_text().splitlines()
        if any(re.search(pattern, line) for pattern in OTHER_CLOCKS)
    ]
    assert found == []


@pytest.mark.parametrize("bug", planted.BUGS, ids=lambda bug: bug.name)
def test_each_planted_bug_has_its_place(bug: planted.Bug) -> None:
    compile(planted.planted(bug), bug.module, "exec")


def test_a_planted_bug_is_found() -> None:
    command = [sys.executable, "-m", "tests.simulation.planted", "a held key is run"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
