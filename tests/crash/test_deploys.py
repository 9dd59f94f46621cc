"""Warm, soft and cold shutdowns, also of a whole process group. None of them counts as a crash."""

import os
import re
import signal

import pytest

from tests.crash.conftest import MakeScene
from tests.crash.crash_deployments import Scene
from tests.integration.deployments import BOTH_WAYS, spelled
from tests.support.records import assert_has


@pytest.mark.parametrize("combination", BOTH_WAYS, ids=spelled)
@pytest.mark.nightly
def test_three_deploys_in_a_row_count_no_crash(scene_factory: MakeScene, name: str) -> None:
    scene = scene_factory(visibility=3)
    gate, result = scene.hold("work", name)

    warm = scene.worker
    warm.kill(signal.SIGTERM)
    warm.wait_for_log("Warm shutdown")
    warm.kill(signal.SIGQUIT)
    warm.wait(20)
    _given_back(scene, name)

    soft = scene.another(env={"SOFT_SHUTDOWN": "1"})
    scene.wait_for("begin", 2, name=name)
    soft.kill(signal.SIGQUIT)
    soft.wait(20)
    assert "Initiating Soft Shutdown" in soft.full_log()
    _given_back(scene, name)

    cold = scene.another()
    scene.wait_for("begin", 3, name=name)
    cold.kill(signal.SIGQUIT)
    cold.wait(20)
    _given_back(scene, name)

    scene.another()
    last = scene.wait_for("begin", 4, name=name)[3]
    assert (last["attempt"], last["previous"]) == (1, "interrupted")
    gate.touch()
    assert result.get(timeout=20) == {"name": name, "fence": last["fence"]}
    scene.done_once("work", name, crashes=0)
    scene.wait_until_drained()


@pytest.mark.parametrize("combination", BOTH_WAYS, ids=spelled)
def test_a_cold_shutdown_of_a_solo_worker_loses_nothing(
    scene_factory: MakeScene, name: str
) -> None:
    """Celery ends the body by an error of its own there."""
    scene = scene_factory(visibility=3, start=False)
    solo = scene.another(pool="solo")
    gate, result = scene.hold("work", name)
    solo.kill(signal.SIGQUIT)
    solo.wait(20)
    gate.touch()
    scene.another()
    assert result.get(timeout=30)["name"] == name
    scene.done_once("work", name, crashes=0)


@pytest.mark.parametrize("combination", BOTH_WAYS[:1], ids=spelled)
def test_a_body_that_tidies_up_in_a_cold_shutdown_counts_no_crash(
    scene_factory: MakeScene, name: str
) -> None:
    scene = scene_factory(visibility=3)
    gate = scene.gate()
    result = scene.tasks.tidies.delay(name, str(gate))
    scene.wait_for("begin", name=name)
    scene.worker.kill(signal.SIGQUIT)
    scene.worker.wait(20)
    _given_back(scene, name, "tidies")
    assert len(scene.events("tidied", name=name)) == 1
    scene.another()
    again = scene.wait_for("begin", 2, name=name)[1]
    assert (again["attempt"], again["previous"]) == (1, "interrupted")
    gate.touch()
    assert result.get(timeout=20)["name"] == name
    scene.done_once("tidies", name, crashes=0)


def test_sigterm_to_the_process_group_counts_no_crash(scene_factory: MakeScene, name: str) -> None:
    """As systemd and many shells do."""
    scene = scene_factory(BOTH_WAYS[0], visibility=3)
    gate = scene.gate()
    result = scene.tasks.tidies.delay(name, str(gate))
    (first,) = scene.wait_for("begin", name=name)
    scene.worker.kill(signal.SIGTERM)
    os.kill(first["pid"], signal.SIGTERM)
    scene.wait_for("tidying", name=name)  # a second signal while the first is pending would be none
    os.kill(first["pid"], signal.SIGTERM)
    scene.worker.wait(30)
    _given_back(scene, name, "tidies")
    scene.another()
    again = scene.wait_for("begin", 2, name=name)[1]
    assert (again["attempt"], again["previous"]) == (1, "interrupted")
    gate.touch()
    assert result.get(timeout=20)["name"] == name
    scene.done_once("tidies", name, crashes=0)


def _given_back(scene: Scene, name: str, task: str = "work") -> None:
    row = scene.wait_for_state(task, f"{task}:{name}", "pending")
    assert_has(row, ended="interrupted", attempt=0, crashes=0, failures=0)
    assert not scene.is_held(task, f"{task}:{name}")
    assert not [line for line in scene.log("Traceback") if re.search(name, line)]
