"""Every pool and every way to die in it: the guarantees hold, one body ends, and no resource leaks.

Stalls that a process survives are in ``tests/integration/test_pool_stalls.py``.
"""

from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import text

from celery_leases.testing.waits import wait_until
from tests.crash.conftest import MakeScene
from tests.crash.crash_deployments import Scene, corrected, kill
from tests.integration.deployments import POOL_STORES, REDIS_REDIS_POSTGRES
from tests.integration.process_resources import resource_counts, wait_until_released

DYING = "tests.apps.blocking_bodies"
TTL = 2
NOTICED = 3.0
"""Seconds within which a body must notice the loss on a busy machine; usually milliseconds."""


def chosen(pools: tuple[str, ...]) -> Any:
    """A parameter for each of *pools*."""
    return pytest.mark.parametrize("pool", pools)


@pytest.fixture
def scene(pool: str, scene_factory: MakeScene) -> Scene:
    """A worker of that pool for one body at a time, to be hurt."""
    skip_without(pool)
    scene = scene_factory(POOL_STORES[pool], home=DYING, ttl=TTL, start=False)
    scene.worker.pool = pool  # type: ignore[assignment]
    scene.start()
    return scene


def skip_without(pool: str) -> None:
    """Skip where the pool's library is missing."""
    if pool in ("gevent", "eventlet"):
        pytest.importorskip(pool)


@chosen(("prefork",))  # the others have no child
def test_a_killed_child_leaves_its_work_and_nothing_else(scene: Scene, name: str) -> None:
    before = None
    for number in range(3):
        gate, each = scene.gate(), f"{name}-{number}"
        result = scene.tasks.stands.delay(each, str(gate))
        (first,) = scene.wait_for("begin", name=each)
        kill(first["pid"])
        second = scene.wait_for("begin", 2, name=each)[1]
        assert (second["attempt"], second["previous"], second["id"]) == (2, "crashed", first["id"])
        gate.touch()
        assert result.get(timeout=20)["fence"] == second["fence"]
        scene.done_once("stands", each, crashes=1)
        if before is None:  # the first death starts a thread, and connects to the stores
            before = resource_counts(scene.worker.pid)
    assert before is not None
    wait_until_released(scene.worker.pid, before)


@chosen(tuple(POOL_STORES))
def test_a_killed_worker_leaves_its_work(scene: Scene, name: str, pool: str) -> None:
    gate = scene.gate()
    result = scene.tasks.stands.delay(name, str(gate))
    (first,) = scene.wait_for("begin", name=name)
    kill(scene.worker.pid)
    scene.another(pool=pool)
    second = scene.wait_for("begin", 2, name=name)[1]
    assert (second["attempt"], second["previous"], second["id"]) == (2, "abandoned", first["id"])
    gate.touch()
    assert result.get(timeout=20)["fence"] == second["fence"]
    scene.done_once("stands", name, crashes=1)


@chosen(("gevent",))  # eventlet's worker has the same loop
def test_a_killed_green_worker_on_redis_leaves_its_work_to_one_of_another_pool(
    scene_factory: MakeScene, name: str, pool: str
) -> None:
    """Celery's loop for greenlets never looks for messages of a dead worker on Redis."""
    skip_without(pool)
    scene = scene_factory(REDIS_REDIS_POSTGRES, home=DYING, ttl=TTL, start=False)
    green = scene.another(pool=pool)
    gate = scene.gate()
    result = scene.tasks.stands.delay(name, str(gate))
    (first,) = scene.wait_for("begin", name=name)
    kill(green.pid)
    scene.another(pool="prefork")
    second = scene.wait_for("begin", 2, name=name)[1]
    assert (second["attempt"], second["previous"], second["id"]) == (2, "abandoned", first["id"])
    gate.touch()
    assert result.get(timeout=20)["fence"] == second["fence"]
    scene.done_once("stands", name, crashes=1)


@chosen(tuple(POOL_STORES))
def test_a_process_that_is_paused_beyond_the_ttl_is_interrupted_and_refused(
    scene_factory: MakeScene, name: str, pool: str
) -> None:
    skip_without(pool)
    scene = scene_factory(POOL_STORES[pool], home=DYING, ttl=TTL, visibility=60, start=False)
    scene.worker.pool = pool  # type: ignore[assignment]
    scene.start()
    gate, checks = scene.gate(), pool == "threads"
    zombie = scene.tasks.stands.delay(name, str(gate), checks)
    (first,) = scene.wait_for("begin", name=name)
    scene.worker.pause(pid=first["pid"])
    scene.another(pool=pool)
    result = scene.tasks.stands.delay(name, str(gate), checks)
    second = scene.wait_for("begin", 2, name=name)[1]
    gate.touch()
    answer = result.get(timeout=20)
    assert answer["fence"] == second["fence"] > first["fence"]
    gate.unlink()
    before = scene.known("stands", name)
    scene.worker.resume(pid=first["pid"])
    (lost,) = scene.wait_for("lost", timeout=NOTICED, name=name)
    assert lost["pid"] == first["pid"]
    scene.wait_for_log(zombie.id, "refused: a later attempt owns the key")
    assert zombie.get(timeout=20) == answer
    assert scene.known("stands", name) == corrected(before)
    scene.done_once("stands", name, crashes=1)


@chosen(("prefork",))  # the others have no child
def test_children_of_one_task_leave_nothing(scene_factory: MakeScene, name: str, pool: str) -> None:
    scene = scene_factory(POOL_STORES[pool], home=DYING, ttl=TTL, visibility=60, start=False)
    worker = scene.another(concurrency=2, options=("--max-tasks-per-child", "1"))
    gate = scene.gate()
    gate.touch()
    assert scene.tasks.stands.delay(f"{name}-warm", str(gate)).get(timeout=20)
    (warm,) = scene.events("begin", name=f"{name}-warm")
    # Until the next child exists, its pipes are missing in the count.
    wait_until(lambda: warm["pid"] not in worker.children(), 20.0, "the end of the first child")
    worker.wait_for_children(timeout=20.0)
    before = resource_counts(worker.pid)
    names = [f"{name}-{number}" for number in range(30)]
    results = [scene.tasks.stands.delay(each, str(gate)) for each in names]
    for each, result in zip(names, results, strict=True):
        assert result.get(timeout=60)["name"] == each
        scene.done_once("stands", each)
    begun = [event for each in names for event in scene.events("begin", name=each)]
    assert len(begun) == len({event["pid"] for event in begun}) == 30
    wait_until_released(worker.pid, before)


@pytest.mark.nightly
def test_children_of_one_task_purge_what_is_over(scene_factory: MakeScene, name: str) -> None:
    scene = scene_factory(("redis", "redis", "postgres"), visibility=60, start=False)
    columns = "task, key, state, fence, owner, call_id, holder, lease_store, attempt"
    old = "'t', 'k', 'done', 1, '', '', '', '', 1, 1, 1, 1"
    with scene._engine.connect() as connection:
        connection.execute(
            text(
                f"INSERT INTO celery_leases_records (stored_key, {columns}, created_at, started_at, "  # noqa: S608
                f"expires_at) SELECT 'old:' || n, {old} FROM generate_series(1, 1000) AS n"
            )
        )
    scene.another(concurrency=2, options=("--max-tasks-per-child", "1"))
    left = text("SELECT count(*) FROM celery_leases_records WHERE expires_at = 1")

    def gone() -> bool:
        scene.tasks.work.delay(f"{name}-{uuid4().hex}").get(timeout=30)
        with scene._engine.connect() as connection:
            return not connection.execute(left).scalar_one()

    wait_until(gone, 60, "the old records to be purged")
