"""The default rules, row by row, and the traps between them."""

from __future__ import annotations

import errno
import re
import socket
import sqlite3
import ssl
from typing import Any

import pytest
from billiard.exceptions import SoftTimeLimitExceeded

from celery_leases.errors import CoolingDown, StoreUnavailable
from celery_leases.failures.actions import Action, Reason, RuleMatch
from celery_leases.failures.classifier import Rules
from celery_leases.failures.default_rules import DEFAULTS
from celery_leases.failures.error_facts import ErrorFacts
from tests.unit.fake_errors import RpcError, aws, caused, fake_class, fake_error, http_error

NOW = 1_800_000_000.0


def classified(error: BaseException) -> RuleMatch:
    """How the default rules classify *error* now."""
    return Rules.default().classify(error, NOW)


def code(*codes: str, status: int = 400, **headers: str) -> Any:
    """An answer with these codes in its body."""
    first, *rest = codes
    return http_error(
        status,
        {"error": {"type": first, "details": {"error_code": rest[0]} if rest else None}},
        **headers,
    )


def mail(name: str, **attributes: Any) -> Any:
    """An error of smtplib's, which are all OSErrors."""
    return fake_error(f"smtplib.{name}", fake_class("smtplib.SMTPException", OSError), **attributes)


HttpxTimeout = fake_class("httpx.TransportError")
UrllibError = fake_class("urllib.error.URLError", OSError)
RequestsError = fake_class("requests.exceptions.RequestException", OSError)
RequestsConnection = fake_class("requests.exceptions.ConnectionError", RequestsError)
RequestsTimeout = fake_class("requests.exceptions.Timeout", RequestsError)
AiohttpConnection = fake_class("aiohttp.client_exceptions.ClientConnectionError")
AiohttpOs = fake_class("aiohttp.client_exceptions.ClientOSError", AiohttpConnection, OSError)
RedisConnection = fake_class("redis.exceptions.ConnectionError")
RedisResponse = fake_class("redis.exceptions.ResponseError")
PsycopgOperational = fake_class("psycopg.OperationalError")
Failed = fake_class("shop.errors.UpstreamFailed")
"""An error of the application, which decides only if it is known itself."""


def behind_sdks(*causes: BaseException) -> list[Any]:
    """The connection errors of SDKs, which let their causes decide."""
    return [
        caused(fake_error(name, *bases, **more), cause)
        for cause in causes
        for name, bases, more in (
            ("openai.APIConnectionError", (), {}),
            ("anthropic.APITimeoutError", (fake_class("anthropic.APIConnectionError"),), {}),
            ("stripe._error.APIConnectionError", (), {"should_retry": False}),
        )
    ]


def urllib_error(status: int) -> Any:
    """What urllib raises for an answer: an error of the connection by its class."""
    return fake_error(
        "urllib.error.HTTPError", UrllibError, said=f"HTTP Error {status}", code=status
    )


