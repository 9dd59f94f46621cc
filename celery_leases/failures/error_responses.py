"""Reads the HTTP response that an error of any client library has: its status, its headers, and the
error codes in its body.

Nothing is fetched: only attributes that are set, and a body that has been read, are used.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Iterator
from itertools import islice
from typing import Any, Final

from celery_leases.failures.safe_attribute_reader import Reader, as_int, as_text, members

VALUE_MAX: Final = 200
BODY_MAX: Final = 20_000
CODES_MAX: Final = 16
BODY_DEPTH: Final = 5

HEADERS: Final = frozenset(
    {
        "date",
        "ratelimit",
        "retry-after",
        "retry-after-ms",
        "stripe-should-retry",
        "x-amz-retry-after",
        "x-ratelimit-remaining",
        "x-ratelimit-remaining-requests",
        "x-ratelimit-remaining-tokens",
        "x-ratelimit-reset",
        "x-ratelimit-reset-requests",
        "x-ratelimit-reset-tokens",
        "x-should-retry",
    }
)
"""The headers that default rules and delays read, in addition to Anthropic's windows."""

_ANTHROPIC_WINDOW: Final = re.compile(r"anthropic-ratelimit-[a-z-]+-(?:remaining|reset)")
_CODE: Final = re.compile(r"[\w.:/#*-]{1,100}", re.ASCII)
_CODE_KEYS: Final = (
    "code",
    "error_code",
    "errorcode",
    "type",
    "__type",
    "status",
    "reason",
    "error",
)
_BODY_PLACES: Final = ("body", "json_body", "http_body", "details", "content", "response_data")


def status_of(read: Reader, error: BaseException) -> int | None:
    """The HTTP status of the response of *error*."""
    response = read.attribute(error, "response")
    for thing, names in (
        (error, ("status_code", "status", "http_status")),
        (response, ("status_code", "status")),
        (read.attribute(error, "resp"), ("status",)),  # googleapiclient
    ):
        for name in names:
            if (status := _status(read.attribute(thing, name))) is not None:
                return status
    if isinstance(response, dict) and isinstance(
        metadata := response.get("ResponseMetadata"), dict
    ):  # botocore
        return _status(metadata.get("HTTPStatusCode"))
    return _status(code_of(read, error))


def code_of(read: Reader, error: BaseException) -> Any:
    """The attribute ``code``. It is not read from a class that has a ``status``, because aiohttp's
    property emits a warning.
    """
    own = read.instance_attribute(error, "code")
    if own is not None or as_int(read.attribute(error, "status")) is not None:
        return own
    return read.attribute(error, "code")


def headers_of(read: Reader, error: BaseException, wanted: Container[str]) -> dict[str, str]:
    """The headers of the response that are in *wanted* or in :data:`HEADERS`, by lower-case name;
    values are cut to 200 characters.
    """
    response = read.attribute(error, "response")
    places = [
        read.attribute(error, "headers"),
        read.attribute(response, "headers"),
        read.attribute(error, "resp"),
    ]
    if isinstance(response, dict) and isinstance(
        metadata := response.get("ResponseMetadata"), dict
    ):
        places.append(metadata.get("HTTPHeaders"))
    places.append(grpc_metadata(read, error))
    for place in places:
        if place is not None and (found := _headers(read, place, wanted)):
            return found
    return {}


def grpc_metadata(read: Reader, error: BaseException) -> Any:
    """The trailing metadata of a failed gRPC call. Reading it does not block: the call has
    ended.
    """
    return read.method_result(error, "trailing_metadata") if is_grpc(error) else None


def is_grpc(error: BaseException) -> bool:
    """Whether *error* is one of grpcio, which has its facts in methods."""
    return any(
        kind.__module__ == "grpc" and kind.__name__ == "RpcError" for kind in type(error).__mro__
    )


def bodies_of(read: Reader, error: BaseException) -> list[Any]:
    """The parsed JSON of each attribute that has the body of the response."""
    response = read.attribute(error, "response")
    places = [read.attribute(error, name) for name in _BODY_PLACES]
    places += [
        read.instance_attribute(response, "_content"),
        read.instance_attribute(response, "data"),
    ]
    if isinstance(response, dict):
        places.append(response.get("Error"))
    return [body for body in map(_parsed, places) if body]


def codes_in(body: Any) -> Iterator[str]:
    """The error codes and types in a parsed body, as they are written, those of outer levels
    first.
    """
    level, depth = [body], 0
    while level and depth < BODY_DEPTH:
        deeper: list[Any] = []
        for part in level:
            if isinstance(part, dict):
                lowered = {str(name).lower(): value for name, value in islice(part.items(), 50)}
                yield from (code for name in _CODE_KEYS if (code := as_code(lowered.get(name))))
                deeper += [value for value in lowered.values() if isinstance(value, dict | list)]
            elif isinstance(part, list):
                deeper += [value for value in part[:20] if isinstance(value, dict | list)]
        level, depth = deeper[:50], depth + 1


def as_code(value: object) -> str | None:
    """*value* as an error code, if it is one word, or a number that is no HTTP status."""
    number = as_int(value)
    if number is not None:
        return str(number) if _status(number) is None and number else None
    text = as_text(value)
    return text if text and _CODE.fullmatch(text) and text != "error" else None


def _status(value: object) -> int | None:
    text = as_text(value)
    number = (
        int(text) if text and re.fullmatch("[1-5][0-9][0-9]", text, re.ASCII) else as_int(value)
    )
    return number if number is not None and 100 <= number <= 599 else None


def _parsed(body: Any) -> Any:
    if isinstance(body, dict | list):
        return body
    if (
        isinstance(body, bytes | str)
        and 1 < len(body) <= BODY_MAX
        and body[:1] in (b"{", b"[", "{", "[")
    ):
        try:
            return json.loads(body)
        except (ValueError, RecursionError):
            return None
    return None


def _headers(read: Reader, headers: Any, wanted: Container[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for pair in members(
        read.method_result(headers, "items") if hasattr(type(headers), "items") else headers
    ):
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            continue
        name = (_text(pair[0]) or "").lower()
        if name in HEADERS or name in wanted or _ANTHROPIC_WINDOW.fullmatch(name):
            value = _text(pair[1])
            if value is not None:
                found.setdefault(name, value[:VALUE_MAX].strip())
    return found


def _text(value: object) -> str | None:
    if type(value) is str:
        return value
    if isinstance(value, bytes):
        return value[:1000].decode("latin-1")
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f"{value}"
    return str.__str__(value) if isinstance(value, str) else None
