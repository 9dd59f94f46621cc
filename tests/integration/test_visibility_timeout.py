"""Redis restores what is unacknowledged for longer than ``visibility_timeout``: copies of a call
that still runs.
"""

import time

import pytest

from tests.integration.deployments import (
    REDIS_DATABASE_SQLITE,
    REDIS_REDIS_POSTGRES,
    Stage,
    got,
    stages,
)

VISIBILITY = 1.0


module_stage = stages(
    REDIS_REDIS_POSTGRES,
    REDIS_DATABASE_SQLITE,
    env={"VISIBILITY": str(VISIBILITY)},
    worker={"log_level": "DEBUG"},
    drained=False,
)
"""A Redis broker that restores after one second, looked at every second."""


@pytest.mark.parametrize("task", ["work", "rerun", "keyless"])
def test_c3_a_call_beyond_the_visibility_runs_once(stage: Stage, name: str, task: str) -> None:
    gate = stage.gate()
    running = stage.send(task, name, 0.0, str(gate))
    # Three rounds of the copies: the body is held until they have been restored, rescheduled, and
    # restored again.
    stage.wait_for_log(running.id, "rescheduled in", 3)
    gate.touch()
    assert got(running)["name"] == name
    stage.wait_until_drained()
    assert len(stage.events("begin", name=name)) == 1
    assert running.state == "SUCCESS"
    row = stage.row(task, f"{task}:{name}" if task != "keyless" else running.id)
    assert (row["state"], row["attempt"], row["crashes"]) == ("done", 1, 0)


def test_a_far_countdown_waits_in_hops_and_only_once(stage: Stage, name: str) -> None:
    """The broker would deliver the waiting message again and again."""
    # The first call of a process takes about as long as the visibility timeout.
    for first in [stage.send("work", f"{name}-{n}", 0.5) for n in range(4)]:
        got(first)
    sent = time.time()
    waits = stage.send("work", name, countdown=5 * VISIBILITY)
    stage.wait_for_log(waits.id, "rescheduled in", 3)
    assert not stage.events("begin", name=name)
    assert got(waits)["name"] == name
    assert time.time() - sent >= 5 * VISIBILITY
    stage.wait_until_drained()
    assert len(stage.events("begin", name=name)) == 1
    hops = len(stage.log(f"{waits.id}] key work:{name}: rescheduled in"))
    assert len(stage.log(f"{waits.id}] received")) == hops + 1
