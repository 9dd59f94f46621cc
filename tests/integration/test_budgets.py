"""What a call costs: Redis commands and SQL statements of a warmed-up worker, counted at the servers themselves."""

import re
from collections.abc import Callable, Iterator
from threading import Event, Thread
from typing import Any
from uuid import uuid4

import pytest
import redis

from celery_leases.testing.process import wait_until
from celery_leases.testing.servers import PostgresServer, RedisServer
from tests.integration.conftest import StageFactory
from tests.integration.stages import PATIENCE, RABBIT_DATABASE_POSTGRES, REDIS_REDIS_POSTGRES, Stage, spelled

TTL = 3
LONG_TTL = 600.0


class RedisTape:
    """The commands with *about* in them that a Redis server was given, by MONITOR; what scripts ran does not count."""

    def __init__(self, url: str, about: str = "") -> None:
        self._url = url
        self._about = about
        self._client = redis.Redis.from_url(url)
        self._lines: list[str] = []
        self._stop = Event()
        self._started = Event()
        self._thread = Thread(target=self._listen, daemon=True)
        self._thread.start()
        self._started.wait(10)

    def _listen(self) -> None:
        client = redis.Redis.from_url(self._url, socket_timeout=None)
        with client.monitor() as monitor:
            self._started.set()
            while not self._stop.is_set():
                command = monitor.next_command()
                if command["client_type"] != "lua":
                    self._lines.append(command["command"])

    def _mark(self) -> int:
        marker = f"marker-{uuid4().hex}"
        self._client.echo(marker)
        wait_until(lambda: any(marker in line for line in self._lines), 10, "the marker in MONITOR")
        return next(place for place, line in enumerate(self._lines) if marker in line)

    def during(self, action: Callable[[], object]) -> list[str]:
        """The first words of the commands that came while *action* ran."""
        start = self._mark()
        action()
        told = self._lines[start + 1 : self._mark()]
        return [line.split()[0].upper() for line in told if self._about in line]

    def close(self) -> None:
        """Stop listening."""
        self._stop.set()
        self._client.echo("end")
        self._thread.join(10)
        self._client.close()


class SqlTape:
    """The statements a PostgreSQL server was given, by its own log (``log_statement=all``), BEGIN and COMMIT too."""

    _STATEMENT = re.compile(r"LOG: +(?:statement|execute [^:]+): (.*)")

    def __init__(self, server: PostgresServer, run: Callable[[str], Any]) -> None:
        self._server = server
        self._run = run

    def _mark(self) -> int:
        marker = f"marker-{uuid4().hex}"
        self._run(f"SELECT '{marker}'")
        wait_until(lambda: marker in self._server.logs(), 10, "the marker in the log")
        log = self._server.logs()
        return log.rindex("\n", 0, log.index(marker))

    def during(self, action: Callable[[], object]) -> list[str]:
        """The statements that came while *action* ran."""
        start = self._mark()
        action()
        end = self._mark()
        told = self._STATEMENT.findall(self._server.logs()[start:end])
        return [statement for statement in told if "marker-" not in statement]


@pytest.fixture(scope="module")
def postgres() -> Iterator[PostgresServer]:
    """A PostgreSQL that logs every statement and is asked by nobody else."""
    server = PostgresServer(settings={"log_statement": "all", "autovacuum": "off"})
    with server:
        yield server


@pytest.fixture(scope="module")
def lease_server() -> Iterator[RedisServer]:
    """A Redis for leases alone."""
    with RedisServer() as server:
        yield server


class Bench:
    """A stage with one warmed-up child, and what its servers were asked."""

    def __init__(self, stage: Stage, postgres: PostgresServer, tape: RedisTape) -> None:
        self.stage = stage
        self.redis = tape
        self.sql = SqlTape(postgres, self.ask)

    def ask(self, statement: str) -> list[dict[str, Any]]:
        """Ask the database."""
        with self.stage._engine.connect() as connection:
            return [dict(row) for row in connection.exec_driver_sql(statement).mappings()]

    def cost(self, action: Callable[[], object]) -> tuple[list[str], list[str]]:
        """The Redis commands and the SQL statements of *action*."""
        commands: list[str] = []

        def both() -> None:
            commands.extend(self.redis.during(action))

        statements = self.sql.during(both)
        return commands, [statement.split()[0].upper() for statement in statements]

    def version(self, key: str) -> dict[str, Any]:
        """Where the row's tuple lies and which transaction wrote it: any write moves both."""
        (found,) = self.ask(f"SELECT xmin::text, ctid::text FROM celery_leases_records WHERE key = '{key}'")  # noqa: S608
        return found


def _warm_up(stage: Stage) -> None:
    """Connections are made, scripts and statements known."""
    for _ in range(8):
        stage.tasks.work.delay("warm").get(timeout=PATIENCE)
        stage.tasks.keyless.delay("warm").get(timeout=PATIENCE)


@pytest.fixture(scope="module", params=[REDIS_REDIS_POSTGRES, RABBIT_DATABASE_POSTGRES], ids=spelled)
def bench(
    request: pytest.FixtureRequest, stage_factory: StageFactory, postgres: PostgresServer, lease_server: RedisServer
) -> Iterator[Bench]:
    """One child, so that a warm-up warms what is measured; a ttl so long that no renewal falls into a measurement."""
    env = {"TTL": str(LONG_TTL)}
    if "redis" in request.param[1]:
        env["LEASES_URL"] = lease_server.url
        # A store that has been up for longer than a ttl is past its settling period.
        with redis.Redis.from_url(lease_server.url) as client:
            client.flushall()
            client.set("celery_leases:epoch", "1", px=60_000)
    stage = stage_factory(request.param, env=env, urls={"postgres": postgres.new_database()}, worker={"concurrency": 1})
    # Where no Redis is for leases, the result backend is the only one that could have been asked.
    tape = RedisTape(lease_server.url) if "redis" in request.param[1] else RedisTape(stage.redis_url, "celery_leases")
    _warm_up(stage)
    yield Bench(stage, postgres, tape)
    tape.close()
    stage.close()


