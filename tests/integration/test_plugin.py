"""The pytest plugin reports missing servers: a skip and one line on a laptop, a failure in CI."""

import pytest

CONFTEST = """
pytest_plugins = ["tests.support.plugin"]

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
    outcome.assert_outcomes(passed=1, skipped=2)
    outcome.stdout.fnmatch_lines(
        ["NOT TESTED because a server is missing: 2 tests: no Redis: install it"]
    )


def test_in_ci_it_is_a_failure(project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")
    outcome = project.runpytest_subprocess("-p", "no:cacheprovider")
    outcome.assert_outcomes(passed=1, errors=2)
    outcome.stdout.fnmatch_lines(["*no Redis: install it*because CI is set*"])
    outcome.stdout.no_fnmatch_line("NOT TESTED*")


@pytest.mark.nightly
def test_the_plugin_hides_no_fixture_of_celery(pytester: pytest.Pytester) -> None:
    pytester.makeconftest('pytest_plugins = ["celery.contrib.pytest", "tests.support.plugin"]')
    alone = pytester.runpytest_subprocess("--fixtures", "-q", "-p", "no:celery")
    alone.stdout.fnmatch_lines(["celery_worker *celery/contrib/pytest.py*"])
