"""How long a takeover takes: ``TAKEOVERS=20`` kills so many children, and so many workers of each
pool. With ``--all-combinations`` on all brokers and pools.
"""

import os
import statistics
from itertools import cycle, islice

import pytest
import redis

from celery_leases.testing.waits import wait_until
from tests.crash.conftest import MakeScene
from tests.crash.crash_deployments import Scene, kill
from tests.crash.test_worker_leases import SOON, begins, registered
from tests.crash.test_worker_leases import TTL as WORKER_TTL
from tests.integration.deployments import BOTH_WAYS, PATIENCE, REDIS_REDIS_POSTGRES, spelled

TIMES = int(os.environ.get("TAKEOVERS", "0"))
TTL = 15.0
"""The default; workers are killed with a ttl of 5 s."""

VISIBILITY = 3600.0
"""The default of a Redis broker, in seconds."""

POOLS = ("prefork", "threads", "gevent", "eventlet", "solo")
LEASES = (REDIS_REDIS_POSTGRES, ("redis", "database", "postgres"))
"""Workers are killed with leases in Redis and in the database by turns."""

pytestmark = [
    pytest.mark.skipif(not TIMES, reason="a measurement: set TAKEOVERS to the number of kills"),
    pytest.mark.timeout(0),
]


def report(what: str, spans: list[float]) -> None:
    spread = f"{min(spans):.2f} to {max(spans):.2f} s"
    print(f"{what}: median {statistics.median(spans):.2f} s, {spread}, {len(spans)} times")


def after_a_child(scene: Scene, name: str) -> float:
    """Seconds from the kill of a child to the begin of the next attempt."""
    gate, result = scene.hold("work", name)
    killed = kill(scene.events("begin", name=name)[0]["pid"])
    second = scene.wait_for("begin", 2, 4 * TTL, name=name)[1]
    gate.touch()
    result.get(timeout=PATIENCE)
    return float(second["t"] - killed)


@pytest.mark.parametrize("combination", BOTH_WAYS, ids=spelled)
def test_after_a_child(scene_factory: MakeScene, name: str, combination: tuple[str, ...]) -> None:
    """Its median is below a second, however long the lease."""
    scene = scene_factory(combination, ttl=TTL, visibility=VISIBILITY, concurrency=2)
    spans = [after_a_child(scene, f"{name}-{number}") for number in range(TIMES)]
    report(f"{spelled(combination)}: killed child", spans)
    assert statistics.median(spans) < 1.0


def after_a_worker(scene: Scene, name: str, pool: str) -> float:
    """Seconds from the kill of a worker to the begin of the next attempt. It has fetched three more
    leased messages, and a plain one; those of the rounds before are left.
    """
    # Of these pools, those that run one body at a time fetch nothing behind it but a countdown.
    delay = {} if pool in ("prefork", "threads") else {"countdown": 2 * WORKER_TTL}
    with redis.Redis.from_url(scene.broker_url) as client:
        plain = client.hlen("unacked") + 1
        if not delay:
            gate, first = scene.hold("work", f"{name}-0")
        others = [
            scene.tasks.work.apply_async((f"{name}-{number}",), **delay) for number in (1, 2, 3)
        ]
        scene.send("plain", **delay)
        if delay:
            wait_until(lambda: client.hlen("unacked") == plain + 3, PATIENCE, "four messages")
            gate, first = scene.hold("work", f"{name}-0")
        wait_until(lambda: client.hlen("unacked") == plain + 4, PATIENCE, "five messages")
        wait_until(lambda: registered(client) == 4, PATIENCE, "four registrations")
        scene.another(pool=pool)
        killed = kill(scene.workers[-2].pid)
        second = scene.wait_for("begin", 2, SOON, name=f"{name}-0")[1]
        gate.touch()
        for each in (first, *others):
            each.get(timeout=SOON)
        wait_until(lambda: client.hlen("unacked") == plain, PATIENCE, "acknowledgements")
        assert begins(scene, name) == [0, 0, 1, 2, 3]
        assert not scene.events("plain")
        wait_until(lambda: not registered(client), PATIENCE, "no registration")
        assert not client.llen(scene.queue)
    return float(second["t"] - killed)


@pytest.mark.parametrize("pool", POOLS)
def test_after_a_worker(scene_factory: MakeScene, name: str, pool: str) -> None:
    """Each leased call is done, and only the one that was killed has begun twice."""
    scenes = [
        scene_factory(each, ttl=WORKER_TTL, start=False, env={"PREFETCH": "8"}) for each in LEASES
    ]
    for scene in scenes:
        scene.env.pop("VISIBILITY")
        scene.workers.clear()
        scene.another(pool=pool)
    spans = [
        after_a_worker(scene, f"{name}{number}", pool)
        for number, scene in enumerate(islice(cycle(scenes), TIMES))
    ]
    for scene, its in zip(scenes, (spans[::2], spans[1::2]), strict=True):
        report(f"{scene.lease_store} leases: killed {pool} worker", its)
    report(f"killed {pool} worker", spans)
    assert max(spans) < SOON
