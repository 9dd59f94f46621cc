"""Deployments with a worker, started once per module and combination to save time."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import redis

from tests.integration.deployments import BOTH_WAYS, Stage, stages
from tests.integration.payments import provider  # noqa: F401
from tests.integration.query_logs import Bench, RedisMonitor
from tests.support.servers import PostgresServer, RedisServer

MakeStage = Callable[..., Stage]
BenchFactory = Callable[..., Bench]


@pytest.fixture(scope="module")
def stage_factory(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[MakeStage]:
    """``stage_factory(combination, **options)`` returns a deployment with a running worker.

    It is closed at the end of the module.
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


module_stage = stages(*BOTH_WAYS)
"""One deployment per module, on both brokers and both lease stores."""


@pytest.fixture
def stage(module_stage: Stage, request: pytest.FixtureRequest) -> Iterator[Stage]:
    """The module's deployment; after a failed test the worker's log is shown."""
    module_stage.app.set_current()
    start = len(module_stage.worker.full_log())
    yield module_stage
    request.node.add_report_section(
        "teardown", "log of the worker", module_stage.worker.full_log()[start:]
    )


@pytest.fixture
def name() -> str:
    return Path(uuid4().hex[:8]).name


@pytest.fixture(scope="module")
def postgres() -> Iterator[PostgresServer]:
    """A PostgreSQL that logs every statement and writes nothing by itself."""
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
    stage_factory: MakeStage, postgres: PostgresServer, lease_server: RedisServer
) -> BenchFactory:
    """``bench_factory(combination, **options)`` returns a deployment for measurements.

    It has one child, so that a warm-up reaches the measured process, and a ttl so long that no
    renewal falls into a measurement. The test closes it.
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
        tape = (
            RedisMonitor(lease_server.url)
            if ours
            else RedisMonitor(stage.redis_url, "celery_leases:")
        )
        return Bench(stage, postgres, tape)

    return make
