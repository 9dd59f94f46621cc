"""What client libraries call their errors, sorted by what has happened: names for :class:`NamedAs`,
no imports.
"""

from __future__ import annotations

from typing import Final

from celery_leases.failures.conditions import NamedAs


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
        "ReadOnlyError",
        "TimeoutError",
        "TryAgainError",
    )
    | {"sqlalchemy.exc.TimeoutError", "psycopg_pool.PoolTimeout", "pymysql.InterfaceError"}
    | {"celery_leases.StoreUnavailable"}
)
"""Databases and Redis: away for a moment, or asking for patience."""

LIBPQ: Final = NamedAs(_in_each("psycopg psycopg2", "OperationalError"), itself=True)
"""Without a SQLSTATE, which subclasses have: the connection could not be made, or is gone."""

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
"""No connection, so nothing was executed."""

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
"""The request was sent, at least in part, and no whole answer came."""

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
"""Something with a connection; what it was, the error it wraps knows better."""

INVALID_REQUEST: Final = NamedAs(
    _in_each(
        "requests", "InvalidURL", "InvalidSchema", "InvalidHeader", "MissingSchema", "URLRequired"
    )
    | _in_each("httpx httpx2", "InvalidURL")
    | _in_each(_HTTPX, "UnsupportedProtocol", "LocalProtocolError")
    | _in_each("aiohttp", "InvalidURL", "NonHttpUrlClientError")
    | {"urllib3.LocationValueError", "http.client.InvalidURL", "botocore.ParamValidationError"}
)
"""It never left: the URL, a header or a parameter is none."""

INVALID_DATA: Final = NamedAs(
    _in_each("sqlalchemy sqlite3 pymysql MySQLdb", "IntegrityError", "DataError")
)
"""What SQLSTATE 22 and 23 say, from drivers that give none."""

INVALID_CERTIFICATE: Final = NamedAs(
    frozenset({"ssl.SSLCertVerificationError", "aiohttp.ServerFingerprintMismatch"})
)
