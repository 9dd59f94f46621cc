"""Converts errors of a Redis client to ``StoreUnavailable``, which says whether the command may
have been executed.
"""

from __future__ import annotations

import errno
import re
import socket
import ssl
from typing import Final

from redis import exceptions
from redis.sentinel import MasterNotFoundError

from celery_leases.errors import StoreUnavailable
from celery_leases.stores.python_errors import PYTHON_ERRORS

REDIS_ERRORS: Final = (exceptions.RedisError, *PYTHON_ERRORS)
"""Errors of a Redis client, its pool, a credential provider or Python."""

_REJECTED: Final = (
    exceptions.ResponseError,
    exceptions.AuthenticationError,
    exceptions.AuthorizationError,
    exceptions.BusyLoadingError,
    exceptions.MaxConnectionsError,
    exceptions.DataError,
    MasterNotFoundError,
)
_REJECTED_TEXTS: Final = re.compile(
    "Timeout connecting|max number of clients reached|Error .* connecting to |The previous master is now a slave"
)
_FORBIDDEN: Final = re.compile(
    "NOPERM|has no permissions|can't run this command|can't access at least one|ACL failure"
)
_UNSENT: Final = (socket.gaierror, ssl.SSLCertVerificationError)
_UNREACHED: Final = frozenset(
    {
        errno.ECONNREFUSED,
        errno.ENOENT,
        errno.EACCES,
        errno.ENETUNREACH,
        errno.EHOSTUNREACH,
        errno.EADDRNOTAVAIL,
    }
)


ACL_COMMANDS: Final = "+evalsha +eval +get +set +del +pttl +pexpire +scan +time +info"
"""The commands that the user of a lease store must be allowed to call, as in ``ACL SETUSER``."""


def unavailable(
    store: str, error: Exception, secret: str | None = None, prefix: str = ""
) -> StoreUnavailable:
    """The error to raise for *error*. *secret* is removed from the message, because servers repeat
    the arguments of a command that they reject.

    If the server's ACL forbids the command, the message says which rights the user needs for keys
    that begin with *prefix*.
    """
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, MasterNotFoundError):
        # redis-py's message lists the repr of each Sentinel client with its error.
        reasons = sorted(set(re.findall(r"> - (.*?)(?=, \w*<|$)", text)))
        text = f"{text.partition(' : ')[0]}: no Sentinel that answers knows a primary"
        text += f" (others: {', '.join(reasons)})" if reasons else ""
    if secret:
        text = text.replace(secret, "**")
    if isinstance(error, exceptions.NoPermissionError) or _FORBIDDEN.search(text):
        text += f"; the user of leases needs ~{prefix}:* {ACL_COMMANDS}"
    return StoreUnavailable(f"lease store {store}: {type(error).__name__}: {text}", executed(error))


def is_from_replica(error: Exception) -> bool:
    """Whether a server refused to write because it is a replica. Redis 6 says so inside the error
    of a script.
    """
    return isinstance(error, exceptions.ReadOnlyError) or "READONLY" in str(error)


def advice_for(error: BaseException | None) -> str | None:
    """The advice to append to a Redis error that would repeat; ``None`` for any other error."""
    text = str(error)
    if isinstance(error, exceptions.NoPermissionError) or _FORBIDDEN.search(text):
        return ""  # unavailable() has appended the advice
    if isinstance(error, exceptions.AuthenticationError):
        return "; write user and password of the server into leases_url"
    if isinstance(error, exceptions.ResponseError) and "unknown command" in text.lower():
        return "; leases need EVALSHA and EVAL: write a leases_url of Redis 6.2 or later, or Valkey, that allows them"
    return None


def executed(error: Exception) -> bool | None:
    """``False`` if the command did not reach the server or was rejected by it; ``None`` if that is
    not known.

    This is only right for clients that do not retry commands.
    """
    if isinstance(error, _REJECTED) or _REJECTED_TEXTS.match(str(error)):
        return False
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, _UNSENT) or (isinstance(cause, OSError) and cause.errno in _UNREACHED):
            return False
        cause = cause.__cause__ or cause.__context__
    return None
