"""The stored form of a call: its signature as JSON, from which its message can be published."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Final, NoReturn

from kombu.exceptions import KombuError
from kombu.serialization import dumps, registry

from celery_leases.results import NO_LIMIT, decode, encode

_SIGNATURE: Final = {"task", "args", "kwargs", "options"}
_FOLLOWING: Final = ("link", "link_error", "chain", "chord")


class _Recorded(BaseException):
    """The headers are recorded, so nothing more is done."""


class HeaderRecorder:
    """Records the headers of a message that is published to nowhere.

    *stops*: it is the router of the publish, and stops it there. Otherwise it is the producer, so
    that receivers of Celery's signals see the publish.
    """

    def __init__(self, connection: Any, *, stops: bool) -> None:
        self.connection = connection
        self.headers: dict[str, Any] = {}
        self._stops = stops

    def record(
        self,
        task: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        headers: Mapping[str, Any] | None,
        call_id: str,
    ) -> None:
        """Publish a call of *task* to nowhere."""
        to: dict[str, Any] = {"router": self} if self._stops else {"producer": self, "retry": False}
        with suppress(_Recorded):
            task.apply_async(
                tuple(args),
                dict(kwargs),
                task_id=call_id,
                headers=dict(headers or {}),
                ignore_result=True,
                add_to_parent=False,
                **to,
            )

    def route(self, options: Mapping[str, Any], *_: Any, **__: Any) -> NoReturn:
        """Record the headers as the router of a publish."""
        self.headers = dict(options.get("headers") or {})
        raise _Recorded

    def publish(self, *_: Any, headers: Mapping[str, Any] | None = None, **__: Any) -> None:
        """Record the headers as the producer, unless they belong to an event about the message."""
        self.headers = self.headers or dict(headers or {})


class HeaderKeeper:
    """A kombu producer whose messages have *headers*, whatever this process adds when it publishes
    them.
    """

    def __init__(self, producer: Any, headers: Mapping[str, Any]) -> None:
        self._producer = producer
        self._headers = headers

    def __getattr__(self, name: str) -> Any:
        return getattr(self._producer, name)

    def publish(self, *args: Any, headers: Mapping[str, Any] | None = None, **named: Any) -> Any:
        """Publish with these headers. An event about the message does not get them."""
        if headers and "task" in headers:
            headers = {**headers, **self._headers}
        return self._producer.publish(*args, headers=headers, **named)


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
