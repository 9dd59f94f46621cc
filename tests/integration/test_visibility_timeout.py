"""Redis restores what is unacknowledged for longer than ``visibility_timeout``: copies of a call
that still runs.
"""

import time
from collections.abc import Iterator

import pytest

from tests.integration.conftest import DeploymentFactory
from tests.integration.deployments import (
    PATIENCE,
    REDIS_DATABASE_SQLITE,
    REDIS_REDIS_POSTGRES,
    Deployment,
    spelled,
)

VISIBILITY = 1.0


@pytest.fixture(scope="module", params=[REDIS_REDIS_POSTGRES, REDIS_DATABASE_SQLITE], ids=spelled)
def module_stage(
    request: pytest.FixtureRequest, stage_factory: DeploymentFactory
) -> Iterator[Deployment]:
    """A Redis broker that restores after one second, looked at every second."""
    env = {"VISIBILITY": str(VISIBILITY)}
    made = stage_factory(request.param, env=env, worker={"log_level": "DEBUG"})
    yield made
    made.close()


@pytest.mark.parametrize("task", ["work", "rerun", "keyless"])
def test_c3_a_call_beyond_the_visibility_timeout_runs_once(
    stage: Deployment, name: str, task: str
) -> None:
    gate = stage.gate()
    running = stage.send(task, name, 0.0, str(gate))
    # Three rounds of the copies: the body is held until they have been restored, rescheduled, and
    # restored again.
    stage.wait_for_log(running.id, "rescheduled in", 3)
    gate.touch()
    assert running.get(timeout=PATIENCE)["name"] == name
    stage.wait_until_drained()
    assert len(stage.events("begin", name=name)) == 1
    assert running.state == "SUCCESS"
    row = stage.row(task, f"{task}:{name}" if task != "keyless" else running.id)
    assert row is not None
    assert (row["state"], row["attempt"], row["crashes"]) == ("done", 1, 0)


def test_a_far_countdown_waits_in_hops_and_only_once(stage: Deployment, name: str) -> None:
    """The broker would deliver the waiting message again and again."""
    # The first call of a process takes about as long as the visibility timeout.
    for first in [stage.send("work", f"{name}-{n}", 0.5) for n in range(4)]:
        first.get(timeout=PATIENCE)
    sent = time.time()
    waits = stage.send("work", name, countdown=5 * VISIBILITY)
    stage.wait_for_log(waits.id, "rescheduled in", 3)
    assert not stage.events("begin", name=name)
    assert waits.get(timeout=PATIENCE)["name"] == name
    assert time.time() - sent >= 5 * VISIBILITY
    stage.wait_until_drained()
    assert len(stage.events("begin", name=name)) == 1
    hops = len(stage.log(f"{waits.id}] key work:{name}: rescheduled in"))
    assert len(stage.log(f"{waits.id}] received")) == hops + 1
