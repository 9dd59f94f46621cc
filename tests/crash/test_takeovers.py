"""How long a takeover takes: ``TAKEOVERS=20`` kills so many children, and so many workers of each
pool. With ``--all-combinations`` on all brokers and pools.
"""

import os
import statistics

import pytest

from tests.crash.conftest import MakeScene
from tests.crash.crash_deployments import Scene, kill
from tests.integration.deployments import BOTH_WAYS, spelled

TIMES = int(os.environ.get("TAKEOVERS", "0"))
TTL = 15.0
"""The default; workers are killed with a ttl of WORKER_TTL."""

WORKER_TTL = 5.0

VISIBILITY = 3600.0
"""The default of a Redis broker, in seconds."""

pytestmark = [
    pytest.mark.skipif(not TIMES, reason="a measurement: set TAKEOVERS to the number of kills"),
    pytest.mark.timeout(0),
    pytest.mark.parametrize("combination", BOTH_WAYS, ids=spelled),
]


def report(what: str, combination: tuple[str, ...], spans: list[float]) -> None:
    spread = f"{min(spans):.2f} to {max(spans):.2f} s"
    print(
        f"{spelled(combination)}: {what}: median {statistics.median(spans):.2f} s, {spread}, {len(spans)} times"
    )


def begins(scene: Scene, name: str) -> list[str]:
    """The names of the calls that have begun, sorted."""
    began = (str(event["name"]) for event in scene.events("begin"))
    return sorted(each for each in began if each.startswith(name))


def takeover(scene: Scene, name: str, pool: str | None = None) -> float:
    """Seconds from the kill to the begin of the next attempt: of the process of a child, or of a
    worker of *pool* that has three more messages.
    """
    calls = [f"{name}-{number}" for number in range(4 if pool else 1)]
    gate, result = scene.hold("work", calls[0])
    results = [result, *(scene.tasks.work.delay(call) for call in calls[1:])]
    (first,) = scene.events("begin", name=calls[0])
    if pool is not None:
        scene.another(pool=pool)
    killed = kill(first["pid"] if pool is None else scene.workers[-2].pid)
    second = scene.wait_for("begin", 2, 4 * TTL, name=calls[0])[1]
    gate.touch()
    for each in results:
        each.get(timeout=30)
    assert begins(scene, f"{name}-") == [calls[0], *calls]
    return float(second["t"] - killed)


def test_after_a_child(scene_factory: MakeScene, name: str, combination: tuple[str, ...]) -> None:
    """Its median is below a second, however long the lease."""
    scene = scene_factory(combination, ttl=TTL, visibility=VISIBILITY, concurrency=2)
    spans = [takeover(scene, f"{name}-{number}") for number in range(TIMES)]
    report("killed child", combination, spans)
    assert statistics.median(spans) < 1.0


@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent", "eventlet", "solo"])
def test_after_a_worker(
    scene_factory: MakeScene, name: str, combination: tuple[str, ...], pool: str
) -> None:
    """Each call is done, and only the one that was killed has begun twice."""
    scene = scene_factory(
        combination, ttl=WORKER_TTL, visibility=VISIBILITY, start=False, env={"PREFETCH": "8"}
    )
    scene.workers.clear()
    scene.another(pool=pool)
    spans = [takeover(scene, f"{name}-{number}", pool) for number in range(TIMES)]
    report(f"killed {pool} worker", combination, spans)
    assert max(spans) < WORKER_TTL + 10.0
