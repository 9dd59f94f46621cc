"""Threads, solo, gevent and eventlet: the same protocol where bodies share a process."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.integration.conftest import MakeStage
from tests.integration.deployments import (
    RABBIT_DATABASE_POSTGRES,
    RABBIT_REDIS_SQLITE,
    REDIS_DATABASE_SQLITE,
    REDIS_REDIS_POSTGRES,
    Stage,
    got,
)

TTL = 2
POOLS: list[tuple[str, int, tuple[str, ...]]] = [
    ("threads", 4, RABBIT_REDIS_SQLITE),
    ("solo", 1, RABBIT_DATABASE_POSTGRES),
    ("gevent", 10, REDIS_REDIS_POSTGRES),
    ("eventlet", 10, REDIS_DATABASE_SQLITE),
]


@pytest.fixture(scope="module", params=POOLS, ids=lambda pool: "-".join((pool[0], *pool[2])))
def module_stage(request: pytest.FixtureRequest, stage_factory: MakeStage) -> Iterator[Stage]:
    """A worker of each pool that logs its renewals."""
    pool, concurrency, combination = request.param
    if pool in ("gevent", "eventlet"):
        pytest.importorskip(pool)
    options: dict[str, Any] = {"pool": pool, "concurrency": concurrency, "log_level": "DEBUG"}
    made = stage_factory(combination, worker=options, env={"TTL": str(TTL)})
    yield made
    made.close_when_drained(request.session)


def test_twenty_calls_of_one_key_run_one_body_in_every_pool(stage: Stage, name: str) -> None:
    gate = stage.gate()
    results = [stage.tasks.work.delay(name, gate=str(gate)) for _ in range(20)]
    stage.wait_for("begin", name=name)
    if stage.worker.pool != "solo":
        stage.wait_for_log(f"key work:{name}:", "another call holds the key", 2)
    gate.touch()
    values = [got(result) for result in results]
    assert values == [values[0]] * 20
    assert len(stage.events("begin", name=name)) == 1


def test_renewals_hold_the_lease_of_a_body_of_twice_the_ttl(stage: Stage, name: str) -> None:
    gate = stage.gate()
    running = stage.tasks.work.delay(name, gate=str(gate))
    stage.wait_for_log(f"key work:{name}:", "lease renewed", 7)
    assert stage.is_held("work", f"work:{name}")
    gate.touch()
    assert got(running)["name"] == name
    row = stage.row("work", f"work:{name}")
    assert (row["state"], row["attempt"], row["crashes"]) == ("done", 1, 0)


def test_several_bodies_in_one_process_keep_their_own_leases(stage: Stage, name: str) -> None:
    number = min(3, stage.worker.concurrency)
    gate = stage.gate()
    results = [stage.tasks.keyless.delay(f"{name}-{n}", gate=str(gate)) for n in range(number)]
    for n, result in enumerate(results):
        (begun,) = stage.wait_for("begin", name=f"{name}-{n}")
        assert begun["key"] == result.id
        stage.wait_for_log(f"key {result.id}:", "lease renewed", 1)
    gate.touch()
    fences = [got(result)["fence"] for result in results]
    for n in range(number):
        (ended,) = stage.events("end", name=f"{name}-{n}")
        assert (ended["key"], ended["fence"]) == (results[n].id, fences[n])


def test_check_raises_when_an_operator_released_the_lease(stage: Stage, name: str) -> None:
    running = stage.tasks.checks.delay(name, gate="once")
    (begun,) = stage.wait_for("begin", name=name)
    stage.client.release(f"checks:{name}", task=stage.tasks.checks.name)
    (lost,) = stage.wait_for("lost", name=name)
    assert lost["error"] == "LeaseLost"
    value = got(running)
    assert value["fence"] > begun["fence"]
    row = stage.row("checks", f"checks:{name}")
    assert (row["state"], row["crashes"]) == ("done", 0)


def test_a_body_that_raises_what_ends_a_worker_fails(stage: Stage, name: str) -> None:
    """Taken for a stop, the call would run for ever."""
    hows = [*stage.tasks.STOPS] + (["kill"] if stage.worker.pool in ("gevent", "eventlet") else [])
    results = {how: stage.tasks.stops.delay(name, how) for how in hows}
    for how, result in results.items():
        error = got(result, propagate=False)
        assert isinstance(error, RuntimeError), how
        assert str(error).startswith("the body raised "), how
        row = stage.row("stops", f"stops:{name}:{how}")
        assert (row["state"], row["failures"], row["crashes"]) == ("cooling", 1, 0), how
        assert len(stage.events("begin", name=name, how=how)) == 1


@pytest.mark.parametrize("how", ["retry and return", "publish itself"])
def test_a_call_that_goes_on_elsewhere_runs_again(stage: Stage, name: str, how: str) -> None:
    assert got(stage.tasks.passes.delay(name, how)) == {"name": name}
    begun = stage.events("begin", name=name)
    assert [event["attempt"] for event in begun] == [1, 2]
