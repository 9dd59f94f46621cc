"""An error and the errors that it wraps, in the attributes where client libraries put them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from celery_leases.failures.safe_attribute_reader import Reader, members

DEPTH: Final = 8
MEMBERS: Final = 16

_WRAPPING_ATTRIBUTES: Final = (
    "__cause__",
    "orig",  # SQLAlchemy
    "exceptions",  # an ExceptionGroup
    "reason",  # urllib3.MaxRetryError, urllib.error.URLError
    "os_error",  # aiohttp.ClientConnectorError
    "original_error",  # urllib3.ProxyError
    "cause",  # google.api_core.RetryError
    "args",  # requests and urllib3 wrap by position
)


def error_chain(error: BaseException, read: Reader | None = None) -> list[BaseException]:
    """*error* and the errors that it wraps, depth first, each once: at most 16, and at most 8 deep.
    Never raises.
    """
    read = read or Reader()
    found: list[BaseException] = []
    waiting = [(error, 1)]
    while waiting and len(found) < MEMBERS:
        current, depth = waiting.pop()
        if any(current is known for known in found):
            continue
        found.append(current)
        if depth < DEPTH:
            waiting += [(inner, depth + 1) for inner in reversed(_wrapped(read, current))]
    return found


def _wrapped(read: Reader, error: BaseException) -> list[BaseException]:
    try:
        return list(_searched(read, error))
    except BaseException:  # noqa: BLE001 - its attributes may be objects that raise anything
        return []


def _searched(read: Reader, error: BaseException) -> Iterator[BaseException]:
    for name in _WRAPPING_ATTRIBUTES:
        yield from _errors_in(read.attribute(error, name))
    keywords = read.attribute(error, "kwargs")  # botocore
    if isinstance(keywords, dict):
        yield from _errors_in(keywords.get("error"))


def _errors_in(value: object) -> Iterator[BaseException]:
    if isinstance(value, BaseException):
        yield value
    elif isinstance(value, tuple | list):
        yield from (
            member for member in members(value)[:MEMBERS] if isinstance(member, BaseException)
        )
