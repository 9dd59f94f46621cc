"""On a Redis broker with its default visibility timeout of an hour: a worker that is killed or
frozen, and another one that returns its messages when its lease has ended.
"""

import json
import os
import signal
import sys
from functools import partial

import pytest
import redis

from celery_leases.testing.waits import wait_until
from tests.crash.conftest import MakeScene
from tests.crash.crash_deployments import FAILING, Scene
from tests.integration.deployments import REDIS_DATABASE_SQLITE, REDIS_REDIS_POSTGRES, spelled
from tests.support.commands import run_command

TTL = 5.0
AN_HOUR = 3600.0
KILLS = int(os.environ.get("KILLS", "4"))
"""Workers that are killed while they fetch messages."""
SOON = TTL + 10.0
"""Seconds in which the messages of a dead worker have run elsewhere."""


def registered(client: redis.Redis) -> int:
    """How many messages all workers have registered that were not fetched again since."""
    keys = client.scan_iter("celery_leases:unacked:workers:*")
    times = [each for key in keys for each in client.hgetall(key).items()]
    return sum(float(time) == client.zscore("unacked_index", tag) for tag, time in times)


def begins(scene: Scene, name: str) -> list[int]:
    """Which of the calls have begun, in order of their numbers."""
    return sorted(
        int(event["name"].rpartition("-")[2])
        for event in scene.events("begin")
        if event["name"].startswith(name)
    )


@pytest.mark.parametrize("pool", ["prefork", "threads", "solo", "gevent", "eventlet"])
@pytest.mark.parametrize("combination", [REDIS_REDIS_POSTGRES, REDIS_DATABASE_SQLITE], ids=spelled)
def test_the_messages_of_a_killed_worker_run_soon(
    scene_factory: MakeScene, name: str, pool: str
) -> None:
    """What has begun begins again, what was fetched begins once; a plain message stays."""
    scene = scene_factory(ttl=TTL, visibility=AN_HOUR, start=False, env={"PREFETCH": "8"})
    scene.worker = scene.workers[0] = scene.new_worker(pool=pool, concurrency=1)
    scene.worker.start()
    held = scene.directory / "gate"
    result = scene.tasks.work.delay(f"{name}-0", gate=str(held))
    scene.wait_for("begin", name=f"{name}-0")
    results = [result, *(scene.tasks.work.delay(f"{name}-{number}") for number in (1, 2, 3))]
    with redis.Redis.from_url(scene.redis_url) as client:
        if pool in ("prefork", "threads"):
            wait_until(lambda: registered(client) == 4, 20, "four messages to be registered")
            scene.send("plain")
            wait_until(lambda: client.hlen("unacked") == 5, 20, "the plain message to be fetched")
        else:
            wait_until(lambda: registered(client) >= 1, 20, "the message to be registered")
        scene.another(pool=pool, concurrency=1)
        scene.kill_worker()
        wait_until(lambda: 0 in begins(scene, name)[1:], SOON, "the call to begin again")
        held.touch()
        for one in results:
            one.get(timeout=SOON)
        assert begins(scene, name) == [0, 0, 1, 2, 3]
        if pool in ("prefork", "threads"):
            wait_until(
                lambda: client.hlen("unacked") == 1, SOON, "the leased ones to be acknowledged"
            )
            assert not scene.events("plain")


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_what_a_worker_has_just_fetched_runs_soon_too(
    scene_factory: MakeScene, name: str, pool: str
) -> None:
    """A worker may be killed before it has registered a message; a plain message stays."""
    scene = scene_factory(
        REDIS_REDIS_POSTGRES,
        ttl=TTL,
        visibility=AN_HOUR,
        start=False,
        module=FAILING,
        env={"PREFETCH": "8"},
    )
    scene.workers.clear()
    scene.worker = scene.another(env=scene.failpoint("never registered"), pool=pool)
    gate, first = scene.hold("work", f"{name}-0")
    results = [first, *(scene.tasks.work.delay(f"{name}-{number}") for number in (1, 2, 3))]
    scene.send("plain")
    with redis.Redis.from_url(scene.redis_url) as client:
        wait_until(lambda: client.hlen("unacked") == 5, 20, "five messages to be fetched")
        assert not registered(client)
        scene.another(pool=pool)
        scene.kill_worker()
        wait_until(lambda: 0 in begins(scene, name)[1:], SOON, "the call to begin again")
        gate.touch()
        for one in results:
            one.get(timeout=SOON)
        assert begins(scene, name) == [0, 0, 1, 2, 3]
        wait_until(lambda: client.hlen("unacked") == 1, SOON, "the leased ones to be acknowledged")
        assert not scene.events("plain")


