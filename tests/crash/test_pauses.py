"""SIGSTOP for longer than the ttl: another call takes over, and the zombie's outcome is refused."""

import time

import pytest

from celery_leases.testing.waits import wait_until
from tests.crash.conftest import MakeScene
from tests.crash.crash_deployments import Scene, corrected
from tests.integration.deployments import BOTH_WAYS, spelled

NOTICED = 2.0
"""Seconds within which a resumed body must notice the loss; measured are milliseconds."""


@pytest.fixture(params=BOTH_WAYS, ids=spelled)
def scene(request: pytest.FixtureRequest, scene_factory: MakeScene) -> Scene:
    """A worker whose child will be paused; its message is not delivered again."""
    return scene_factory(request.param, visibility=60)


def resumed(scene: Scene, pid: int) -> float:
    """SIGCONT; when that was."""
    scene.worker.resume(pid=pid)
    return time.monotonic()


@pytest.mark.both_lease_stores
def test_m9_a_zombie_leaves_the_next_one_its_lease(scene: Scene, name: str) -> None:
    stop = scene.gate()
    scene.tasks.checks.delay(name, stop=str(stop))
    (first,) = scene.wait_for("begin", name=name)
    scene.worker.pause(pid=first["pid"])
    scene.another()
    result = scene.tasks.checks.delay(name, stop=str(stop))
    second = scene.wait_for("begin", 2, name=name)[1]
    mine = scene.holder("checks", f"checks:{name}")
    assert mine is not None
    assert mine.call_id == result.id
    resumed(scene, first["pid"])
    scene.wait_for_log(f"key checks:{name}:", f"outcome of fence {first['fence']} refused")
    scene.wait_for_log(f"key checks:{name}:", "rescheduled in")
    still = scene.holder("checks", f"checks:{name}")
    assert still is not None
    assert still.token == mine.token
    assert not scene.events("end", name=name)
    row = scene.row("checks", f"checks:{name}")
    assert (row["state"], row["crashes"], row["previous_ended"]) == ("running", 0, "lost")
    stop.touch()
    assert result.get(timeout=20)["fence"] == second["fence"]
    scene.done_once("checks", name, crashes=1)


def test_a_zombie_that_sleeps_is_interrupted(scene: Scene, name: str) -> None:
    zombie = scene.tasks.sleeps.delay(name, 600)
    (first,) = scene.wait_for("begin", name=name)
    scene.worker.pause(pid=first["pid"])
    scene.wait_until_free("sleeps", f"sleeps:{name}")
    at = resumed(scene, first["pid"])
    (lost,) = scene.wait_for("lost", name=name)
    assert (lost["error"], lost["pid"]) == ("LeaseLost", first["pid"])
    assert lost["t"] - at < NOTICED
    # No other call took over: the attempt is given back, and the call runs again. No crash.
    again = scene.wait_for("begin", 2, name=name)[1]
    row = scene.row("sleeps", f"sleeps:{name}")
    assert (again["attempt"], row["crashes"], row["previous_ended"]) == (1, 0, "lost")
    assert zombie.id == again["id"]
    print(f"interrupted {lost['t'] - at:.3f} s after SIGCONT")


def test_a_zombie_that_swallows_exceptions_is_interrupted(scene: Scene, name: str) -> None:
    stop, zombie = scene.hold("swallows", name, by="stop")
    (first,) = scene.events("begin", name=name)
    scene.worker.pause(pid=first["pid"])
    scene.another()
    result = scene.tasks.swallows.delay(name, stop=str(stop))
    answer = result.get(timeout=20)
    before = scene.known("swallows", name)
    resumed(scene, first["pid"])
    (lost,) = scene.wait_for("lost", name=name)
    assert (lost["error"], lost["pid"]) == ("LeaseLost", first["pid"])
    assert not scene.events("swallowed", name=name)
    assert zombie.get(timeout=20) == answer
    assert scene.known("swallows", name) == corrected(before)
    scene.done_once("swallows", name, crashes=1)


def test_a_redelivered_copy_takes_over_from_a_paused_child_and_finishes(
    scene_factory: MakeScene, name: str
) -> None:
    scene = scene_factory(BOTH_WAYS[0], visibility=2)
    stop, result = scene.hold("checks", name, by="stop")
    (first,) = scene.events("begin", name=name)
    scene.worker.pause(pid=first["pid"])
    scene.another()
    second = scene.wait_for("begin", 2, name=name)[1]
    assert second["id"] == first["id"] == result.id
    stop.touch()
    assert result.get(timeout=20)["fence"] == second["fence"]
    stop.unlink()
    before = scene.known("checks", name)
    resumed(scene, first["pid"])
    scene.wait_for("lost", name=name)
    wait_until(lambda: "refused: a later attempt" in scene.logs(), 20, "the refusal")
    assert result.get(timeout=20)["fence"] == second["fence"]
    assert scene.known("checks", name) == corrected(before)
    scene.done_once("checks", name, crashes=1)
    scene.wait_until_drained()
