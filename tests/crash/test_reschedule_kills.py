"""C6: the first worker runs, the second meets a copy of the same call, and both die, at each step
of a reschedule.
"""

import pytest

from celery_leases.testing.waits import wait_until
from tests.crash.conftest import MakeScene
from tests.crash.crash_deployments import FAILING

REDIS = ("redis", "redis", "postgres")
STEPS = ("before publish", "after publish", "after mark")


def test_c6_a_copy_that_met_the_holder_is_not_the_last(scene_factory: MakeScene, name: str) -> None:
    scene = scene_factory(REDIS, visibility=2)
    gate, result = scene.hold("work", name)
    (first,) = scene.events("begin", name=name)
    scene.another()
    scene.wait_for_log(result.id, "rescheduled in")
    wait_until(
        lambda: "] rescheduled\n" in scene.workers[1].full_log(), 20, "the end of the old delivery"
    )
    scene.kill_worker()
    gate.touch()
    assert result.get(timeout=30)["name"] == name
    assert len(scene.events("begin", name=name)) == 2
    scene.done_once("work", name, crashes=1)
    assert scene.events("begin", name=name)[1]["id"] == first["id"]


@pytest.mark.parametrize(
    ("step", "first_survives"),
    [("after publish", True), *((step, False) for step in STEPS)],
    ids=["after publish, the first goes on", *(f"{step}, the first dies too" for step in STEPS)],
)
def test_a_worker_killed_during_a_reschedule_loses_no_message(
    scene_factory: MakeScene, name: str, step: str, first_survives: bool
) -> None:
    """The dead worker's lease outlasts the visibility timeout."""
    scene = scene_factory(REDIS, ttl=2 if first_survives else 5, visibility=2, module=FAILING)
    gate, result = scene.hold("work", name)
    second = scene.another(env=scene.failpoint(step))
    scene.wait_until_failed(step)
    second.wait(20)
    if not first_survives:
        scene.kill_worker()
        scene.another()
    gate.touch()
    assert result.get(timeout=30)["name"] == name
    assert len(scene.events("begin", name=name)) == (1 if first_survives else 2)
    scene.done_once("work", name, crashes=0 if first_survives else 1)
    scene.wait_until_drained()


@pytest.mark.parametrize("step", STEPS)
def test_a_worker_killed_during_a_reschedule_on_rabbitmq_loses_no_message(
    scene_factory: MakeScene, name: str, step: str
) -> None:
    scene = scene_factory(("rabbit", "database", "postgres"), module=FAILING)
    gate, result = scene.hold("work", name)
    second = scene.another(env=scene.failpoint(step))
    duplicate = scene.tasks.work.delay(name, gate=str(gate))
    scene.wait_until_failed(step)
    second.wait(20)
    scene.kill_worker()
    scene.another()
    gate.touch()
    assert result.get(timeout=30) == duplicate.get(timeout=30)
    scene.done_once("work", name, crashes=1)
    scene.wait_until_drained()
