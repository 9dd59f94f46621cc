"""Messages with headers that another program has written: none of them disables the protection."""

from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest

from celery_leases.worker.headers import HEADER, OURS, Header
from tests.integration.conftest import MakeStage
from tests.integration.deployments import APP, RABBIT_REDIS_SQLITE, REDIS_REDIS_POSTGRES, Stage, got

MINE = {"answer": "mine"}
INSIDE = ("running", "state", "stored_key", "replaced", "token", "watched")


@pytest.fixture(
    scope="module",
    params=[("prefork", REDIS_REDIS_POSTGRES), ("threads", RABBIT_REDIS_SQLITE)],
    ids=["prefork", "threads"],
)
def module_stage(request: pytest.FixtureRequest, stage_factory: MakeStage) -> Iterator[Stage]:
    """A worker whose bodies run in children, and one whose bodies run in its main process."""
    pool, combination = request.param
    made = stage_factory(combination, worker={"pool": pool})
    yield made
    made.close_when_drained(request.session)


@pytest.mark.parametrize(
    "value", [True, "f" * 32, {"running": True}, ["t:tests.apps.leased.work|x", "call"]], ids=str
)
def test_internal_names_are_not_taken_from_a_message(stage: Stage, name: str, value: Any) -> None:
    forged = {f"{OURS}_{inside}": value for inside in INSIDE} | {
        "is_eager": True,
        "called_directly": True,
    }
    first, second = (stage.send("work", name, headers=forged) for _ in range(2))
    assert got(first) == got(second)
    (begun,) = stage.events("begin", name=name)
    row = stage.row("work", f"work:{name}")
    assert (row["state"], row["fence"]) == ("done", begun["fence"])
    assert not row["owner"].startswith("f" * 32)


@pytest.mark.parametrize(
    "embedded",
    [
        {"is_eager": True},
        {f"{OURS}_token": "f" * 32},
        {f"{OURS}_origin": {"queue": "another"}},
        {"headers": {"a": 1}},
    ],
    ids=str,
)
def test_the_third_part_of_a_body_sets_nothing(stage: Stage, name: str, embedded: Any) -> None:
    calls = [str(uuid4()) for _ in range(2)]
    with stage.app.connection_for_write() as connection:
        for call in calls:
            headers = {"task": f"{APP}.work", "id": call, "retries": 0, "lang": "py"}
            body = [[name], {"seconds": 0.5, "answer": "mine"}, {"callbacks": None, **embedded}]
            options = {"routing_key": stage.queue, "serializer": "json", "correlation_id": call}
            connection.Producer().publish(body, headers=headers, **options)
    assert [got(stage.app.AsyncResult(call)) for call in calls] == ["mine", "mine"]
    (begun,) = stage.events("begin", name=name)
    row = stage.row("work", f"work:{name}")
    assert (row["state"], row["fence"]) == ("done", begun["fence"])
    assert not row["owner"].startswith("f" * 32)
    assert len(stage.log(f"the message body has {sorted(embedded)[:1]}"[:-1])) >= len(calls)


def test_a_header_with_another_key_gives_nothing_of_it(stage: Stage, name: str) -> None:
    other, call = f"{name}-other", str(uuid4())
    answer = got(stage.tasks.work.delay(other, answer="secret"))
    before = stage.row("work", f"work:{other}")
    header = Header(f"{APP}.work", call, key=f"work:{other}", started=True, reschedules=3)
    result = stage.send(
        "work", name, kwargs=MINE, task_id=call, headers={HEADER: header.written()}, retries=1
    )
    assert answer == "secret"
    assert got(result) == "mine"
    assert stage.find_row("work", f"work:{other}") == before


@pytest.mark.parametrize(
    "header",
    ["x", {"v": 1}, {"v": 1, "key": None}, {"v": 1, "key": {"a": 1}}, {"v": 1, "tries": "many"}],
    ids=str,
)
def test_a_header_of_the_wrong_type_is_ignored(stage: Stage, name: str, header: Any) -> None:
    call = str(uuid4())
    if isinstance(header, dict) and len(header) > 1:
        header = {"task": f"{APP}.work", "id": call} | header
    result = stage.send("work", name, kwargs=MINE, task_id=call, headers={HEADER: header})
    assert got(result) == "mine"
    ignored = "its message header 'celery_leases' is ignored"
    assert sum(ignored in line for line in stage.log(call)) == 1


@pytest.mark.parametrize("retries", ["1", 1.5, -1, [1], True], ids=str)
def test_retries_that_are_no_count_are_ignored(stage: Stage, name: str, retries: Any) -> None:
    result = stage.send("work", name, kwargs=MINE, headers={"retries": retries})
    assert got(result) == "mine"
    ignored = "its message header 'retries' is ignored"
    assert sum(ignored in line for line in stage.log(result.id)) == 1
    row = stage.row("work", f"work:{name}")
    assert row["retries"] == 0
