"""The stored form of a call: its signature as JSON, from which its message can be published."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from kombu.exceptions import KombuError
from kombu.serialization import dumps, registry

from celery_leases.protocol.results import NO_LIMIT, decode, encode

_SIGNATURE: Final = {"task", "args", "kwargs", "options"}
_FOLLOWING: Final = ("link", "link_error", "chain", "chord")


class NotStorable(Exception):
    """A call cannot be stored; the text says why."""


def stored_form(signature: Any) -> str:
    """The call of *signature* as its record stores it; raises :class:`NotStorable` if JSON would
    change its arguments.
    """
    text = encode(dict(signature), NO_LIMIT)[0]
    if text is None:
        raise NotStorable("records store arguments as JSON, and these have no JSON form")
    if not _same(_contents(signature), _contents(decode(text))):
        raise NotStorable(
            "records store arguments as JSON, which would change these; pass lists instead of tuples and text as keys"
        )
    return text


def as_delivered(
    args: Sequence[Any], kwargs: Mapping[str, Any], serializer: str
) -> tuple[list[Any], dict[str, Any]]:
    """The arguments as a body gets them after a publish with *serializer*; raises
    :class:`NotStorable` if they cannot be published.
    """
    try:
        content_type, encoding, data = dumps((list(args), dict(kwargs)), serializer=serializer)
        # Forced, because it is safe to unpickle data that this process has just pickled.
        given, named = registry.loads(data, content_type, encoding, force=True)
    except KombuError as error:
        raise NotStorable(
            f"they cannot be published with the serializer {serializer!r}: {error}"
        ) from None
    return given, named


def has_expired(expires: str | datetime | None, now: datetime) -> bool:
    """Whether a message with that ``expires`` has expired at *now*."""
    if not expires:
        return False
    when = datetime.fromisoformat(expires) if isinstance(expires, str) else expires
    return (when if when.tzinfo else when.replace(tzinfo=UTC)) <= now


def _contents(call: Mapping[str, Any]) -> list[Any]:
    """The arguments of a call, and the calls that Celery makes after it."""
    options = call["options"]
    return [list(call["args"]), call["kwargs"], *[options.get(name) for name in _FOLLOWING]]


def _same(given: Any, back: Any) -> bool:
    """Whether a value and all types in it are the same after a round trip through JSON. The types
    of a signature's own fields do not matter.
    """
    if isinstance(given, dict) and given.keys() >= _SIGNATURE and isinstance(given["args"], tuple):
        given = {**given, "args": list(given["args"])}
    if type(given) is not type(back):
        return False
    if isinstance(given, dict):
        return _same(list(given.items()), list(back.items()))
    if isinstance(given, list | tuple):
        return len(given) == len(back) and all(map(_same, given, back))
    return True
