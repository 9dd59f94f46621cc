"""The write of a mark that names the latest copy of a waiting call is lost; no call may be lost."""

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from celery.result import AsyncResult

from celery_leases.decide.copies import Copy, waiter_mark
from celery_leases.keys import stored_key
from celery_leases.stores.redis import lease_scripts
from celery_leases.worker import processes
from celery_leases.worker.publisher import OVER
from tests.crash.conftest import MakeScene
from tests.crash.crash_deployments import Scene
from tests.crash.cutting_proxy import CuttingProxy
from tests.integration.cooldowns import COOLING, OK, limited
from tests.integration.deployments import PATIENCE, got

NOTING = lease_scripts.SWAP_MARK.sha.encode()


@pytest.fixture
def proxy(leases_redis: object) -> Iterator[CuttingProxy]:
    """Between the worker and its lease store."""
    made = CuttingProxy(urlsplit(leases_redis.url).port or 6379)  # type: ignore[attr-defined]
    yield made
    made.close()


def scene_of(factory: MakeScene, proxy: CuttingProxy, **options: object) -> Scene:
    """A worker whose leases are behind the proxy; it waits in hops of a second."""
    leases = {"LEASES_URL": f"redis://127.0.0.1:{proxy.port}/15"}
    return factory(("redis", "redis", "sqlite"), env=leases, concurrency=2, **options)


def held_and_waited_for(scene: Scene, name: str) -> tuple[Path, AsyncResult, AsyncResult]:
    """A key that one call holds, and that another has been rescheduled for."""
    gate, holder = scene.hold("work", name)
    waiter = scene.tasks.work.delay(name, gate=str(gate))
    scene.wait_for_log(waiter.id, "rescheduled in")
    return gate, holder, waiter


def test_a_call_that_waits_for_a_key_outlives_a_mark_that_was_not_set(
    scene_factory: MakeScene, proxy: CuttingProxy, name: str
) -> None:
    """Its second copy is not taken for superfluous because of the first one."""
    scene = scene_of(scene_factory, proxy, ttl=15, log_level="DEBUG")
    gate, holder, waiter = held_and_waited_for(scene, name)
    proxy.cut(NOTING, before=True)
    assert proxy.was_cut.wait(PATIENCE)
    scene.wait_for_log(waiter.id, "rescheduled in", 4)
    gate.touch()
    assert got(waiter) == got(holder)
    assert "waits already" not in "".join(scene.log(waiter.id))


def test_a_call_that_cools_down_outlives_a_mark_that_was_not_set(
    scene_factory: MakeScene, proxy: CuttingProxy, name: str
) -> None:
    scene = scene_of(scene_factory, proxy, home=COOLING)
    result = scene.tasks.resumes.delay(name, [limited(4), OK])
    scene.wait_for_log(result.id, "rescheduled in")
    proxy.cut(NOTING, before=True)
    assert proxy.was_cut.wait(PATIENCE)
    assert got(result) == {"name": name, "paid": 2}


def test_a_message_with_an_unreadable_header_is_not_dropped_for_a_mark(
    scene_factory: MakeScene, proxy: CuttingProxy, name: str
) -> None:
    scene = scene_of(scene_factory, proxy, ttl=15)
    gate, holder = scene.hold("work", name)
    marks, stored = (
        processes.process_of(scene.app).leases,
        stored_key(scene.tasks.work.name, f"work:{name}"),
    )
    assert marks.swap_mark(stored, waiter_mark(name, 0), None, f"7 {'f' * 32}", 60)
    headers = {"celery_leases": {"v": 99}}
    again = scene.tasks.work.apply_async(
        (name,), {"gate": str(gate)}, task_id=name, headers=headers
    )
    scene.wait_for_log(again.id, "key ")
    gate.touch()
    assert got(again) == got(holder)


def test_the_mark_of_an_ended_call_drops_no_new_message_with_the_same_id(
    scene_factory: MakeScene, proxy: CuttingProxy, name: str
) -> None:
    scene = scene_of(scene_factory, proxy, ttl=15)
    gate, holder, waiter = held_and_waited_for(scene, name)
    marks, stored = (
        processes.process_of(scene.app).leases,
        stored_key(scene.tasks.work.name, f"work:{name}"),
    )
    assert Copy.read(marks.mark(stored, waiter_mark(waiter.id, 0)))
    gate.touch()
    assert got(waiter) == got(holder)
    assert marks.mark(stored, waiter_mark(waiter.id, 0)) == OVER
