"""Stages: started once per module and combination, because a worker takes a second of a core to
start.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import redis

from tests.integration.stages import BOTH_WAYS, Stage, spelled
from tests.integration.tapes import Bench, RedisTape
from tests.support.servers import PostgresServer, RedisServer

StageFactory = Callable[..., Stage]
BenchFactory = Callable[..., Bench]


@pytest.fixture(scope="module")
def stage_factory(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[StageFactory]:
    """``stage_factory(combination, **Stage options)`` gives a stage with a running worker until the
    module ends.
    """
    stages: list[Stage] = []

    def make(
        combination: tuple[str, ...],
        *,
        start: bool = True,
        urls: Mapping[str, str] | None = None,
        **options: Any,
    ) -> Stage:
        urls = {"redis": request.getfixturevalue("leases_redis").url, **(urls or {})}
        if "rabbit" in combination:
            urls["rabbit"] = request.getfixturevalue("leases_rabbit").url
        for server in {"postgres", "mariadb"} & {*combination} - {*urls}:
            urls[server] = request.getfixturevalue(f"leases_{server}").new_database()
        stage = Stage(combination, urls, tmp_path_factory.mktemp("stage"), **options)
        stages.append(stage)
        if start:
            stage.worker.start()
        return stage

    yield make
    for stage in stages:
        stage.close()


@pytest.fixture(scope="module", params=BOTH_WAYS, ids=spelled)
def module_stage(request: pytest.FixtureRequest, stage_factory: StageFactory) -> Iterator[Stage]:
    """One stage per module, on both brokers and both lease stores; at its end nothing may be left
    in the queue.
    """
    made = stage_factory(request.param)
    yield made
    made.close_when_drained(request.session)


@pytest.fixture
def stage(module_stage: Stage, request: pytest.FixtureRequest) -> Iterator[Stage]:
    """The module's stage; the log of a test that failed is shown."""
    module_stage.app.set_current()
    start = len(module_stage.worker.full_log())
    yield module_stage
    request.node.add_report_section(
        "teardown", "log of the worker", module_stage.worker.full_log()[start:]
    )


@pytest.fixture
def name() -> str:
    """A name that no other test uses."""
    return Path(uuid4().hex[:8]).name


@pytest.fixture(scope="module")
def postgres() -> Iterator[PostgresServer]:
    """A PostgreSQL that logs every statement, is asked by nobody else, and writes nothing by
    itself.
    """
    alone = {"autovacuum": "off", "wal_level": "minimal", "max_wal_senders": "0"}
    server = PostgresServer(settings={"log_statement": "all", **alone})
    with server:
        yield server


@pytest.fixture(scope="module")
def lease_server() -> Iterator[RedisServer]:
    """A Redis for leases alone."""
    with RedisServer() as server:
        yield server


@pytest.fixture(scope="module")
def bench_factory(
    stage_factory: StageFactory, postgres: PostgresServer, lease_server: RedisServer
) -> BenchFactory:
    """``bench_factory(combination, **Stage options)`` gives a stage with one child, so that a
    warm-up warms what is measured, and a ttl so long that no renewal falls into a measurement.
    Whoever takes it closes it.
    """

    def make(combination: tuple[str, ...], **options: Any) -> Bench:
        env, ours = {"TTL": "600"}, "redis" in combination[1]
        if ours:
            env["LEASES_URL"] = lease_server.url
            with redis.Redis.from_url(lease_server.url) as client:
                client.flushall()
        urls = {"postgres": postgres.new_database()}
        stage = stage_factory(combination, env=env, urls=urls, worker={"concurrency": 1}, **options)
        # Where no Redis is for leases, the result backend is the only one that could have been
        # asked.
        tape = RedisTape(lease_server.url) if ours else RedisTape(stage.redis_url, "celery_leases:")
        return Bench(stage, postgres, tape)

    return make
