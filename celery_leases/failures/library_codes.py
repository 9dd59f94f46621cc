"""Error codes of servers and client libraries, for errors that a status does not identify."""

from __future__ import annotations

import errno
from typing import Final

MYSQL_LOCK_CONFLICTS: Final = frozenset({1205, 1213})  # lock wait timeout, deadlock
MYSQL_CONNECTION_ERRORS: Final = frozenset({1040, 1053, 2002, 2003, 2006, 2013, 2055, 4031})
UNREACHABLE_ERRNOS: Final = frozenset(
    {
        errno.EADDRNOTAVAIL,
        errno.ECONNREFUSED,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.ENETDOWN,
        errno.ENETUNREACH,
    }
)
THROTTLING: Final = (  # botocore/retries/standard.py: ThrottledRetryableChecker
    "Throttling",
    "ThrottlingException",
    "ThrottledException",
    "RequestThrottledException",
    "TooManyRequestsException",
    "ProvisionedThroughputExceededException",
    "TransactionInProgressException",
    "RequestLimitExceeded",
    "BandwidthLimitExceeded",
    "LimitExceededException",
    "RequestThrottled",
    "SlowDown",
    "PriorRequestNotComplete",
    "EC2ThrottledException",
)
# An error within a stream follows a status of 200, so only its code identifies it.
GOOGLE_LIMITS: Final = ("rateLimitExceeded", "userRateLimitExceeded")  # with 403
LIMITS_IN_STREAMS: Final = (
    "rate_limit_exceeded",
    "rate_limit_error",
    "overloaded_error",
    "server_overloaded",
)
FAULTS_IN_STREAMS: Final = ("api_error", "server_error", "timeout_error", "internal_error")
BAD_CREDENTIAL_CODES: Final = (  # Google's comes with a status of 400
    *("ExpiredToken*", "UnrecognizedClient*", "InvalidClientTokenId", "InvalidAccessKeyId"),
    "API_KEY_INVALID",
)