KOMBU = "kombu.exceptions.OperationalError"
THROTTLED = """
    Throttling ThrottlingException ThrottledException RequestThrottledException TooManyRequestsException
    ProvisionedThroughputExceededException TransactionInProgressException RequestLimitExceeded BandwidthLimitExceeded
    LimitExceededException RequestThrottled SlowDown PriorRequestNotComplete EC2ThrottledException
"""
OUT_OF_QUOTA = """
    insufficient_quota credit_balance_exhausted organization_spend_limit_exceeded project_spend_limit_exceeded
    organization_usage_limit_exceeded
"""
REFUSED_BY_REDIS = [
    "MISCONF Redis is configured to save RDB snapshots", "OOM command not allowed when used memory > 'maxmemory'.",
    "NOREPLICAS Not enough good replicas to write.", "BUSY Redis is busy running a script.",
    "Command # 1 (SET a 1) of pipeline caused error: MISCONF Redis is configured",
    "Error running script (call to f_1): @user_script:1: -OOM command not allowed",
]  # fmt: skip
BROKEN_PSYCOPG2 = [
    ("InterfaceError", "connection already closed"), ("DatabaseError", "SSL SYSCALL error: EOF detected\n"),
    ("DatabaseError", "SSL error: decryption failed or bad record mac"),
    ("DatabaseError", "error with status PGRES_TUPLES_OK and no message from the libpq"),
    ("OperationalError", "SSL SYSCALL error: EOF detected\n"),
]  # fmt: skip
ROWS: dict[str, list[Any]] = {
    "not-retryable": [
        fake_error("temporalio.exceptions.ApplicationError", non_retryable=True),
        fake_error("google.auth.exceptions.RefreshError", retryable=False), fake_error("shop.Error",
        should_retry=False),
    ],
    "told-not-to-retry": [
        http_error(500, x_should_retry="false"), http_error(503, stripe_should_retry="False", retry_after="5"),
        http_error(529, x_should_retry="false"),
    ],
    "out-of-quota": [
        *(code(one, status=429, retry_after="5") for one in OUT_OF_QUOTA.split()),
        code("rate_limit_error", "enforced_spend_limit_reached", status=429),
        code("billing_error", status=402), code("billing_error", status=400),
        fake_error("google.genai.errors.ClientError", fake_class("google.genai.errors.APIError"), code=402),
        fake_error("anthropic.BadRequestError", fake_class("anthropic.APIStatusError"),
                   said="Your credit balance is too low to access the API", status_code=400),
    ],
    "lock-timeout": [code("invalid_request_error", "lock_timeout", status=429), code("lock_timeout", status=400)],
    "already-exists": [RpcError("ALREADY_EXISTS"), fake_error("google.Error", status="ALREADY_EXISTS", code=409)],
    "declined": [fake_error("stripe._error.CardError", http_status=402), fake_error("stripe.CardError"),
    http_error(402)],
    "bad-credentials": [
        http_error(401), *map(aws, ("ExpiredToken", "ExpiredTokenException", "UnrecognizedClientException")),
        aws("InvalidClientTokenId", 403), RpcError("UNAUTHENTICATED"), mail("SMTPAuthenticationError", smtp_code=535),
        fake_error("redis.exceptions.AuthenticationError", RedisConnection),
    ],
    "rate-limited": [
        *map(http_error, (429, 509, 529)), *(http_error(status, retry_after="5") for status in (403, 413, 503)),
        http_error(403, x_ratelimit_remaining="0", x_ratelimit_reset=f"{NOW + 60:.0f}"),
        http_error(429, x_should_retry="false"), *map(aws, THROTTLED.split()),
        code("overloaded_error", status=200), code("userRateLimitExceeded", status=403),
        RpcError("RESOURCE_EXHAUSTED"), mail("SMTPServerBusy", smtp_code=421),
        caused(fake_error("shop.Failed", status_code=400), aws("ThrottlingException", 400)),
        caused(fake_error("shop.Failed", status_code=503), http_error(503, retry_after="7")),
        caused(RuntimeError("the month failed"), caused(Failed(), http_error(429))),
        ExceptionGroup("1 of 3", [ValueError(), http_error(429)]),
        fake_error("urllib3.exceptions.MaxRetryError",
                   reason=fake_error("urllib3.exceptions.ResponseError", said="too many 429 error responses")),
    ],
    "conflict": [
        *map(http_error, (409, 421, 423, 425)), RpcError("ABORTED"),
        fake_error("stripe._error.PermissionError", http_status=409),
    ],
    "infrastructure": [
        *(fake_error("psycopg.errors.Some", PsycopgOperational, sqlstate=state)
          for state in ["40001", "40P01", "08006", "57P01", "57P02", "57P03", "53300", "55P03", "25006"]),
        fake_error("sqlalchemy.exc.OperationalError", orig=fake_error("asyncpg.Error", sqlstate="40001")),
        fake_error("sqlalchemy.exc.OperationalError", orig=PsycopgOperational("failed")),
        fake_error("sqlalchemy.exc.DBAPIError", connection_invalidated=True),
        fake_error("sqlalchemy.exc.TimeoutError"),
        PsycopgOperational("connection failed"),
        *(fake_error("pymysql.err.OperationalError", said=(number, "no")) for number in (1205, 1213, 2006, 2013)),
        sqlite3.OperationalError("database is locked"), sqlite3.OperationalError("database table is locked: t"),
        RedisConnection(), fake_error("redis.exceptions.TimeoutError"),
        fake_error("redis.exceptions.BusyLoadingError", RedisConnection),
        *(fake_error(f"redis.exceptions.{name}Error") for name in ("TryAgain", "ClusterDown", "MasterDown",
        "ReadOnly")),
        caused(RedisConnection(), ConnectionRefusedError(111, "refused")),
        fake_error("redis.exceptions.OutOfMemoryError", RedisResponse, said="command not allowed"),
        *map(RedisResponse, REFUSED_BY_REDIS),
        *(fake_error(f"psycopg2.{name}", fake_class("psycopg2.Error"), said=text) for name, text in BROKEN_PSYCOPG2),
        fake_error("MySQLdb.InterfaceError", said=(0, "")), StoreUnavailable("away"),
        caused(fake_error(KOMBU), RedisConnection()), caused(fake_error(KOMBU), ValueError()),
        caused(fake_error(KOMBU), ConnectionRefusedError(errno.ECONNREFUSED, "refused")),
    ],
    "connect-phase": [
        *(fake_error(f"{library}.{name}", HttpxTimeout)
          for library in ("httpx", "httpx2", "httpcore") for name in ("ConnectTimeout", "ConnectError",
          "PoolTimeout")),
        *behind_sdks(fake_error("httpx2.ConnectTimeout")),
        ConnectionRefusedError(errno.ECONNREFUSED, "refused"), OSError(errno.ENETUNREACH, "unreachable"),
        socket.gaierror(socket.EAI_AGAIN, "try again"),
        fake_error("requests.exceptions.ConnectTimeout", RequestsConnection, RequestsTimeout),
        RequestsConnection(fake_error("urllib3.exceptions.MaxRetryError",
                                      reason=fake_error("urllib3.exceptions.NewConnectionError"))),
        fake_error("urllib3.exceptions.NameResolutionError", fake_class("urllib3.exceptions.NewConnectionError")),
        fake_error("aiohttp.client_exceptions.ClientConnectorDNSError",
                   fake_class("aiohttp.ClientConnectorError", AiohttpOs)),
        fake_error("botocore.exceptions.EndpointConnectionError"), UrllibError("<urlopen error timed out>"),
        RpcError("UNAVAILABLE", "failed to connect to all addresses; last error: ..."),
        RpcError("UNAVAILABLE", "errors resolving shop.example:443: [field:hostname lookup error:...]"),
    ],
    "outcome-unknown": [
        *map(http_error, (408, 499, 500, 502, 503, 504, 520, 521, 522, 523, 524)),
        *map(RpcError, ["DEADLINE_EXCEEDED", "UNAVAILABLE", "INTERNAL", "UNKNOWN", "CANCELLED", "DATA_LOSS"]),
        *(fake_error(f"{library}.ReadTimeout", HttpxTimeout) for library in ("httpx", "httpx2", "httpcore2")),
        *behind_sdks(fake_error("httpx2.ReadTimeout"), ValueError("unknown")),
        fake_error("httpx.RemoteProtocolError", HttpxTimeout),
        fake_error("requests.exceptions.ReadTimeout", RequestsTimeout), RequestsConnection(),
        RequestsConnection(fake_error("urllib3.exceptions.ProtocolError", said=("no", ConnectionResetError(104)))),
        urllib_error(500), http_error(500, x_should_retry="true"),
        ConnectionResetError(errno.ECONNRESET, "reset"), BrokenPipeError(), TimeoutError(), ConnectionError(),
        mail("SMTPServerDisconnected"),
        fake_error("aiohttp.client_exceptions.ServerDisconnectedError",
                   fake_class("aiohttp.ServerConnectionError", AiohttpConnection)),
        fake_error("botocore.exceptions.ReadTimeoutError"), aws("RequestTimeout", 400), code("server_error",
        status=200),
        fake_error("openai.APIConnectionError"),
        fake_error("openai.APITimeoutError", fake_class("openai.APIConnectionError")),
        fake_error("stripe._error.APIConnectionError", should_retry=False),
        fake_error("google.auth.exceptions.TransportError", retryable=False),
    ],
    "refused-here": [
        *(fake_error("psycopg.errors.Some", sqlstate=state) for state in ("22003", "23505", "42P01")),
        fake_error("sqlalchemy.exc.IntegrityError"),
        fake_error("sqlalchemy.exc.DBAPIError", orig=fake_error("psycopg.errors.X", sqlstate="23505")),
        sqlite3.IntegrityError("UNIQUE constraint failed"), FileNotFoundError(errno.ENOENT, "no such file"),
        caused(FileNotFoundError(), http_error(429)), PermissionError(errno.EACCES, "denied"),
    ],
    "not-there-yet": [
        fake_error("shop.models.DoesNotExist", fake_class("django.core.exceptions.ObjectDoesNotExist")),
        fake_error("sqlalchemy.exc.NoResultFound"), fake_error("peewee.DoesNotExist"),
    ],
    "request-refused": [
        *map(http_error, (400, 403, 404, 405, 410, 413, 422, 424, 451, 501, 505)),
        http_error(404, stripe_should_retry="false"), http_error(403, x_ratelimit_remaining="12"),
        caused(fake_error("shop.Failed", status_code=404), http_error(429)),
        *(mail("SMTPDataError", smtp_code=reply) for reply in (550, 554)),
        mail("SMTPRecipientsRefused", recipients={"a@x": (550, b"no")}),
        *map(RpcError, ["INVALID_ARGUMENT", "NOT_FOUND", "PERMISSION_DENIED", "FAILED_PRECONDITION",
        "OUT_OF_RANGE", "UNIMPLEMENTED"]),
        *(fake_error(f"requests.exceptions.{name}", RequestsError, ValueError) for name in ("MissingSchema",
        "InvalidURL")),
        fake_error("httpx.UnsupportedProtocol", HttpxTimeout), *behind_sdks(fake_error("httpx.UnsupportedProtocol")),
        fake_error("httpx.InvalidURL"), UrllibError("<urlopen error unknown url type: gopher>"),
        aws("ValidationException"),
    ],
    "certificate-rejected": [
        ssl.SSLCertVerificationError(1, "certificate verify failed"),
        *behind_sdks(ssl.SSLCertVerificationError(1, "no")),
        caused(fake_error("httpx.ConnectError", HttpxTimeout), ssl.SSLCertVerificationError(1, "no")),
        fake_error("requests.exceptions.SSLError", RequestsConnection, said=(ssl.SSLCertVerificationError(1, "no"),)),
        fake_error("aiohttp.ClientConnectorCertificateError", AiohttpOs, ssl.SSLCertVerificationError),
    ],
    "broken-answer": [
        caused(fake_error("aiohttp.client_exceptions.ClientResponseError", status=400),
               fake_error("aiohttp.http_exceptions.BadStatusLine",
                          fake_class("aiohttp.http_exceptions.HttpProcessingError"))),
    ],
    "time-or-memory-limit": [
        SoftTimeLimitExceeded(), MemoryError(), caused(fake_error("openai.APIConnectionError"),
        SoftTimeLimitExceeded()),
    ],
    "anything-else": [
        fake_error("psycopg2.InterfaceError", said="cursor already closed"),
        *map(RedisResponse, ("WRONGTYPE Operation", "BUSYKEY Target", "ERR OOM")),
        TypeError(), KeyError("total"), ValueError(), Exception(), OSError(errno.ENOSPC, "no space"),
        IsADirectoryError(errno.EISDIR, "a directory"), http_error(507), http_error(304), urllib_error(507),
        fake_error("shop.TimeoutError"), fake_error("shop.PermissionError"),
        fake_error("psycopg.errors.QueryCanceled", PsycopgOperational, sqlstate="57014"),
        sqlite3.OperationalError("no such table: t"), mail("SMTPDataError", smtp_code=450),
        fake_error("redis.exceptions.ResponseError"), CoolingDown("not now", key="k", retry_after=5.0),
    ],
}  # fmt: skip
CASES = [(row, error) for row, errors in ROWS.items() for error in errors]


