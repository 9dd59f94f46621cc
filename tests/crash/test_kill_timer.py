"""``lease_on_lost="kill"``: a POSIX timer kills the process at the deadline of its lease, whatever
the process does.
"""

import os
import time
from functools import partial

import pytest

from celery_leases.testing.waits import wait_until
from tests.crash.conftest import MakeScene
from tests.crash.crash_deployments import Scene
from tests.integration.deployments import BOTH_WAYS, got, spelled

KILLING = "tests.apps.kill_timer_tasks"
CHILDREN = 6
ROUNDS = 5
LATE = 0.25
"""What a kill may be late on a busy machine, in seconds; a stopped process need not run for it."""


@pytest.fixture(params=BOTH_WAYS, ids=spelled)
def scene(request: pytest.FixtureRequest, scene_factory: MakeScene) -> Scene:
    return scene_factory(request.param, home=KILLING, ttl=2, visibility=60, concurrency=CHILDREN)


def all_dead(pids: list[int]) -> bool:
    return not any(map(is_there, pids))


def is_there(pid: int) -> bool:
    """Whether the process runs, or could run again."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.nightly
def test_thirty_stopped_bodies_have_no_effect_again(scene: Scene, name: str) -> None:
    longest = 0.0
    for round_ in range(ROUNDS):
        gate = scene.gate()
        names = [f"{name}-{round_}-{number}" for number in range(CHILDREN)]
        results = [scene.tasks.pulses.delay(each, gate=str(gate)) for each in names]
        first = {each: scene.wait_for("pulse", name=each)[0] for each in names}
        for each in names:
            scene.worker.pause(pid=first[each]["pid"])
        stopped = time.monotonic()
        wait_until(
            partial(all_dead, [event["pid"] for event in first.values()]),
            20,
            "the stopped to be dead",
        )
        longest = max(longest, time.monotonic() - stopped)
        for each in names:
            second = scene.wait_for("begin", 2, name=each)[1]
            zombie = [
                event["t"]
                for event in scene.events("pulse", name=each)
                if event["pid"] == first[each]["pid"]
            ]
            assert max(zombie) <= stopped + 0.1, (each, max(zombie), stopped)
            assert max(zombie) < second["t"]
        gate.touch()
        for each, result in zip(names, results, strict=True):
            assert result.get(timeout=30)["fence"] > first[each]["fence"]
            scene.done_once("pulses", each, crashes=1)
    assert longest < scene.ttl + LATE + 2.0
    print(f"dead {longest:.2f} s after SIGSTOP at the latest, ttl {scene.ttl:g} s")


def test_a_body_that_holds_the_interpreter_dies_at_its_deadline_and_the_next_one_ends(
    scene: Scene, name: str
) -> None:
    result = scene.tasks.hogs.delay(name)
    (first,) = scene.wait_for("begin", name=name)
    wait_until(lambda: not is_there(first["pid"]), 20, "the hog to be dead")
    died = time.monotonic() - first["t"]
    assert result.get(timeout=30)["name"] == name
    second = scene.events("begin", name=name)[1]
    assert second["attempt"] == 2
    assert second["pid"] != first["pid"]
    assert scene.ttl * 0.9 < died < scene.ttl + 2.0
    scene.done_once("hogs", name, crashes=1)
    print(f"dead {died:.2f} s after it began, ttl {scene.ttl:g} s")


def test_a_renewed_body_leaves_no_timer_behind(scene: Scene, name: str) -> None:
    results = [
        scene.tasks.lasts.delay(f"{name}-{number}", seconds=3 * scene.ttl) for number in range(2)
    ]
    for result in results:
        assert result.get(timeout=60)["timers"] == 1
    gate = scene.gate()
    counts = [scene.tasks.counts.delay(f"{name}-{number}", str(gate)) for number in range(CHILDREN)]
    scene.wait_for("count", CHILDREN)  # one in each child
    gate.touch()
    left = [result.get(timeout=30) for result in counts]
    assert {told["timers"] for told in left} == {0}
    assert {event["pid"] for event in scene.events("end")} <= {told["pid"] for told in left}


def test_an_eager_call_in_the_body_leaves_it_its_timer(scene: Scene, name: str) -> None:
    gate = scene.gate()
    result = scene.tasks.nests.delay(name, str(gate))
    (first,) = scene.wait_for("begin", name=name)
    assert (first["inside"], first["after"]) == (1, 1)
    scene.client.release(f"nests:{name}", task=f"{KILLING}.nests")
    second = scene.wait_for("begin", 2, name=name)[1]
    assert second["fence"] > first["fence"]
    gate.touch()
    assert result.get(timeout=30)["fence"] == second["fence"]
    scene.wait_for_log(result.id, "lease lost")
    assert [event["fence"] for event in scene.events("end", name=name)] == [second["fence"]]


def test_without_a_process_for_each_body_none_starts(scene_factory: MakeScene) -> None:
    scene = scene_factory(BOTH_WAYS[0], home=KILLING, start=False)
    scene.worker.pool = "threads"
    with pytest.raises(Exception, match="start"):
        scene.worker.start()
    log = scene.worker.full_log()
    assert "lease_on_lost='kill' ends the whole process" in log
    assert f"{KILLING}.pulses" in log


def test_a_body_whose_key_was_released_is_killed_as_soon_as_that_is_seen(
    scene_factory: MakeScene, name: str
) -> None:
    ttl = 12
    scene = scene_factory(BOTH_WAYS[0], home=KILLING, ttl=ttl, visibility=60, concurrency=2)
    result = scene.tasks.clings.delay(name)
    (begun,) = scene.wait_for("begin", name=name)
    released = time.monotonic()
    scene.client.release(f"clings:{name}", task=scene.tasks.clings.name)
    wait_until(lambda: not is_there(begun["pid"]), 20, "the zombie to be dead")
    assert time.monotonic() - released < ttl / 2  # it is seen by the next renewal, after a third
    first, second = scene.wait_for("begin", 2, name=name)
    assert got(result)["fence"] == second["fence"] > first["fence"]
    scene.done_once("clings", name)
