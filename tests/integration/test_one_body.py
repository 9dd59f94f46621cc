"""One action runs once: duplicates of a key, copies of a call, and other arguments under the same
key.
"""

from uuid import uuid4

import pytest

from celery_leases.errors import KeyReused
from tests.integration.deployments import PAIRWISE, Stage, got, stages
from tests.support.records import assert_has

module_stage = stages(*PAIRWISE)


def test_twenty_calls_of_one_key_run_one_body(stage: Stage, name: str) -> None:
    gate = stage.gate()
    results = [stage.tasks.work.delay(name, gate=str(gate)) for _ in range(20)]
    (begun,) = stage.wait_for("begin", name=name)
    stage.wait_for_log(f"key work:{name}:", "another call holds the key", 3)
    gate.touch()
    values = [got(result) for result in results]
    assert values == [{"name": name, "fence": begun["fence"]}] * 20
    assert len(stage.events("begin", name=name)) == 1
    row = stage.row("work", f"work:{name}")
    assert_has(row, state="done", attempt=1, call_id=begun["id"], crashes=0)


def test_x4_other_arguments_are_refused_and_change_nothing(stage: Stage, name: str) -> None:
    gate, running = stage.hold("work", name, answer="first")
    before = stage.row("work", f"work:{name}")
    if stage.lease_store == "database":
        # A renewal moves the lease in the row, and nothing else.
        before = {**(before or {}), "lease_until": None}
    early = stage.tasks.work.delay(name, gate=str(gate), answer="second")
    if stage.lease_store == "database":
        with pytest.raises(KeyReused):
            got(early)
        during = {**(stage.find_row("work", f"work:{name}") or {}), "lease_until": None}
        assert during == before
    gate.touch()
    assert got(running) == "first"
    with pytest.raises(KeyReused) as refused:
        got(early)
    assert refused.value.differing == ["answer"]
    done = stage.row("work", f"work:{name}")
    with pytest.raises(KeyReused) as refused:
        got(stage.tasks.work.delay(name, gate=str(gate), answer="third"))
    assert (refused.value.key, refused.value.differing) == (f"work:{name}", ["answer"])
    assert stage.find_row("work", f"work:{name}") == done
    assert got(stage.tasks.work.delay(name, gate=str(gate), answer="first")) == "first"
    assert stage.find_row("work", f"work:{name}") == done
    assert len(stage.events("begin", name=name)) == 1


def test_without_a_key_equal_calls_both_run(stage: Stage, name: str) -> None:
    first, second = stage.tasks.keyless.delay(name), stage.tasks.keyless.delay(name)
    assert [got(call)["name"] for call in (first, second)] == [name, name]
    assert {event["id"] for event in stage.events("begin", name=name)} == {first.id, second.id}


@pytest.mark.parametrize("task", ["keyless", "rerun"])
def test_ten_deliveries_run_once_and_leave_one_copy(stage: Stage, name: str, task: str) -> None:
    gate, call = stage.gate(), str(uuid4())
    first = stage.send(task, name, 0.0, str(gate), task_id=call)
    stage.wait_for("begin", name=name)
    stage.send(task, name, 0.0, str(gate), task_id=call)
    stage.wait_for_log(call, "a copy of this call is running")
    for _ in range(8):
        stage.send(task, name, 0.0, str(gate), task_id=call)
    stage.wait_for_log(call, "dropped: another copy of this call waits already", 8)
    gate.touch()
    assert got(first)["name"] == name
    # Only Celery's id distinguishes this copy from a new call; it gets the saved result.
    stage.send(task, name, 0.0, str(gate), task_id=call)
    stage.wait_for_log(call, "answered with the saved result")
    stage.wait_until_drained()
    assert len([line for line in stage.log(call) if "rescheduled in" in line]) == 1
    assert len(stage.events("begin", name=name)) == 1
    assert got(first)["name"] == name


def test_rerun_runs_once_for_each_call_in_turn(stage: Stage, name: str) -> None:
    results = [stage.tasks.rerun.delay(name, 0.05) for _ in range(5)]
    fences = [got(result)["fence"] for result in results]
    assert len(set(fences)) == 5
    events = sorted(stage.events(name=name), key=lambda event: event["t"])
    assert [event["what"] for event in events] == ["begin", "end"] * 5
    began = [event["fence"] for event in events if event["what"] == "begin"]
    assert began == sorted(began)
