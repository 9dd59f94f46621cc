"""Surprises found with real errors."""

from __future__ import annotations

import ssl
from typing import Any

import pytest

from celery_leases.failures.actions import Classification
from celery_leases.failures.classifier import Rules
from celery_leases.failures.error_facts import ErrorFacts
from tests.unit.fake_errors import aws, caused, fake_class, fake_error, http_error

NOW = 1_800_000_000.0

UrllibError = fake_class("urllib.error.URLError", OSError)
RequestsError = fake_class("requests.exceptions.RequestException", OSError)
RequestsConnection = fake_class("requests.exceptions.ConnectionError", RequestsError)
RedisConnection = fake_class("redis.exceptions.ConnectionError")
PsycopgOperational = fake_class("psycopg.OperationalError")


def classified(error: BaseException) -> Classification:
    """How the default rules classify *error* now."""
    return Rules.default().classify(error, NOW)


def code(value: str, status: int) -> Any:
    """An answer with this code in its body."""
    return http_error(status, {"error": {"type": "invalid_request_error", "code": value}})


def test_codes_beat_status() -> None:
    assert classified(aws("ThrottlingException", 400)).rule == "rate-limited"
    assert classified(aws("ValidationException", 400)).rule == "request-refused"
    assert classified(code("lock_timeout", status=429)).rule == "lock-timeout"
    assert classified(code("insufficient_quota", status=429)).rule == "out-of-quota"
    assert classified(code("overloaded_error", status=200)).rule == "rate-limited"


def test_an_error_that_repeats_the_status_of_its_cause_is_not_poorer_than_it() -> None:
    """An application's own error often copies the status, and nothing else."""
    failed = fake_error("shop.errors.UpstreamFailed", status_code=400)
    assert classified(caused(failed, aws("ThrottlingException", 400))).rule == "rate-limited"
    failed = fake_error("shop.errors.UpstreamFailed", status_code=503)
    classification = classified(caused(failed, http_error(503, retry_after="7")))
    assert (classification.rule, classification.delay) == ("rate-limited", 7.0)
    other = fake_error("shop.errors.UpstreamFailed", status_code=404)
    assert classified(caused(other, http_error(429))).rule == "request-refused"


def test_a_request_not_to_retry_counts_for_faults_of_the_server_only() -> None:
    assert classified(http_error(500, x_should_retry="false")).rule == "told-not-to-retry"
    assert classified(http_error(429, x_should_retry="false")).rule == "rate-limited"
    assert classified(http_error(404, stripe_should_retry="false")).rule == "request-refused"
    assert classified(http_error(500, x_should_retry="true")).rule == "outcome-unknown"


def test_a_window_that_is_not_empty_is_no_limit() -> None:
    assert classified(http_error(403, x_ratelimit_remaining="12")).rule == "request-refused"
    assert classified(http_error(503)).rule == "outcome-unknown"
    assert classified(http_error(413)).rule == "request-refused"


def test_families_of_classes_lie() -> None:
    wrong_url = fake_error("requests.exceptions.InvalidURL", RequestsError, ValueError)
    assert isinstance(wrong_url, OSError)
    assert classified(wrong_url).rule == "request-refused"
    wrong_password = fake_error("redis.exceptions.AuthenticationError", RedisConnection)
    assert classified(wrong_password).rule == "bad-credentials"
    assert (
        classified(fake_error("stripe._error.PermissionError", http_status=409)).rule == "conflict"
    )
    assert classified(fake_error("shop.TimeoutError")).rule == "anything-else"
    assert classified(fake_error("shop.PermissionError")).rule == "anything-else"


WRAPPERS = [
    fake_error("openai.APIConnectionError"),
    fake_error("anthropic.APITimeoutError", fake_class("anthropic.APIConnectionError")),
    fake_error("stripe._error.APIConnectionError", should_retry=False),
]


