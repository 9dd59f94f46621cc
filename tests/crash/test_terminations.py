"""Limits and revokes: Celery's own ways to end a body keep their meaning, and leave the key
free.
"""

import os
import signal
import time

import pytest
from celery.exceptions import TaskRevokedError, TimeLimitExceeded

from tests.crash.conftest import MakeScene
from tests.crash.crash_deployments import Scene
from tests.integration.deployments import BOTH_WAYS, spelled

TTL = 30
FREED = TTL / 6
"""By when the main process has freed the key of a child that Celery has killed, on a busy machine,
in seconds.
"""


@pytest.fixture(params=BOTH_WAYS, ids=spelled)
def scene(request: pytest.FixtureRequest, scene_factory: MakeScene) -> Scene:
    """The broker delivers nothing again by itself, and no lease ends by itself."""
    return scene_factory(request.param, ttl=TTL, visibility=60)


@pytest.mark.both_lease_stores
def test_m8_the_hard_time_limit_is_a_failure(scene: Scene, name: str) -> None:
    result = scene.tasks.limited.delay(name)
    (first,) = scene.wait_for("begin", name=name)
    with pytest.raises(TimeLimitExceeded):
        result.get(timeout=20)
    ended = time.monotonic()
    free = scene.wait_until_free("limited", f"limited:{name}")
    assert free - ended < FREED
    following = scene.tasks.limited.delay(name)
    assert following.get(timeout=30) == {"name": name}
    second = scene.events("begin", name=name)[1]
    assert (second["attempt"], second["id"]) == (2, following.id)
    row = scene.wait_for_state("limited", f"limited:{name}", "done")
    assert (row["previous_ended"], row["crashes"]) == ("terminated", 0)
    scene.wait_until_drained()
    print(
        f"free {free - ended:.2f} s after FAILURE ({row['previous_ended']}), {ended - first['t']:.1f} s after begin"
    )


def test_m8_a_frozen_child_killed_by_its_limit_frees_the_key(scene: Scene, name: str) -> None:
    result = scene.tasks.limited.delay(name)
    (first,) = scene.wait_for("begin", name=name)
    os.kill(first["pid"], signal.SIGSTOP)
    with pytest.raises(TimeLimitExceeded):
        result.get(timeout=20)
    ended = time.monotonic()
    row = scene.wait_for_state("limited", f"limited:{name}", "pending")
    assert (row["ended"], row["crashes"], row["attempt"]) == ("terminated", 1, 1)
    free = scene.wait_until_free("limited", f"limited:{name}")
    assert free - ended < FREED
    assert scene.tasks.limited.delay(name).get(timeout=30) == {"name": name}
    print(f"free {free - ended:.2f} s after FAILURE")


@pytest.mark.parametrize("sig", ["SIGTERM", "SIGKILL"])
def test_m6_a_revoked_call_leaves_the_key_free(scene: Scene, name: str, sig: str) -> None:
    gate, result = scene.hold("work", name)
    asked = time.monotonic()
    result.revoke(terminate=True, signal=sig)
    following = scene.tasks.work.delay(name, gate=str(gate))
    second = scene.wait_for("begin", 2, name=name)[1]
    with pytest.raises(TaskRevokedError):
        result.get(timeout=20)
    assert second["id"] == following.id
    assert second["t"] - asked < FREED
    assert second["previous"] == ("interrupted" if sig == "SIGTERM" else "terminated")
    assert second["attempt"] == 1
    gate.touch()
    assert following.get(timeout=20)["fence"] == second["fence"]
    scene.done_once("work", name, crashes=0)
    scene.wait_until_drained()
    print(f"the next call runs {second['t'] - asked:.2f} s after revoke by {sig}")


@pytest.mark.parametrize("combination", BOTH_WAYS[:1], ids=spelled)
def test_a_request_class_of_the_users_own_does_not_keep_the_key_of_a_revoked_call(
    scene_factory: MakeScene, name: str
) -> None:
    scene = scene_factory(ttl=TTL, visibility=60)
    gate = scene.gate()
    result = scene.tasks.audited.delay(name, str(gate))
    scene.wait_for("begin", name=name)
    asked = time.monotonic()
    result.revoke(terminate=True, signal="SIGKILL")
    following = scene.tasks.audited.delay(name, str(gate))
    second = scene.wait_for("begin", 2, name=name)[1]
    assert second["t"] - asked < FREED
    assert scene.wait_for_log(f"audited {result.id}", "")
    gate.touch()
    assert following.get(timeout=20) == {"name": name}
