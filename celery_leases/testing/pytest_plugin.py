"""The pytest plugin: the fixture ``leases``, with leases in memory.

Write ``pytest_plugins = ["celery_leases.testing.pytest_plugin"]`` in the top ``conftest.py``.
Celery is imported by the first test that uses the fixture.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from celery import Celery

    from celery_leases.testing.kit import LeaseKit


@pytest.fixture
def leases_app() -> Celery | None:
    """The Celery app of the fixture ``leases``, by default the current app. Override it."""
    return None


@pytest.fixture
def leases(leases_app: Celery | None) -> Iterator[LeaseKit]:
    """Leases in memory, and eager calls, for one test."""
    from celery_leases.testing.kit import LeaseKit

    with LeaseKit(leases_app) as kit:
        yield kit
