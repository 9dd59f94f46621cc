"""What a call costs: Redis commands and SQL statements of a warmed-up worker, counted at the
servers themselves.
"""

from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest
import redis

from celery_leases.testing.waits import wait_until
from tests.integration.conftest import BenchFactory, DeploymentFactory
from tests.integration.deployments import (
    PATIENCE,
    RABBIT_DATABASE_POSTGRES,
    REDIS_REDIS_POSTGRES,
    Deployment,
    spelled,
)
from tests.integration.query_logs import Bench, RedisMonitor, Writes
from tests.support.servers import PostgresServer, RedisServer

TTL = 60
pytestmark = pytest.mark.both_lease_stores  # their costs differ

FIRST_RUN = {
    "redis": Writes(wal=820, xids=2, row_locks=0),
    "database": Writes(wal=800, xids=2, row_locks=0),
}
REPLAY = Writes(wal=0, xids=0, row_locks=0)
"""What PostgreSQL may write for one call; a first run by lease store. Lower it when it falls."""
MEASURED = 20
"""Calls of one measurement: some of them begin a page, which costs more."""


def _warm_up(stage: Deployment) -> None:
    """Connections are made, scripts and statements known."""
    for _ in range(8):
        stage.tasks.work.delay("warm").get(timeout=PATIENCE)
        stage.tasks.keyless.delay("warm").get(timeout=PATIENCE)


@pytest.fixture(
    scope="module", params=[REDIS_REDIS_POSTGRES, RABBIT_DATABASE_POSTGRES], ids=spelled
)
def bench(request: pytest.FixtureRequest, bench_factory: BenchFactory) -> Iterator[Bench]:
    """A worker that has run before."""
    made = bench_factory(request.param)
    _warm_up(made.stage)
    yield made
    made.close()


def test_a_first_run_is_two_redis_trips_and_two_statements(bench: Bench, name: str) -> None:
    commands, statements = bench.cost(
        lambda: bench.stage.tasks.work.delay(name).get(timeout=PATIENCE)
    )
    assert commands == ([] if bench.stage.lease_store == "database" else ["EVALSHA", "EVALSHA"])
    assert len(statements) == 2
    assert statements[1] == "UPDATE"
    assert not {"BEGIN", "COMMIT", "ROLLBACK", "SET", "SHOW"} & set(statements)


def test_a_duplicate_is_answered_by_one_statement_that_writes_nothing(
    bench: Bench, name: str
) -> None:
    stage = bench.stage
    value = stage.tasks.work.delay(name).get(timeout=PATIENCE)
    before = bench.version(f"work:{name}")
    answers: list[Any] = []
    commands, statements = bench.cost(
        lambda: answers.append(stage.tasks.work.delay(name).get(timeout=PATIENCE))
    )
    assert answers == [value]
    assert len(commands) == (0 if stage.lease_store == "database" else 2)
    assert len(statements) == 1
    assert bench.version(f"work:{name}") == before


def test_a_redelivered_copy_is_answered_by_one_select(bench: Bench, name: str) -> None:
    """No lease is acquired, and nothing is written."""
    stage, side = bench.stage, bench.stage.side_queue()
    call = str(uuid4())
    stage.send("work", name, task_id=call).get(timeout=PATIENCE)
    before = bench.version(f"work:{name}")
    stage.send("work", name, task_id=call, queue=side)

    def redelivered() -> None:
        stage.redeliver(side)
        stage.wait_for_log(call, "answered with the saved result")
        stage.wait_for_log(call, "succeeded", 2)

    commands, statements = bench.cost(redelivered)
    assert (commands, statements) == ([], ["SELECT"])
    assert bench.version(f"work:{name}") == before


def test_publishing_asks_neither_store(bench: Bench, name: str) -> None:
    side = bench.stage.side_queue()
    commands, statements = bench.cost(
        lambda: bench.stage.tasks.work.apply_async((name,), queue=side)
    )
    assert (commands, statements) == ([], [])


def test_a_first_run_and_a_replay_write_within_their_budgets(bench: Bench, name: str) -> None:
    work, store = bench.stage.tasks.work, bench.stage.lease_store
    first_runs, replays = [], []
    for attempt in range(3):
        names = [f"{name}-{attempt}-{number:02}" for number in range(MEASURED)]

        def call(names: list[str] = names) -> None:
            for each in names:
                work.delay(each).get(timeout=PATIENCE)

        first_runs.append(_each(bench.writes(call)))
        replays.append(_each(bench.writes(call)))
    # A purge may fall into one of them.
    assert any(writes.within(FIRST_RUN[store]) for writes in first_runs), first_runs
    assert any(writes.within(REPLAY) for writes in replays), replays


def _each(writes: Writes) -> Writes:
    """Per call."""
    return Writes(writes.wal / MEASURED, writes.xids / MEASURED, writes.row_locks / MEASURED)


def test_replays_leave_no_dead_tuple_behind(bench: Bench, name: str) -> None:
    """A read may clear a page of rows that were dead before."""
    stage = bench.stage
    value = stage.tasks.work.delay(name).get(timeout=PATIENCE)
    before = _statistics_of_writes(bench)
    stage.worker.start()
    results = [stage.tasks.work.delay(name) for _ in range(20)]
    assert [result.get(timeout=PATIENCE) for result in results] == [value] * 20
    after = _statistics_of_writes(bench)
    for old, new in zip(before, after, strict=True):
        assert new.pop("n_dead_tup") <= old.pop("n_dead_tup")
    assert after == before
    (records,) = [table for table in before if table["relname"] == "celery_leases_records"]
    assert records["n_tup_ins"] > 0
    assert records["n_tup_upd"] >= records["n_tup_ins"], "the runs before were counted"


def _statistics_of_writes(bench: Bench) -> list[dict[str, Any]]:
    """What was written to the tables so far. A backend reports its last numbers when it ends, so
    the worker is stopped first.
    """
    bench.stage.worker.stop()
    others = "SELECT count(*) AS n FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> "
    wait_until(
        lambda: bench.ask(f"{others} pg_backend_pid()")[0]["n"] == 0,
        10,
        "the end of the worker's connections",
    )
    columns = "relname, n_tup_ins, n_tup_upd, n_tup_del, n_dead_tup"
    return bench.ask(
        f"SELECT {columns} FROM pg_stat_user_tables WHERE relname LIKE 'celery_leases%%' ORDER BY 1"  # noqa: S608
    )


def test_an_empty_redis_costs_nothing_more(
    stage_factory: DeploymentFactory, postgres: PostgresServer, lease_server: RedisServer, name: str
) -> None:
    stage = stage_factory(
        REDIS_REDIS_POSTGRES,
        env={"TTL": str(TTL), "LEASES_URL": lease_server.url},
        urls={"postgres": postgres.new_database()},
        worker={"concurrency": 1},
    )
    tape = RedisMonitor(lease_server.url)
    bench = Bench(stage, postgres, tape)
    try:
        stage.tasks.work.delay(f"{name}-warm").get(timeout=PATIENCE)
        with redis.Redis.from_url(lease_server.url) as client:
            client.flushall()  # may take the scripts along
        costs = []
        for number in range(5):
            call = stage.tasks.work.s(f"{name}-{number}")
            costs.append(bench.cost(lambda call=call: call.delay().get(timeout=PATIENCE)))  # type: ignore[misc]
        # A purge may fall into one of them.
        assert sorted(len(statements) for _, statements in costs)[:-1] == [2] * 4
        assert [commands for commands, _ in costs[1:]] == [["EVALSHA", "EVALSHA"]] * 4
    finally:
        tape.close()
        stage.close()
