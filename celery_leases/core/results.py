"""Results as they are kept: JSON text through kombu's serializer registry, never pickle."""

from __future__ import annotations

from typing import Any

from kombu.exceptions import DecodeError, EncodeError
from kombu.serialization import dumps, loads

from celery_leases.core.records import Failure
from celery_leases.core.redaction import redact

TOO_LARGE = "result_too_large"
NOT_JSON = "result_not_json"
CONTENT_TYPE = "application/json"
MESSAGE_MAX = 2000


def encode(value: Any, limit: int) -> tuple[str | None, str | None]:
    """The JSON text of *value* and ``None``; or ``None`` and why it is not kept. *limit* is in bytes. Never raises."""
    try:
        text = dumps(value, serializer="json")[2]
        text = text if isinstance(text, str) else text.decode()
        size = len(text.encode())
        if '"__type__"' in text:
            decode(text)  # it may look like one of kombu's typed values and be none
    except (EncodeError, DecodeError, TypeError, ValueError, LookupError, OverflowError, RecursionError):
        return None, NOT_JSON
    return (text, None) if size <= limit else (None, TOO_LARGE)


def decode(text: str | None) -> Any:
    """The value a stored text stands for; no text stands for ``None``."""
    return loads(text, CONTENT_TYPE, "utf-8", accept={CONTENT_TYPE}) if text is not None else None


def failure_of(error: BaseException, rule: str | None = None) -> Failure:
    """What is remembered of an exception: dotted class name and message, without secrets, cut at 2000 characters.

    Never raises.
    """
    kind = type(error)
    try:
        message = str(error)
    except Exception:  # noqa: BLE001 - a broken __str__ must not hide the failure
        message = "(its text cannot be had)"
    message = message.replace("\x00", "").encode("utf-8", "replace").decode()
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    message = redact(message)
    return Failure(name, message if len(message) <= MESSAGE_MAX else message[: MESSAGE_MAX - 1] + "…", rule)
