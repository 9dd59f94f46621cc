"""The pytest plugin reports missing servers: a skip and one line on a laptop, a failure in CI."""

import tomllib

import pytest

from tests.unit.doc_pages import ROOT

CONFTEST = """
pytest_plugins = ["tests.support.plugin", "tests.support.node_plugin"]

def pytest_configure(config):
    from tests.support import plugin, servers

    class Absent(plugin.RedisServer):
        def start(self):
            raise servers.ServerMissing("no Redis: install it")

    plugin.RedisServer = Absent
"""

TESTS = """
import pytest

def test_needs_redis(leases_redis): ...
def test_needs_it_too(leases_redis_url): ...
def test_needs_nothing(leases_queue): ...

@pytest.mark.docker
def test_needs_docker(): ...
"""


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A project of two tests that need a Redis, which is not installed."""
    monkeypatch.delenv("CI", raising=False)
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(TESTS)
    return pytester


def test_a_missing_server_is_a_skip_and_one_line(project: pytest.Pytester) -> None:
    outcome = project.runpytest_subprocess("-p", "no:cacheprovider")
    outcome.assert_outcomes(passed=1, skipped=3)
    outcome.stdout.fnmatch_lines(
        ["NOT TESTED because a server is missing: 2 tests: no Redis: install it"]
    )


def test_in_ci_it_is_a_failure(project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")
    outcome = project.runpytest_subprocess("-p", "no:cacheprovider")
    outcome.assert_outcomes(passed=1, skipped=1, errors=2)
    outcome.stdout.fnmatch_lines(["*no Redis: install it*because CI is set*"])
    outcome.stdout.no_fnmatch_line("NOT TESTED*")


@pytest.mark.nightly
def test_the_docker_flag_leaves_the_nodes_to_pytest_celery(project: pytest.Pytester) -> None:
    local = project.runpytest_subprocess("--fixtures", "-q")
    local.stdout.fnmatch_lines(["celery_broker_cluster*node_fixtures.py*"])
    docker = project.runpytest_subprocess("--fixtures", "-q", "--leases-docker")
    docker.stdout.fnmatch_lines(["celery_broker_cluster*pytest_celery*"])
    ran = project.runpytest_subprocess("--leases-docker", "-m", "docker")
    ran.assert_outcomes(passed=1, deselected=3)


@pytest.mark.nightly
def test_the_plugin_hides_no_fixture_of_celery(pytester: pytest.Pytester) -> None:
    pytester.makeconftest('pytest_plugins = ["celery.contrib.pytest", "tests.support.plugin"]')
    alone = pytester.runpytest_subprocess("--fixtures", "-q", "-p", "no:celery")
    alone.stdout.fnmatch_lines(["celery_worker *celery/contrib/pytest.py*"])
    pytester.makeconftest('pytest_plugins = ["tests.support.plugin"]')
    beside = pytester.runpytest_subprocess("--fixtures", "-q")
    beside.stdout.fnmatch_lines(["celery_broker_cluster*pytest_celery*"])


def test_the_extra_for_testing_does_not_install_pytest_celery() -> None:
    """Its ``celery_worker`` would hide Celery's own."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "optional-dependencies"
    ]
    assert not [line for line in extras["testing"] if line.startswith("pytest-celery")]
