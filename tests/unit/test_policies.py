"""How the waits of a key grow."""

from __future__ import annotations

import pickle
from dataclasses import FrozenInstanceError, replace
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_leases.errors import LeaseConfigurationError
from celery_leases.failures.actions import (
    Action,
    Reason,
    cooldown,
    exact_delay,
    permanent,
    retry,
    retry_exactly,
)
from celery_leases.failures.cooldown_policies import CooldownPolicy

policies = st.builds(
    lambda base, factor, growth, jitter: CooldownPolicy(base, factor, base * growth, jitter),
    st.floats(0.001, 10_000),
    st.floats(1, 10),
    st.floats(1, 10_000),
    st.floats(0, 1),
)


def test_the_default_is_five_minutes_doubling_to_six_hours() -> None:
    policy = CooldownPolicy()
    assert [policy.longest(n) for n in (1, 2, 3, 7, 8, 9)] == [
        300.0, 600.0, 1200.0, 19200.0, 21600.0, 21600.0,
    ]  # fmt: skip
    assert (policy.factor, policy.cap, policy.jitter) == (2.0, 21_600.0, 0.5)


def test_durations_may_be_written_in_any_form() -> None:
    assert CooldownPolicy("5m", cap=timedelta(hours=6)) == CooldownPolicy(300, 2, 21600.0)


@pytest.mark.parametrize("n", [10**6, 10**400])
def test_a_huge_number_of_failures_waits_for_the_cap(n: int) -> None:
    """The power of the growth would overflow."""
    assert CooldownPolicy(0.001, 1000, "6h").longest(n) == 21_600.0
    assert CooldownPolicy(5, factor=1).longest(n) == 5.0


def test_before_the_first_failure_the_wait_is_that_of_the_first() -> None:
    assert CooldownPolicy().longest(0) == CooldownPolicy().longest(-3) == 300.0


@pytest.mark.parametrize(
    ("jitter", "rand", "part"),
    [
        (0.5, 0.0, 0.5), (0.5, 0.5, 0.75), (0.5, 1.0, 1.0), (0.0, 0.0, 1.0), (1.0, 0.0, 0.0),
        (1.0, 0.25, 0.25),
    ],
)  # fmt: skip
def test_jitter_shortens_the_wait(jitter: float, rand: float, part: float) -> None:
    assert CooldownPolicy(300, jitter=jitter).delay(2, rand) == 600 * part


@given(policies, st.integers(1, 10_000), st.floats(0, 1, exclude_max=True))
def test_a_wait_is_never_above_its_upper_bound_and_never_falls(policy, n, rand) -> None:
    assert (
        policy.longest(n) * (1 - policy.jitter) * 0.999
        <= policy.delay(n, rand)
        <= policy.longest(n)
    )
    assert policy.base <= policy.longest(n) <= policy.longest(n + 1) <= policy.cap


WRONG: list[dict[str, Any]] = [
    {"base": 0}, {"base": "soon"}, {"base": True}, {"cap": None}, {"base": 600, "cap": 599},
    {"base": "7h"}, {"factor": 0.5}, {"factor": "2"}, {"factor": True}, {"factor": float("nan")},
    {"factor": float("inf")}, {"jitter": -0.1}, {"jitter": 1.1}, {"jitter": float("nan")},
]  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_a_policy_out_of_range_cannot_be_made(wrong: dict[str, Any]) -> None:
    with pytest.raises(
        LeaseConfigurationError, match=rf"CooldownPolicy: .*({'|'.join(wrong)})=.*; (write|raise)"
    ):
        CooldownPolicy(**wrong)


def test_a_number_is_the_base_and_raises_the_cap_if_needed() -> None:
    assert CooldownPolicy.of(60) == CooldownPolicy(60)
    assert CooldownPolicy.of("12h") == CooldownPolicy(43_200, cap=43_200)
    assert CooldownPolicy.of(timedelta(minutes=1)).base == 60.0
    policy = CooldownPolicy(1, 3, 9, 0)
    assert CooldownPolicy.of(policy) is policy


def test_the_error_for_a_wrong_policy_names_the_option() -> None:
    with pytest.raises(LeaseConfigurationError, match="Failures: cooldown='soon' is not usable"):
        CooldownPolicy.of("soon", "Failures: cooldown")


