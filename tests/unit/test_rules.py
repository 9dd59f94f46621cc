"""Rules of the user's: when they are asked, and what comes of them."""

from __future__ import annotations

import logging
import pickle
from datetime import timedelta
from typing import Any

import pytest

from celery_leases.errors import Cooldown, PermanentFailure, RetryLater, Snooze
from celery_leases.failures.actions import (
    Action,
    Reason,
    RuleMatch,
    cooldown,
    permanent,
    retry,
)
from celery_leases.failures.classifier import Rule, Rules
from celery_leases.failures.error_facts import ErrorFacts, facts_of
from tests.unit.case_ids import stable_id
from tests.unit.fake_errors import caused, fake_error, http_error

NOW = 1_800_000_000.0
STOP = permanent(operator=True)


def classified(rules: Rules, error: BaseException) -> RuleMatch:
    return rules.classify(error, NOW)


def a_hook(exc: BaseException, facts: ErrorFacts) -> bool | None:
    """Retry all that is about drafts."""
    return True if "draft" in facts.message else None


# -- what is done ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("to", "action"),
    [
        (retry("10s", max=3), retry("10s", max=3)),
        ("retry", retry()),
        ("cooldown", cooldown()),
        ("permanent", permanent()),
    ],
    ids=str,
)
def test_a_rule_does_what_it_says(to: Any, action: Action) -> None:
    assert classified(Rules().on(status=404, to=to), http_error(404)).action == action


@pytest.mark.parametrize("to", [7, 7.0, "7s", timedelta(seconds=7)], ids=repr)
def test_a_duration_means_a_retry_after_exactly_that(to: Any) -> None:
    matched = classified(Rules().on(status=429, to=to), http_error(429, retry_after="60"))
    assert (matched.action.kind, matched.delay, matched.source) == (
        "retry",
        7.0,
        "rule",
    )


def test_a_delay_in_the_answer_reaches_the_action_of_a_user() -> None:
    matched = classified(Rules().on(status=404, to=retry("10s")), http_error(404, retry_after="60"))
    assert (matched.delay, matched.source, matched.action.server_delay) == (
        60.0,
        "retry-after",
        "at_least",
    )


def test_a_permanent_failure_has_no_delay() -> None:
    matched = classified(Rules().on(status=404, to=permanent()), http_error(404, retry_after="60"))
    assert (matched.delay, matched.source, matched.reason) == (
        None,
        None,
        Reason.REFUSED,
    )


def test_the_first_rule_that_matches_wins_before_all_default_ones() -> None:
    rules = (
        Rules.default()
        .on(status=429, to="permanent", name="first")
        .on(status="4xx", to="retry", name="second")
    )
    assert classified(rules, http_error(429)).rule == "first"
    assert classified(rules, http_error(404)).rule == "second"
    assert classified(rules, http_error(500)).rule == "outcome-unknown"


def test_a_rule_about_a_cause_comes_before_a_later_one_about_the_error_itself() -> None:
    rules = (
        Rules()
        .on(status=404, to="permanent", name="inner")
        .on(exc="shop.Failed", to="retry", name="outer")
    )
    assert classified(rules, caused(fake_error("shop.Failed"), http_error(404))).rule == "inner"


def test_rules_are_immutable() -> None:
    rules = Rules.default()
    more = rules.on(status=404, to="retry")
    assert (len(rules.written), len(more.written)) == (0, 1)
    assert rules == Rules.default() != more
    assert Rules().on(status=[404, 403], to=5) == Rules().on(status=[403, 404], to=5)


def test_rules_pickle() -> None:
    rules = Rules.default().on(status="5xx", message="x+", to=retry("1s")).use(a_hook)
    assert pickle.loads(pickle.dumps(rules)) == rules  # noqa: S301 - our own bytes


# -- names -----------------------------------------------------------------------------------------


def test_a_rule_without_a_name_is_named_after_its_conditions() -> None:
    rules = (
        Rules()
        .on(status=404, to=5)
        .on(exc="shop.errors.Declined", code="x_*", status="5xx", to=5)
        .on(status=[404, 403, 500, 501, 502], header="X-A", message="a+", to=5)
        .on(sqlstate=["40", "08"], grpc="ABORTED", to=5)
        .use(a_hook)
        .on(status=404, name="gone", to=5)
        .use(a_hook, name="drafts")
    )
    assert [rule.name for rule in rules.written] == [
        "user: status=404", "user: status=500-599 code=x_* exc=shop.errors.Declined",
        "user: status=403,404,500-502 header=x-a message=a+", "user: sqlstate=08,40 grpc=ABORTED",
        "user: a_hook", "gone", "drafts",
    ]  # fmt: skip


def test_why_names_what_matched_and_where() -> None:
    rules = Rules.default().on(exc="shop.Failed", status=404, to=5).use(a_hook)
    failed = caused(fake_error("shop.Failed"), http_error(404, dotted="openai.NotFoundError"))
    assert classified(rules, failed).why == "status 404 of openai.NotFoundError and shop.Failed"
    assert (
        classified(rules, http_error(429, dotted="openai.RateLimitError")).why
        == "status 429 of openai.RateLimitError"
    )
    assert classified(rules, ConnectionRefusedError()).why == "ConnectionRefusedError"
    assert classified(rules, KeyError()).why == "no rule knows KeyError"
    assert classified(rules, ValueError("draft")).why == "the rule function decided"
    assert Rules.default().classify_facts(ErrorFacts(status=429), NOW).why == "status 429"


