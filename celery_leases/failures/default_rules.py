"""The default rules, as data: errors of common client libraries, and the action for each.

The comments give the row of the table in docs/explanation/failures.md. Within a phase the first
match wins. A rule on a code comes before a rule on a status that contradicts it.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Final

from celery_leases.failures import library_codes, library_errors
from celery_leases.failures.actions import Action, Reason, cooldown, permanent, retry
from celery_leases.failures.conditions import (
    CodeIn,
    Condition,
    ErrnoIn,
    FactIs,
    GrpcIn,
    HasHeader,
    MessageHas,
    NamedAs,
    SmtpIn,
    SqlStateStarts,
    StatusIn,
)
from celery_leases.failures.rule import Phase, Rule

Case = tuple[Condition, ...]


def _status(*statuses: int) -> StatusIn:
    return StatusIn(frozenset(statuses))


def _code(*codes: str) -> CodeIn:
    return CodeIn(frozenset(codes))


def _named(*names: str) -> NamedAs:
    return NamedAs(frozenset(names))


def _grpc(*names: str) -> GrpcIn:
    return GrpcIn(frozenset(names))


def _smtp(*replies: int) -> SmtpIn:
    return SmtpIn(frozenset(replies))


def _text(pattern: str) -> MessageHas:
    return MessageHas(re.compile(pattern))


def _any(*conditions: Condition | Case) -> tuple[Case, ...]:
    return tuple(one if isinstance(one, tuple) else (one,) for one in conditions)


REFUSED_HERE: Final = "refused-here"
"""The name of the rule for errors of one's own database or file system that refuse a value."""

# -- actions ---------------------------------------------------------------------------------------

OUT_OF_QUOTA: Final = replace(cooldown("1h", scope="group", operator=True), server_delay="ignore")
UNAUTHORIZED: Final = replace(cooldown("15m", scope="group", operator=True), server_delay="ignore")
RATE_LIMITED: Final = replace(cooldown("30s", scope="group", cap="1h"), server_delay="instead")
CONFLICT: Final = retry("1s", jitter=1.0)
INFRASTRUCTURE: Final = retry("200ms", cap="30s")
UNREACHABLE: Final = retry("1s", then=cooldown("30s", scope="group", cap="1h"))
NOT_COMMITTED: Final = retry("500ms", then=cooldown("30s"))
OUTCOME_UNKNOWN: Final = replace(
    retry("1s", ambiguous=True), if_not_idempotent=cooldown("60s", ambiguous=True)
)
LIMIT_HIT: Final = replace(cooldown(ambiguous=True), at_least=15.0)
ASKED_COOLDOWN: Final = replace(cooldown(), server_delay="instead")
ASKED_RETRY: Final = replace(retry("1s"), server_delay="instead")
ASKED_SNOOZE: Final[Action] = replace(retry("1s"), server_delay="instead")

_RETRY_AFTER: Final = (HasHeader("retry-after"), HasHeader("retry-after-ms"))

# -- row 2 -----------------------------------------------------------------------------------------

CONTROL_FLOW: Final = (
    Rule(
        "asked-cooldown",
        _any(_named("celery_leases.Cooldown")),
        ASKED_COOLDOWN,
        Reason.ASKED,
        Phase.FIRST,
    ),
    Rule(
        "asked-retry",
        _any(_named("celery_leases.RetryLater")),
        ASKED_RETRY,
        Reason.ASKED,
        Phase.FIRST,
    ),
    Rule(
        "asked-permanent",
        _any(_named("celery_leases.PermanentFailure")),
        permanent(),
        Reason.ASKED,
        Phase.FIRST,
    ),
    Rule(
        "asked-snooze",
        _any(_named("celery_leases.Snooze")),
        ASKED_SNOOZE,
        Reason.ASKED,
        Phase.FIRST,
    ),
)
"""The exceptions of celery_leases that a body raises. Their delay is an attribute of the
exception.
"""

# -- rows 3 to 13 ----------------------------------------------------------------------------------

