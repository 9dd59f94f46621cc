"""Deployments for the tests that kill, pause and restart processes; most tests have their own."""

from collections.abc import Callable, Iterator
from uuid import uuid4

import pytest

from tests.crash.crash_deployments import Scene
from tests.integration.deployments import BOTH_WAYS
from tests.integration.payments import provider  # noqa: F401
from tests.support.plugin import missing_server
from tests.support.servers import (
    LocalServer,
    PostgresServer,
    RabbitServer,
    RedisServer,
    ServerMissing,
)

MakeScene = Callable[..., Scene]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all tests here as ``crash``."""
    for item in items:
        if "tests/crash/" in item.path.as_posix():
            item.add_marker(pytest.mark.crash)


@pytest.fixture
def combination() -> tuple[str, ...]:
    """Where the scenes of a test are that is not parametrized by it, and names no other."""
    return BOTH_WAYS[0]


@pytest.fixture
def scene_factory(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    combination: tuple[str, ...],
) -> Iterator[MakeScene]:
    """``scene_factory(urls=..., start=True, **options)`` returns a deployment on the combination
    of the test, or on another one; *urls* are those of the test's own servers.
    """
    scenes: list[Scene] = []

    def make(
        combination: tuple[str, ...] = combination,
        *,
        urls: dict[str, str] | None = None,
        start: bool = True,
        **options: object,
    ) -> Scene:
        known = dict(urls or {})
        known.setdefault("redis", request.getfixturevalue("leases_redis").url)
        if "rabbit" in combination and "rabbit" not in known:
            known["rabbit"] = request.getfixturevalue("leases_rabbit").url
        for server in {"postgres", "mariadb"} & {*combination} - {*known}:
            known[server] = request.getfixturevalue(f"leases_{server}").new_database()
        scene = Scene(combination, known, tmp_path_factory.mktemp("scene"), **options)  # type: ignore[arg-type]
        scenes.append(scene)
        if start:
            scene.start()
        return scene

    yield make
    for scene in scenes:
        scene.close()
        for worker in scene.workers:
            request.node.add_report_section("teardown", f"log of {worker.name}", worker.full_log())


def _own(server: LocalServer) -> Iterator[LocalServer]:
    try:
        server.start()
    except ServerMissing as missing:
        missing_server(str(missing))
    yield server
    server.stop()


@pytest.fixture
def own_redis() -> Iterator[LocalServer]:
    """A Redis that the test may kill; it loses its data when it dies."""
    yield from _own(RedisServer())


@pytest.fixture
def durable_redis() -> Iterator[LocalServer]:
    """A Redis that the test may kill; it writes every command to disk."""
    yield from _own(RedisServer(options=("--appendonly", "yes", "--appendfsync", "always")))


@pytest.fixture(scope="module")
def module_postgres() -> Iterator[LocalServer]:
    """A PostgreSQL that the tests of one module may kill."""
    yield from _own(PostgresServer())


@pytest.fixture
def own_postgres(module_postgres: LocalServer) -> LocalServer:
    return _healed(module_postgres)


@pytest.fixture(scope="module")
def module_rabbit() -> Iterator[LocalServer]:
    """A RabbitMQ that the tests of one module may kill."""
    yield from _own(RabbitServer())


@pytest.fixture
def own_rabbit(module_rabbit: LocalServer) -> LocalServer:
    return _healed(module_rabbit)


def _healed(server: LocalServer) -> LocalServer:
    """The server, running again even if another test failed during an outage."""
    if server.alive:
        server.resume()
    return server.start()


@pytest.fixture
def name() -> str:
    return uuid4().hex[:8]
