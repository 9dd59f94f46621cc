"""Calls of a held key wait in their worker, cost its other tasks nothing, and begin as soon as the
key is free.

Each of these tests fails, after its patience, if a waiting call begins when its countdown is over:
after 45 s or more.
"""

import os
from typing import Any

import pytest

from tests.integration.conftest import MakeStage
from tests.integration.deployments import (
    PAIRWISE,
    PATIENCE,
    POOL_STORES,
    REDIS_REDIS_POSTGRES,
    Stage,
    got,
    spelled,
    stages,
    until,
)

ONE_BY_ONE = 12


module_stage = stages(*PAIRWISE)


def alone(stage: Stage, name: str) -> list[str]:
    """The calls whose bodies have run, in their order, none while another one ran."""
    told = [
        (event["what"], event["id"])
        for event in stage.events(name=name)
        if event["what"] in ("begin", "end")
    ]
    begun = [call for what, call in told if what == "begin"]
    assert told == [(what, call) for call in begun for what in ("begin", "end")]
    return begun


@pytest.mark.parametrize("pool", POOL_STORES)
@pytest.mark.every_argument
def test_calls_of_a_mutex_follow_at_once(stage_factory: MakeStage, pool: str, name: str) -> None:
    with stage_factory(POOL_STORES[pool], worker={"pool": pool, "concurrency": 2}) as stage:
        gate = stage.gate()
        results = [stage.tasks.rerun.delay(name, gate=str(gate)) for _ in range(ONE_BY_ONE)]
        stage.wait_for("begin", name=name)
        if pool != "solo":  # nothing else happens there while a body runs
            stage.wait_for_log(f"key rerun:{name}", "rescheduled in")
        gate.touch()
        for result in results:
            got(result)
        assert sorted(alone(stage, name)) == sorted(result.id for result in results)
        stage.wait_until_drained()


def test_a_call_that_comes_later_takes_no_process(stage: Stage, name: str) -> None:
    gate, first = stage.hold("rerun", name)
    second = stage.tasks.rerun.delay(name)
    stage.wait_for_log(second.id, "another call holds the key")
    stage.wait_for_log(second.id, "received", 2)  # its copy waits again
    shown = stage.client.status(f"rerun:{name}", task=stage.tasks.rerun.name, waiting=True)
    assert shown.waiting == (second.id,)
    assert "1 call waits for it" in shown.what_next()
    later = [stage.tasks.rerun.delay(name) for _ in range(5)]
    for call in later:
        stage.wait_for_log(call.id, "received")
    other = stage.tasks.plain.delay(1)
    assert got(other) == 1
    gate.touch()
    for call in (first, second, *later):
        got(call)
    assert alone(stage, name) == [call.id for call in (first, second, *later)]
    assert not [line for call in later for line in stage.log(call.id) if "rescheduled" in line]


def test_a_revoked_waiter_lets_the_next_pass(stage: Stage, name: str) -> None:
    gate, first = stage.hold("rerun", name)
    calls = [stage.tasks.rerun.delay(name)]
    stage.wait_for_log(calls[0].id, "another call holds the key")
    stage.wait_for_log(calls[0].id, "received", 2)  # its copy waits again
    calls += [stage.tasks.rerun.delay(name) for _ in range(2)]
    for call in calls[1:]:
        stage.wait_for_log(call.id, "waits here")
    stage.app.control.revoke(calls[1].id)
    stage.wait_for_log(calls[1].id, "flagged as revoked")
    gate.touch()
    for call in (first, calls[0], calls[2]):
        got(call)
    assert sorted(alone(stage, name)) == sorted(call.id for call in (first, calls[0], calls[2]))
    stage.wait_until_drained()
    assert calls[1].state == "REVOKED"


def test_inspect_shows_those_that_wait_and_no_others(stage: Stage, name: str) -> None:
    gate, running = stage.hold("rerun", name)
    waiting = stage.tasks.rerun.delay(name, gate=str(gate))
    stage.wait_for_log(waiting.id, "another call holds the key")

    def scheduled() -> set[str]:
        return {entry["request"]["id"] for entry in stage._in_worker()["scheduled"]}

    until(lambda: waiting.id in scheduled(), "the call to be shown")
    gate.touch()
    for call in (running, waiting):
        got(call)
    until(lambda: not scheduled(), "nothing to be shown")


def test_a_key_that_another_worker_frees_is_noticed(stage: Stage, name: str) -> None:
    side, gate = stage.side_queue(), stage.gate()
    with stage.new_worker(concurrency=1) as other:
        other.start()
        stage.app.control.cancel_consumer(
            stage.queue, destination=[f"{other.name}@{os.uname().nodename}"]
        )
        stage.consume(side, other)
        held = stage.tasks.rerun.apply_async((name,), {"gate": str(gate)}, queue=side)
        stage.wait_for("begin", name=name)
        waiting = stage.tasks.rerun.delay(name)
        stage.wait_for_log(waiting.id, "another call holds the key")
        gate.touch()
        for call in (held, waiting):
            got(call)
    assert alone(stage, name) == [held.id, waiting.id]


@pytest.mark.parametrize(
    "combination", [REDIS_REDIS_POSTGRES, ("rabbit", "database", "postgres")], ids=spelled
)
def test_the_calls_that_wait_in_a_killed_worker_run_in_another_one(
    stage_factory: MakeStage, combination: tuple[str, ...], name: str
) -> None:
    with stage_factory(combination, env={"VISIBILITY": "4"}) as stage:
        gate = stage.gate()
        results: list[Any] = [
            stage.tasks.rerun.delay(name, gate=str(gate)) for _ in range(ONE_BY_ONE)
        ]
        stage.wait_for("begin", name=name)
        stage.wait_for_log(f"key rerun:{name}", "rescheduled in")
        for result in results:
            stage.wait_for_log(result.id, "received")
        stage.stop_consuming(stage.worker)
        stage.worker.kill()
        gate.touch()
        with stage.new_worker() as other:
            other.start()
            for result in results:
                result.get(timeout=2 * PATIENCE)
        ran = {event["id"] for event in stage.events("end", name=name)}
        assert ran == {result.id for result in results}
