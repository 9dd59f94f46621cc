"""Results in their stored form: JSON text by kombu's serializer registry, never pickle."""

from __future__ import annotations

import json
from typing import Any, Final

from kombu.exceptions import DecodeError, EncodeError
from kombu.serialization import dumps, loads

from celery_leases.errors import RecordUnreadable
from celery_leases.record import Failure, Record
from celery_leases.text.cleaning import shown
from celery_leases.text.redaction import message_of

TOO_LARGE = "result_too_large"
NOT_JSON = "result_not_json"
CONTENT_TYPE = "application/json"
_decoded: Final = json.JSONDecoder().decode
_quoted: Final = json.encoder.encode_basestring_ascii
_CONSTANTS: Final = {None: "null", True: "true", False: "false"}
_VALUES: Final = {text: value for value, text in _CONSTANTS.items()} | {None: None}
MESSAGE_MAX = 2000
"""Characters of the message of a stored exception, at most."""
NO_LIMIT: Final = 2**62
RESULT_MAX: Final = 2**20
"""Bytes of the largest result, or reply of an effect, that is stored."""
"""More bytes than any value has."""


def encode(value: Any, limit: int | None = None) -> tuple[str | None, str | None]:
    """The JSON text of *value* and ``None``; or ``None`` and why it is not stored. *limit* is the
    number of bytes allowed, by default :data:`RESULT_MAX`. Only a method of *value* can make it
    raise.
    """
    kind = type(value)
    if value is None or kind is bool:
        return _CONSTANTS[value], None
    try:
        if kind is str:
            text = _quoted(value)
        elif kind is int:
            text = repr(value)
        else:
            text = dumps(value, serializer="json")[2]
            text = text if isinstance(text, str) else text.decode()
            if '"__type__"' in text:
                decode(text)  # raises for a value that only looks like one of kombu's typed values
        size = len(text) if text.isascii() else len(text.encode())
    except (
        EncodeError,
        DecodeError,
        TypeError,
        ValueError,
        LookupError,
        OverflowError,
        RecursionError,
    ):
        return None, NOT_JSON
    return (text, None) if size <= (RESULT_MAX if limit is None else limit) else (None, TOO_LARGE)


def decode(text: str | None) -> Any:
    """The value of a stored JSON text; no text stands for ``None``."""
    if text in _VALUES:
        return _VALUES[text]
    if text is None or not text:
        return text
    # kombu's typed values are objects: other JSON needs no hook.
    return (
        loads(text, CONTENT_TYPE, "utf-8", accept={CONTENT_TYPE})
        if text[0] in "{["
        else _decoded(text)
    )


def as_decoded(value: Any, text: str) -> Any:
    """*value* after a round trip through *text*, its JSON text."""
    return value if type(value) is int or (type(value) is str and value.isascii()) else decode(text)


def decode_stored(text: str | None, key: str, column: str, task: str) -> Any:
    """The value of a stored JSON text; raises :class:`RecordUnreadable` if it is no JSON, as after
    a change by hand.
    """
    try:
        return decode(text)
    except Exception as error:  # noqa: BLE001 - a decoder may raise anything
        message = unreadable(key, task, column, text, error)
        raise RecordUnreadable(message, False, key, column) from None


def result_of(record: Record) -> Any:
    """The result in a record; raises :class:`RecordUnreadable` as :func:`decode_stored` does."""
    return decode_stored(record.result, record.key, "result", record.task)


def unreadable(key: str, task: str, column: str, value: object, error: Exception) -> str:
    """The message about a column of a record with a value that cannot be read."""
    return (
        f"{key}: the record cannot be read: its column {column} has {shown(value)} ({type(error).__name__}); "
        f"repair it, or write: leases forget {key} --task {task}"
    )


def failure_of(error: BaseException, rule: str | None = None) -> Failure:
    """The stored form of an exception: the dotted name of its class, and its message, cut and
    without secrets. Never raises.
    """
    kind = type(error)
    name = (
        kind.__qualname__
        if kind.__module__ == "builtins"
        else f"{kind.__module__}.{kind.__qualname__}"
    )
    return Failure(name, message_of(error, MESSAGE_MAX), rule)
