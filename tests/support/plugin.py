"""The pytest plugin: private servers, worker processes, and a summary of tests without a server.

Use it with ``pytest_plugins = ["tests.support.plugin"]`` in the top ``conftest.py``.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn, TypeVar
from uuid import uuid4

import pytest

from tests.support.servers import (
    LocalServer,
    MariaServer,
    MySQLServer,
    PostgresServer,
    RabbitServer,
    RedisServer,
    RunningRabbit,
    ServerMissing,
    find_running_rabbit,
)
from tests.support.workers import LocalWorker, Pool

Server = TypeVar("Server", bound=LocalServer)

MISSING = "missing server: "
"""The prefix of such a skip's reason, by which the summary counts them."""

WorkerFactory = Callable[..., LocalWorker]
"""The type of the fixture ``worker_factory``, for annotations."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--leases-mysql``, which replaces MariaDB by MySQL."""
    parser.getgroup("celery_leases").addoption(
        "--leases-mysql",
        action="store_true",
        help="give the tests that use MariaDB a MySQL server instead",
    )


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Write a line about the tests that were skipped because a server is missing."""
    counts: dict[str, int] = {}
    for report in terminalreporter.stats.get("skipped", []):
        reason = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
        _, found, what = reason.partition(MISSING)
        if found:
            counts[what] = counts.get(what, 0) + 1
    if counts:
        summary = "; ".join(
            f"{number} test{'s' * (number > 1)}: {what}" for what, number in counts.items()
        )
        terminalreporter.write_line(
            f"NOT TESTED because a server is missing: {summary}", yellow=True
        )


def missing_server(what: str) -> NoReturn:
    """Skip the test, and say what to install. With ``CI=true`` fail it, because CI must have all
    servers.
    """
    if os.environ.get("CI", "").lower() in {"1", "true"}:
        pytest.fail(
            f"{MISSING}{what} (a skip on a laptop, a failure because CI is set)", pytrace=False
        )
    pytest.skip(f"{MISSING}{what}")


def _started(server: Server) -> Iterator[Server]:
    try:
        server.start()
    except ServerMissing as missing:
        missing_server(str(missing))
    yield server
    server.stop()


@pytest.fixture(scope="session")
def leases_redis() -> Iterator[RedisServer]:
    """One private Redis or Valkey for the whole run. A test that kills or pauses a server starts
    its own RedisServer.
    """
    yield from _started(RedisServer())


@pytest.fixture
def leases_redis_url(leases_redis: RedisServer) -> str:
    """URL of the shared private Redis, emptied before the test."""
    import redis

    with redis.Redis.from_url(leases_redis.url) as client:
        client.flushall()
    return leases_redis.url


@pytest.fixture(scope="session")
def leases_postgres() -> Iterator[PostgresServer]:
    """One private PostgreSQL for the whole run. A test that restarts a server starts its own
    PostgresServer.
    """
    yield from _started(PostgresServer())


@pytest.fixture
def leases_postgres_url(leases_postgres: PostgresServer) -> str:
    """SQLAlchemy URL of an empty database of the shared private PostgreSQL, made for this test."""
    return leases_postgres.new_database()


@pytest.fixture(scope="session")
def leases_mariadb(request: pytest.FixtureRequest) -> Iterator[MariaServer]:
    """One private MariaDB, or MySQL, for the whole run. A test that restarts a server starts its
    own of the same type.
    """
    yield from _started(
        MySQLServer() if request.config.getoption("--leases-mysql") else MariaServer()
    )


@pytest.fixture
def leases_mariadb_url(leases_mariadb: MariaServer) -> str:
    """SQLAlchemy URL of an empty database of the shared private MariaDB, made for this test."""
    return leases_mariadb.new_database()


@pytest.fixture(scope="session")
def leases_rabbit() -> Iterator[RunningRabbit]:
    """RabbitMQ: the running one, if possible in a virtual host for this run; otherwise a private
    node.
    """
    if running := find_running_rabbit():
        ours = running.isolate()
        yield ours
        ours.remove()
    else:
        for server in _started(RabbitServer()):
            yield RunningRabbit(server.url, isolated=True)


@pytest.fixture
def leases_queue() -> str:
    """A queue name that no other test uses."""
    return f"leases-{uuid4().hex[:12]}"


@pytest.fixture
def worker_factory(
    tmp_path: Path, pytestconfig: pytest.Config, request: pytest.FixtureRequest
) -> Iterator[WorkerFactory]:
    """``worker_factory(app, *, broker=, backend=, wait=True, **LocalWorker options)`` starts a
    worker.

    Workers run in pytest's root directory. They end with their children when the test ends, and the
    logs of a failed test are shown. ``broker`` and ``backend`` are passed to Celery as
    CELERY_BROKER_URL and CELERY_RESULT_BACKEND, which have precedence over the app's settings.
    """
    workers: list[LocalWorker] = []

    def make(
        app: str,
        *,
        broker: str | None = None,
        backend: str | None = None,
        pool: Pool = "prefork",
        env: dict[str, str] | None = None,
        wait: bool = True,
        **options: Any,
    ) -> LocalWorker:
        urls = {"CELERY_BROKER_URL": broker, "CELERY_RESULT_BACKEND": backend}
        worker = LocalWorker(
            app,
            pool=pool,
            directory=options.pop("directory", tmp_path),
            cwd=options.pop("cwd", pytestconfig.rootpath),
            env={name: url for name, url in urls.items() if url} | (env or {}),
            **options,
        )
        workers.append(worker)
        return worker.start() if wait else worker.launch()

    yield make
    for worker in workers:
        worker.teardown()
    for worker in workers:
        request.node.add_report_section("teardown", f"log of {worker.name}", worker.full_log())
