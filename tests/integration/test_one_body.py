"""One action runs once: duplicates of a key, copies of a call, and other arguments under the same
key.
"""

from collections.abc import Iterator
from uuid import uuid4

import pytest

from celery_leases.errors import KeyReused
from tests.integration.conftest import DeploymentFactory
from tests.integration.deployments import PAIRWISE, PATIENCE, Deployment, spelled


@pytest.fixture(scope="module", params=PAIRWISE, ids=spelled)
def module_stage(
    request: pytest.FixtureRequest, stage_factory: DeploymentFactory
) -> Iterator[Deployment]:
    """A stage for every combination."""
    made = stage_factory(request.param)
    yield made
    made.close_when_drained(request.session)


def test_twenty_calls_of_one_key_run_one_body(stage: Deployment, name: str) -> None:
    gate = stage.gate()
    results = [stage.tasks.work.delay(name, gate=str(gate)) for _ in range(20)]
    (begun,) = stage.wait_for("begin", name=name)
    stage.wait_for_log(f"key work:{name}:", "another call holds the key", 3)
    gate.touch()
    values = [result.get(timeout=PATIENCE) for result in results]
    assert values == [{"name": name, "fence": begun["fence"]}] * 20
    assert len(stage.events("begin", name=name)) == 1
    row = stage.row("work", f"work:{name}")
    assert row is not None
    assert (row["state"], row["attempt"], row["call_id"], row["crashes"]) == (
        "done",
        1,
        begun["id"],
        0,
    )


def test_x4_other_arguments_are_refused_and_change_nothing(stage: Deployment, name: str) -> None:
    gate = stage.gate()
    running = stage.tasks.work.delay(name, gate=str(gate), answer="first")
    stage.wait_for("begin", name=name)
    before = stage.row("work", f"work:{name}")
    if stage.lease_store == "database":
        # A renewal moves the lease in the row, and nothing else.
        before = {**(before or {}), "lease_until": None}
    early = stage.tasks.work.delay(name, gate=str(gate), answer="second")
    if stage.lease_store == "database":
        with pytest.raises(KeyReused):
            early.get(timeout=PATIENCE)
        during = {**(stage.row("work", f"work:{name}") or {}), "lease_until": None}
        assert during == before
    gate.touch()
    assert running.get(timeout=PATIENCE) == "first"
    with pytest.raises(KeyReused) as refused:
        early.get(timeout=PATIENCE)
    assert refused.value.differing == ["answer"]
    done = stage.row("work", f"work:{name}")
    with pytest.raises(KeyReused) as refused:
        stage.tasks.work.delay(name, gate=str(gate), answer="third").get(timeout=PATIENCE)
    assert (refused.value.key, refused.value.differing) == (f"work:{name}", ["answer"])
    assert stage.row("work", f"work:{name}") == done
    assert (
        stage.tasks.work.delay(name, gate=str(gate), answer="first").get(timeout=PATIENCE)
        == "first"
    )
    assert stage.row("work", f"work:{name}") == done
    assert len(stage.events("begin", name=name)) == 1


def test_without_a_key_equal_calls_both_run(stage: Deployment, name: str) -> None:
    first, second = stage.tasks.keyless.delay(name), stage.tasks.keyless.delay(name)
    assert [call.get(timeout=PATIENCE)["name"] for call in (first, second)] == [name, name]
    assert {event["id"] for event in stage.events("begin", name=name)} == {first.id, second.id}


@pytest.mark.parametrize("task", ["keyless", "rerun"])
def test_ten_deliveries_run_once_and_leave_one_copy(
    stage: Deployment, name: str, task: str
) -> None:
    gate, call = stage.gate(), str(uuid4())
    first = stage.send(task, name, 0.0, str(gate), task_id=call)
    stage.wait_for("begin", name=name)
    stage.send(task, name, 0.0, str(gate), task_id=call)
    stage.wait_for_log(call, "a copy of this call is running")
    for _ in range(8):
        stage.send(task, name, 0.0, str(gate), task_id=call)
    stage.wait_for_log(call, "dropped: another copy of this call waits already", 8)
    gate.touch()
    assert first.get(timeout=PATIENCE)["name"] == name
    # Only Celery's id distinguishes this copy from a new call; it gets the saved result.
    stage.send(task, name, 0.0, str(gate), task_id=call)
    stage.wait_for_log(call, "answered with the saved result")
    stage.wait_until_drained()
    assert len([line for line in stage.log(call) if "rescheduled in" in line]) == 1
    assert len(stage.events("begin", name=name)) == 1
    assert first.get(timeout=PATIENCE)["name"] == name


def test_rerun_runs_once_for_each_call_in_turn(stage: Deployment, name: str) -> None:
    results = [stage.tasks.rerun.delay(name, 0.05) for _ in range(5)]
    fences = [result.get(timeout=PATIENCE)["fence"] for result in results]
    assert len(set(fences)) == 5
    events = sorted(stage.events(name=name), key=lambda event: event["t"])
    assert [event["what"] for event in events] == ["begin", "end"] * 5
    began = [event["fence"] for event in events if event["what"] == "begin"]
    assert began == sorted(began)
