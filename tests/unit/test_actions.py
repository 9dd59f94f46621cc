"""The functions that rules are written with."""

from __future__ import annotations

import pickle
from datetime import timedelta
from typing import Any

import pytest

from celery_leases.errors import LeaseConfigurationError
from celery_leases.failures.actions import (
    Reason,
    Ruling,
    cooldown,
    exact_delay,
    permanent,
    retry,
    retry_exactly,
)
from celery_leases.failures.cooldown_policies import CooldownPolicy


def test_a_retry_is_soon_and_grows_to_five_minutes() -> None:
    """Unless it says otherwise."""
    assert retry() == Ruling("retry", CooldownPolicy(1, 2, 300, 0.5))
    assert retry("10s", max=3, factor=3, cap="1h", jitter=1) == Ruling(
        "retry", CooldownPolicy(10, 3, 3600, 1), 3
    )
    assert retry(max=0).max == 0
    assert retry("10m").policy == CooldownPolicy(600, 2, 600)
    assert retry(ambiguous=True, then=permanent()) == Ruling(
        "retry", CooldownPolicy(1, cap=300), ambiguous=True, then=Ruling("permanent")
    )


def test_a_cooldown_follows_the_policy_of_the_task_or_its_own() -> None:
    assert cooldown() == Ruling("cooldown")
    assert cooldown(scope="group", ambiguous=True, operator=True) == Ruling(
        "cooldown", scope="group", ambiguous=True, operator=True
    )
    assert cooldown("10m").policy == CooldownPolicy(600, 2, 21_600, 0.5)
    assert cooldown(timedelta(hours=12)).policy == CooldownPolicy(43_200, cap=43_200)
    assert cooldown(60, factor=3, cap=120, jitter=0).policy == CooldownPolicy(60, 3, 120, 0)


def test_a_permanent_failure_may_call_an_operator() -> None:
    assert (permanent(), permanent(operator=True)) == (
        Ruling("permanent"),
        Ruling("permanent", operator=True),
    )


def test_an_exact_retry_neither_grows_nor_jitters_nor_uses_a_server_delay() -> None:
    ruling = retry_exactly("7s")
    assert ruling.policy is not None
    assert [ruling.policy.delay(n, rand) for n, rand in ((1, 0.0), (5, 0.9))] == [7.0, 7.0]
    assert (ruling.kind, ruling.server_delay, exact_delay(ruling)) == ("retry", "ignore", 7.0)
    assert exact_delay(retry_exactly(0)) == 0.001
    assert [exact_delay(other) for other in (retry(7), cooldown(7), permanent())] == [
        None,
        None,
        None,
    ]


WRONG: list[tuple[Any, dict[str, Any]]] = [
    (retry, {"delay": 0}), (retry, {"delay": "soon"}), (retry, {"delay": None}),
    (retry, {"max": -1}), (retry, {"max": True}), (retry, {"max": 2.5}), (retry, {"factor": 0.5}),
    (retry, {"cap": "0.5s"}), (retry, {"jitter": 2}), (retry, {"then": "permanent"}),
    (cooldown, {"delay": -1}), (cooldown, {"scope": "world"}), (cooldown, {"factor": 3.0}),
    (cooldown, {"cap": "1h"}), (cooldown, {"jitter": 0.1}),
    (cooldown, {"delay": "2h", "cap": "1h"}), (retry_exactly, {"span": -1}),
    (retry_exactly, {"span": float("nan")}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("word", "options"), WRONG, ids=lambda value: getattr(value, "__name__", str(value))
)
def test_a_wrong_value_is_refused_where_it_is_written(word: Any, options: dict[str, Any]) -> None:
    with pytest.raises(LeaseConfigurationError):
        word(**options)


def test_rulings_are_plain_values() -> None:
    ruling = retry(then=cooldown("1m", scope="group"))
    assert pickle.loads(pickle.dumps(ruling)) == ruling  # noqa: S301 - our own bytes
    assert len({ruling, retry(then=cooldown(60, scope="group")), retry()}) == 2


def test_reasons_are_their_stable_codes() -> None:
    assert (
        str(Reason.RATE_LIMITED)
        == f"{Reason.RATE_LIMITED}"
        == Reason("rate_limited")
        == "rate_limited"
    )
    assert len(Reason) == 16