def test_growth_starts_again_after_twice_the_cap_but_not_within_a_day() -> None:
    assert CooldownPolicy().quiet == 86_400.0
    assert CooldownPolicy(cap="1d").quiet == 172_800.0


def test_a_policy_is_a_frozen_value() -> None:
    policy = CooldownPolicy(60)
    assert pickle.loads(pickle.dumps(policy)) == policy  # noqa: S301 - our own bytes
    assert hash(policy) == hash(CooldownPolicy(60.0))
    with pytest.raises(FrozenInstanceError):
        policy.base = 5.0  # type: ignore[misc]
    with pytest.raises(LeaseConfigurationError):
        replace(policy, cap=59.0)


def test_a_retry_is_soon_and_grows_to_five_minutes() -> None:
    """Unless it says otherwise."""
    assert retry() == Action("retry", CooldownPolicy(1, 2, 300, 0.5))
    assert retry("10s", max=3, factor=3, cap="1h", jitter=1) == Action(
        "retry", CooldownPolicy(10, 3, 3600, 1), 3
    )
    assert retry(max=0).max == 0
    assert retry("10m").policy == CooldownPolicy(600, 2, 600)
    assert retry(ambiguous=True, then=permanent()) == Action(
        "retry", CooldownPolicy(1, cap=300), ambiguous=True, then=Action("permanent")
    )


def test_a_cooldown_follows_the_policy_of_the_task_or_its_own() -> None:
    assert cooldown() == Action("cooldown")
    assert cooldown(scope="group", ambiguous=True, operator=True) == Action(
        "cooldown", scope="group", ambiguous=True, operator=True
    )
    assert cooldown("10m").policy == CooldownPolicy(600, 2, 21_600, 0.5)
    assert cooldown(timedelta(hours=12)).policy == CooldownPolicy(43_200, cap=43_200)
    assert cooldown(60, factor=3, cap=120, jitter=0).policy == CooldownPolicy(60, 3, 120, 0)


def test_a_permanent_failure_may_call_an_operator() -> None:
    assert (permanent(), permanent(operator=True)) == (
        Action("permanent"),
        Action("permanent", operator=True),
    )


def test_an_exact_retry_neither_grows_nor_jitters_nor_uses_a_server_delay() -> None:
    action = retry_exactly("7s")
    assert action.policy is not None
    assert [action.policy.delay(n, rand) for n, rand in ((1, 0.0), (5, 0.9))] == [7.0, 7.0]
    assert (action.kind, action.server_delay, exact_delay(action)) == ("retry", "ignore", 7.0)
    assert exact_delay(retry_exactly(0)) == 0.001
    assert [exact_delay(other) for other in (retry(7), cooldown(7), permanent())] == [
        None,
        None,
        None,
    ]


WRONG_RULINGS: list[tuple[Any, dict[str, Any]]] = [
    (retry, {"delay": 0}), (retry, {"delay": "soon"}), (retry, {"delay": None}),
    (retry, {"max": -1}), (retry, {"max": True}), (retry, {"max": 2.5}), (retry, {"factor": 0.5}),
    (retry, {"cap": "0.5s"}), (retry, {"jitter": 2}), (retry, {"then": "permanent"}),
    (cooldown, {"delay": -1}), (cooldown, {"scope": "world"}), (cooldown, {"factor": 3.0}),
    (cooldown, {"cap": "1h"}), (cooldown, {"jitter": 0.1}),
    (cooldown, {"delay": "2h", "cap": "1h"}), (retry_exactly, {"span": -1}),
    (retry_exactly, {"span": float("nan")}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("word", "options"), WRONG_RULINGS, ids=lambda value: getattr(value, "__name__", str(value))
)
def test_a_wrong_value_is_refused_where_it_is_written(word: Any, options: dict[str, Any]) -> None:
    with pytest.raises(LeaseConfigurationError):
        word(**options)


def test_actions_are_plain_values() -> None:
    action = retry(then=cooldown("1m", scope="group"))
    assert pickle.loads(pickle.dumps(action)) == action  # noqa: S301 - our own bytes
    assert len({action, retry(then=cooldown(60, scope="group")), retry()}) == 2


def test_reasons_are_their_stable_codes() -> None:
    assert (
        str(Reason.RATE_LIMITED)
        == f"{Reason.RATE_LIMITED}"
        == Reason("rate_limited")
        == "rate_limited"
    )
    assert len(Reason) == 19
