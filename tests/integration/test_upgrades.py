"""A deploy: a later release brings the tables to its version while workers of this one run."""

import threading

import pytest

from celery_leases.stores.sql.connections import engine_for
from celery_leases.stores.sql.records import SqlRecordStore
from tests.contract.test_migrations import migrated
from tests.integration.conftest import MakeStage
from tests.integration.deployments import (
    RABBIT_DATABASE_POSTGRES,
    REDIS_REDIS_POSTGRES,
    got,
    spelled,
)
from tests.support.records import assert_has

pytestmark = pytest.mark.both_lease_stores
AT_LEAST = 12
"""Calls that end before the next step of the deploy, so that all processes of the worker take
part.
"""


@pytest.mark.parametrize(
    "combination", [REDIS_REDIS_POSTGRES, RABBIT_DATABASE_POSTGRES], ids=spelled
)
def test_no_call_is_lost_and_none_runs_twice_while_the_tables_are_migrated(
    stage_factory: MakeStage, combination: tuple[str, ...], name: str
) -> None:
    stage = stage_factory(combination)
    stop, sent = threading.Event(), []

    def call() -> None:
        while not stop.is_set():
            sent.append(
                (f"{name}-{len(sent)}", stage.tasks.work.delay(f"{name}-{len(sent)}", 0.02))
            )
            stop.wait(0.03)

    def more() -> None:
        stage.wait_for("end", len(stage.events("end")) + AT_LEAST)

    before = got(stage.tasks.work.delay(f"{name}-before"))
    gate = stage.gate()
    held = [stage.tasks.work.delay(f"{name}-held-{number}", gate=str(gate)) for number in range(2)]
    for number in range(2):
        stage.wait_for("begin", name=f"{name}-held-{number}")
    calling = threading.Thread(target=call)
    calling.start()
    records = SqlRecordStore(engine_for(stage.database_url))
    try:
        more()
        assert migrated(records).after == 2
        more()
    finally:
        stop.set()
        calling.join()
        gate.touch()
        records.database.close()
    values = [got(result) for result in held] + [got(result) for _, result in sent]
    names = [f"{name}-held-{number}" for number in range(2)] + [each for each, _ in sent]
    begun = [event["name"] for event in stage.events("begin")]
    assert sorted(begun) == sorted([*names, f"{name}-before"])
    assert [value["name"] for value in values] == names
    for each in names:
        row = stage.row("work", f"work:{each}")
        assert_has(row, state="done", attempt=1, crashes=0, generation=0)
    assert got(stage.tasks.work.delay(f"{name}-before")) == before
    stage.wait_until_drained()
