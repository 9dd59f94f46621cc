"""What workers have counted agrees with the records: after a warm shutdown at once, and after kills
as soon as the counts of the dead are folded.
"""

from __future__ import annotations

from collections import Counter

import pytest

from celery_leases.attempt.process import open_metrics
from celery_leases.metrics_totals import Tally
from celery_leases.testing.waits import wait_until
from tests.crash.conftest import CrashDeploymentFactory
from tests.crash.crash_deployments import CrashDeployment, kill
from tests.integration.deployments import PATIENCE, POOL_STORES, REDIS_REDIS_POSTGRES

METRICS = {"METRICS": "1"}


def attempts(tally: Tally) -> Counter[str]:
    """How many attempts were counted, by outcome."""
    found: Counter[str] = Counter()
    for (name, *labels), count in tally.counts.items():
        if name == "attempts":
            found[labels[1]] += count
    return found


def recorded(scene: CrashDeployment) -> Counter[str]:
    """How many attempts the records have, by how they ended."""
    return Counter(each.ended for status in scene.client.matching() for each in status.attempts)


@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent"])
def test_a_warm_shutdown_loses_no_count(
    pool: str, scene_factory: CrashDeploymentFactory, name: str
) -> None:
    if pool == "gevent":
        pytest.importorskip("gevent")
    scene = scene_factory(POOL_STORES[pool], start=False, env=METRICS, concurrency=3)
    scene.worker.pool = pool  # type: ignore[assignment]
    scene.start()
    results = [scene.tasks.work.delay(f"{name}-{number}") for number in range(20)]
    for result in results:
        result.get(timeout=PATIENCE)
    scene.worker.stop(timeout=60)
    counts = open_metrics(scene.client._records).read()
    assert attempts(counts.tally) == recorded(scene) == {"returned": 20}
    assert sum(counts.tally.spans["run", scene.tasks.work.name][:-1]) == 20
    assert counts.processes == 0


def test_counts_and_records_agree_after_kills(
    scene_factory: CrashDeploymentFactory, name: str
) -> None:
    scene = scene_factory(REDIS_REDIS_POSTGRES, env=METRICS, concurrency=4)
    gate = scene.gate()
    stands = scene.tasks.work.delay(f"{name}-stands", gate=str(gate))
    (begun,) = scene.wait_for("begin", name=f"{name}-stands")
    kill(begun["pid"])
    scene.wait_for("begin", 2, name=f"{name}-stands")
    gate.touch()
    stands.get(timeout=PATIENCE)
    # The record has its last attempt only, so the crash must be counted before that.
    metrics = open_metrics(scene.client._records)
    wait_until(lambda: "crashed" in attempts(metrics.read().tally), PATIENCE, "the count")
    results = [scene.tasks.work.delay(f"{name}-{number}") for number in range(60)]
    for result in results:
        result.get(timeout=PATIENCE)
    scene.kill_worker()
    while metrics.fold(silent=0.0):
        pass
    tally = metrics.read().tally
    assert attempts(tally) == recorded(scene) == {"returned": 61, "crashed": 1}
    assert tally.counts["crashes", scene.tasks.work.name] == 1
    assert not [series for series in tally.counts if series[0] == "duplicate_terminal_states"]
