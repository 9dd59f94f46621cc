"""Fixtures for all tests come from ``tests/support``; which tests run, from ``combinations``; in
how many processes, from ``processes``.
"""

import gc
import os

import pytest
import trustme
from hypothesis import settings

from celery_leases.concurrency import resource_pool
from tests.combinations import chosen
from tests.support.servers.local import LocalServer, directory_in_memory

# On a busy machine single examples are slow, which is no fault of the code.
settings.register_profile("a few", deadline=None, max_examples=30)
settings.register_profile("many", deadline=None, max_examples=300)
settings.load_profile("a few")

# A new database of PostgreSQL is a copy of 300 files, and the tests need hundreds of databases.
# Benchmarks keep their servers on the disk.
LocalServer.homes = directory_in_memory()

pytest_plugins = [
    "tests.processes",
    "tests.support.plugin",
    "tests.support.browser",
    "pytester",
]


@pytest.fixture(autouse=True)
def _patience() -> None:
    """A test that acquires a lease itself must not leave the patience of its call to the tests
    after it.
    """
    resource_pool.max_wait.set(None)


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--all-combinations`` runs each test on all of its combinations."""
    parser.getgroup("celery_leases").addoption(
        "--all-combinations",
        action="store_true",
        help="run each test on all its brokers, lease stores and databases",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Let hypothesis try more examples for all combinations, and TLS clients trust one authority:
    the usual 150 cost each of them 30 ms, also each connection to MariaDB.
    """
    file = config.cache.mkdir("tls") / "authority.pem"  # type: ignore[union-attr]
    if config.getoption("--all-combinations"):
        settings.load_profile("many")
    if not file.exists():
        trustme.CA().cert_pem.write_to_path(file)
    os.environ["SSL_CERT_FILE"] = str(file)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Choose the combinations to run on."""
    kept = chosen(items, everywhere=config.getoption("--all-combinations"))
    left_out = set(items).difference(kept)
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = kept


def pytest_collectstart() -> None:
    """Collect tests without garbage collections, which would find next to nothing."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Leave what was collected, which lives until the end, out of all later garbage collections."""
    gc.collect()
    gc.freeze()
    gc.enable()
