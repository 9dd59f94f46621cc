"""The pytest plugin that runs pytest-celery's fixtures over local processes instead of containers.

Use it together with the other plugin: ``pytest_plugins = ["tests.support.plugin",
"tests.support.node_plugin"]``. It needs pytest-celery, which the extra ``testing`` does not
install, because its fixture ``celery_worker`` replaces that of Celery.
"""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--leases-docker``, with which pytest-celery's nodes are Docker containers."""
    parser.getgroup("celery_leases").addoption(
        "--leases-docker",
        action="store_true",
        help="run pytest-celery's nodes in Docker containers instead of local processes",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Replace pytest-celery's nodes by local processes, unless ``--leases-docker`` is given."""
    config.addinivalue_line(
        "markers", "docker: needs a Docker engine; runs only with --leases-docker"
    )
    if not config.getoption("--leases-docker"):
        from tests.support import node_fixtures

        config.pluginmanager.register(node_fixtures, "tests.support.node_fixtures")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip the tests marked ``docker`` unless ``--leases-docker`` is given."""
    if not config.getoption("--leases-docker"):
        for item in items:
            if item.get_closest_marker("docker"):
                item.add_marker(pytest.mark.skip(reason="needs Docker: run with --leases-docker"))
