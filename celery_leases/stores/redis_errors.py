"""From errors of a Redis client to ``StoreUnavailable``, with what they say about the command's fate."""

from __future__ import annotations

import errno
import socket
from typing import Final

from redis import exceptions

from celery_leases.core.errors import StoreUnavailable

REDIS_ERRORS: Final = (exceptions.RedisError, OSError)
"""What a Redis client may raise."""

_REJECTED: Final = (
    exceptions.ResponseError,
    exceptions.AuthenticationError,
    exceptions.AuthorizationError,
    exceptions.BusyLoadingError,
    exceptions.MaxConnectionsError,
    exceptions.DataError,
)
_REJECTED_TEXTS: Final = ("Timeout connecting", "max number of clients reached")
_UNREACHED: Final = frozenset(
    {errno.ECONNREFUSED, errno.ENOENT, errno.EACCES, errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EADDRNOTAVAIL}
)


def unavailable(store: str, error: Exception, secret: str | None = None) -> StoreUnavailable:
    """The error to raise for *error*, without *secret* (servers repeat the arguments of commands they reject)."""
    text = " ".join(str(error).split()) or type(error).__name__
    if secret:
        text = text.replace(secret, "**")
    return StoreUnavailable(f"lease store {store}: {type(error).__name__}: {text}", executed(error))


def executed(error: Exception) -> bool | None:
    """``False``: the command never reached the server, or was rejected by it; ``None``: nobody knows.

    Holds for clients that do not repeat commands by themselves.
    """
    if isinstance(error, _REJECTED) or str(error).startswith(_REJECTED_TEXTS):
        return False
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, socket.gaierror) or (isinstance(cause, OSError) and cause.errno in _UNREACHED):
            return False
        cause = cause.__cause__ or cause.__context__
    return None