def test_what_a_failed_cold_shutdown_has_interrupted_runs_soon_too(
    scene_factory: MakeScene, name: str
) -> None:
    """Celery's handler of the signal fails with threads, wherever the worker is at that moment."""
    scene = scene_factory(
        REDIS_REDIS_POSTGRES, ttl=TTL, visibility=AN_HOUR, start=False, module=FAILING
    )
    scene.workers.clear()
    scene.worker = scene.another(env=scene.failpoint("noted"), pool="threads", concurrency=2)
    gate, first = scene.hold("work", f"{name}-0")
    second = scene.tasks.work.delay(f"{name}-1")
    scene.worker.wait_for_log("does not implement kill_job", 20)  # Celery's own words
    gate.touch()
    scene.worker.wait(30)
    with redis.Redis.from_url(scene.redis_url) as client:
        assert (client.hlen("unacked"), registered(client)) == (1, 0)
        scene.another()
        for one in (first, second):
            one.get(timeout=SOON)
        assert begins(scene, name) == [0, 1]


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_a_message_that_came_as_the_prefetch_limit_fell_runs_soon_too(
    scene_factory: MakeScene, name: str, pool: str
) -> None:
    """Kombu takes it out of its queue, and would leave it unread until another message ends."""
    by_brpop = {"polling_interval": 60, "priority_steps": [0]}
    waits = {"BROKER_OPTIONS": json.dumps(by_brpop)}
    scene = scene_factory(REDIS_REDIS_POSTGRES, ttl=TTL, visibility=AN_HOUR, start=False, env=waits)
    scene.workers.clear()
    scene.worker = scene.another(pool=pool)
    gate = scene.gate()
    first = scene.tasks.work.apply_async((f"{name}-0",), {"gate": str(gate)}, countdown=1)
    scene.wait_for("begin", name=f"{name}-0")
    second = scene.tasks.work.delay(f"{name}-1")
    with redis.Redis.from_url(scene.redis_url) as client:
        wait_until(lambda: client.hlen("unacked") == 2, SOON, "both messages to be noted")
        scene.kill_worker()
        gate.touch()
        scene.another(pool=pool)
        for one in (first, second):
            one.get(timeout=2 * SOON)
        assert begins(scene, name) == [0, 0, 1]


def kept(client: redis.Redis, queue: str) -> set[str]:
    """The ids of the calls whose messages are in the queue, or noted as unacknowledged."""
    stored = [json.loads(message) for message in client.lrange(queue, 0, -1)]
    noted = [json.loads(note)[0] for note in client.hvals("unacked")]
    return {message["headers"]["id"] for message in (*stored, *noted)}


def is_shorter(client: redis.Redis, queue: str, length: int) -> bool:
    """Whether no more messages than *length* are in the queue."""
    return int(client.llen(queue)) <= length


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_a_worker_that_is_killed_while_it_fetches_loses_no_message(
    scene_factory: MakeScene, name: str, pool: str
) -> None:
    """Kombu alone notes a message only after it has left its queue, and loses one at most kills."""
    much = {"PREFETCH": "2000"}
    scene = scene_factory(REDIS_REDIS_POSTGRES, ttl=60, visibility=AN_HOUR, start=False, env=much)
    gate = str(scene.gate())
    ids = {scene.tasks.work.delay(f"{name}-{number}", gate=gate).id for number in range(2000)}
    with redis.Redis.from_url(scene.redis_url) as client:
        for _ in range(KILLS):
            enough = client.llen(scene.queue) - 20
            worker = scene.another(pool=pool)
            wait_until(
                partial(is_shorter, client, scene.queue, enough), 20, "messages to be fetched"
            )
            worker.kill()
            worker.wait(20)
            assert client.llen(scene.queue), "the worker has fetched all"
            assert kept(client, scene.queue) == ids


