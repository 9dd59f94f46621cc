"""Rules of the user's: when they are asked, and what comes of them."""

from __future__ import annotations

import pickle
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_leases.errors import Cooldown
from celery_leases.failures.actions import (
    Classification,
    Reason,
    Ruling,
    cooldown,
    permanent,
    retry,
)
from celery_leases.failures.classifier import Rule, Rules
from celery_leases.failures.error_facts import ErrorFacts
from tests.unit.fake_errors import RpcError, aws, caused, fake_error, http_error

NOW = 1_800_000_000.0
STOP = permanent(operator=True)


def classified(rules: Rules, error: BaseException) -> Classification:
    """How *rules* classify *error* now."""
    return rules.classify(error, NOW)


def a_hook(exc: BaseException, facts: ErrorFacts) -> bool | None:
    """Retry all that is about drafts."""
    return True if "draft" in facts.message else None


# -- what is done ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("to", "ruling"),
    [
        (retry("10s", max=3), retry("10s", max=3)),
        ("retry", retry()),
        ("cooldown", cooldown()),
        ("permanent", permanent()),
    ],
    ids=str,
)
def test_a_rule_does_what_it_says(to: Any, ruling: Ruling) -> None:
    assert classified(Rules().on(status=404, to=to), http_error(404)).ruling == ruling


@pytest.mark.parametrize("to", [7, 7.0, "7s", timedelta(seconds=7)], ids=repr)
def test_a_duration_means_a_retry_after_exactly_that(to: Any) -> None:
    classification = classified(Rules().on(status=429, to=to), http_error(429, retry_after="60"))
    assert (classification.ruling.kind, classification.delay, classification.source) == (
        "retry",
        7.0,
        "rule",
    )


def test_a_delay_in_the_answer_reaches_the_ruling_of_a_user() -> None:
    classification = classified(
        Rules().on(status=404, to=retry("10s")), http_error(404, retry_after="60")
    )
    assert (classification.delay, classification.source, classification.ruling.server_delay) == (
        60.0,
        "retry-after",
        "at_least",
    )


def test_a_permanent_failure_has_no_delay() -> None:
    classification = classified(
        Rules().on(status=404, to=permanent()), http_error(404, retry_after="60")
    )
    assert (classification.delay, classification.source, classification.reason) == (
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

PIECES: list[Any] = [
    *(
        None, True, -1, 0, 402, 429, 503, 10**30, float("nan"), "", "429", "x",
        "RESOURCE_EXHAUSTED", b"\xff", [], {},
    ),
    *(
        {"error": {"code": "insufficient_quota"}},
        [("retry-after", "1e400")],
        {"date": "x", "retry-after": "-"},
    ),
    *(
        ValueError("token=abc"), RpcError("UNAVAILABLE"), aws("SlowDown"), http_error(500),
        object(), range(5), print,
    ),
]  # fmt: skip
NAMES = [
    *(
        "status_code", "status", "code", "type", "response", "headers", "body", "details",
        "sqlstate", "errno", "reason",
    ),
    *(
        "retryable", "retry_after", "kwargs", "orig", "cause", "exceptions", "args", "__cause__",
        "connection_invalidated",
    ),
]  # fmt: skip


@given(
    st.sampled_from(
        [
            "shop.Error", "redis.exceptions.ConnectionError", "smtplib.SMTPError",
            "pymysql.err.Error", "grpc.X",
        ]
    ),
    st.dictionaries(st.sampled_from(NAMES), st.integers(0, len(PIECES) - 1)),
)  # fmt: skip
def test_judging_never_raises(name: str, drawn: dict[str, int]) -> None:
    error = fake_error(name)
    for attribute, index in drawn.items():
        try:
            setattr(error, attribute, PIECES[index])
        except TypeError:
            continue
    classification = Rules.default().use(lambda *_: None).classify(error, NOW)
    assert isinstance(classification, Classification)
    assert classification.why
    assert classification.delay is None or 0 < classification.delay <= 21_600


def test_an_error_that_cannot_be_classified_counts_as_any_other(caplog) -> None:
    """The log has an error, because that is a bug of the product."""

    class Broken(Cooldown):
        @property
        def scope(self) -> Any:
            raise RuntimeError("out of order")

        @scope.setter
        def scope(self, _: Any) -> None:
            """Not stored."""

    classification = classified(Rules.default(), Broken(5))
    assert (classification.rule, classification.reason) == ("anything-else", Reason.ERROR)
    assert "could not classify" in caplog.text