DEFAULTS: Final = (
    # 13. Every library wraps it in a connection error, which would be retried.
    Rule(
        "certificate-rejected",
        _any(library_errors.INVALID_CERTIFICATE),
        permanent(),
        Reason.REFUSED,
        Phase.FIRST,
    ),
    # 12. aiohttp gives a response that is not HTTP the status 400, which no server has sent.
    Rule(
        "broken-answer",
        _any(_named("aiohttp.http_exceptions.HttpProcessingError")),
        OUTCOME_UNKNOWN,
        Reason.OUTCOME_UNKNOWN,
        Phase.FIRST,
    ),
    # 3
    Rule("not-retryable", _any(FactIs("retryable", value=False)), permanent(), Reason.REFUSED),
    # 4
    Rule(
        "told-not-to-retry",
        _any(
            (StatusIn(frozenset(range(500, 600))), HasHeader("x-should-retry", "false")),
            (StatusIn(frozenset(range(500, 600))), HasHeader("stripe-should-retry", "false")),
        ),
        cooldown(ambiguous=True, operator=True),
        Reason.OUTCOME_UNKNOWN,
    ),
    # 5
    Rule(
        "out-of-quota",
        _any(
            _code(
                "insufficient_quota",
                "credit_balance_exhausted",
                "organization_spend_limit_exceeded",
                "project_spend_limit_exceeded",
                "organization_usage_limit_exceeded",
                "enforced_spend_limit_reached",
                "billing_error",
            ),
            (_named("google.genai.errors.APIError", "google.GoogleAPICallError"), _status(402)),
            # Anthropic's 400 for an account without credit has no code.
            (_named("anthropic.APIStatusError"), _text("credit balance is too low")),
        ),
        OUT_OF_QUOTA,
        Reason.OUT_OF_QUOTA,
    ),
    # 9, before 8: Stripe sends it with 429.
    Rule("lock-timeout", _any(_code("lock_timeout")), CONFLICT, Reason.CONFLICT),
    # 13, before 9: Google sends it with 409, but a retry would find the same.
    Rule("already-exists", _any(_grpc("ALREADY_EXISTS")), permanent(), Reason.REFUSED),
    # 6
    Rule("declined", _any(_named("stripe.CardError"), _status(402)), permanent(), Reason.DECLINED),
    # 7
    Rule(
        "bad-credentials",
        _any(
            _status(401),
            _code(*library_codes.BAD_CREDENTIAL_CODES),
            _grpc("UNAUTHENTICATED"),
            _smtp(530, 534, 535),
            library_errors.BAD_CREDENTIALS,
        ),
        UNAUTHORIZED,
        Reason.UNAUTHORIZED,
    ),
    # 8
    Rule(
        "rate-limited",
        _any(
            _status(429, 509, 529),
            *((_status(403, 413, 503), header) for header in _RETRY_AFTER),
            (_status(403), HasHeader("x-ratelimit-remaining", "0")),
            _code(
                *library_codes.THROTTLING,
                *library_codes.GOOGLE_LIMITS,
                *library_codes.LIMITS_IN_STREAMS,
            ),
            _grpc("RESOURCE_EXHAUSTED"),
            _smtp(421),
            (_named("urllib3.ResponseError"), _text("too many (429|509|529) error responses")),
        ),
        RATE_LIMITED,
        Reason.RATE_LIMITED,
    ),
    # 9
    Rule(
        "conflict", _any(_status(409, 421, 423, 425), _grpc("ABORTED")), CONFLICT, Reason.CONFLICT
    ),
    # 10
    Rule(
        "infrastructure",
        _any(
            # 25006: read-only replica; 53: no resources left; 55P03: another session has the lock.
            SqlStateStarts(("08", "25006", "40", "53", "55P03", "57P01", "57P02", "57P03")),
            ErrnoIn(library_codes.MYSQL_LOCK_CONFLICTS | library_codes.MYSQL_CONNECTION_ERRORS),
            _code("SQLITE_BUSY*", "SQLITE_LOCKED*"),
            (_named("sqlite3.OperationalError"), _text("database (table )?is locked")),
            FactIs("invalidated", value=True),
            library_errors.DATABASE_AND_REDIS_ERRORS,
            library_errors.LIBPQ,
            library_errors.CLOSED_CONNECTION,
            library_errors.REDIS_REFUSES,
            # The broker refused a connection. It is one's own, so this must not close the gate.
            _named("kombu.OperationalError"),
        ),
        INFRASTRUCTURE,
        Reason.INFRASTRUCTURE,
    ),
    # 11
    Rule(
        "connect-phase",
        _any(
            library_errors.CONNECT_PHASE,
            ErrnoIn(library_codes.UNREACHABLE_ERRNOS),
            (
                _grpc("UNAVAILABLE"),
                _text("failed to connect to all addresses|DNS resolution failed|errors resolving "),
            ),
        ),
        UNREACHABLE,
        Reason.UNREACHABLE,
    ),
    # 12
    Rule(
        "outcome-unknown",
        _any(
            _status(408, 499, 500, 502, 503, 504, *range(520, 525), 598, 599),
            _grpc(
                "CANCELLED", "DATA_LOSS", "DEADLINE_EXCEEDED", "INTERNAL", "UNAVAILABLE", "UNKNOWN"
            ),
            # botocore/retries/standard.py: TransientRetryableChecker. S3 sends the first with 400.
            _code("RequestTimeout", "RequestTimeoutException", *library_codes.FAULTS_IN_STREAMS),
            library_errors.INCOMPLETE_RESPONSES,
        ),
        OUTCOME_UNKNOWN,
        Reason.OUTCOME_UNKNOWN,
    ),
    # 13
    Rule(
        "request-refused",
        _any(
            _status(*range(400, 500), 501, 505),
            _grpc(
                "FAILED_PRECONDITION",
                "INVALID_ARGUMENT",
                "NOT_FOUND",
                "OUT_OF_RANGE",
                "PERMISSION_DENIED",
                "UNIMPLEMENTED",
            ),
            SmtpIn(frozenset(range(500, 600))),
            library_errors.INVALID_REQUEST,
            (_named("urllib.error.URLError"), _text("unknown url type")),
            FactIs("arguments", value=True),
        ),
        permanent(),
        Reason.REFUSED,
    ),
    # 13, from one's own side: it does not show what another system did before.
    Rule(
        REFUSED_HERE,
        _any(
            SqlStateStarts(("22", "23", "42")),
            library_errors.INVALID_DATA,
            _named("builtins.FileNotFoundError", "builtins.PermissionError"),
        ),
        permanent(),
        Reason.REFUSED,
    ),
    # 14. The caller has published the call before its transaction was committed.
    Rule("not-there-yet", _any(library_errors.NO_SUCH_ROW), NOT_COMMITTED, Reason.NOT_FOUND),
    # 11. urllib wraps errors that occur before it reads a response.
    Rule(
        "connect-phase",
        _any(
            (_named("urllib.error.URLError"), _text("^<urlopen error")),
            _named("botocore.ConnectionError"),
        ),
        UNREACHABLE,
        Reason.UNREACHABLE,
        Phase.LAST,
    ),
    # 10
    Rule(
        "infrastructure",
        _any(library_errors.DATABASE_WRAPPERS),
        INFRASTRUCTURE,
        Reason.INFRASTRUCTURE,
        Phase.LAST,
    ),
    # 12
    Rule(
        "outcome-unknown",
        _any(library_errors.NETWORK_WRAPPERS),
        OUTCOME_UNKNOWN,
        Reason.OUTCOME_UNKNOWN,
        Phase.LAST,
    ),
)

# -- rows 15 and 16 --------------------------------------------------------------------------------

LIMITS: Final = Rule(
    "time-or-memory-limit",
    _any(_named("billiard.exceptions.SoftTimeLimitExceeded", "builtins.MemoryError")),
    LIMIT_HIT,
    Reason.LIMIT_HIT,
    Phase.FIRST,
)
ANYTHING_ELSE: Final = Rule("anything-else", (), cooldown(), Reason.ERROR, Phase.LAST)
