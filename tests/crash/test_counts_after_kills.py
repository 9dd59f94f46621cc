"""What workers have counted agrees with the records, after a warm shutdown and after kills."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from celery_leases.ops.metrics import read_counts
from tests.crash.conftest import MakeScene
from tests.crash.crash_deployments import Scene, kill
from tests.integration.deployments import POOL_STORES, REDIS_REDIS_POSTGRES, got, until


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """Lets the workers count."""
    return {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path / "counts")}


def counted(env: dict[str, str], name: str, label: str = "task") -> Counter[str]:
    """The sum of the samples called *name*, by a label."""
    found: Counter[str] = Counter()
    for family in read_counts(env["PROMETHEUS_MULTIPROC_DIR"]):
        for sample in family.samples:
            if sample.name == f"celery_leases_{name}":
                found[sample.labels[label]] += int(sample.value)
    return found


def recorded(scene: Scene) -> Counter[str]:
    """How many attempts the records have, by how they ended."""
    return Counter(each.ended for status in scene.client.matching() for each in status.attempts)


@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent", "eventlet"])
def test_each_pool_counts_its_calls_and_renewals(
    pool: str, scene_factory: MakeScene, name: str, env: dict[str, str]
) -> None:
    """Renewals are sent by a system thread, also where all others are greenlets."""
    if pool in ("gevent", "eventlet"):
        pytest.importorskip(pool)
    scene = scene_factory(POOL_STORES[pool], start=False, env=env, concurrency=3)
    scene.worker.pool = pool  # type: ignore[assignment]
    scene.start()
    gate = scene.gate()
    results = [scene.tasks.work.delay(f"{name}-{number}") for number in range(20)]
    results.append(scene.tasks.work.delay(f"{name}-long", gate=str(gate)))
    until(lambda: bool(counted(env, "renewal_lateness_seconds_count")), "a renewal")
    gate.touch()
    for result in results:
        got(result)
    scene.worker.stop(timeout=60)
    task = scene.tasks.work.name
    assert counted(env, "attempts_total", "outcome") == recorded(scene) == {"returned": 21}
    assert counted(env, "run_seconds_count") == {task: 21}


def test_counts_agree_after_kills(scene_factory: MakeScene, name: str, env: dict[str, str]) -> None:
    scene = scene_factory(REDIS_REDIS_POSTGRES, env=env, concurrency=4)
    gate = scene.gate()
    stands = scene.tasks.work.delay(f"{name}-stands", gate=str(gate))
    (begun,) = scene.wait_for("begin", name=f"{name}-stands")
    kill(begun["pid"])
    scene.wait_for("begin", 2, name=f"{name}-stands")
    gate.touch()
    got(stands)
    results = [scene.tasks.work.delay(f"{name}-{number}") for number in range(60)]
    for result in results:
        got(result)
    task, ended = scene.tasks.work.name, {"returned": 61, "crashed": 1}
    # The result of a call is sent before its end is counted.
    until(lambda: counted(env, "attempts_total", "outcome") == ended, "the last count")
    scene.kill_worker()
    assert counted(env, "attempts_total", "outcome") == recorded(scene) == ended
    assert counted(env, "crashes_total") == {task: 1}
    assert counted(env, "duplicate_terminal_states_total") == {task: 0}
