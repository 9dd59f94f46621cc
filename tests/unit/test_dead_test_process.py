"""A test run in which a test kills the process that runs it."""

import re

import pytest

MODULE = """
import os
import time
import pytest

@pytest.mark.parametrize("number", range(6))
def test_one_of_six(number):
    if number == 2:
        os._exit(3)
    time.sleep(0.2)
"""


def test_a_test_that_ends_its_process_fails_once_and_the_others_run(
    pytester: pytest.Pytester, pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    makefile = (pytestconfig.rootpath / "Makefile").read_text()
    (options,) = re.findall(r"^PYTEST_ARGS \?= -n \S+ (.*)$", makefile, re.MULTILINE)
    pytester.makepyfile(test_first=MODULE, test_second=MODULE.replace("== 2", "> 6"))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # others only cost time
    ended = pytester.runpytest_subprocess(
        "-p", "xdist.plugin", "-n", "2", *options.split(), timeout=100
    )
    ended.assert_outcomes(passed=11, failed=1)
