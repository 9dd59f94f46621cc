"""A process that the body has forked holds no lease, and cannot write for its parent."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from celery_leases.errors import ForkedLease, LeaseLost
from celery_leases.lease import Lease
from tests.unit.effect_attempts import Attempt, EffectBench


def in_a_fork(ask: Callable[[], Any]) -> Any:
    """What *ask* returns or raises in a forked child."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            try:
                said: Any = ask()
            except BaseException as error:  # noqa: BLE001 - it is what is asked for
                said = error
            os.write(writing, pickle.dumps(said))
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        said = pickle.loads(pipe.read())  # noqa: S301 - our own child's
    os.waitpid(child, 0)
    return said


@pytest.fixture
def attempt() -> Attempt:
    return EffectBench().attempt()


ACTIONS: dict[str, Callable[[Lease], Any]] = {
    "extend()": lambda lease: lease.extend(60),
    "save_progress()": lambda lease: lease.save_progress({"page": 2}),
    "effect()": lambda lease: lease.effect("charge", lambda key: key),
    "each()": lambda lease: list(lease.each([1, 2])),
    "complete()": lambda lease: lease.complete({"sent": 1}, None),
    "guard()": lambda lease: lease.guard(None),
}


@pytest.mark.parametrize("name", ACTIONS)
def test_what_would_write_is_refused(attempt: Attempt, name: str) -> None:
    error = in_a_fork(lambda: ACTIONS[name](attempt.lease))
    assert isinstance(error, ForkedLease)
    assert name in str(error)
    assert error.key == attempt.lease.key


def test_it_is_not_held_there_and_still_is_in_the_parent(attempt: Attempt) -> None:
    lease = attempt.lease
    assert in_a_fork(lambda: (lease.held, lease.lost, lease.remaining())) == (False, True, 0.0)
    assert isinstance(in_a_fork(lease.check), LeaseLost)
    assert (lease.held, lease.lost) == (True, False)
    lease.check()
    lease.save_progress({"page": 1})
    assert lease.progress == {"page": 1}


def test_a_loop_that_was_begun_in_the_parent_ends_in_the_fork(attempt: Attempt) -> None:
    loop = iter(attempt.lease.each([1, 2, 3]))
    assert next(loop) == 1
    assert isinstance(in_a_fork(lambda: next(loop)), ForkedLease)
    assert next(loop) == 2
