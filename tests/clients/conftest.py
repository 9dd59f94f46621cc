"""The real servers that some cases need, and a check for leaked threads and sockets."""

import gc
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

import pytest
import redis

from celery_leases.testing.waits import wait_until
from tests.clients.expectations import Case, Places
from tests.support.plugin import missing_server
from tests.support.servers import PostgresServer, RedisServer, ServerMissing

PASSWORD = "right"
LIBRARIES = (
    *("aiohttp", "anthropic", "botocore", "google.api_core", "google.auth", "google.genai"),
    *("google.rpc", "grpc", "grpc_status", "httpx", "httpx2", "openai", "requests"),
    *("stripe", "tenacity"),
)
"""The modules of the dependency group ``clients``."""


class NotInstalled(pytest.Module):
    """A module whose libraries are not installed: a skip, and a failure in CI."""

    def collect(self) -> NoReturn:
        """Skip or fail."""
        reason = "the client libraries are not installed: pip install --group clients"
        if os.environ.get("CI"):
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)


def _is_missing(library: str) -> bool:
    try:
        return find_spec(library) is None
    except ModuleNotFoundError:  # of the package that it is in
        return True


def pytest_pycollect_makemodule(
    module_path: Path, parent: pytest.Collector
) -> pytest.Module | None:
    """Import the tests only if all libraries are installed."""
    if any(map(_is_missing, LIBRARIES)):
        made: NotInstalled = NotInstalled.from_parent(parent, path=module_path)
        return made
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """An open question is expected to fail, and a failure once it is answered."""
    if any(map(_is_missing, LIBRARIES)):
        return
    from tests.clients.catalog import OPEN

    for item in items:
        callspec = getattr(item, "callspec", None)
        case = callspec.params.get("case") if callspec else None
        if isinstance(case, Case) and case.name in OPEN:
            item.add_marker(
                pytest.mark.xfail(reason=OPEN[case.name], raises=AssertionError, strict=True)
            )


@pytest.fixture(scope="session")
def clients_postgres(leases_postgres: PostgresServer) -> str:
    return leases_postgres.new_database()


@pytest.fixture(scope="session")
def clients_redis() -> Iterator[str]:
    """A private Redis with a password. It is a replica without a primary, so writes fail."""
    server = RedisServer()
    try:
        server.start()
    except ServerMissing as missing:
        missing_server(str(missing))
    with server:
        with redis.Redis.from_url(server.url) as client, socket.socket() as nobody:
            nobody.bind(("127.0.0.1", 0))
            client.replicaof("127.0.0.1", str(nobody.getsockname()[1]))
            client.config_set("requirepass", PASSWORD)
        yield server.url.replace("redis://", f"redis://:{PASSWORD}@")


@pytest.fixture
def places(request: pytest.FixtureRequest) -> Callable[[Case], Places]:
    """``places(case)``: the real servers that one case needs, started when the first one does."""

    def of(case: Case) -> Places:
        return (
            Places(**{case.needs: request.getfixturevalue(f"clients_{case.needs}")})
            if case.needs
            else Places()
        )

    return of


def open_sockets() -> set[str]:
    """The open sockets of this process, on systems that list them."""
    found = set()
    for entry in Path("/proc/self/fd").glob("*"):
        with suppress(OSError):
            found.add(str(entry.readlink()))
    return {target for target in found if target.startswith("socket:")}


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """The test leaves no thread and no socket."""
    threads, sockets = set(threading.enumerate()), open_sockets()
    yield
    # An error holds its frames, and those what a client ends only with its last reference; slow,
    # and so not always.
    if set(threading.enumerate()) - threads or open_sockets() - sockets:
        gc.collect()
    wait_until(lambda: set(threading.enumerate()) <= threads, 2, "the threads to end")
    wait_until(lambda: open_sockets() <= sockets, 2, "the sockets to be closed")
