"""Helpers of the tests of cooldowns: steps of scripts, refusals, and invariants of every run."""

import re
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import pytest

from celery_leases import CoolingDown, LeaseStatus
from tests.integration.deployments import Stage, got, until

COOLING = "tests.apps.cooling"
OK = ["ok"]
BROKEN = ["raise", "KeyError", "customer"]
BUSY = ["answer", 429]
TAKEN = ["answer", 409]

_SETTLED = re.compile(
    r"^\[([\d-]+ [\d:]+),(\d+): .*\]  ?\S+\[([\w-]+)(?:~\d+)?\] key (\S+): attempt \d+ (\w+) after [\d.]+ s, "
    r"the key is (\w+)(?: for ([\d.]+) s)?",
    re.MULTILINE,
)


def limited(seconds: float) -> list[Any]:
    """The step of a script that meets a rate limit with a server delay."""
    return ["answer", 429, {"retry-after": f"{seconds:g}"}]


def refusal(result: Any) -> CoolingDown:
    with pytest.raises(CoolingDown) as told:
        got(result)
    assert isinstance(told.value, CoolingDown)
    return told.value


def paid(stage: Stage, name: str) -> list[dict[str, Any]]:
    return stage.events("paid", name=name)


def status(stage: Stage, task: str, name: str) -> LeaseStatus:
    return stage.client.status(f"{task}:{name}", task=f"{COOLING}.{task}")


def cooled(stage: Stage, task: str, name: str, cooldowns: int = 1) -> dict[str, Any]:
    """The row once its key has had *cooldowns* cooldowns in a row."""

    def seen() -> bool:
        row = stage.find_row(task, f"{task}:{name}") or {}
        return (row.get("state"), row.get("cooldowns")) == ("cooling", cooldowns)

    until(seen, f"cooldown {cooldowns} of {task}:{name}")
    return stage.row(task, f"{task}:{name}")


def wait_until_over(stage: Stage, task: str, name: str) -> None:
    """Return when the cooldown is over by the database's clock."""
    until(lambda: not status(stage, task, name).retry_after, f"the end of the cooldown of {name}")


def lasted(row: dict[str, Any]) -> float:
    """Seconds from the outcome in a row to its ``retry_at``."""
    return float(row["retry_at"] - row["finished_at"]) / 1e6


def settled(log: str, key: str) -> list[tuple[float, str, str, str, float]]:
    """Each outcome of *key* in a log: time (epoch), call, how the attempt ended, state and wait."""
    found = []
    for when, milliseconds, call, about, ended, state, wait in _SETTLED.findall(log):
        if about == key:
            moment = datetime.fromisoformat(when).timestamp() + int(milliseconds) / 1000
            found.append((moment, call, ended, state, float(wait or 0)))
    return sorted(found)


def assert_sound(
    stage: Stage, task: str, name: str, *, logs: Sequence[str] = (), crashes: int = 0
) -> None:
    """No run began while its key was cooling, and each ended in one outcome or one crash."""
    runs = paid(stage, name)
    log = "\n".join(logs) or stage.worker.full_log()
    outcomes = settled(log, f"{task}:{name}")
    for when, _, _, state, wait in outcomes:
        for run in runs:
            between = when < run["wall"] < when + wait - 0.1  # the log rounds to tenths
            assert not (state == "cooling" and between), (
                f"{run} began while {name} was cooling for {wait} s: {outcomes}"
            )
    gone = [
        line
        for line in log.splitlines()
        if f"key {task}:{name}:" in line and "without reporting an outcome" in line
    ]
    assert len(gone) == crashes, gone
    assert len(outcomes) + crashes == len(runs), (outcomes, runs)
