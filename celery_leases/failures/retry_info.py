"""Reads ``google.rpc.RetryInfo``: from Google's libraries, from JSON, and from the bytes of gRPC
metadata.

Source: google/rpc/error_details.proto, status.proto and google/protobuf/duration.proto.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from celery_leases.failures.safe_attribute_reader import Reader, as_int, as_seconds

LARGEST: Final = 16_384
_LENGTHS: Final = {1: 8, 5: 4}


def in_details(read: Reader, details: list[Any]) -> float | None:
    """The seconds of the RetryInfo in parsed error details: protobuf messages, or JSON as dicts."""
    for detail in details:
        if isinstance(detail, dict):
            if str(detail.get("@type", "")).endswith("google.rpc.RetryInfo"):
                return as_seconds(detail.get("retryDelay"))
        elif (delay := read.attribute(detail, "retry_delay")) is not None:
            seconds, nanos = (
                as_int(read.attribute(delay, "seconds")),
                as_int(read.attribute(delay, "nanos")),
            )
            return as_seconds((seconds or 0) + (nanos or 0) / 1e9)
    return None


def in_status(data: bytes) -> float | None:
    """The seconds of the RetryInfo in a serialized ``google.rpc.Status``
    (``grpc-status-details-bin``).
    """
    try:
        for detail in _parts(data[:LARGEST], 3):
            kind = next(_parts(detail, 1), b"")
            if not kind.endswith(b"google.rpc.RetryInfo"):
                continue
            duration = next(_parts(next(_parts(detail, 2)), 1))
            numbers = {
                number: value for number, value in _fields(duration) if isinstance(value, int)
            }
            return as_seconds(numbers.get(1, 0) + numbers.get(2, 0) / 1e9)
    except (IndexError, ValueError, StopIteration):
        return None
    return None


def _parts(data: bytes, wanted: int) -> Iterator[bytes]:
    return (
        value for number, value in _fields(data) if number == wanted and isinstance(value, bytes)
    )


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The numbered fields of a protobuf message. Raises IndexError or ValueError for other
    bytes.
    """
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        kind = tag & 7
        if kind == 0:
            value, at = _varint(data, at)
            yield tag >> 3, value
            continue
        length, at = _varint(data, at) if kind == 2 else (_LENGTHS.get(kind, -1), at)
        if length < 0 or at + length > len(data):
            raise ValueError("not a protobuf message")
        yield tag >> 3, data[at : at + length]
        at += length


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return value, at
    raise ValueError("not a protobuf message")
