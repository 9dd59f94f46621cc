"""The published suites explain their failed assertions, as pytest does for a user's own tests."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

import pytest

from celery_leases.testing import contracts


@pytest.mark.parametrize("suite", [module.name for module in iter_modules(contracts.__path__)])
def test_the_assertions_of_a_suite_are_rewritten(suite: str) -> None:
    """Otherwise a failure shows neither side of a comparison."""
    module = import_module(f"{contracts.__name__}.{suite}")
    assert "@pytest_ar" in vars(module)