def said(error: BaseException) -> str:
    """An error in a few words, for the name of its test."""
    return f"{type(error).__name__} {getattr(error, 'status_code', '')} {error}"[:50]


@pytest.mark.parametrize(
    ("row", "error"), CASES, ids=[f"{row}: {said(error)}" for row, error in CASES]
)
def test_an_error_lands_in_its_row(row: str, error: BaseException) -> None:
    assert classified(error).rule == row


def test_every_row_has_an_example() -> None:
    """A row without one would be a guess."""
    matchable = {row.name for row in Rules.default().rows() if not row.name.startswith("asked-")}
    assert set(ROWS) == matchable


# -- what the rows do ------------------------------------------------------------------------------

REASONS = {
    "not-retryable": Reason.REFUSED,
    "told-not-to-retry": Reason.OUTCOME_UNKNOWN,
    "out-of-quota": Reason.OUT_OF_QUOTA,
    "lock-timeout": Reason.CONFLICT,
    "already-exists": Reason.REFUSED,
    "declined": Reason.DECLINED,
    "bad-credentials": Reason.UNAUTHORIZED,
    "rate-limited": Reason.RATE_LIMITED,
    "conflict": Reason.CONFLICT,
    "infrastructure": Reason.INFRASTRUCTURE,
    "connect-phase": Reason.UNREACHABLE,
    "outcome-unknown": Reason.OUTCOME_UNKNOWN,
    "request-refused": Reason.REFUSED,
    "refused-here": Reason.REFUSED,
    "not-there-yet": Reason.NOT_FOUND,
    "certificate-rejected": Reason.REFUSED,
    "broken-answer": Reason.OUTCOME_UNKNOWN,
    "time-or-memory-limit": Reason.LIMIT_HIT,
    "anything-else": Reason.ERROR,
}


