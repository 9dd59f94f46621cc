"""A step that a store does not answer is repeated while its time lasts."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from celery_leases.attempt.run import retrying
from celery_leases.errors import StoreUnavailable
from tests.unit.memory_stores import ManualClock


def failing(times: int, error: type[Exception] = StoreUnavailable) -> Callable[[], str]:
    """A step that fails so often."""
    left = [error(f"failure {number}") for number in range(times)]

    def step() -> str:
        if left:
            raise left.pop(0)
        return "done"

    return step


def test_the_pauses_double_up_to_two_seconds() -> None:
    clock = ManualClock()
    began = clock.now()
    assert retrying(failing(8), lambda: began + 60, clock) == "done"
    assert clock.now() - began == pytest.approx(0.05 + 0.1 + 0.2 + 0.4 + 0.8 + 1.6 + 2 + 2)


def test_the_last_error_is_raised_before_a_pause_that_would_last_too_long() -> None:
    clock = ManualClock()
    began = clock.now()
    with pytest.raises(StoreUnavailable, match="failure 2"):
        retrying(failing(9), lambda: began + 0.3, clock)
    assert clock.now() - began == pytest.approx(0.15)


def test_what_is_not_repeatable_is_raised_at_once() -> None:
    clock, asked = ManualClock(), []

    def repeatable(error: Exception, tries: int) -> bool:
        asked.append((str(error), tries))
        return tries < 1

    with pytest.raises(StoreUnavailable, match="failure 1"):
        retrying(failing(9), lambda: 1e9, clock, repeatable=repeatable)
    assert asked == [("failure 0", 0), ("failure 1", 1)]


def test_other_errors_are_repeated_only_where_they_are_named() -> None:
    clock = ManualClock()
    with pytest.raises(KeyError):
        retrying(failing(1, KeyError), lambda: 1e9, clock)
    assert retrying(failing(1, KeyError), lambda: 1e9, clock, errors=Exception) == "done"


def test_the_end_is_asked_for_after_each_failure() -> None:
    clock = ManualClock()
    began = clock.now()
    ends = iter([began + 60, began])
    with pytest.raises(StoreUnavailable, match="failure 1"):
        retrying(failing(9), lambda: next(ends), clock)
    assert clock.now() - began == pytest.approx(0.05)
