"""A call with ``lease_runs="each"`` is killed in its effect, and another call takes the key over
before it comes again.
"""

from typing import Any

import pytest
import redis

from celery_leases import LeaseStatus, Uncertain
from celery_leases.testing.waits import wait_until
from tests.crash.conftest import MakeScene
from tests.crash.crash_deployments import Scene
from tests.integration.deployments import spelled
from tests.integration.payments import Provider

INVOICING = "tests.apps.invoicing"
NEVER = 3600.0
COMBINATIONS = (("redis", "redis", "postgres"), ("redis", "database", "sqlite"))


@pytest.fixture(params=COMBINATIONS, ids=spelled)
def scene(request: pytest.FixtureRequest, scene_factory: MakeScene, provider: Provider) -> Scene:
    """A worker; :func:`give_back` makes the broker deliver the messages of a dead one."""
    return scene_factory(
        request.param,
        home=INVOICING,
        ttl=2,
        visibility=NEVER,
        env={"PROVIDER": provider.url, "VERIFY_AFTER": "0.5"},
    )


def give_back(scene: Scene) -> None:
    """The visibility timeout of all that was delivered and not acknowledged is over now."""
    with redis.Redis.from_url(scene.broker_url) as broker:
        # A call that is done is acknowledged a moment after its result is there.
        wait_until(
            lambda: broker.zcard("unacked_index") == 1, 20, "only the killed call to be held"
        )
        broker.zadd("unacked_index", dict.fromkeys(broker.zrange("unacked_index", 0, -1), 1.0))


def status(scene: Scene, name: str) -> LeaseStatus:
    return scene.client.status(f"pays:{name}", task=f"{INVOICING}.pays")


def taken_over(scene: Scene, provider: Provider, name: str, way: str) -> tuple[Any, list[str]]:
    """A call that was killed while it was charged, and both charges; another has finished."""
    provider.script(name, {"never": True})
    killed = scene.tasks.pays.delay(name, way=way)
    first = provider.wait_for("charged", name)["id"]
    scene.kill_worker()
    with redis.Redis.from_url(scene.broker_url) as broker:
        broker.delete("celery_leases:unacked:workers")  # nobody returns its message before that
    scene.another()
    (second,) = scene.tasks.pays.delay(name, way=way).get(timeout=30)["charges"]
    assert provider.charges(name) == [first, second]
    assert [effect.reference for effect in status(scene, name).effects] == [second]
    give_back(scene)
    return killed, [first, second]


def test_a_call_finds_its_charge_after_another(scene: Scene, provider: Provider, name: str) -> None:
    killed, charges = taken_over(scene, provider, name, "verify")
    assert killed.get(timeout=30) == {"charges": charges[:1]}
    assert provider.charges(name) == charges
    assert len(set(provider.keys(name))) == len(provider.keys(name)) == 2
    assert provider.looks(name) == charges[:1]
    assert [
        (event["reference"], event["saved"]) for event in scene.events("charge", name=name)
    ] == [(charges[1], False), (charges[0], True)]


def test_who_cannot_look_waits_for_a_person(scene: Scene, provider: Provider, name: str) -> None:
    killed, charges = taken_over(scene, provider, name, "stop")
    with pytest.raises(Uncertain, match="is not known"):
        killed.get(timeout=30)
    found = status(scene, name)
    assert (found.state, [effect.state for effect in found.effects]) == ("uncertain", ["sent"])
    assert found.effects[0].idempotency_key == provider.keys(name)[0]
    assert provider.charges(name) == charges
    assert len(provider.keys(name)) == 2