@pytest.mark.parametrize("pool", ["prefork", "threads", "solo", "gevent", "eventlet"])
def test_a_worker_that_is_killed_while_it_waits_loses_no_message(
    scene_factory: MakeScene, name: str, pool: str
) -> None:
    """The message that comes stays in its queue."""
    scene = scene_factory(REDIS_REDIS_POSTGRES, ttl=60, visibility=AN_HOUR, start=False)
    scene.workers.clear()
    scene.worker = scene.another(pool=pool)
    scene.tasks.work.delay(f"{name}-0").get(timeout=SOON)
    with redis.Redis.from_url(scene.redis_url) as client:
        wait_until(lambda: not client.hlen("unacked"), 20, "the acknowledgement")
        scene.worker.pause()
        result = scene.tasks.work.delay(f"{name}-1")
        scene.worker.kill()
        scene.worker.wait(20)
        assert not client.hlen("unacked")
    scene.another(pool=pool)
    result.get(timeout=SOON)
    assert begins(scene, name) == [0, 1]


def test_a_frozen_worker_that_comes_back_loses_and_doubles_nothing(
    scene_factory: MakeScene, name: str
) -> None:
    """Its late acknowledgements do not remove the messages that run elsewhere."""
    scene = scene_factory(REDIS_REDIS_POSTGRES, ttl=2.0, visibility=AN_HOUR, env={"PREFETCH": "8"})
    gates = [scene.gate(), scene.gate()]
    first = scene.tasks.checks.delay(f"{name}-0", stop=str(gates[0]))
    scene.wait_for("begin", name=f"{name}-0")
    others = [scene.tasks.work.delay(f"{name}-{number}", gate=str(gates[1])) for number in (1, 2)]
    with redis.Redis.from_url(scene.redis_url) as client:
        wait_until(lambda: registered(client) == 3, 20, "three messages to be registered")
        scene.worker.pause()
        second = scene.another()
        scene.wait_for("begin", 2, name=f"{name}-0")
        scene.worker.resume()
        # The second worker holds the message of the call that it runs, although the first one has
        # ended its own run of it.
        scene.wait_for("lost", name=f"{name}-0")
        scene.wait_for_log(first.id, "refused: a later attempt owns the key")
        scene.wait_for_log(first.id, "] rescheduled")

        def all_registered() -> bool:
            return bool(registered(client) == client.hlen("unacked") == 4)

        wait_until(all_registered, 20, "the copy of the first call to be registered too")
        second.kill()
        second.wait(20)
        for gate in gates:
            gate.touch()
        for one in (first, *others):
            one.get(timeout=SOON)
        scene.wait_until_drained()
        assert not client.hlen("unacked")
        assert len(scene.events("end", name=f"{name}-0")) == 1


@pytest.mark.parametrize("how", ["warm", "cold"])
def test_a_worker_that_shuts_down_leaves_no_registration(
    scene_factory: MakeScene, name: str, how: str
) -> None:
    """Its lease is removed too."""
    scene = scene_factory(REDIS_REDIS_POSTGRES, ttl=TTL, visibility=AN_HOUR)
    result = scene.tasks.work.delay(name)
    result.get(timeout=20)
    with redis.Redis.from_url(scene.redis_url) as client:
        argv = [sys.executable, "-m", "celery", "-A", "tests.apps.leased", "leases", "workers"]
        shown = run_command([*argv, "--json"], env={**os.environ, **scene.env})
        (listed,) = map(json.loads, shown.stdout.splitlines())
        assert (listed["pid"], listed["messages"]) == (scene.worker.pid, 0)
        assert 0 < listed["lease_ends_in"] <= TTL
        assert "ends in" in run_command(argv, env={**os.environ, **scene.env}).stdout
        scene.worker.stop(signal.SIGTERM if how == "warm" else signal.SIGQUIT)
        assert not list(client.scan_iter("celery_leases:unacked:workers*"))