def action_of(row: str) -> Action:
    return classified(ROWS[row][0]).action


@pytest.mark.parametrize("row", REASONS)
def test_each_row_has_its_reason(row: str) -> None:
    assert {classified(error).reason for error in ROWS[row]} == {REASONS[row]}


@pytest.mark.parametrize(
    ("facts", "row"),
    [
        ({"names": ("openai.APIConnectionError",)}, "outcome-unknown"),
        ({"names": ("stripe.CardError",)}, "declined"),
        ({"names": ("celery_leases.errors.PermanentFailure",)}, "asked-permanent"),
        ({"sqlstate": "40001"}, "infrastructure"),
        ({"grpc": "ABORTED"}, "conflict"),
        ({"codes": ("SlowDown",)}, "rate-limited"),
        ({"status": 429}, "rate-limited"),
        ({}, "anything-else"),
    ],
    ids=str,
)
def test_facts_alone_are_judged_like_errors(facts, row) -> None:
    assert Rules.default().classify_facts(ErrorFacts(**facts), NOW).rule == row


def test_a_conflict_is_retried_with_full_jitter() -> None:
    """Those who collided must not collide again."""
    policy = action_of("conflict").policy
    assert policy is not None
    assert policy.jitter == 1.0


def test_names_are_what_an_operator_can_read() -> None:
    assert all(re.fullmatch(r"[a-z]+(-[a-z]+)*", rule.name) for rule in Rules.default().rows())
    by_name = {rule.name: (rule.action, rule.reason) for rule in DEFAULTS}
    assert all(by_name[rule.name] == (rule.action, rule.reason) for rule in DEFAULTS)


# -- delays ----------------------------------------------------------------------------------------


def test_a_rate_limit_has_the_server_delay() -> None:
    matched = classified(http_error(429, retry_after="37"))
    assert (matched.delay, matched.source, matched.clamped) == (
        37.0,
        "retry-after",
        False,
    )
    matched = classified(http_error(429, retry_after="86400"))
    assert (matched.delay, matched.clamped) == (21_600.0, True)
    assert classified(http_error(429)).delay is None
    assert classified(http_error(503, retry_after_ms="1500")).delay == 1.5
    behind = caused(fake_error("shop.Failed", status_code=503), http_error(503, retry_after="7"))
    assert classified(behind).delay == 7.0
    facts = ErrorFacts(status=429, headers={"retry-after": "37"})
    assert Rules.default().classify_facts(facts, NOW).delay == 37.0


def test_a_cooling_down_error_retains_its_details() -> None:
    assert (
        classified(CoolingDown("not now", key="k", retry_at=NOW + 5, retry_after=5.0)).delay == 5.0
    )
