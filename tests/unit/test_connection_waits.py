"""How long each step of a call may wait for a connection of the process's pool."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest

from celery_leases.concurrency.resource_pool import max_wait
from celery_leases.deadlines import (
    LONGEST_CONNECTION_TIMEOUT,
    call_timeout,
    connection_timeout,
)
from celery_leases.decide.verdicts import Return
from tests.unit.memory_worker import Bench

T = TypeVar("T")
TTL = 12.0


def now() -> float | None:
    """The wait that is allowed here; ``None`` for that of the pool."""
    own = max_wait.get()
    return own() if own is not None else None


@pytest.fixture
def bench() -> Iterator[Bench]:
    """A worker with leases apart from the records, in a thread that no call has been in."""
    before = max_wait.set(None)
    yield Bench()
    max_wait.reset(before)


@pytest.fixture
def waits(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> dict[str, float | None]:
    """How long the last step of each name could wait."""
    seen: dict[str, float | None] = {}
    step: Callable[[str, Callable[[], Any]], Any] = bench.journal.step

    def noted(name: str, action: Callable[[], T]) -> T:
        seen[name] = now()
        answer: T = step(name, action)
        return answer

    monkeypatch.setattr(bench.journal, "step", noted)
    return seen


def test_a_step_waits_for_half_of_what_is_left_of_the_lease(bench, waits) -> None:
    left = 9.878

    def during(_: object) -> None:
        assert now() == pytest.approx(left / 2)
        bench.clock.sleep(6.0)
        assert now() == pytest.approx((left - 6.0) / 2)

    assert bench.run(bench.call(ttl=TTL), during=during) == Return(1)
    assert waits["acquire"] is None
    assert waits["claim"] == pytest.approx(left / 2)
    assert waits["settle"] == waits["release"] == pytest.approx((left - 6.0) / 2)
    assert now() is None


def test_after_the_deadline_a_step_waits_for_a_moment_that_ends_before_the_lease(bench, waits):
    bench.run(bench.call(ttl=TTL), during=lambda _: bench.clock.sleep(11.0))
    assert waits["settle"] == call_timeout(TTL) == pytest.approx(TTL / 10)


def test_a_call_inside_the_body_of_another_has_a_patience_of_its_own(bench: Bench) -> None:
    def inside(_: object) -> None:
        outer = now()
        other = Bench()
        other.run(other.call(ttl=0.5), during=lambda _: seen.append(now()))
        assert now() == outer

    seen: list[float | None] = []
    bench.run(bench.call(ttl=TTL), during=inside)
    assert seen == [pytest.approx(0.2047, abs=0.001)]


@pytest.mark.parametrize("fails", ["acquire", "claim", "settle"])
def test_it_ends_with_its_block_after_any_exception(bench, monkeypatch, fails) -> None:
    step: Callable[[str, Callable[[], Any]], Any] = bench.journal.step

    def failing(name: str, action: Callable[[], T]) -> T:
        if name == fails:
            raise SystemExit
        answer: T = step(name, action)
        return answer

    monkeypatch.setattr(bench.journal, "step", failing)
    with pytest.raises(SystemExit):
        bench.run(bench.call(ttl=TTL))
    assert now() is None


@pytest.mark.parametrize("ttl", [0.1, 1.0, 15.0, 60.0, 86_400.0])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.8])
def test_a_wait_ends_before_the_lease(ttl: float, share: float) -> None:
    remaining = share * ttl
    assert connection_timeout(ttl, remaining) < remaining + min(ttl / 6, 5.0)
    assert connection_timeout(ttl, remaining) <= LONGEST_CONNECTION_TIMEOUT
    assert connection_timeout(ttl) == pytest.approx(min(ttl / 3, LONGEST_CONNECTION_TIMEOUT))
