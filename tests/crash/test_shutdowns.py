"""Warm and cold shutdowns where bodies share the worker's process; those of prefork are in
``test_deploys.py``.
"""

import signal
import time
from contextlib import suppress

import celery
import pytest
from celery.exceptions import TaskRevokedError

from tests.crash.conftest import MakeScene
from tests.crash.crash_deployments import Scene
from tests.integration.deployments import BOTH_WAYS, POOL_STORES, spelled

POOLS = [pool for pool in POOL_STORES if pool != "prefork"]

BEFORE_5_7 = "Celery's own handler of a cold shutdown fails before 5.7 on solo and under gevent; the bodies end first"
of_5_7 = pytest.mark.skipif(celery.VERSION < (5, 7), reason=BEFORE_5_7)


@pytest.fixture
def scene(pool: str, scene_factory: MakeScene) -> Scene:
    """A worker of that pool with one body at a time."""
    if pool in ("gevent", "eventlet"):
        pytest.importorskip(pool)
    scene = scene_factory(POOL_STORES[pool], visibility=5, start=False)
    scene.worker.pool = pool  # type: ignore[assignment]
    scene.start()
    return scene


@pytest.mark.parametrize("pool", POOLS)
def test_a_warm_shutdown_waits_for_the_body_and_renews_its_lease_meanwhile(
    scene: Scene, name: str, pool: str
) -> None:
    gate, result = scene.hold("work", name)
    (begun,) = scene.events("begin", name=name)
    mine = scene.holder("work", f"work:{name}")
    scene.worker.kill(signal.SIGTERM)
    told = time.monotonic()
    holders = set()
    while time.monotonic() < told + 2 * scene.ttl:
        holder = scene.holder("work", f"work:{name}")
        holders.add(holder.token if holder is not None else None)
    assert mine is not None
    assert holders == {mine.token}
    gate.touch()
    assert scene.worker.wait(20) == 0
    assert result.get(timeout=20)["fence"] == begun["fence"]
    assert scene.done_once("work", name)["attempt"] == 1


@pytest.mark.parametrize(
    "pool", [pool for pool in POOLS if pool != "eventlet"]
)  # whose cold shutdown may hang
def test_a_cold_shutdown_loses_nothing(scene: Scene, name: str, pool: str) -> None:
    if pool in ("solo", "gevent") and celery.VERSION < (5, 7):
        pytest.skip(BEFORE_5_7)
    gate, result = scene.hold("work", name)
    scene.worker.kill(signal.SIGQUIT)
    if pool == "threads":
        scene.worker.wait_for_log("does not implement kill_job", 20)  # Celery's own words
        assert scene.is_held("work", f"work:{name}")
    else:
        row = scene.wait_for_state("work", f"work:{name}", "pending")
        assert (row["ended"], row["attempt"], row["crashes"]) == ("lost", 0, 0)
        assert not scene.is_held("work", f"work:{name}")
    gate.touch()
    scene.worker.wait(30)
    scene.another(pool=pool)
    assert result.get(timeout=30)["name"] == name
    assert scene.done_once("work", name)["attempt"] == 1


@pytest.mark.both_lease_stores
@pytest.mark.parametrize("combination", BOTH_WAYS, ids=spelled)
def test_a_further_signal_after_a_cold_shutdown_of_threads_gives_the_attempts_back(
    scene_factory: MakeScene, name: str
) -> None:
    scene = scene_factory(visibility=5, start=False)
    worker = scene.another(pool="threads", concurrency=2, env={"IGNORE_SIGINT_AT_EXIT": "1"})
    gate = scene.gate()
    names = [f"{name}-{number}" for number in range(2)]
    results = [scene.tasks.work.delay(each, gate=str(gate)) for each in names]
    scene.wait_for("begin", 2)
    worker.kill(signal.SIGQUIT)
    worker.wait_for_log("does not implement kill_job", 20)
    for _ in range(10):
        worker.kill(signal.SIGINT)
        with suppress(TimeoutError):
            assert worker.wait(2) == 1
            break
    for each in names:
        row = scene.row("work", f"work:{each}")
        assert (row["state"], row["ended"], row["crashes"]) == ("pending", "interrupted", 0)
        assert not scene.is_held("work", f"work:{each}")
    gate.touch()
    scene.another()
    for each, result in zip(names, results, strict=True):
        assert result.get(timeout=30)["name"] == each
        assert scene.done_once("work", each)["attempt"] == 1


@pytest.mark.parametrize(
    "pool", ["gevent"]
)  # the only other pool whose bodies a revoke reaches is eventlet's
def test_a_revoked_greenlet_stays_revoked(scene: Scene, name: str, pool: str) -> None:
    _, result = scene.hold("work", name)
    result.revoke(terminate=True)
    row = scene.wait_for_state("work", f"work:{name}", "pending")
    assert (row["ended"], row["attempt"], row["crashes"]) == ("interrupted", 0, 0)
    with pytest.raises(TaskRevokedError):
        result.get(timeout=20)
    scene.wait_until_drained()
    assert len(scene.events("begin", name=name)) == 1


@of_5_7
@pytest.mark.parametrize("step", ["prerun", "claim", "settle", "publish", "store"])
@pytest.mark.parametrize("pool", ["gevent", "eventlet"])
def test_a_cold_shutdown_cuts_no_step_around_a_body_in_a_greenlet(
    scene_factory: MakeScene, name: str, pool: str, step: str
) -> None:
    pytest.importorskip(pool)
    scene = scene_factory(
        POOL_STORES[pool], module="tests.apps.shutdown_failpoints", start=False, concurrency=4
    )
    worker = scene.another(pool=pool, env={"STEP": step})
    gate = scene.gate()
    results = [scene.tasks.work.delay(name, gate=str(gate))]
    if step == "publish":
        scene.wait_for("begin", name=name)
        results.append(scene.tasks.work.delay(name, gate=str(gate)))
    else:
        gate.touch()
    scene.wait_for("halted", step=step)
    worker.kill(signal.SIGQUIT)
    scene.wait_for("went on", step=step)
    gate.touch()
    worker.wait(30)
    scene.another(pool="prefork")
    assert [result.get(timeout=30)["name"] for result in results] == [name] * len(results)
    assert scene.done_once("work", name)["attempt"] == 1


@of_5_7
@pytest.mark.parametrize("step", ["claim", "settle"])
@pytest.mark.parametrize("pool", ["gevent", "eventlet"])
def test_the_signal_of_a_cold_shutdown_may_interrupt_any_greenlet(
    scene_factory: MakeScene, name: str, pool: str, step: str
) -> None:
    """In one of its greenlets Celery's handler would wait for itself."""
    pytest.importorskip(pool)
    scene = scene_factory(
        POOL_STORES[pool], module="tests.apps.shutdown_failpoints", start=False, concurrency=4
    )
    worker = scene.another(pool=pool, env={"STEP": step, "SIGNALS": "1"})
    result = scene.tasks.work.delay(name)
    scene.wait_for("went on", step=step)
    worker.wait(30)
    scene.another(pool="prefork")
    assert result.get(timeout=30)["name"] == name
    assert scene.done_once("work", name)["attempt"] == 1
