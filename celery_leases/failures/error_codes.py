"""Reads codes of errors other than those of HTTP: SQLSTATE, errno, gRPC, SMTP."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

from celery_leases.failures.error_responses import is_grpc
from celery_leases.failures.safe_attribute_reader import Reader, as_int, as_text, members

GRPC_CODES: Final = frozenset(
    {
        "ABORTED",
        "ALREADY_EXISTS",
        "CANCELLED",
        "DATA_LOSS",
        "DEADLINE_EXCEEDED",
        "FAILED_PRECONDITION",
        "INTERNAL",
        "INVALID_ARGUMENT",
        "NOT_FOUND",
        "OUT_OF_RANGE",
        "PERMISSION_DENIED",
        "RESOURCE_EXHAUSTED",
        "UNAUTHENTICATED",
        "UNAVAILABLE",
        "UNIMPLEMENTED",
        "UNKNOWN",
    }
)
"""Source: google/rpc/code.proto, without OK."""

_SQLSTATE: Final = re.compile(r"[0-9A-Z]{5}", re.ASCII)
_MYSQL: Final = frozenset({"pymysql", "MySQLdb", "mysql", "mariadb", "asyncmy", "aiomysql"})


def sqlstate_of(read: Reader, error: BaseException) -> str | None:
    """The SQLSTATE of an error of a database driver."""
    for name in ("sqlstate", "pgcode"):
        if (state := as_text(read.attribute(error, name))) and _SQLSTATE.fullmatch(state):
            return state
    if (
        type(error).__module__ == "pyodbc"
        and (state := as_text(_first(read, error)))
        and _SQLSTATE.fullmatch(state)
    ):
        return state
    return None


def errno_of(read: Reader, error: BaseException, names: Sequence[str]) -> int | None:
    """The number of an OSError (also of name resolution), or of a MySQL error, whose drivers put it
    first in ``args``.
    """
    number = as_int(read.attribute(error, "errno"))
    if number is None and any(name.partition(".")[0] in _MYSQL for name in names):
        return as_int(_first(read, error))
    return number


def _first(read: Reader, error: BaseException) -> Any:
    return next(iter(members(read.attribute(error, "args"))), None)


def grpc_of(read: Reader, error: BaseException) -> str | None:
    """The name of the gRPC status code, which Google's REST clients use too."""
    code = (
        read.method_result(error, "code")
        if is_grpc(error)
        else read.attribute(error, "grpc_status_code")
    )
    for found in (as_text(read.attribute(code, "name")), as_text(read.attribute(error, "status"))):
        if found in GRPC_CODES:
            return found
    return None


def smtp_of(read: Reader, error: BaseException, names: Sequence[str]) -> int | None:
    """The reply code of a mail server; the lowest one if each recipient has its own."""
    if not any(name.rpartition(".")[2].startswith("SMTP") for name in names):
        return None
    refused = read.attribute(error, "recipients")
    if isinstance(refused, dict):
        return min(
            (
                code
                for reply in refused.values()
                if (code := as_int(next(iter(members(reply)), None)))
            ),
            default=None,
        )
    code = as_int(read.attribute(error, "smtp_code"))
    return code if code is not None else as_int(read.attribute(error, "code"))
