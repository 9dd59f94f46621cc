"""A child and a worker are killed while keys with ``lease_runs="latest"`` get bursts of calls."""

import pytest

from tests.crash.conftest import MakeScene
from tests.crash.crash_deployments import kill
from tests.integration.deployments import BOTH_WAYS, spelled

KEYS, BURST = 6, 6
LAST = BURST - 1


@pytest.mark.parametrize("combination", BOTH_WAYS, ids=spelled)
def test_each_key_sees_its_last_change(scene_factory: MakeScene, name: str) -> None:
    scene = scene_factory(concurrency=2)
    scene.another()
    keys = [f"{name}-{number}" for number in range(KEYS)]
    calls = []
    for number in range(BURST):
        calls += [(number, scene.tasks.newest.delay(key, number, seconds=0.2)) for key in keys]
        if number == 2:
            scene.wait_for("begin")
            kill(scene.events("begin")[-1]["pid"])
        if number == LAST:
            scene.stop_consuming(scene.worker)
            kill(scene.worker.pid)
    for number, call in calls:
        assert call.get(timeout=60) >= number
    for key in keys:
        began = [event["number"] for event in scene.events("begin", name=key)]
        assert began[-1] == LAST
        print(f"{len(began)} runs of {BURST} calls: {began}")