@pytest.mark.parametrize("wrapper", WRAPPERS, ids=lambda wrapper: type(wrapper).__module__)
@pytest.mark.parametrize(
    ("cause", "row"),
    [
        (fake_error("httpx2.ConnectTimeout"), "connect-phase"),
        (fake_error("httpx2.ReadTimeout"), "outcome-unknown"),
        (fake_error("httpx.UnsupportedProtocol"), "request-refused"),
        (ssl.SSLCertVerificationError(1, "no"), "certificate-rejected"),
        (ValueError("unknown"), "outcome-unknown"),
        (None, "outcome-unknown"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_sdks_connection_error_lets_its_cause_decide(wrapper: Any, cause: Any, row: str) -> None:
    assert classified(caused(wrapper, cause)).rule == row


def test_the_connection_error_of_requests_lets_what_it_hides_decide() -> None:
    refused = fake_error("urllib3.exceptions.NewConnectionError")
    exceeded = fake_error("urllib3.exceptions.MaxRetryError", reason=refused)
    assert classified(RequestsConnection(exceeded)).rule == "connect-phase"
    aborted = fake_error(
        "urllib3.exceptions.ProtocolError", said=("aborted", ConnectionResetError(104, "reset"))
    )
    assert classified(RequestsConnection(aborted)).rule == "outcome-unknown"
    assert classified(RequestsConnection()).rule == "outcome-unknown"


def test_the_status_of_an_answer_is_no_failure_of_the_connection() -> None:
    answered = fake_error(
        "urllib.error.HTTPError", UrllibError, said="HTTP Error 500: no", code=500
    )
    assert classified(answered).rule == "outcome-unknown"
    answered = fake_error(
        "urllib.error.HTTPError", UrllibError, said="HTTP Error 507: no", code=507
    )
    assert classified(answered).rule == "anything-else"


def test_a_wrapped_error_of_the_database_is_one_of_the_database() -> None:
    unique = fake_error("psycopg.errors.UniqueViolation", sqlstate="23505")
    assert classified(fake_error("sqlalchemy.exc.DBAPIError", orig=unique)).rule == "refused-here"
    away = fake_error(
        "sqlalchemy.exc.OperationalError", orig=PsycopgOperational("connection failed")
    )
    assert classified(away).rule == "infrastructure"
    broker = caused(fake_error("kombu.exceptions.OperationalError"), RedisConnection())
    assert classified(broker).rule == "infrastructure"


def test_an_error_of_the_application_lets_its_cause_decide() -> None:
    error = caused(
        RuntimeError("the month failed"),
        caused(fake_error("shop.Failed"), http_error(429, retry_after="20")),
    )
    classification = classified(error)
    assert (classification.rule, classification.delay) == ("rate-limited", 20.0)
    assert (
        classified(ExceptionGroup("1 of 3", [ValueError(), http_error(429)])).rule == "rate-limited"
    )


def test_the_outermost_error_that_is_known_decides() -> None:
    assert classified(caused(FileNotFoundError(), http_error(429))).rule == "refused-here"


def test_facts_alone_are_judged_like_errors() -> None:
    rules = Rules.default()
    assert (
        rules.classify_facts(ErrorFacts(status=429, headers={"retry-after": "37"}), NOW).delay
        == 37.0
    )
    assert (
        rules.classify_facts(ErrorFacts(names=("openai.APIConnectionError",)), NOW).rule
        == "outcome-unknown"
    )
    assert rules.classify_facts(ErrorFacts(names=("stripe.CardError",)), NOW).rule == "declined"
    assert rules.classify_facts(ErrorFacts(sqlstate="40001"), NOW).rule == "infrastructure"
    assert rules.classify_facts(ErrorFacts(grpc="ABORTED"), NOW).rule == "conflict"
    assert rules.classify_facts(ErrorFacts(codes=("SlowDown",)), NOW).rule == "rate-limited"
    assert rules.classify_facts(ErrorFacts(), NOW).rule == "anything-else"