# -- the list itself -------------------------------------------------------------------------------


def test_rows_are_the_rules_in_the_order_in_which_they_are_asked() -> None:
    """The body's word, the user's rules, the default ones, anything else."""
    rows = Rules.default().on(status=404, to=5, name="mine").use(a_hook, name="hook").rows()
    names = [row.name for row in rows]
    assert names[:7] == [
        "asked-cooldown", "asked-retry", "asked-permanent", "asked-snooze", "mine", "hook", "time-or-memory-limit",
    ]  # fmt: skip
    assert names[-1] == "anything-else"
    assert all(str(row) for row in rows)
    phases = [row.phase for row in rows[7:-1] if isinstance(row, Rule)]
    assert phases == sorted(phases, key=["first", "each", "last"].index)


def test_rules_without_defaults_know_the_body_the_limits_and_anything_else() -> None:
    """All else is written by the user."""
    assert [row.name for row in Rules().rows()][4:] == ["time-or-memory-limit", "anything-else"]
    assert classified(Rules(), http_error(429)).rule == "anything-else"
    assert classified(Rules(), MemoryError()).rule == "time-or-memory-limit"


# -- never raises ----------------------------------------------------------------------------------


def test_an_error_that_cannot_be_classified_counts_as_any_other(caplog) -> None:
    """The log has an error, because that is a bug of the product."""

    class Broken(Cooldown):
        @property
        def scope(self) -> Any:
            raise RuntimeError("out of order")

        @scope.setter
        def scope(self, _: Any) -> None:
            """Not stored."""

    matched = classified(Rules.default(), Broken(5))
    assert (matched.rule, matched.reason) == ("anything-else", Reason.ERROR)
    assert "could not classify" in caplog.text


# -- hooks -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "action", "delay"),
    [
        (STOP, STOP, None),
        (cooldown("1h", scope="group"), cooldown("1h", scope="group"), None),
        (True, retry(), None),
        (False, permanent(), None),
    ],
    ids=stable_id,
)
def test_a_hook_may_decide(said: Any, action: Action, delay: float | None) -> None:
    matched = classified(Rules.default().use(lambda *_: said, name="mine"), http_error(500))
    assert (matched.rule, matched.action, matched.delay) == (
        "mine",
        action,
        delay,
    )


@pytest.mark.parametrize(
    ("said", "delay"),
    [(7, 7.0), (0.5, 0.5), (0, 0.001), (1, 1.0), ("90s", 90.0), (timedelta(seconds=90), 90.0)],
)
def test_a_duration_of_a_hook_is_a_retry_after_exactly_that(said: Any, delay: float) -> None:
    matched = classified(Rules.default().use(lambda *_: said), http_error(429, retry_after="60"))
    assert (matched.action.kind, matched.delay) == ("retry", delay)


def test_a_hook_sees_the_error_and_the_merged_facts() -> None:
    seen = []
    error = caused(fake_error("shop.Failed"), http_error(404))
    Rules().use(lambda exc, facts: seen.append((exc, facts))).classify(error, NOW)  # type: ignore[arg-type]
    assert seen == [(error, facts_of(error))]


def test_after_a_hook_that_returns_none_the_next_rule_decides() -> None:
    rules = Rules.default().use(lambda *_: None).on(status=404, to=STOP)
    assert classified(rules, http_error(404)).action is STOP


@pytest.mark.parametrize(
    "said",
    ["retry", "5 apples", -1, float("nan"), float("inf"), 10**400, [], object(), retry],
    ids=stable_id,
)
def test_a_hook_that_returns_nonsense_counts_as_silent_and_is_logged(said, caplog) -> None:
    """A failure must not grow into another one."""
    matched = classified(Rules.default().use(lambda *_: said, name="mine"), http_error(429))
    assert matched.rule == "rate-limited"
    assert [(entry.name, entry.levelno) for entry in caplog.records] == [
        ("celery_leases", logging.ERROR)
    ]
    assert "'mine' returned" in caplog.text


def test_what_a_hook_returns_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    said: Any = {"authorization": "Bearer s3cret"}
    classified(Rules.default().use(lambda *_: said, name="mine"), http_error(429))
    assert "returned a dict" in caplog.text
    assert "s3cret" not in caplog.text


@pytest.mark.parametrize("error", [ZeroDivisionError, SystemExit])
def test_a_hook_that_raises_counts_as_silent_and_is_logged(caplog, error) -> None:
    def ends(exc: BaseException, facts: ErrorFacts) -> None:
        raise error

    judged = classified(Rules.default().use(ends, name="mine"), http_error(429))
    assert judged.rule == "rate-limited"
    assert "'mine' raised" in caplog.text
    assert error.__name__ in caplog.text


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
    matched = classified(EVERYTHING, error)
    assert (matched.rule, matched.action.kind, matched.reason) == (
        rule,
        kind_,
        Reason.ASKED,
    )
    assert (matched.delay, matched.clamped) == (delay, False)
    assert matched.action.server_delay == "instead" or kind_ == "permanent"


def test_a_cooldown_of_the_group_is_one() -> None:
    assert classified(EVERYTHING, Cooldown(5, scope="group")).action.scope == "group"
    assert classified(EVERYTHING, Cooldown(5)).action.scope == "key"


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


def test_the_reason_of_the_body_is_shown_without_secrets() -> None:
    assert classified(Rules(), Cooldown(5, "token=abc123")).why.endswith(
        "of its key: token=[redacted]"
    )
