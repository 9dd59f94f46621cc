"""A lease store that evicts leases of living bodies: what counts as a crash, and what does not."""

import time

import pytest
import redis

from celery_leases.stores.redis.lease_scripts import EPOCH_MS
from celery_leases.testing.waits import wait_until
from tests.crash.conftest import MakeScene
from tests.integration.deployments import REDIS_REDIS_POSTGRES
from tests.support.servers import RedisServer

EPOCH = "celery_leases:epoch"
OLD = EPOCH_MS - 3_600_000


def evict(admin: redis.Redis) -> None:
    """Let the server evict all keys that expire. A full server evicts the epoch last."""
    epoch = admin.get(EPOCH)
    admin.config_set("maxmemory", 1)
    with pytest.raises(redis.ResponseError):
        admin.set("the server", "is full")
    admin.config_set("maxmemory", 0)
    assert epoch is not None
    admin.set(EPOCH, epoch, px=OLD)


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_a_body_that_lives_is_no_crash_although_its_lease_was_evicted(
    scene_factory: MakeScene, name: str, own_redis: RedisServer, pool: str
) -> None:
    urls = {"LEASES_URL": own_redis.url}
    scene = scene_factory(REDIS_REDIS_POSTGRES, ttl=3, visibility=60, start=False, env=urls)
    scene.another(pool=pool, concurrency=2)
    gate, first = scene.hold("work", name)
    second = scene.tasks.work.delay(name, gate=str(gate))
    with redis.Redis.from_url(own_redis.url) as admin:
        admin.config_set("maxmemory-policy", "volatile-ttl")

        def taken_over() -> bool:
            evict(admin)
            time.sleep(0.01)
            return len(scene.events("begin", name=name)) > 1

        wait_until(taken_over, 20, "the second call to take over")
    gate.touch()
    assert second.get(timeout=20) == first.get(timeout=20)
    wait_until(lambda: "does not count any more" in scene.logs(), 20, "the crash to be taken back")
    row = scene.wait_for_state("work", f"work:{name}", "done")
    assert (row["crashes"], row["previous_ended"]) == (0, "lost")
    assert "without reporting an outcome" not in scene.logs()
