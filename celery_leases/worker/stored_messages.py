"""Calls as records store them: signatures in JSON that give the delivered message again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from kombu.exceptions import KombuError
from kombu.serialization import dumps, registry

from celery_leases.protocol.results import NO_LIMIT, decode, encode

_SIGNATURE: Final = {"task", "args", "kwargs", "options"}
_FOLLOWING: Final = ("link", "link_error", "chain", "chord")


class NotKept(Exception):
    """Why a call cannot be stored."""


def kept(signature: Any) -> str:
    """A call as its record stores it; raises :class:`NotKept` if its arguments would change in a
    round trip.
    """
    text = encode(dict(signature), NO_LIMIT)[0]
    if text is None:
        raise NotKept("records store arguments as JSON, and these have no JSON form")
    if not _same(_contents(signature), _contents(decode(text))):
        raise NotKept(
            "records store arguments as JSON, which would change these; pass lists instead of tuples and text as keys"
        )
    return text


def as_delivered(
    args: Sequence[Any], kwargs: Mapping[str, Any], serializer: str
) -> tuple[list[Any], dict[str, Any]]:
    """The arguments as a body gets them after publishing with *serializer*; raises :class:`NotKept`
    if that is impossible.
    """
    try:
        content_type, encoding, data = dumps((list(args), dict(kwargs)), serializer=serializer)
        # Forced: celery_leases wrote these data itself, so pickle is safe here.
        given, named = registry.loads(data, content_type, encoding, force=True)
    except KombuError as error:
        raise NotKept(
            f"they cannot be published with the serializer {serializer!r}: {error}"
        ) from None
    return given, named


def is_over(expires: str | datetime | None, now: datetime) -> bool:
    """Whether the ``expires`` of a message is over."""
    if not expires:
        return False
    when = datetime.fromisoformat(expires) if isinstance(expires, str) else expires
    return (when if when.tzinfo else when.replace(tzinfo=UTC)) <= now


def _contents(call: Mapping[str, Any]) -> list[Any]:
    """The arguments of a call, and the calls that follow it."""
    options = call["options"]
    return [list(call["args"]), call["kwargs"], *[options.get(name) for name in _FOLLOWING]]


def _same(given: Any, back: Any) -> bool:
    """Whether a round trip through JSON has kept a value and all its types; those of the signature
    itself do not matter.
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
