"""What users do with tasks: retries, Celery's control flow, recursion, direct and eager calls,
every shape of task.
"""

from collections.abc import Iterator
from typing import Any

import pytest
from celery import group
from celery.exceptions import Reject
from kombu.exceptions import EncodeError

from celery_leases.errors import AlreadyDone, LeaseHeld, ResultMissing
from celery_leases.worker.processes import close_all
from tests.integration.deployments import BOTH_WAYS, Stage, got, imported_anew, stages

SHAPES = "tests.apps.shapes"


module_stage = stages(*BOTH_WAYS, module=SHAPES)
"""A worker that knows the tasks of ``tests.apps.shapes`` too."""


def shaped(stage: Stage, task: str, *args: object, **kwargs: object) -> object:
    """The result of a task of ``tests.apps.shapes``, which only the worker has imported."""
    return got(stage.app.send_task(f"{SHAPES}.{task}", args=args, kwargs=kwargs))


def test_another_call_does_not_jump_the_queue_during_a_countdown(stage: Stage, name: str) -> None:
    first = stage.tasks.retries.delay(name, 1, countdown=2)
    stage.wait_for_state("retries", f"retries:{name}", "pending")
    other = stage.tasks.retries.delay(name, 1, countdown=2)
    stage.wait_for_log(other.id, "is cooling down")
    assert got(other) == got(first) == {"name": name, "retries": 1}
    begun = stage.events("begin", name=name)
    assert [event["id"] for event in begun] == [first.id] * 2
    assert begun[1]["t"] - begun[0]["t"] >= 1.9


def test_what_the_body_ignores_is_done_without_a_result(stage: Stage, name: str) -> None:
    call = stage.tasks.passes.delay(name, "ignore")
    row = stage.wait_for_state("passes", f"passes:{name}", "done")
    assert (row["reason"], row["result"], row["ended"]) == ("ignored", None, "ignored")
    stage.send("passes", name, "ignore", task_id=call.id)
    stage.wait_for_log(call.id, "dropped: it was ignored by the task itself")
    assert len(stage.events("begin", name=name)) == 1
    assert not stage.is_held("passes", f"passes:{name}")


def test_what_the_body_rejects_runs_when_it_is_moved_back(stage: Stage, name: str) -> None:
    """Such as a dead letter."""
    call = stage.tasks.passes.delay(name, "reject")
    with pytest.raises(Reject):
        got(call)
    row = stage.wait_for_state("passes", f"passes:{name}", "pending")
    assert (row["ended"], row["resumes"], row["failures"]) == ("rejected", 0, 0)
    stage.send("passes", name, "reject", task_id=call.id)
    assert len(stage.wait_for("begin", 2, name=name)) == 2
    assert got(stage.tasks.passes.delay(name, "return")) == {"name": name}


@pytest.mark.parametrize("how", ["retry and return", "publish itself"])
def test_a_call_that_goes_on_elsewhere_is_not_done(stage: Stage, name: str, how: str) -> None:
    call = stage.tasks.passes.si(name, how)
    # What a body publishes itself has no chain, unless the body gives it one.
    steps = call | stage.tasks.plain.s() if how == "retry and return" else call
    assert got(steps.delay()) == {"name": name}
    begun = stage.events("begin", name=name)
    assert [event["attempt"] for event in begun] == [1, 2]
    assert len({event["id"] for event in begun}) == 1


def test_what_the_body_rejects_for_another_time_runs_again(stage: Stage, name: str) -> None:
    assert got(stage.tasks.passes.delay(name, "requeue")) == {"name": name}
    assert [event["attempt"] for event in stage.events("begin", name=name)] == [1, 2]
    row = stage.row("passes", f"passes:{name}")
    assert (row["state"], row["crashes"]) == ("done", 0)


def test_another_call_gets_the_result_of_a_replacement(stage: Stage, name: str) -> None:
    gate = stage.gate()
    first = stage.tasks.passes.delay(name, str(gate))
    stage.wait_for_state("passes", f"passes:{name}", "done")
    other = stage.tasks.passes.delay(name, str(gate))
    stage.wait_for_log(other.id, f"call {first.id} continues as another task, which has not ended")
    gate.touch()
    assert got(first) == got(other) == name
    steps = (stage.tasks.passes.si(name, str(gate)) | stage.tasks.plain.s())()
    assert got(steps) == name
    assert len(stage.events("begin", name=name)) == 1


def test_another_call_gets_the_error_of_a_replacement(stage: Stage, name: str) -> None:
    gate = stage.gate()
    gate.write_text(f"broken {name}")
    calls = [stage.tasks.passes.delay(name, str(gate)) for _ in range(2)]
    for call in calls:
        with pytest.raises(ValueError, match=f"broken {name}"):
            got(call)
    assert len(stage.events("begin", name=name)) == 1


def test_a_task_that_calls_itself_does_not_wait_for_its_lease(stage: Stage, name: str) -> None:
    assert got(stage.tasks.recursive.delay(name, 2)) == [2, 1, 0]
    held = [(event["what"], event["depth"], event["held"]) for event in stage.events(name=name)]
    assert held == [
        ("begin", 2, True),
        ("begin", 1, False),
        ("begin", 0, False),
        ("end", 0, False),
        ("end", 1, False),
        ("end", 2, True),
    ]
    row = stage.row("recursive", f"recursive:{name}")
    assert (row["state"], row["attempt"]) == ("done", 1)


