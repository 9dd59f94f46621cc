"""The pytest plugin says what it could not test: a skip and one line on a laptop, a failure in CI."""

import pytest

CONFTEST = """
pytest_plugins = ["celery_leases.testing.plugin"]

def pytest_configure(config):
    from celery_leases.testing import plugin, servers

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
    """A project of two tests that need a Redis where there is none."""
    monkeypatch.delenv("CI", raising=False)
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(TESTS)
    return pytester


def test_a_missing_server_is_a_skip_and_one_line(project: pytest.Pytester) -> None:
    """Every test that needed the server is skipped and counted in one summary line."""
    outcome = project.runpytest_subprocess("-p", "no:cacheprovider")
    outcome.assert_outcomes(passed=1, skipped=3)
    outcome.stdout.fnmatch_lines(["NOT TESTED for the lack of a server: 2 tests: no Redis: install it"])


def test_a_missing_server_is_a_failure_in_ci(project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """With CI=true nothing may be missing."""
    monkeypatch.setenv("CI", "true")
    outcome = project.runpytest_subprocess("-p", "no:cacheprovider")
    outcome.assert_outcomes(passed=1, skipped=1, errors=2)
    outcome.stdout.fnmatch_lines(["*no Redis: install it*because CI is set*"])
    outcome.stdout.no_fnmatch_line("NOT TESTED*")


def test_the_docker_flag_leaves_the_nodes_to_pytest_celery(project: pytest.Pytester) -> None:
    """Without the flag the local nodes are in place; with it pytest-celery's own are, and docker tests run."""
    local = project.runpytest_subprocess("--fixtures", "-q")
    local.stdout.fnmatch_lines(["celery_broker_cluster*node_fixtures.py*"])
    docker = project.runpytest_subprocess("--fixtures", "-q", "--leases-docker")
    docker.stdout.fnmatch_lines(["celery_broker_cluster*pytest_celery*"])
    ran = project.runpytest_subprocess("--leases-docker", "-m", "docker")
    ran.assert_outcomes(passed=1, deselected=3)
