"""Functions of the user's that judge failures, and what the body itself asks for."""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import Any

import pytest

from celery_leases.errors import Cooldown, PermanentFailure, RetryLater, Snooze
from celery_leases.failures.actions import (
    Classification,
    Reason,
    Ruling,
    cooldown,
    permanent,
    retry,
)
from celery_leases.failures.classifier import Rules
from celery_leases.failures.error_facts import ErrorFacts, facts_of
from tests.unit.case_ids import stable_id
from tests.unit.fake_errors import caused, fake_error, http_error

NOW = 1_800_000_000.0
STOP = permanent(operator=True)


def classified(rules: Rules, error: BaseException) -> Classification:
    """How *rules* classify *error* now."""
    return rules.classify(error, NOW)


# -- hooks -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "ruling", "delay"),
    [
        (STOP, STOP, None),
        (cooldown("1h", scope="group"), cooldown("1h", scope="group"), None),
        (True, retry(), None),
        (False, permanent(), None),
    ],
    ids=stable_id,
)
def test_a_hook_may_decide(said: Any, ruling: Ruling, delay: float | None) -> None:
    classification = classified(Rules.default().use(lambda *_: said, name="mine"), http_error(500))
    assert (classification.rule, classification.ruling, classification.delay) == (
        "mine",
        ruling,
        delay,
    )


@pytest.mark.parametrize(("said", "delay"), [(7, 7.0), (0.5, 0.5), (0, 0.001), (1, 1.0)])
def test_a_number_of_a_hook_is_a_retry_after_exactly_that(said: float, delay: float) -> None:
    classification = classified(
        Rules.default().use(lambda *_: said), http_error(429, retry_after="60")
    )
    assert (classification.ruling.kind, classification.delay) == ("retry", delay)


def test_a_hook_sees_the_error_and_the_merged_facts() -> None:
    seen = []
    error = caused(fake_error("shop.Failed"), http_error(404))
    Rules().use(lambda exc, facts: seen.append((exc, facts))).classify(error, NOW)  # type: ignore[arg-type]
    assert seen == [(error, facts_of(error))]


def test_after_a_hook_that_returns_none_the_next_rule_decides() -> None:
    rules = Rules.default().use(lambda *_: None).on(status=404, to=STOP)
    assert classified(rules, http_error(404)).ruling is STOP


@pytest.mark.parametrize(
    "said",
    ["retry", "5 apples", -1, float("nan"), float("inf"), 10**400, [], object(), retry],
    ids=stable_id,
)
def test_a_hook_that_returns_nonsense_counts_as_silent_and_is_logged(said, caplog) -> None:
    """A failure must not grow into another one."""
    classification = classified(Rules.default().use(lambda *_: said, name="mine"), http_error(429))
    assert classification.rule == "rate-limited"
    assert [(entry.name, entry.levelno) for entry in caplog.records] == [
        ("celery_leases", logging.ERROR)
    ]
    assert "'mine' returned" in caplog.text


def test_a_hook_may_end_itself_and_not_the_attempt(caplog: pytest.LogCaptureFixture) -> None:
    def ends(exc: BaseException, facts: ErrorFacts) -> None:
        raise SystemExit

    assert (
        classified(Rules.default().use(ends, name="mine"), http_error(429)).rule == "rate-limited"
    )
    assert "'mine' raised" in caplog.text


def test_what_a_hook_returns_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    said: Any = {"authorization": "Bearer s3cret"}
    classified(Rules.default().use(lambda *_: said, name="mine"), http_error(429))
    assert "returned a dict" in caplog.text
    assert "s3cret" not in caplog.text


@pytest.mark.parametrize("said", ["90s", timedelta(seconds=90), 90])
def test_a_hook_may_return_a_duration_in_any_form(said: Any) -> None:
    assert classified(Rules.default().use(lambda *_: said), http_error(429)).delay == 90.0


def test_a_hook_that_raises_counts_as_silent_and_is_logged(caplog) -> None:
    classification = classified(
        Rules.default().use(lambda *_: 1 // 0, name="mine"), http_error(429)
    )
    assert classification.rule == "rate-limited"
    assert "'mine' raised" in caplog.text
    assert "ZeroDivisionError" in caplog.text


def test_a_hook_does_not_swallow_what_ends_a_run() -> None:
    def interrupted(exc: BaseException, facts: ErrorFacts) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        classified(Rules().use(interrupted), ValueError())


def test_hooks_are_not_asked_about_facts_alone() -> None:
    rules = Rules.default().use(lambda *_: False)
    assert rules.classify_facts(ErrorFacts(status=429), NOW).rule == "rate-limited"


# -- what the body asked for -----------------------------------------------------------------------

EVERYTHING = Rules.default().on(exc="LeasesError", to=STOP).use(lambda *_: STOP)


@pytest.mark.parametrize(
    ("error", "rule", "kind_", "delay"),
    [
        (Cooldown(300, "draft"), "asked-cooldown", "cooldown", 300.0),
        (Cooldown("2d"), "asked-cooldown", "cooldown", 172_800.0),
        (Cooldown(until=NOW + 90), "asked-cooldown", "cooldown", 90.0),
        (Cooldown(until=NOW - 90), "asked-cooldown", "cooldown", 0.0),
        (Cooldown(), "asked-cooldown", "cooldown", None),
        (RetryLater(10), "asked-retry", "retry", 10.0),
        (RetryLater(0), "asked-retry", "retry", 0.0),
        (Snooze(60), "asked-snooze", "retry", 60.0),
        (PermanentFailure("unknown invoice"), "asked-permanent", "permanent", None),
    ],
    ids=stable_id,
)
def test_what_the_body_asks_for_comes_before_every_rule(error, rule, kind_, delay) -> None:
    classification = classified(EVERYTHING, error)
    assert (classification.rule, classification.ruling.kind, classification.reason) == (
        rule,
        kind_,
        Reason.ASKED,
    )
    assert (classification.delay, classification.clamped) == (delay, False)
    assert classification.ruling.server_delay == "instead" or kind_ == "permanent"


def test_a_cooldown_of_the_group_is_one() -> None:
    assert classified(EVERYTHING, Cooldown(5, scope="group")).ruling.scope == "group"
    assert classified(EVERYTHING, Cooldown(5)).ruling.scope == "key"


def test_what_the_body_asks_for_is_found_in_groups_and_causes() -> None:
    assert (
        classified(Rules(), ExceptionGroup("two", [ValueError(), Cooldown(5)])).rule
        == "asked-cooldown"
    )
    assert (
        classified(Rules(), caused(RuntimeError(), PermanentFailure("no"))).rule
        == "asked-permanent"
    )


def test_a_subclass_of_the_users_asks_for_the_same() -> None:
    class Declined(PermanentFailure):
        """The card was declined."""

    assert classified(Rules(), Declined()).rule == "asked-permanent"


def test_facts_alone_have_what_the_body_asked_for() -> None:
    facts = ErrorFacts(names=("celery_leases.errors.PermanentFailure",))
    assert Rules().classify_facts(facts, NOW).rule == "asked-permanent"


def test_the_reason_of_the_body_is_shown_without_secrets() -> None:
    assert classified(Rules(), Cooldown(5, "token=abc123")).why.endswith(
        "of its key: token=[redacted]"
    )