def test_another_task_called_directly_in_a_body_runs_alone(stage: Stage, name: str) -> None:
    assert got(stage.tasks.calls.delay(name)) == {"direct": 9, "map": [1, 4]}
    (begin,) = stage.events("begin", name=name)
    (end,) = stage.events("end", name=name)
    assert begin["key_before"] == end["key_after"] == f"calls:{name}"
    assert begin["held"]
    assert end["held"]
    assert stage.find_row("square", "square:3") is None


def test_map_and_chunks_run_the_bodies_without_leases(stage: Stage) -> None:
    square = stage.tasks.square
    assert got(square.map([7, 7, 8]).apply_async()) == [49, 49, 64]
    assert got(square.chunks([(9,), (9,)], 1).apply_async()) == [[81], [81]]
    assert {event["held"] for event in stage.events("square")} == {False}
    assert stage.find_row("square", "square:7") is None
    assert got(square.delay(10)) == 100
    assert stage.events("square", number=10)[0]["held"]


def test_options_of_a_base_class_hold_for_its_tasks(stage: Stage, name: str) -> None:
    assert shaped(stage, "inherits", name) == name
    (event,) = stage.events("begin", name=name)
    assert (event["held"], event["key"]) == (True, f"billing:{name}")
    with pytest.raises(AlreadyDone):
        shaped(stage, "inherits", name)


@pytest.mark.parametrize("task", ["ClassBased", "shared", "mixed", "made"])
def test_each_shape_of_task_runs_once_under_its_lease(stage: Stage, name: str, task: str) -> None:
    assert shaped(stage, task, name) == shaped(stage, task, name)
    assert len(stage.events("begin", name=name)) == 1
    assert stage.events("begin", name=name)[0].get("held", True)


def test_the_hooks_of_another_base_class_are_called(stage: Stage, name: str) -> None:
    assert shaped(stage, "mixed", name) == name
    assert shaped(stage, "mixed", name) == name
    seen = stage.wait_for("on_success", 2, name=name)
    assert [event["retval"] for event in seen] == [name, name]


def test_a_pydantic_task_gets_and_gives_models(stage: Stage, name: str) -> None:
    invoice = {"name": name, "month": 4}
    assert (
        shaped(stage, "model", invoice)
        == shaped(stage, "model", invoice)
        == {"name": name, "month": 5}
    )
    (event,) = stage.events("begin", name=name)
    assert (event["held"], event["kind"]) == (True, "Invoice")


def test_two_apps_in_one_process_keep_their_stores_apart(stage: Stage, name: str) -> None:
    assert shaped(stage, "hosts", name) == [True, f"hosts:{name}"]
    (inner,) = stage.events("foreign", name=name)
    assert (inner["held"], inner["key"]) == (True, f"other:{name}")


@pytest.fixture
def eager(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The tasks under an app of their own, whose bodies run in this process."""
    monkeypatch.setenv("JOURNAL", str(stage.journal))
    tasks = imported_anew("tests.apps.leased", stage.env)
    tasks.app.conf.broker_url = stage.broker_url
    yield tasks
    close_all()
    stage.app.set_current()


def test_task_always_eager_replays_and_retries(stage: Stage, name: str, eager: Any) -> None:
    eager.app.conf.update(task_always_eager=True)
    assert eager.work.delay(name).get() == eager.work.delay(name).get()
    assert eager.retries.delay(name, 2).get() == {"name": name, "retries": 2}
    assert (
        group(eager.work.s(name), eager.work.s(name))().get() == [eager.work.delay(name).get()] * 2
    )
    assert eager.refuses.delay(name).get()["name"] == name
    with pytest.raises(AlreadyDone):
        eager.refuses.delay(name).get()


def test_an_eager_call_of_a_held_key_is_refused(stage: Stage, name: str, eager: Any) -> None:
    eager.app.conf.update(
        leases_eager_stores=True, task_always_eager=True, task_eager_propagates=True
    )
    gate, holder = stage.hold("work", name)
    with pytest.raises(LeaseHeld):
        eager.work.delay(name, gate=str(gate))
    gate.touch()
    value = got(holder)
    assert eager.work.delay(name, gate=str(gate)).get() == value


def test_code_around_the_body_that_ends_its_process_is_guarded(stage: Stage, name: str) -> None:
    """No count would end that."""
    tasks, children = stage.tasks, stage.worker.children()
    for task in (tasks.keyed, tasks.unprepared):
        error = got(task.delay(name), propagate=False)
        assert "raised SystemExit" in str(error), task.name
    followed = tasks.followed.apply_async((name,), ignore_result=True)
    stage.wait_for_log(followed.id, "on_success handler raised")
    with pytest.raises(EncodeError):
        got(tasks.unread.delay(name))
    with pytest.raises(ResultMissing):
        got(tasks.unread.delay(name))
    assert stage.worker.children() == children
    assert len(stage.events("begin", name=name)) == 2
