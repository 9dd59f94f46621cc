"""A test run in which a test kills the process that runs it."""

import pytest

MODULE = """
import os
import time
import pytest

@pytest.mark.parametrize("number", range(6))
def test_one_of_six(number):
    if number == 2:
        os._exit(3)
    time.sleep(0.1)
"""


def test_a_test_that_ends_its_process_fails_once_and_the_others_run(
    pytester: pytest.Pytester, pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytester.makepyfile(test_first=MODULE, test_second=MODULE.replace("== 2", "> 6"))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # others only cost time
    monkeypatch.setenv("PYTHONPATH", str(pytestconfig.rootpath))
    ended = pytester.runpytest_subprocess("-p", "tests.processes", "--processes=2", timeout=100)
    ended.assert_outcomes(passed=11, failed=1)
    ended.stdout.fnmatch_lines("*the process that ran test_first.py::*[[]2] ended with 3*")
