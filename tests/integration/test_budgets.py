"""What a call costs: Redis commands and SQL statements of a warmed-up worker, counted at the
servers themselves.
"""

from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest
import redis

from tests.integration.conftest import BenchFactory, MakeStage
from tests.integration.deployments import (
    RABBIT_DATABASE_POSTGRES,
    REDIS_REDIS_POSTGRES,
    Stage,
    got,
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


def _warm_up(stage: Stage) -> None:
    """Connections are made, scripts and statements known."""
    for _ in range(8):
        got(stage.tasks.work.delay("warm"))
        got(stage.tasks.keyless.delay("warm"))


@pytest.fixture(
    scope="module", params=[REDIS_REDIS_POSTGRES, RABBIT_DATABASE_POSTGRES], ids=spelled
)
def bench(request: pytest.FixtureRequest, bench_factory: BenchFactory) -> Iterator[Bench]:
    made = bench_factory(request.param)
    _warm_up(made.stage)
    yield made
    made.close()


def test_a_first_run_is_two_redis_trips_and_two_statements(bench: Bench, name: str) -> None:
    commands, statements = bench.cost(lambda: got(bench.stage.tasks.work.delay(name)))
    assert commands == ([] if bench.stage.lease_store == "database" else ["EVALSHA", "EVALSHA"])
    assert len(statements) == 2
    assert statements[1] == "UPDATE"
    assert not {"BEGIN", "COMMIT", "ROLLBACK", "SET", "SHOW"} & set(statements)


def test_a_duplicate_is_one_statement_that_writes_nothing(bench: Bench, name: str) -> None:
    stage = bench.stage
    value = got(stage.tasks.work.delay(name))
    before = bench.version(f"work:{name}")
    answers: list[Any] = []
    commands, statements = bench.cost(lambda: answers.append(got(stage.tasks.work.delay(name))))
    assert answers == [value]
    assert len(commands) == (0 if stage.lease_store == "database" else 2)
    assert len(statements) == 1
    assert bench.version(f"work:{name}") == before


def test_a_redelivered_copy_is_answered_by_one_select(bench: Bench, name: str) -> None:
    """No lease is acquired, and nothing is written."""
    stage, side = bench.stage, bench.stage.side_queue()
    call = str(uuid4())
    got(stage.send("work", name, task_id=call))
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
                got(work.delay(each))

        first_runs.append(_each(bench.writes(call)))
        replays.append(_each(bench.writes(call)))
    # A purge may fall into one of them.
    assert any(writes.within(FIRST_RUN[store]) for writes in first_runs), first_runs
    assert any(writes.within(REPLAY) for writes in replays), replays


def _each(writes: Writes) -> Writes:
    return Writes(writes.wal / MEASURED, writes.xids / MEASURED, writes.row_locks / MEASURED)


def test_an_empty_redis_costs_nothing_more(
    stage_factory: MakeStage, postgres: PostgresServer, lease_server: RedisServer, name: str
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
        got(stage.tasks.work.delay(f"{name}-warm"))
        with redis.Redis.from_url(lease_server.url) as client:
            client.flushall()  # may take the scripts along
        costs = []
        for number in range(5):
            call = stage.tasks.work.s(f"{name}-{number}")
            costs.append(bench.cost(lambda call=call: got(call.delay())))  # type: ignore[misc]
        # A purge may fall into one of them.
        assert sorted(len(statements) for _, statements in costs)[:-1] == [2] * 4
        assert [commands for commands, _ in costs[1:]] == [["EVALSHA", "EVALSHA"]] * 4
    finally:
        tape.close()
        stage.close()
