"""Faults of other systems when a first run outlives its lease, without a fence or with one in the
wrong place.
"""

from itertools import pairwise
from pathlib import Path

import pytest

from celery_leases.testing.waits import wait_until
from tests.crash.conftest import MakeScene
from tests.crash.crash_deployments import Scene, corrected
from tests.integration.deployments import BOTH_WAYS, spelled

CALLS = 8
"""Calls that wait for one key."""


@pytest.fixture(params=BOTH_WAYS, ids=spelled)
def scene(request: pytest.FixtureRequest, scene_factory: MakeScene) -> Scene:
    """A worker whose child will be paused; its message is not delivered again."""
    return scene_factory(request.param, visibility=60)


def test_x1_a_failure_after_a_takeover_changes_nothing(scene: Scene, name: str) -> None:
    end_too_late(scene, name, "too late")


def test_x3_a_success_after_a_takeover_changes_nothing(scene: Scene, name: str) -> None:
    end_too_late(scene, name, None)


def end_too_late(scene: Scene, name: str, error: str | None) -> None:
    """The second keeps its lease, its row stays what it was, and no third body begins."""
    gate = scene.gate()
    zombie = scene.tasks.goes_on.delay(name, str(gate), error)
    (first,) = scene.wait_for("begin", name=name)
    scene.worker.pause(pid=first["pid"])
    scene.another(
        concurrency=2
    )  # it may get the third call too, while one child is in the second's body
    second = scene.tasks.goes_on.delay(name, str(gate), error)
    scene.wait_for("begin", 2, name=name)
    mine = scene.holder("goes_on", f"goes_on:{name}")
    before = scene.known("goes_on", name)
    assert mine is not None
    Path(f"{gate}.1").touch()
    scene.worker.resume(pid=first["pid"])
    scene.wait_for("end", name=name, attempt=1)
    scene.wait_for_log(f"key goes_on:{name}:", f"outcome of fence {first['fence']} refused")
    third = scene.tasks.goes_on.delay(name, str(gate), error)
    scene.wait_for_log(third.id, "another call holds the key")
    still = scene.holder("goes_on", f"goes_on:{name}")
    assert still is not None
    assert still.token == mine.token
    # A renewal changes only the lease in the row, and the first run that it has not crashed.
    expected = {**corrected(before), "crashes": 0, "lease_until": None}
    assert {**scene.known("goes_on", name), "lease_until": None} == expected
    Path(f"{gate}.2").touch()
    answer = second.get(timeout=20)
    assert third.get(timeout=20) == zombie.get(timeout=20) == answer
    assert len(scene.events("begin", name=name)) == 2
    scene.done_once("goes_on", name, ends=2, crashes=1)


def test_x2_calls_that_wait_for_a_zombie_run_in_turn(scene: Scene, name: str) -> None:
    gate = scene.gate()
    scene.tasks.rerun.delay(name, 0.1, str(gate))
    (first,) = scene.wait_for("begin", name=name)
    scene.worker.pause(pid=first["pid"])
    scene.another(concurrency=4)
    results = [scene.tasks.rerun.delay(name, 0.1, str(gate)) for _ in range(CALLS)]
    scene.wait_for("begin", 2, name=name)
    scene.worker.resume(pid=first["pid"])
    gate.touch()
    for result in results:
        result.get(timeout=60)
    wait_until(lambda: len(scene.events("end", name=name)) == CALLS + 1, 60, "the end of all calls")
    ended = {event["fence"]: event["t"] for event in scene.events("end", name=name)}
    begun = sorted((event["t"], event["fence"]) for event in scene.events("begin", name=name))
    runs = [(start, ended[fence]) for start, fence in begun if fence in ended]
    assert len(runs) == CALLS + 1
    assert all(end <= start for (_, end), (start, _) in pairwise(runs)), runs
