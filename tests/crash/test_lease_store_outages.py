"""The Redis with the leases freezes, dies, or loses its data while a body runs."""

import time

import pytest
import redis

from celery_leases.keys import stored_key
from celery_leases.testing.waits import wait_until
from tests.crash.conftest import MakeScene
from tests.crash.crash_deployments import Scene
from tests.integration.deployments import spelled
from tests.support.servers import RedisServer

ELSEWHERE = ("rabbit", "redis", "postgres")


@pytest.fixture
def scene(scene_factory: MakeScene, own_redis: RedisServer) -> Scene:
    """Broker, records and leases are in servers of their own."""
    return scene_factory(ELSEWHERE, ttl=3, env={"LEASES_URL": own_redis.url})


@pytest.mark.parametrize("how", ["frozen", "killed"])
def test_an_outage_of_the_lease_store_interrupts_a_body_and_its_work_is_done_later(
    scene: Scene, own_redis: RedisServer, name: str, how: str
) -> None:
    stop, result = scene.hold("checks", name, by="stop")
    away = time.monotonic()
    own_redis.pause() if how == "frozen" else own_redis.kill()
    (lost,) = scene.wait_for("lost", name=name)
    assert lost["error"] == "LeaseLost"
    assert lost["t"] - away < scene.ttl
    scene.wait_for_log(result.id, "rescheduled in")
    scene.wait_for_state("checks", f"checks:{name}", "pending")
    # The copy is delivered while the store is still down, cannot acquire, and is rescheduled for
    # longer.
    scene.wait_for_log(result.id, "rescheduled in", 2)
    assert any("WARNING" in line and "lease store" in line for line in scene.log("rescheduled in"))
    assert len(scene.events("begin", name=name)) == 1
    stop.touch()
    own_redis.resume() if how == "frozen" else own_redis.start()
    back = time.monotonic()
    assert result.get(timeout=40)["name"] == name
    row = scene.done_once("checks", name, crashes=0)
    assert row["attempt"] == 1
    (_, again) = scene.events("begin", name=name)
    print(
        f"told after {lost['t'] - away:.2f} s, away {back - away:.1f} s, run again {again['t'] - back:.1f} s later"
    )


@pytest.mark.parametrize("combination", [ELSEWHERE, ("redis", "redis", "postgres")], ids=spelled)
def test_a_body_keeps_its_lease_when_the_store_is_flushed(
    scene_factory: MakeScene, own_redis: RedisServer, name: str
) -> None:
    scene = scene_factory(ttl=3, visibility=30, concurrency=2, env={"LEASES_URL": own_redis.url})
    gate, result = scene.hold("work", name)
    mine = scene.holder("work", f"work:{name}")
    with redis.Redis.from_url(own_redis.url) as client:
        client.flushall()
    duplicate = scene.tasks.work.delay(name, gate=str(gate))
    scene.wait_for_log(duplicate.id, "rescheduled in")
    again = _wait_for_holder(scene, name, "work")
    assert mine is not None
    assert again == mine.token
    gate.touch()
    value = result.get(timeout=20)
    assert duplicate.get(timeout=20) == value
    assert len(scene.events("begin", name=name)) == 1
    assert scene.done_once("work", name)["fence"] == value["fence"]
    with redis.Redis.from_url(own_redis.url) as client:
        client.flushall()
    assert scene.tasks.work.delay(name, gate=str(gate)).get(timeout=20) == value
    assert len(scene.events("begin", name=name)) == 1


def test_a_newcomer_with_a_shorter_ttl_takes_nothing_over_after_a_flush(
    scene_factory: MakeScene, own_redis: RedisServer, name: str
) -> None:
    """The store is older than the newcomer's ttl, and the holder lives."""
    scene = scene_factory(ELSEWHERE, ttl=15, visibility=60, env={"LEASES_URL": own_redis.url})
    stop, result = scene.hold("checks", name, by="stop")
    scene.another(env={"TTL": "1"})
    mine = scene.holder("checks", f"checks:{name}")
    lease = f"celery_leases:{{{stored_key('tests.apps.leased.checks', f'checks:{name}')}}}:lease"
    with redis.Redis.from_url(own_redis.url) as client:
        wait_until(
            lambda: client.pttl(lease) > 14_000, 10, "a renewal, so that the next one is 5 s away"
        )
        client.flushall()
        scene.tasks.work.delay(f"{name}-other").get(
            timeout=20
        )  # a worker has noticed that the store was empty
        born = client.pttl("celery_leases:epoch")
        wait_until(
            lambda: born - client.pttl("celery_leases:epoch") > 1_200, 10, "the newcomer's ttl"
        )
    duplicate = scene.tasks.checks.delay(name, stop=str(stop))
    scene.wait_for_log(duplicate.id, "rescheduled in")
    again = _wait_for_holder(scene, name)
    assert mine is not None
    assert again == mine.token
    stop.touch()
    assert result.get(timeout=20)["name"] == name
    assert len(scene.events("begin", name=name)) == 1
    scene.done_once("checks", name, crashes=0)


def test_broker_and_leases_on_one_redis_that_dies_with_its_data_on_disk(
    scene_factory: MakeScene, durable_redis: RedisServer, name: str
) -> None:
    scene = scene_factory(
        ("redis", "redis", "postgres"), urls={"redis": durable_redis.url}, ttl=2, visibility=3
    )
    stop, result = scene.hold("checks", name, by="stop")
    durable_redis.kill()
    scene.wait_for("lost", name=name)
    scene.wait_for_state("checks", f"checks:{name}", "pending")
    stop.touch()
    durable_redis.start()
    back = time.monotonic()
    scene.wait_for("end", name=name, timeout=40)
    scene.done_once("checks", name)
    scene.wait_until_drained()
    assert result.get(timeout=20)["name"] == name
    print(f"done {scene.events('end', name=name)[0]['t'] - back:.1f} s after the restart")


def _wait_for_holder(scene: Scene, name: str, task: str = "checks") -> str:
    wait_until(lambda: scene.holder(task, f"{task}:{name}") is not None, 10, "a holder")
    holder = scene.holder(task, f"{task}:{name}")
    assert holder is not None
    return holder.token
