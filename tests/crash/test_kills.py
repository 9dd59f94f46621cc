"""SIGKILL in the middle of a body: of the pool child, and of the whole worker."""

import pytest

from tests.crash.conftest import MakeScene
from tests.crash.crash_deployments import RESCHEDULE_DELAY, kill
from tests.integration.deployments import BOTH_WAYS, PAIRWISE, spelled
from tests.support.records import assert_has

TAKEOVER = 3.0
"""By when the work of a killed child runs again on a busy machine, in seconds: far below ttl and
billiard's five.
"""


@pytest.mark.both_lease_stores
@pytest.mark.parametrize("combination", PAIRWISE, ids=spelled)
def test_m4_the_work_of_a_killed_pool_child_runs_again_at_once_however_long_its_lease(
    scene_factory: MakeScene, name: str
) -> None:
    scene = scene_factory(ttl=15, visibility=60)
    gate, result = scene.hold("work", name)
    (first,) = scene.events("begin", name=name)
    before = scene.row("work", f"work:{name}")
    killed = kill(first["pid"])
    second = scene.wait_for("begin", 2, name=name)[1]
    assert second["t"] - killed < TAKEOVER
    assert (second["attempt"], second["previous"], second["id"]) == (2, "crashed", first["id"])
    assert second["fence"] > first["fence"]
    row = scene.row("work", f"work:{name}")
    assert_has(row, crashes=1, previous_ended="crashed", previous_host=before["holder"])
    gate.touch()
    assert result.get(timeout=20) == {"name": name, "fence": second["fence"]}
    scene.done_once("work", name, crashes=1)
    scene.wait_until_drained()
    print(f"takeover after {second['t'] - killed:.2f} s")


@pytest.mark.both_lease_stores
@pytest.mark.parametrize(
    "combination",
    [*BOTH_WAYS, ("redis", "database", "mariadb"), ("redis", "database", "sqlite")],
    ids=spelled,
)
def test_a_killed_worker_blocks_the_key_for_the_ttl_and_its_work_is_delivered_to_another(
    scene_factory: MakeScene, name: str
) -> None:
    scene = scene_factory()
    gate, result = scene.hold("work", name)
    (first,) = scene.events("begin", name=name)
    before = scene.row("work", f"work:{name}")
    killed = kill(scene.worker.pid)
    free = scene.wait_until_free("work", f"work:{name}")
    assert free - killed < scene.ttl + 3.0
    scene.another()
    second = scene.wait_for("begin", 2, name=name)[1]
    assert (second["attempt"], second["previous"], second["id"]) == (2, "abandoned", first["id"])
    row = scene.row("work", f"work:{name}")
    assert (row["crashes"], row["previous_host"]) == (1, before["holder"])
    gate.touch()
    assert result.get(timeout=20)["fence"] == second["fence"]
    scene.done_once("work", name, crashes=1)
    print(f"free after {free - killed:.2f} s, takeover after {second['t'] - killed:.2f} s")


@pytest.mark.both_lease_stores
@pytest.mark.parametrize("combination", BOTH_WAYS, ids=spelled)
def test_another_call_takes_over_from_a_killed_worker_within_the_ttl_and_one_reschedule(
    scene_factory: MakeScene, name: str
) -> None:
    scene = scene_factory(visibility=20)
    gate, result = scene.hold("work", name)
    (first,) = scene.events("begin", name=name)
    scene.another()
    duplicate = scene.tasks.work.delay(name, gate=str(gate))
    scene.wait_for_log(duplicate.id, "another call holds the key")
    killed = kill(scene.worker.pid)
    second = scene.wait_for("begin", 2, name=name)[1]
    # The duplicate asks every second at first, then every two; the last time may be just before the
    # lease ends.
    assert second["t"] - killed < scene.ttl + scene.ttl + RESCHEDULE_DELAY + 1.5
    assert second["previous"] == "abandoned"
    assert second["fence"] > first["fence"]
    gate.touch()
    answer = {"name": name, "fence": second["fence"]}
    assert duplicate.get(timeout=20) == answer
    if scene.broker == "rabbit":
        assert result.get(timeout=20) == answer
    scene.done_once("work", name, crashes=1)
    print(f"takeover after {second['t'] - killed:.2f} s")
