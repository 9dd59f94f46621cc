"""Leases behind Sentinel whose primary dies in the middle of a body, and in a cluster that loses a
node.
"""

from collections.abc import Iterator

import pytest
import redis

from celery_leases.keys import stored_key
from celery_leases.stores.redis.values import Keys
from celery_leases.testing.waits import wait_until
from tests.crash.conftest import MakeScene
from tests.support.servers import RedisCluster, RedisSentinels, RedisServer
from tests.support.servers.local import free_port

BROKER_APART = ("redis", "redis", "postgres")


@pytest.fixture
def sentinels(leases_redis: RedisServer) -> Iterator[RedisSentinels]:
    """A primary and a replica of the test's own; *leases_redis* is the broker."""
    with RedisSentinels() as started:
        yield started


@pytest.fixture
def cluster(leases_redis: RedisServer) -> Iterator[RedisCluster]:
    with RedisCluster() as started:
        yield started


def leave_behind(sentinels: RedisSentinels) -> None:
    """Cut the replica off from its primary, which the Sentinels would mend if they were awake."""
    for sentinel in sentinels.sentinels:
        sentinel.pause()
    (replica,) = (server for server in sentinels.servers if server is not sentinels.servers[0])
    with redis.Redis(port=replica.port) as admin:
        admin.replicaof("127.0.0.1", str(free_port()))


@pytest.mark.parametrize("replica", ["up to date", "left behind"])
def test_one_body_goes_on_over_a_failover(
    scene_factory: MakeScene, sentinels: RedisSentinels, name: str, replica: str
) -> None:
    """Its lease goes on at the promoted replica, or is asserted there again."""
    scene = scene_factory(
        BROKER_APART, ttl=10, visibility=30, concurrency=2, env={"LEASES_URL": sentinels.url}
    )
    warm = scene.gate()
    warm.touch()
    scene.tasks.checks.delay(f"{name}-warm", stop=str(warm)).get(
        timeout=20
    )  # so that the store is no new one
    if replica == "left behind":
        leave_behind(sentinels)
    stop, result = scene.hold("checks", name, by="stop")
    mine = scene.wait_for_state("checks", f"checks:{name}", "running")["owner"]
    (old,) = sentinels.servers[:1]
    old.kill()
    for sentinel in sentinels.sentinels:
        sentinel.resume()
    wait_until(lambda: sentinels.primary is not old, 30, "the failover")
    duplicate = scene.tasks.checks.delay(name, stop=str(stop))
    scene.wait_for_log(duplicate.id, "rescheduled in")

    def held_again() -> bool:
        holder = scene.holder("checks", f"checks:{name}")
        return holder is not None and holder.token == mine

    wait_until(held_again, 20, "the holder's lease")
    stop.touch()
    assert duplicate.get(timeout=40) == result.get(timeout=40)
    assert len(scene.events("begin", name=name)) == 1
    assert scene.events("lost", name=name) == []
    row = scene.done_once("checks", name)
    assert (row["attempt"], row["owner"]) == (1, mine)


def test_a_failover_longer_than_the_lease_ends_in_one_done_record(
    scene_factory: MakeScene, sentinels: RedisSentinels, name: str
) -> None:
    """Never two bodies at the same time."""
    scene = scene_factory(
        BROKER_APART, ttl=2, visibility=30, concurrency=2, env={"LEASES_URL": sentinels.url}
    )
    stop, result = scene.hold("checks", name, by="stop")
    for sentinel in sentinels.sentinels:
        sentinel.pause()
    (old,) = sentinels.servers[:1]
    old.kill()
    scene.wait_for("lost", name=name)
    for sentinel in sentinels.sentinels:
        sentinel.resume()
    scene.wait_for("begin", 2, name=name, timeout=60)
    stop.touch()
    assert result.get(timeout=40)["name"] == name
    scene.done_once("checks", name, crashes=0)


def test_a_cluster_that_loses_a_node_loses_its_leases_only(
    scene_factory: MakeScene, cluster: RedisCluster, name: str
) -> None:
    scene = scene_factory(
        BROKER_APART, ttl=3, visibility=30, concurrency=3, env={"LEASES_URL": cluster.url}
    )
    names = {}
    for number in range(100):
        key = stored_key(f"{scene.home}.checks", f"checks:{name}-{number}")
        names.setdefault(
            cluster.node_of(Keys("celery_leases", clustered=True).lease(key)), f"{name}-{number}"
        )
    assert len(names) == 3
    gone, *others = cluster.nodes
    stop = scene.gate()
    results = {
        node: scene.tasks.checks.delay(names[node], stop=str(stop)) for node in cluster.nodes
    }
    for node in cluster.nodes:
        scene.wait_for("begin", name=names[node])
    gone.kill()
    scene.wait_for("lost", name=names[gone])
    before = {node: scene.holder("checks", f"checks:{names[node]}") for node in others}
    scene.wait_for_log(results[gone].id, "rescheduled in", 2)  # so that the others outlive the ttl
    for node in others:
        holder, was = scene.holder("checks", f"checks:{names[node]}"), before[node]
        assert holder is not None
        assert was is not None
        assert holder.token == was.token
    gone.start()
    stop.touch()
    for node in cluster.nodes:
        assert results[node].get(timeout=60)["name"] == names[node]
        assert len(scene.events("begin", name=names[node])) == (2 if node is gone else 1)
        scene.done_once("checks", names[node])
