"""The default rules, as data: errors of common client libraries, and the action for each.

Within a phase the first match wins. A rule on a code comes before a rule on a status that
contradicts it. In their order the rules match

=========================  =========================================================================
rule                       what it matches
=========================  =========================================================================
``asked-cooldown``         the body raised ``Cooldown``
``asked-retry``            the body raised ``RetryLater``
``asked-permanent``        the body raised ``PermanentFailure``
``asked-snooze``           the body raised ``Snooze``
``time-or-memory-limit``   the soft time limit (``SoftTimeLimitExceeded``), ``MemoryError``
``certificate-rejected``   the server's TLS certificate was not accepted
``broken-answer``          aiohttp could not read the response as HTTP
``not-retryable``          an attribute of the error says so: ``retryable`` or ``should_retry`` is
                           false, or ``non_retryable`` is true
``told-not-to-retry``      a 5xx with the header ``x-should-retry: false`` or ``stripe-should-retry:
                           false``
``out-of-quota``           billing codes of OpenAI (``insufficient_quota``, …), Anthropic
                           (``billing_error``, …, an empty balance); 402 from Google
``lock-timeout``           Stripe's code ``lock_timeout``
``already-exists``         gRPC ``ALREADY_EXISTS``
``declined``               402; Stripe's ``CardError``
``bad-credentials``        401; AWS ``ExpiredToken*``, ``UnrecognizedClient*``,
                           ``InvalidClientTokenId``, ``InvalidAccessKeyId``, or no credentials at
                           all; Google ``API_KEY_INVALID``; gRPC ``UNAUTHENTICATED``; SMTP 530, 534,
                           535; a login that Redis refuses
``rate-limited``           429, 509, 529; also 403, 413 or 503 with ``Retry-After``, 403 with
                           ``x-ratelimit-remaining: 0``; throttling codes of AWS at any status,
                           limits of Google, OpenAI and Anthropic by code, also inside a stream;
                           gRPC ``RESOURCE_EXHAUSTED``; SMTP 421
``conflict``               409, 421, 423, 425; gRPC ``ABORTED``
``infrastructure``         your own database or Redis: SQLSTATE 08…, 40…, 53…, 25006, 55P03, 57P01
                           to 57P03; MySQL's deadlocks, lock waits and lost connections; SQLite is
                           locked; a connection that was lost or closed, with each driver; Redis
                           unavailable, loading, read-only, failing over, full (``OOM``), busy with
                           a script, unable to save (``MISCONF``), or without replicas
                           (``NOREPLICAS``)
``connect-phase``          no connection, so nothing was executed: refused, timed out while
                           connecting, no route, no such host, no free connection in the pool, proxy
``outcome-unknown``        408, 499, 500, 502, 503, 504, 520 to 524, 598, 599; timed out while
                           reading or writing, connection reset or closed; gRPC ``CANCELLED``,
                           ``DATA_LOSS``, ``DEADLINE_EXCEEDED``, ``INTERNAL``, ``UNAVAILABLE``,
                           ``UNKNOWN``; AWS ``RequestTimeout``; server errors inside a stream, by
                           code
``request-refused``        any other 4xx, 501, 505; an invalid URL or header; gRPC
                           ``INVALID_ARGUMENT``, ``NOT_FOUND``, ``PERMISSION_DENIED``,
                           ``FAILED_PRECONDITION``, ``OUT_OF_RANGE``, ``UNIMPLEMENTED``; SMTP 5…;
                           arguments that do not fit the task, or that pydantic refuses before the
                           body runs
``refused-here``           SQLSTATE 22…, 23…, 42…, ``IntegrityError``, ``DataError``;
                           ``FileNotFoundError``, ``PermissionError``. None of these is the response
                           to a request, so an effect stays in doubt
``not-there-yet``          a query for one row found none: Django's ``DoesNotExist``, SQLAlchemy's
                           ``NoResultFound``, peewee's ``DoesNotExist``
``connect-phase``          ``URLError`` and botocore's ``ConnectionError``, and no other rule
                           matches an error inside
``infrastructure``         a database driver's ``OperationalError``, in the same case
``outcome-unknown``        ``ConnectionError``, ``TimeoutError`` and similar errors, OpenAI's
                           ``APIConnectionError``, …, in the same case
``anything-else``          anything else: ``KeyError``, ``TypeError``, …
=========================  =========================================================================
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

# -- raised on purpose -----------------------------------------------------------------------------

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

# -- defaults --------------------------------------------------------------------------------------

DEFAULTS: Final = (
    # Every library wraps it in a connection error, which would be retried.
    Rule(
        "certificate-rejected",
        _any(library_errors.INVALID_CERTIFICATE),
        permanent(),
        Reason.REFUSED,
        Phase.FIRST,
    ),
    # aiohttp gives a response that is not HTTP the status 400, which no server has sent.
    Rule(
        "broken-answer",
        _any(_named("aiohttp.http_exceptions.HttpProcessingError")),
        OUTCOME_UNKNOWN,
        Reason.OUTCOME_UNKNOWN,
        Phase.FIRST,
    ),
    Rule("not-retryable", _any(FactIs("retryable", value=False)), permanent(), Reason.REFUSED),
    Rule(
        "told-not-to-retry",
        _any(
            (StatusIn(frozenset(range(500, 600))), HasHeader("x-should-retry", "false")),
            (StatusIn(frozenset(range(500, 600))), HasHeader("stripe-should-retry", "false")),
        ),
        cooldown(ambiguous=True, operator=True),
        Reason.OUTCOME_UNKNOWN,
    ),
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
    # Before rate-limited: Stripe sends it with 429.
    Rule("lock-timeout", _any(_code("lock_timeout")), CONFLICT, Reason.CONFLICT),
    # Before conflict: Google sends it with 409, but a retry would find the same.
    Rule("already-exists", _any(_grpc("ALREADY_EXISTS")), permanent(), Reason.REFUSED),
    Rule("declined", _any(_named("stripe.CardError"), _status(402)), permanent(), Reason.DECLINED),
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
    Rule(
        "conflict", _any(_status(409, 421, 423, 425), _grpc("ABORTED")), CONFLICT, Reason.CONFLICT
    ),
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
            # The broker refused a connection. It is one's own, so this must not close the group.
            _named("kombu.OperationalError"),
        ),
        INFRASTRUCTURE,
        Reason.INFRASTRUCTURE,
    ),
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
    # From one's own side: it does not show what another system did before.
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
    # The caller has published the call before its transaction was committed.
    Rule("not-there-yet", _any(library_errors.NO_SUCH_ROW), NOT_COMMITTED, Reason.NOT_FOUND),
    # urllib wraps errors that occur before it reads a response.
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
    Rule(
        "infrastructure",
        _any(library_errors.DATABASE_WRAPPERS),
        INFRASTRUCTURE,
        Reason.INFRASTRUCTURE,
        Phase.LAST,
    ),
    Rule(
        "outcome-unknown",
        _any(library_errors.NETWORK_WRAPPERS),
        OUTCOME_UNKNOWN,
        Reason.OUTCOME_UNKNOWN,
        Phase.LAST,
    ),
)

# -- the first and the last ------------------------------------------------------------------------

LIMITS: Final = Rule(
    "time-or-memory-limit",
    _any(_named("billiard.exceptions.SoftTimeLimitExceeded", "builtins.MemoryError")),
    LIMIT_HIT,
    Reason.LIMIT_HIT,
    Phase.FIRST,
)
ANYTHING_ELSE: Final = Rule("anything-else", (), cooldown(), Reason.ERROR, Phase.LAST)
