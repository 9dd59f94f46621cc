"""docs/testing-your-tasks.md: its project is written to files, and its tests pass."""

from __future__ import annotations

import re
from importlib.util import find_spec

import pytest

from celery_leases import testing
from celery_leases.testing.crash_points import PACKAGE
from tests.unit.doc_pages import blocks, page

PAGE = page("testing-your-tasks")


def test_the_project_of_the_page_passes_its_tests(pytester: pytest.Pytester) -> None:
    written = 0
    for block in blocks(PAGE, "python"):
        name = re.match(r"# ([\w/]+\.py)", block)
        assert name
        if "import Flask" in block and find_spec("flask") is None:
            continue
        path = pytester.path / name[1].replace("tests.py", "test_unittest.py")
        path.parent.mkdir(exist_ok=True)
        path.write_text(block)
        written += block.count("def test_")
    (pytester.path / "shop" / "__init__.py").touch()
    result = pytester.runpytest_subprocess("-q", "-p", "no:cacheprovider", timeout=240)
    result.assert_outcomes(passed=written)


def test_the_page_names_every_function() -> None:
    table = PAGE.partition("## Reference")[2]
    assert {*re.findall(r"`(\w+)\(", table)} >= {*testing.__all__}
    assert "charge: 2 calls instead of 1" in table
    number, line = re.search(r"attempt 1  tasks\.py:(\d+): (.*)", PAGE).groups()  # type: ignore[union-attr]
    assert blocks(PAGE, "python")[0].splitlines()[int(number) - 1].strip() == line
    assert PACKAGE.endswith("celery_leases")
