"""Replies that arrive late: at a zombie, at an attempt that lost its lease, or during an outage of
the database.

A process that has lost its lease begins no effect. A reply to an effect that it began before is
recorded, unless another attempt has taken the intent over.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from celery_leases import LeaseStatus, PermanentFailure, Uncertain
from celery_leases.testing.waits import wait_until
from tests.crash.conftest import MakeScene
from tests.crash.crash_deployments import Scene
from tests.crash.cutting_proxy import CuttingProxy
from tests.integration.deployments import BOTH_WAYS, spelled
from tests.integration.payments import Provider
from tests.support.servers import PostgresServer

INVOICING = "tests.apps.invoicing"
OPTIONS: dict[str, Any] = {"home": INVOICING, "ttl": 2, "visibility": 60}
REDIS_LEASES = ("rabbit", "redis", "postgres")
DATABASE_LEASES = ("redis", "database", "postgres")


@pytest.fixture(params=BOTH_WAYS, ids=spelled)
def scene(request: pytest.FixtureRequest, scene_factory: MakeScene, provider: Provider) -> Scene:
    """A worker whose child will be paused; its message is not delivered again."""
    return scene_factory(request.param, env={"PROVIDER": provider.url, "LATER": "10"}, **OPTIONS)


def status(scene: Scene, task: str, name: str) -> LeaseStatus:
    return scene.client.status(f"{task}:{name}", task=f"{INVOICING}.{task}")


def charged(
    scene: Scene, provider: Provider, name: str, task: str, way: str
) -> tuple[Any, dict[str, Any], Any]:
    """A call whose reply the provider holds; its result, its event, and the gate."""
    gate = scene.gate()
    provider.script(name, {"hold": str(gate)}, dedupe=way == "dedupe")
    result = getattr(scene.tasks, task).delay(name, way)
    (begun,) = scene.wait_for("begin", name=name)
    provider.wait_for("charged", name)
    return result, begun, gate


@contextmanager
def paused(scene: Scene, pid: int, task: str, name: str) -> Iterator[None]:
    """Its process stands still from before the end of its lease to the end of the block."""
    scene.worker.pause(pid=pid)
    scene.wait_until_free(task, f"{task}:{name}")
    yield
    scene.worker.resume(pid=pid)


def test_a_zombie_begins_no_effect(scene: Scene, provider: Provider, name: str) -> None:
    gate = scene.gate()
    zombie = scene.tasks.flagged.delay(name, "stop", str(gate))
    (begun,) = scene.wait_for("begin", name=name)
    with paused(scene, begun["pid"], "flagged", name):
        gate.touch()
        scene.another()
        answer = scene.tasks.flagged.delay(name, "stop", str(gate)).get(timeout=30)
    (told,) = scene.wait_for("raised", name=name)
    assert (told["pid"], told["error"]) == (begun["pid"], "LeaseLost")
    assert zombie.get(timeout=30) == answer
    assert provider.charges(name) == [answer["charge"]]
    assert len(provider.lines("asked", name)) == 1


def test_a_reply_that_reaches_a_zombie_is_recorded_and_resolves_an_uncertain_effect(
    scene: Scene, provider: Provider, name: str
) -> None:
    zombie, begun, gate = charged(scene, provider, name, "flagged", "stop")
    with paused(scene, begun["pid"], "flagged", name):
        scene.another()
        with pytest.raises(Uncertain):
            scene.tasks.flagged.delay(name, "stop").get(timeout=30)
        assert [effect.state for effect in status(scene, "flagged", name).effects] == ["sent"]
        gate.touch()
        provider.wait_for("replied", name)
    told = scene.wait_for("raised", 2, name=name)[1]
    assert (told["pid"], told["error"]) == (begun["pid"], "LeaseLost")
    found = status(scene, "flagged", name)
    (charge,) = provider.charges(name)
    assert (found.state, found.reference, [effect.state for effect in found.effects]) == (
        "uncertain",
        charge,
        ["done"],
    )
    with pytest.raises(PermanentFailure):
        zombie.get(timeout=30)
    scene.client.resolve(f"flagged:{name}", "retry", task=f"{INVOICING}.flagged")
    assert scene.tasks.flagged.delay(name, "stop").get(timeout=30) == {
        "charge": charge,
        "saved": True,
    }
    assert provider.charges(name) == [charge]
    assert len(provider.lines("asked", name)) == 1


@pytest.mark.parametrize("scene", BOTH_WAYS[1:], indirect=True, ids=spelled)
def test_who_waits_finds_the_reply_that_came(scene: Scene, provider: Provider, name: str) -> None:
    scene.another()
    zombie, begun, gate = charged(scene, provider, name, "flagged", "later")
    with paused(scene, begun["pid"], "flagged", name):
        other = scene.tasks.flagged.delay(name, "later")
        scene.wait_for("raised", name=name, error="Snooze")
        gate.touch()
        provider.wait_for("replied", name)
    answer = other.get(timeout=30)
    assert provider.charges(name) == [answer["charge"]]
    assert (answer["saved"], provider.looks(name)) == (True, [])
    assert zombie.get(timeout=30) == answer


@pytest.mark.parametrize("scene", BOTH_WAYS[:1], indirect=True, ids=spelled)
def test_an_interrupted_zombie_loses_its_reply_and_the_other_side_is_asked(
    scene: Scene, provider: Provider, name: str
) -> None:
    zombie, begun, gate = charged(scene, provider, name, "interrupted", "verify")
    with paused(scene, begun["pid"], "interrupted", name):
        pass
    told = scene.wait_for("raised", name=name)[0]
    assert (told["pid"], told["error"]) == (begun["pid"], "LeaseLost")
    answer = zombie.get(timeout=30)
    gate.touch()
    assert provider.charges(name) == [answer["charge"]]
    assert (answer["saved"], provider.looks(name)) == (True, [answer["charge"]])


@pytest.mark.parametrize("combination", [REDIS_LEASES, DATABASE_LEASES], ids=spelled)
def test_a_reply_is_refused_once_another_attempt_has_taken_the_effect_over(
    scene_factory: MakeScene, provider: Provider, name: str
) -> None:
    scene = scene_factory(env={"PROVIDER": provider.url}, concurrency=2, **OPTIONS)
    early, late = scene.gate(), scene.gate()
    provider.script(name, {"hold": str(early)}, {"hold": str(late)}, dedupe=True)
    first = scene.tasks.flagged.delay(name, "dedupe")
    provider.wait_for("charged", name)
    scene.client.release(f"flagged:{name}", task=f"{INVOICING}.flagged")
    second = scene.tasks.flagged.delay(name, "dedupe")
    provider.wait_for("deduped", name)
    early.touch()
    (told,) = scene.wait_for("raised", name=name)
    assert (told["pid"], told["error"]) == (scene.events("begin", name=name)[0]["pid"], "LeaseLost")
    (effect,) = status(scene, "flagged", name).effects
    assert (effect.state, effect.reference) == ("sent", None)
    late.touch()
    answer = second.get(timeout=30)
    assert first.get(timeout=30) == answer
    (charge,) = scene.events("charge", name=name)
    assert (charge["fence"], charge["saved"]) == (status(scene, "flagged", name).fence, False)
    assert charge["fence"] > told["fence"]
    assert (provider.charges(name), len(provider.lines("asked", name))) == ([answer["charge"]], 2)


INTENT, REPLY = b"INSERT INTO celery_leases_effects", b"UPDATE celery_leases_effects"


@pytest.mark.both_lease_stores
@pytest.mark.parametrize("combination", [REDIS_LEASES, DATABASE_LEASES], ids=spelled)
def test_a_statement_whose_reply_is_lost_leaves_nothing_in_doubt(
    scene_factory: MakeScene, leases_postgres: PostgresServer, provider: Provider, name: str
) -> None:
    url = leases_postgres.new_database()
    with CuttingProxy(leases_postgres.port) as proxy:
        through = url.replace(f":{leases_postgres.port}/", f":{proxy.port}/")
        env = {"PROVIDER": provider.url, "LEASES_DATABASE_URL": through}
        scene = scene_factory(urls={"postgres": url}, env=env, **OPTIONS | {"ttl": 6})
        for number, (statement, before, away) in enumerate(
            (statement, before, away)
            for statement in (INTENT, REPLY)
            for before in (True, False)
            for away in (0.0, 0.6)
        ):
            one = f"{name}-{number}"
            proxy.refusing = bool(away)
            proxy.cut(statement, before=before)
            result = scene.tasks.flagged.delay(one, "stop")
            assert proxy.was_cut.wait(20), (statement, before)
            cut_at = time.monotonic()
            wait_until(
                lambda cut_at=cut_at, away=away: time.monotonic() - cut_at >= away,  # type: ignore[misc]
                5,
                "a short outage",
            )
            proxy.refusing = False
            answer = result.get(timeout=40)
            assert provider.charges(one) == [answer["charge"]], (statement, before, away)
            assert len(provider.lines("asked", one)) == 1
            assert len(scene.events("begin", name=one)) == 1
            assert status(scene, "flagged", one).attempt == 1


@pytest.mark.parametrize("combination", [REDIS_LEASES, DATABASE_LEASES], ids=spelled)
def test_a_reply_that_arrives_during_an_outage_is_recorded_afterwards(
    scene_factory: MakeScene, own_postgres: PostgresServer, provider: Provider, name: str
) -> None:
    urls = {"postgres": own_postgres.new_database()}
    scene = scene_factory(urls=urls, env={"PROVIDER": provider.url}, **OPTIONS)
    result, _, gate = charged(scene, provider, name, "flagged", "stop")
    own_postgres.kill()
    gate.touch()
    replied = provider.wait_for("replied", name)["t"]
    wait_until(lambda: time.monotonic() - replied > 3.0, 10, "an outage of 3 s")
    assert not scene.events("raised", name=name)
    own_postgres.start()
    answer = result.get(timeout=40)
    assert provider.charges(name) == [answer["charge"]]
    assert len(provider.lines("asked", name)) == 1
    assert status(scene, "flagged", name).reference == answer["charge"]
