"""The leases of workers on other brokers than one plain Redis: with Sentinel, with a key prefix and
an ACL, shared by two apps, and one that a worker does not reach for a while.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.exceptions import RedisError

from celery_leases.testing.waits import wait_until
from tests.crash.conftest import MakeScene
from tests.crash.crash_deployments import Scene
from tests.crash.cutting_proxy import StallingProxy
from tests.crash.test_worker_leases import AN_HOUR, SOON, TTL, begins
from tests.integration.deployments import REDIS_DATABASE_SQLITE
from tests.support.servers import LocalServer, RedisSentinels
from tests.unit.doc_pages import page

PREFIX = "app1:"
OF_KOMBU = (
    "+select +ping +client +hello +info +brpop +lpush +rpush +llen +sadd +srem +smembers +publish "
    "+subscribe +psubscribe +unsubscribe +punsubscribe +evalsha +unwatch +get +set +script "
    "+zrevrangebyscore"  # before kombu 5.6
)


def on(scene: Scene, url: str, **options: Any) -> dict[str, str]:
    """The environment of a worker on another broker, which the caller of *scene* uses too."""
    scene.app.conf.update(broker_url=url, broker_transport_options=options)
    return {"CELERY_BROKER_URL": url, "BROKER_OPTIONS": json.dumps(options), "PREFETCH": "8"}


def made(factory: MakeScene, server: LocalServer, ttl: float = TTL) -> Scene:
    """A deployment without a worker, with leases in its database."""
    urls = {"redis": server.url}
    scene = factory(REDIS_DATABASE_SQLITE, urls=urls, ttl=ttl, visibility=AN_HOUR, start=False)
    scene.workers.clear()
    return scene


def registered(client: redis.Redis, prefix: str = "") -> int:
    """How many messages all workers have registered; 0 while the broker does not answer."""
    try:
        keys = [*client.scan_iter(f"{prefix}celery_leases:unacked:workers:*")]
        return sum(client.hlen(key) for key in keys)
    except RedisError:
        return 0


def begun(scene: Scene, name: str, queues: list[str]) -> tuple[Path, list[Any]]:
    """A call that runs, and one that waits behind it for each queue."""
    gate, first = scene.hold("work", f"{name}-0")
    calls = [
        scene.tasks.work.apply_async((f"{name}-{number}",), queue=queue)
        for number, queue in enumerate(queues, 1)
    ]
    return gate, [first, *calls]


def test_two_apps_share_a_broker_with_a_prefix_and_an_acl(
    scene_factory: MakeScene, own_redis: LocalServer, name: str
) -> None:
    """A worker of the other app returns messages to queues that it does not consume. The user has
    the documented rights, beside those that kombu needs.
    """
    (ours,) = re.findall(r"broker\* also needs `([^`]+)`", page("stores"))
    with redis.Redis.from_url(own_redis.url) as admin:
        rights = ("reset", "on", ">secret", f"~{PREFIX}*", "&*", *ours.split(), *OF_KOMBU.split())
        admin.execute_command("ACL", "SETUSER", "worker", *rights)
    scene, other = made(scene_factory, own_redis, 2.0), made(scene_factory, own_redis, 2.0)
    url = re.sub("//[^@]*@|//", "//worker:secret@", scene.redis_url, count=1)
    env = on(scene, url, global_keyprefix=PREFIX)
    scene.app.set_current()
    first = scene.another(env=env)
    side = scene.side_queue()
    scene.consume(side, first)
    gate, results = begun(scene, name, [scene.queue, scene.queue, side])
    with redis.Redis.from_url(scene.redis_url) as client:
        wait_until(lambda: registered(client, PREFIX) == 4, 20, "four messages to be registered")
        other.another(env=env)
        first.kill()
        wait_until(lambda: not client.hlen(f"{PREFIX}unacked"), SOON, "the messages to be returned")
        assert client.llen(PREFIX + scene.queue) == 3
        assert client.llen(PREFIX + side) == 1
        gate.touch()
        scene.consume(side, scene.another(env=env))
        for each in results:
            each.get(timeout=SOON)
        assert begins(scene, name) == [0, 0, 1, 2, 3]


@pytest.mark.nightly
def test_the_lease_survives_a_failover(
    scene_factory: MakeScene, own_redis: LocalServer, name: str
) -> None:
    """And what a worker has lost with its connection runs elsewhere. A worker that waits for a body
    at that moment may end: Celery 5.7 cannot close its connection then.
    """
    scene = made(scene_factory, own_redis)
    with RedisSentinels() as sentinels:
        env = on(scene, sentinels.url.partition("?")[0], master_name="leases")
        first = scene.another(env=env)
        gate, results = begun(scene, name, [scene.queue, scene.queue])
        second = scene.another(env=env)
        old = sentinels.primary
        with redis.Redis(port=old.port) as client:
            wait_until(lambda: registered(client) == 3, 20, "three messages to be registered")
            client.wait(1, 5000)
        old.kill()
        wait_until(lambda: sentinels.primary is not old, 30, "the failover")
        wait_until(lambda: begins(scene, name) == [0, 1, 2], 40, "the calls that did not run")
        assert second.alive
        first.kill()
        wait_until(lambda: begins(scene, name) == [0, 0, 1, 2], 2 * SOON, "the call to begin again")
        gate.touch()
        for each in results:
            each.get(timeout=SOON)


@pytest.fixture
def proxy(own_redis: LocalServer) -> Iterator[StallingProxy]:
    with StallingProxy(own_redis.port) as started:
        yield started


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_a_worker_that_does_not_reach_the_broker_for_a_while(
    scene_factory: MakeScene, own_redis: LocalServer, proxy: StallingProxy, name: str, pool: str
) -> None:
    """Its body runs on, as it has the lease of its key. The messages run elsewhere, and what the
    network delivers late changes nothing.
    """
    scene = made(scene_factory, own_redis, 2.0)
    url = scene.redis_url.replace(f":{own_redis.port}/", f":{proxy.port}/")
    env = {"CELERY_BROKER_URL": url, "PREFETCH": "8"}
    scene.worker = scene.another(env=env, pool=pool)
    gate, results = begun(scene, name, [scene.queue, scene.queue])
    with redis.Redis.from_url(scene.redis_url) as client:
        wait_until(lambda: registered(client) == 3, 20, "three messages to be registered")
        scene.another(pool=pool)
        proxy.stall()
        for each in results[1:]:
            each.get(timeout=SOON)
        proxy.resume()
        last = scene.tasks.work.delay(f"{name}-3")
        gate.touch()
        for each in (results[0], last):
            each.get(timeout=SOON)
        wait_until(lambda: not client.hlen("unacked"), SOON, "all messages to be acknowledged")
        wait_until(lambda: not registered(client), SOON, "no message to be registered")
        assert begins(scene, name) == [0, 1, 2, 3]
        scene.wait_until_drained()
