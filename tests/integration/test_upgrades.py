"""A rolling deploy: workers of this release on tables of the one before, and ``leases migrate``
while they run.
"""

import threading

import pytest

from celery_leases.stores.sql.database import engine_for
from celery_leases.stores.sql.records import SqlRecordStore
from tests.contract.test_migrations import make_old
from tests.integration.conftest import DeploymentFactory
from tests.integration.deployments import (
    PATIENCE,
    RABBIT_DATABASE_POSTGRES,
    REDIS_REDIS_POSTGRES,
    Deployment,
    spelled,
)
from tests.support.servers import PostgresServer

pytestmark = pytest.mark.both_lease_stores
AT_LEAST = 12
"""Calls that end before the next step of the deploy, so that all processes of the worker take
part.
"""


@pytest.fixture(params=[REDIS_REDIS_POSTGRES, RABBIT_DATABASE_POSTGRES], ids=spelled)
def stage(
    request: pytest.FixtureRequest,
    stage_factory: DeploymentFactory,
    leases_postgres: PostgresServer,
) -> Deployment:
    """A worker on tables of version 1."""
    url = leases_postgres.new_database()
    make_old(url)
    return stage_factory(request.param, urls={"postgres": url})


def test_no_call_is_lost_and_none_runs_twice_while_the_tables_are_migrated(
    stage: Deployment, name: str
) -> None:
    """Up, down and up again, under a stream of calls and with bodies that hold their leases
    throughout.
    """
    stop, sent = threading.Event(), []

    def call() -> None:
        while not stop.is_set():
            sent.append(
                (f"{name}-{len(sent)}", stage.tasks.work.delay(f"{name}-{len(sent)}", 0.02))
            )
            stop.wait(0.03)

    def more() -> None:
        stage.wait_for("end", len(stage.events("end")) + AT_LEAST)

    before = stage.tasks.work.delay(f"{name}-before").get(timeout=PATIENCE)
    gate = stage.gate()
    held = [stage.tasks.work.delay(f"{name}-held-{number}", gate=str(gate)) for number in range(2)]
    for number in range(2):
        stage.wait_for("begin", name=f"{name}-held-{number}")
    calling = threading.Thread(target=call)
    calling.start()
    records = SqlRecordStore(engine_for(stage.database_url))
    try:
        for version in (2, 1, 2):
            more()
            assert records.migrate(version).after == version
        more()
    finally:
        stop.set()
        calling.join()
        gate.touch()
        records.database.close()
    values = [result.get(timeout=PATIENCE) for result in held] + [
        result.get(timeout=PATIENCE) for _, result in sent
    ]
    names = [f"{name}-held-{number}" for number in range(2)] + [each for each, _ in sent]
    begun = [event["name"] for event in stage.events("begin")]
    assert sorted(begun) == sorted([*names, f"{name}-before"])
    assert [value["name"] for value in values] == names
    for each in names:
        row = stage.row("work", f"work:{each}")
        assert row is not None
        assert (row["state"], row["attempt"], row["crashes"], row["generation"]) == (
            "done",
            1,
            0,
            0,
        )
    assert stage.tasks.work.delay(f"{name}-before").get(timeout=PATIENCE) == before
    stage.wait_until_drained()


def test_a_worker_on_old_tables_warns_at_its_start(stage: Deployment) -> None:
    """With the command to run."""
    assert any(
        "have version 1" in line and "leases migrate" in line for line in stage.log("tables")
    )
