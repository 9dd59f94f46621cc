"""The pytest plugin that runs pytest-celery's fixtures over local processes instead of containers.

Use it beside the other one: ``pytest_plugins = ["tests.support.plugin",
"tests.support.node_plugin"]``. It needs pytest-celery, which the extra ``testing`` does not bring:
its fixture ``celery_worker`` hides Celery's own.
"""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--leases-docker`` leaves pytest-celery's nodes to Docker."""
    parser.getgroup("celery_leases").addoption(
        "--leases-docker",
        action="store_true",
        help="run pytest-celery's nodes in Docker containers instead of local processes",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Put nodes over local processes in the place of pytest-celery's own, unless Docker is
    wanted.
    """
    config.addinivalue_line(
        "markers", "docker: needs a Docker engine; runs only with --leases-docker"
    )
    if not config.getoption("--leases-docker"):
        from tests.support import node_fixtures

        config.pluginmanager.register(node_fixtures, "tests.support.node_fixtures")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what is marked ``docker`` unless it was asked for."""
    if not config.getoption("--leases-docker"):
        for item in items:
            if item.get_closest_marker("docker"):
                item.add_marker(pytest.mark.skip(reason="needs Docker: run with --leases-docker"))
