"""How long a takeover takes: ``TAKEOVERS=20`` kills so many children, and a twentieth of that many
workers.
"""

import os
import statistics
import time

import pytest

from tests.crash.conftest import MakeScene
from tests.crash.crash_deployments import Scene, kill
from tests.integration.deployments import BOTH_WAYS, spelled

TIMES = int(os.environ.get("TAKEOVERS", "0"))
TTL = 15.0
"""The default."""

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


def takeover(scene: Scene, name: str, *, whole_worker: bool) -> float:
    """Seconds from the kill to the begin of the next attempt."""
    gate, result = scene.hold("work", name)
    (first,) = scene.events("begin", name=name)
    if whole_worker:
        scene.another()
    killed = kill(scene.workers[-2].pid if whole_worker else first["pid"])
    deadline = time.monotonic() + 4 * TTL
    while len(scene.events("begin", name=name)) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    second = scene.events("begin", name=name)[1]
    gate.touch()
    result.get(timeout=30)
    return float(second["t"] - killed)


def test_after_a_child(scene_factory: MakeScene, name: str, combination: tuple[str, ...]) -> None:
    """Its median is below a second, however long the lease."""
    scene = scene_factory(combination, ttl=TTL, visibility=VISIBILITY, concurrency=2)
    spans = [takeover(scene, f"{name}-{number}", whole_worker=False) for number in range(TIMES)]
    report("killed child", combination, spans)
    assert statistics.median(spans) < 1.0


def test_after_a_worker(scene_factory: MakeScene, name: str, combination: tuple[str, ...]) -> None:
    """Lease or visibility timeout, and one reschedule."""
    scene = scene_factory(combination, ttl=TTL, visibility=VISIBILITY)
    spans = [
        takeover(scene, f"{name}-{number}", whole_worker=True)
        for number in range(max(1, TIMES // 20))
    ]
    report("killed worker", combination, spans)
    assert max(spans) < TTL + 10.0
