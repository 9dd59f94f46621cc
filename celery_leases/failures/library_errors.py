"""Names of the errors of client libraries, grouped by what they mean; nothing is imported."""

from __future__ import annotations

import re
from typing import Final

from celery_leases.failures.conditions import MessageHas, NamedAs


def _in_each(packages: str, *names: str) -> frozenset[str]:
    return frozenset(f"{package}.{name}" for package in packages.split() for name in names)


_HTTPX: Final = "httpx httpx2 httpcore httpcore2"

BAD_CREDENTIALS: Final = NamedAs(
    _in_each("redis valkey", "AuthenticationError", "AuthorizationError")
    | {"botocore.NoCredentialsError", "google.DefaultCredentialsError"}
)

DATABASE_AND_REDIS_ERRORS: Final = NamedAs(
    _in_each(
        "redis valkey",
        "BusyLoadingError",
        "ClusterDownError",
        "ConnectionError",
        "MasterDownError",
        "OutOfMemoryError",
        "ReadOnlyError",
        "TimeoutError",
        "TryAgainError",
    )
    | {"sqlalchemy.exc.TimeoutError", "psycopg_pool.PoolTimeout"}
    | _in_each("pymysql MySQLdb", "InterfaceError")
    | {"celery_leases.StoreUnavailable"}
)
"""Databases and Redis: not available for a moment, or overloaded."""

LIBPQ: Final = NamedAs(_in_each("psycopg psycopg2", "OperationalError"), itself=True)
"""Only the class itself: subclasses have a SQLSTATE. The connection failed or was lost."""

CLOSED_CONNECTION: Final = (
    NamedAs(_in_each("psycopg2", "DatabaseError", "InterfaceError"), itself=True),
    MessageHas(re.compile(r"connection (already closed|not open)|SSL (SYSCALL )?error|libpq")),
)
"""psycopg2 has classes without SQLSTATE for a connection that was lost, and for other errors."""

REDIS_REFUSES: Final = (
    NamedAs(_in_each("redis valkey", "ResponseError")),
    MessageHas(re.compile(r"(^|[:-] ?)(MISCONF|OOM|NOREPLICAS|BUSY) ")),
)
"""Redis takes no commands: it cannot save, is full, has too few replicas, or executes a script. In
a pipeline, and in a script, other words come before the code.
"""

DATABASE_WRAPPERS: Final = NamedAs(
    _in_each("pymysql MySQLdb mysql mariadb oracledb pyodbc kombu", "OperationalError")
)

CONNECT_PHASE: Final = NamedAs(
    _in_each(_HTTPX, "ConnectTimeout", "ConnectError", "PoolTimeout", "ProxyError")
    | _in_each("requests", "ConnectTimeout")
    | _in_each(
        "urllib3", "NewConnectionError", "ConnectTimeoutError", "ProxyError", "EmptyPoolError"
    )
    | _in_each("aiohttp", "ClientConnectorError", "ConnectionTimeoutError")
    | _in_each("botocore", "EndpointConnectionError", "ConnectTimeoutError", "ProxyConnectionError")
    | {"builtins.ConnectionRefusedError", "socket.gaierror", "smtplib.SMTPConnectError"}
)
"""There was no connection, so nothing was executed."""

INCOMPLETE_RESPONSES: Final = NamedAs(
    _in_each(
        _HTTPX,
        "ReadTimeout",
        "WriteTimeout",
        "ReadError",
        "WriteError",
        "CloseError",
        "RemoteProtocolError",
    )
    | _in_each("requests", "ReadTimeout", "ChunkedEncodingError")
    | _in_each("urllib3", "ReadTimeoutError", "ProtocolError", "IncompleteRead")
    | _in_each("http.client", "RemoteDisconnected", "IncompleteRead", "BadStatusLine")
    | _in_each("aiohttp", "ServerConnectionError", "ClientOSError", "ClientPayloadError")
    | _in_each(
        "botocore",
        "ReadTimeoutError",
        "ConnectionClosedError",
        "ResponseStreamingError",
        "IncompleteReadError",
    )
    | _in_each("builtins", "BrokenPipeError", "ConnectionAbortedError", "ConnectionResetError")
    | {"smtplib.SMTPServerDisconnected", "asyncio.IncompleteReadError"}
)
"""At least a part of the request was sent, and no complete response was received."""

NETWORK_WRAPPERS: Final = NamedAs(
    _in_each("openai anthropic stripe", "APIConnectionError")
    | _in_each(_HTTPX, "TransportError", "TimeoutException", "NetworkError")
    | _in_each("requests", "ConnectionError", "Timeout", "RetryError")
    | _in_each("urllib3", "MaxRetryError", "TimeoutError", "SSLError")
    | _in_each("google", "TransportError", "TimeoutError", "RetryError")
    | _in_each("builtins", "ConnectionError", "TimeoutError")
    | {"aiohttp.ClientConnectionError", "botocore.HTTPClientError", "http.client.HTTPException"}
    | {"ssl.SSLError", "grpc.RpcError"}
)
"""Network errors that wrap another error, which is more precise."""

INVALID_REQUEST: Final = NamedAs(
    _in_each(
        "requests", "InvalidURL", "InvalidSchema", "InvalidHeader", "MissingSchema", "URLRequired"
    )
    | _in_each("httpx httpx2", "InvalidURL")
    | _in_each(_HTTPX, "UnsupportedProtocol", "LocalProtocolError")
    | _in_each("aiohttp", "InvalidURL", "NonHttpUrlClientError")
    | {"urllib3.LocationValueError", "http.client.InvalidURL", "botocore.ParamValidationError"}
)
"""The request was not sent: its URL, a header or a parameter is invalid."""

NO_SUCH_ROW: Final = NamedAs(
    frozenset(
        {
            "django.core.exceptions.ObjectDoesNotExist",
            "sqlalchemy.exc.NoResultFound",
            "peewee.DoesNotExist",
        }
    )
)
"""A query for one row found none."""

INVALID_DATA: Final = NamedAs(
    _in_each("sqlalchemy sqlite3 pymysql MySQLdb", "IntegrityError", "DataError")
)
"""The errors of SQLSTATE 22 and 23, from drivers without SQLSTATE."""

INVALID_CERTIFICATE: Final = NamedAs(
    frozenset({"ssl.SSLCertVerificationError", "aiohttp.ServerFingerprintMismatch"})
)