def test_a_first_run_is_two_redis_trips_and_two_statements(bench: Bench, name: str) -> None:
    """Acquire and release, claim and settle; with database leases the claim is the lease, and Redis is not asked."""
    commands, statements = bench.cost(lambda: bench.stage.tasks.work.delay(name).get(timeout=PATIENCE))
    assert commands == ([] if bench.stage.lease_store == "database" else ["EVALSHA", "EVALSHA"])
    assert len(statements) == 2
    assert statements[1] == "UPDATE"
    assert not {"BEGIN", "COMMIT", "ROLLBACK", "SET", "SHOW"} & set(statements)


def test_a_duplicate_by_another_call_is_answered_by_one_statement_that_writes_nothing(bench: Bench, name: str) -> None:
    """The refused claim tells the result; the row's tuple is the one that was there before."""
    stage = bench.stage
    value = stage.tasks.work.delay(name).get(timeout=PATIENCE)
    before = bench.version(f"work:{name}")
    answers: list[Any] = []
    commands, statements = bench.cost(lambda: answers.append(stage.tasks.work.delay(name).get(timeout=PATIENCE)))
    assert answers == [value]
    assert len(commands) == (0 if stage.lease_store == "database" else 2)
    assert len(statements) == 1
    assert bench.version(f"work:{name}") == before


def test_a_redelivered_copy_is_answered_by_one_select(bench: Bench, name: str) -> None:
    """A delivery that says it is a repeat reads before it claims: no lease is taken, nothing is written."""
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
    """The caller's side: not one command, not one statement."""
    side = bench.stage.side_queue()
    commands, statements = bench.cost(lambda: bench.stage.tasks.work.apply_async((name,), queue=side))
    assert (commands, statements) == ([], [])


def test_replays_leave_no_dead_tuple_behind(bench: Bench, name: str) -> None:
    """Twenty replays, by the server's own statistics: not one row inserted, updated, deleted, or dead."""
    stage = bench.stage
    value = stage.tasks.work.delay(name).get(timeout=PATIENCE)
    before = _statistics_of_writes(bench)
    stage.worker.start()
    results = [stage.tasks.work.delay(name) for _ in range(20)]
    assert [result.get(timeout=PATIENCE) for result in results] == [value] * 20
    assert _statistics_of_writes(bench) == before
    (records,) = [table for table in before if table["relname"] == "celery_leases_records"]
    assert records["n_tup_ins"] > 0
    assert records["n_tup_upd"] >= records["n_tup_ins"], "the runs before were counted"


def _statistics_of_writes(bench: Bench) -> list[dict[str, Any]]:
    """What has been written to our tables so far. A backend tells its last numbers when it ends, so the worker is."""
    bench.stage.worker.stop()
    others = "SELECT count(*) AS n FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> "
    wait_until(lambda: bench.ask(f"{others} pg_backend_pid()")[0]["n"] == 0, 10, "the end of the worker's connections")
    columns = "relname, n_tup_ins, n_tup_upd, n_tup_del, n_dead_tup"
    return bench.ask(f"SELECT {columns} FROM pg_stat_user_tables WHERE relname LIKE 'celery_leases%%' ORDER BY 1")  # noqa: S608


def test_in_the_settling_period_of_an_empty_redis_an_acquire_looks_at_the_record_first(
    stage_factory: StageFactory, postgres: PostgresServer, lease_server: RedisServer, name: str
) -> None:
    """For one ttl after a flush, one trip and one SELECT more, for the holders of before may still be at work."""
    stage = stage_factory(
        REDIS_REDIS_POSTGRES,
        env={"TTL": str(TTL), "LEASES_URL": lease_server.url},
        urls={"postgres": postgres.new_database()},
        worker={"concurrency": 1},
    )
    tape = RedisTape(lease_server.url)
    bench = Bench(stage, postgres, tape)
    try:
        stage.tasks.work.delay(f"{name}-warm").get(timeout=PATIENCE)
        with redis.Redis.from_url(lease_server.url) as client:
            client.flushall()
        commands, statements = bench.cost(lambda: stage.tasks.work.delay(f"{name}-1").get(timeout=PATIENCE))
        # EVAL: the flush took the scripts along, except what is cached for good.
        assert len([command for command in commands if command in ("EVALSHA", "EVAL")]) >= 3
        assert statements[0] == "SELECT"
        assert len(statements) == 3

        commands, statements = bench.cost(lambda: stage.tasks.work.delay(f"{name}-2").get(timeout=PATIENCE))
        assert (len(commands), len(statements)) == (3, 3)

        with redis.Redis.from_url(lease_server.url) as client:
            epoch = "celery_leases:epoch"
            born = client.pttl(epoch)
            wait_until(lambda: born - client.pttl(epoch) > TTL * 1000, 10, "the end of the settling period")
        commands, statements = bench.cost(lambda: stage.tasks.work.delay(f"{name}-3").get(timeout=PATIENCE))
        assert (len(commands), len(statements)) == (2, 2)
    finally:
        tape.close()
        stage.close()
