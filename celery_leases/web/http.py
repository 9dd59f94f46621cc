"""Maps a status or an error to an HTTP response: status code, headers and JSON body, for every web
framework. Without I/O.

The table is in ``docs/reference/http.md``. Errors have the form of RFC 9457
(``application/problem+json``). The text for people is
:meth:`~celery_leases.LeaseStatus.message`: a response contains no text of an exception, no host and
no name of an effect.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any, Final, Literal
from urllib.parse import quote

from celery_leases.errors import (
    AlreadyDone,
    AlreadyQueued,
    BrokerUnavailable,
    CoolingDown,
    KeyReused,
    KeyUnusable,
    LeaseHeld,
    LeaseIsLive,
    LeaseMisuse,
    LeasesError,
    PermanentFailure,
    RecordUnreadable,
    RescheduleFailed,
    ResultMissing,
    StoreUnavailable,
    Uncertain,
    UnknownKey,
)
from celery_leases.failures.actions import Reason
from celery_leases.record import Ended, State
from celery_leases.status import (
    ABANDONED,
    LEASE_ENDED,
    LEASE_STORE_UNAVAILABLE,
    RECORD_UNREADABLE,
    UNREADABLE,
    LeaseStatus,
    MessageCode,
)
from celery_leases.text.durations import in_words

__all__ = [
    "HttpAnswer",
    "IdempotencyKeyRefused",
    "answer",
    "forbidden",
    "idempotency_key",
    "public",
]

Asked = Literal["status", "work"]
"""What a request asks for: the status of a key, or its work."""

POLL_AFTER: Final = 2.0
"""Seconds after which a client may read the status again while a key is queued or running."""
UNAVAILABLE_AFTER: Final = 5.0
"""Seconds after which a client may retry if a store does not answer."""
LONGEST_HEADER: Final = 255
"""Characters of an ``Idempotency-Key``, at most."""

JSON: Final = "application/json"
PROBLEM: Final = "application/problem+json"

_PUBLIC: Final = (
    *("key", "state", "message", "message_code", "attempt", "retry_at", "scope", "resumes"),
    *("progress", "result"),
    *("reference", "created_at", "queued_at", "started_at", "finished_at"),
)
_CODES: Final = frozenset(
    {*Reason, *Ended, LEASE_ENDED, RECORD_UNREADABLE, LEASE_STORE_UNAVAILABLE}
)
_OUTSTANDING: Final = frozenset({State.PENDING, State.RUNNING, ABANDONED})
_ENDED: Final = frozenset({State.DONE, State.FAILED, State.UNCERTAIN, UNREADABLE})
_OF_URIS: Final = "!#$%&'()*+,/:;=?@[]~"
"""Characters other than letters and digits that :rfc:`3986` allows in a URL, and so in the
``Location`` header.
"""
_VISIBLE: Final = re.compile(r"[\x21-\x7e]+", re.ASCII)
_STRING: Final = re.compile(r'"((?:[\x20\x21\x23-\x5b\x5d-\x7e]|\\["\\])*)"', re.ASCII)


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """An HTTP response: the ``status`` code, the ``headers`` (with ``Content-Type``), and the
    ``body`` as plain values.
    """

    status: int
    headers: Mapping[str, str]
    body: Mapping[str, Any]

    def content(self) -> bytes:
        """The body as JSON in UTF-8."""
        return json.dumps(self.body, ensure_ascii=False, allow_nan=False).encode("utf-8", "replace")

    @property
    def accepted(self) -> bool:
        """Whether the status code is 202: the call may be published."""
        return self.status == HTTPStatus.ACCEPTED


class IdempotencyKeyRefused(KeyUnusable):
    """The ``Idempotency-Key`` of a request is missing or malformed. The message may be sent to the
    client.
    """

    advice = "send an Idempotency-Key header with each request that starts work"


def answer(
    subject: LeaseStatus | LeasesError,
    *,
    asked: Asked = "status",
    idempotent: bool = False,
    location: str | None = None,
    poll_after: float = POLL_AFTER,
    now: float | None = None,
) -> HttpAnswer:
    """The response for a status or an error.

    *asked*: ``"status"`` for a request that reads the status, which gets 200 for every status;
    ``"work"`` for a request that asks for the work, with the status before its call is published:
    202 says that it may be published. *idempotent*: the request has an ``Idempotency-Key``, so
    unfinished work of the same key is a conflict. *location*: the URL of the status. *poll_after*:
    seconds after which the client should read the status again. *now*, in seconds since the epoch,
    is for an error that was raised earlier: its remaining wait is computed from it.
    """
    if location is not None:
        location = quote(location, safe=_OF_URIS, errors="replace")
    if isinstance(subject, LeaseStatus):
        return _of_status(subject, asked, idempotent, location, poll_after)
    return _of_error(subject, location, poll_after, now)


def forbidden() -> HttpAnswer:
    """The response if the user may not see the status; the same whether the key exists or not."""
    return _problem(HTTPStatus.FORBIDDEN, "forbidden", "You may not see this", None, None)


def public(status: LeaseStatus) -> dict[str, Any]:
    """The part of *status* that a client may see, as plain values; ``retry_after`` is in whole
    seconds, rounded up.

    It has no ``error``, ``detail``, ``rule``, ``group``, ``holder``, ``effects`` and other values
    for operators. ``reason`` is a stable code, or ``None``.
    """
    values = status.as_json()
    body = {name: values[name] for name in _PUBLIC}
    body["retry_after"] = _whole(status.retry_after)
    body["reason"] = status.reason if status.reason in _CODES else None
    return body


def idempotency_key(header: str | None, caller: object) -> str:
    """The key of a call from the ``Idempotency-Key`` *header* of a request.

    *caller* is the id of the user or account that sends the request: the same header of two callers
    makes two keys. A quoted header is read as a structured field value (RFC 8941), another one as
    it is. Raises :class:`IdempotencyKeyRefused` for a header that is missing, empty, longer than
    255 characters or malformed, and :class:`~celery_leases.errors.LeaseMisuse` for a blank
    *caller*.
    """
    who = str(caller) if caller is not None else ""
    if not who.strip():
        raise LeaseMisuse(
            f"caller={caller!r}: write the id of the user or account, or all callers would share their keys"
        )
    text = (header or "").strip()
    if not text:
        raise IdempotencyKeyRefused("The request needs an Idempotency-Key header.")
    if text.startswith('"'):
        read = _STRING.fullmatch(text)
        text = re.sub(r"\\(.)", r"\1", read[1]) if read else ""
    elif not _VISIBLE.fullmatch(text) or "," in text:
        text = ""
    if not text.strip() or len(text) > LONGEST_HEADER:
        raise IdempotencyKeyRefused(
            f"The Idempotency-Key header must be one string of 1 to {LONGEST_HEADER} visible ASCII characters."
        )
    # The caller is quoted, so the first colon always ends it.
    return f"{quote(who, safe='')}:{text}"


def _of_status(
    status: LeaseStatus, asked: Asked, idempotent: bool, location: str | None, poll_after: float
) -> HttpAnswer:
    wait = status.retry_after or (None if status.state in _ENDED else poll_after)
    if asked == "status" or status.state == State.DONE:
        return _plain(HTTPStatus.OK, public(status), wait)
    refused = _refusal(status, idempotent)
    if refused is None:
        return _plain(HTTPStatus.ACCEPTED, public(status), wait, location)
    code, name = refused
    details = {
        name: value
        for name, value in public(status).items()
        if name in ("state", "retry_at", "scope", "reason")
    }
    return _problem(code, name, status.message(), wait, location, **details)


def _refusal(status: LeaseStatus, idempotent: bool) -> tuple[HTTPStatus, str] | None:
    """The status code and the problem code if the work of a key must not be done now; otherwise
    ``None``.
    """
    if status.state == UNREADABLE:
        return HTTPStatus.INTERNAL_SERVER_ERROR, "unreadable"
    if status.state in (State.FAILED, State.UNCERTAIN):
        return HTTPStatus.CONFLICT, str(status.state)
    if status.retry_after and status.scope == "group" and status.reason not in _FULL:
        return HTTPStatus.SERVICE_UNAVAILABLE, "group_cooling_down"
    if status.retry_after and status.state == State.COOLING:
        return HTTPStatus.TOO_MANY_REQUESTS, "cooling_down"
    queued = status.state in _OUTSTANDING or (status.state == State.COOLING and status.resumes)
    if idempotent and queued and not _may_be_called_again(status):
        return HTTPStatus.CONFLICT, "outstanding"
    return None


def _may_be_called_again(status: LeaseStatus) -> bool:
    """Whether the last attempt failed, and its call does not run again by itself: its caller may
    send the request again.
    """
    return status.state == State.PENDING and status.error is not None and not status.resumes


def _of_error(
    error: LeasesError, location: str | None, poll_after: float, now: float | None
) -> HttpAnswer:
    match error:
        case CoolingDown():
            return _of_cooldown(error, location, now)
        case AlreadyDone() | ResultMissing():
            done = LeaseStatus(error.key, None, State.DONE.value)
            return _plain(HTTPStatus.OK, public(done), None)
        case AlreadyQueued():
            return _of_queued(error, location, poll_after)
        case LeaseHeld() | LeaseIsLive():
            return _problem(
                HTTPStatus.CONFLICT, "held", _HELD, error.remaining or poll_after, location
            )
        case IdempotencyKeyRefused():
            return _problem(
                HTTPStatus.BAD_REQUEST, "idempotency_key_refused", str(error), None, location
            )
    code, name, text, wait = next(row for kind, row in _ERRORS.items() if isinstance(error, kind))
    state = {"state": name} if name in (State.FAILED, State.UNCERTAIN) else {}
    return _problem(code, name, text, wait, location, **state)


def _of_queued(error: AlreadyQueued, location: str | None, poll_after: float) -> HttpAnswer:
    """The response for a call that was not published, by the state of the key's record."""
    status = LeaseStatus(error.key, None, error.state or State.PENDING.value, attempt=1)
    if status.state == State.DONE:
        return _plain(HTTPStatus.OK, public(status), None)
    ended = status.state in _ENDED
    name = status.state if ended else "outstanding"
    wait = None if ended else poll_after
    text = status.message() if ended else _HELD
    return _problem(HTTPStatus.CONFLICT, name, text, wait, location, state=status.state)


def _of_cooldown(error: CoolingDown, location: str | None, now: float | None) -> HttpAnswer:
    at: float | None = error.retry_at  # None in an error that was created without details
    left = error.retry_after if now is None or at is None else at - now
    wait = max(1.0, left or 0.0)
    scope = error.scope or "key"
    known = (
        (HTTPStatus.SERVICE_UNAVAILABLE, "group_cooling_down")
        if scope == "group" and error.reason not in _FULL
        else (HTTPStatus.SERVICE_UNAVAILABLE, "group_full")
        if scope == "group"
        else (HTTPStatus.TOO_MANY_REQUESTS, "cooling_down")
    )
    then = datetime.fromtimestamp(at, UTC).isoformat() if at is not None else None
    reason = error.reason if error.reason in _CODES else None
    text = MessageCode.RETRY_IN.text.format(wait=in_words(wait))
    return _problem(
        *known, text, wait, location, state="cooling", retry_at=then, scope=scope, reason=reason
    )


_FULL: Final = (Reason.GROUP_FULL, Reason.GROUP_RATE)
"""The reasons of a call that waits for its turn in its group."""
_HELD: Final = "The same work is queued or running"
_UNAVAILABLE: Final = (
    HTTPStatus.SERVICE_UNAVAILABLE,
    "unavailable",
    "The service does not answer now",
    UNAVAILABLE_AFTER,
)
_ERRORS: Final[Mapping[type[LeasesError], tuple[HTTPStatus, str, str, float | None]]] = {
    KeyReused: (
        HTTPStatus.UNPROCESSABLE_ENTITY,
        "key_reused",
        "The same key was used for a request with other content",
        None,
    ),
    KeyUnusable: (
        HTTPStatus.BAD_REQUEST,
        "key_unusable",
        "The content of the request makes no key",
        None,
    ),
    UnknownKey: (HTTPStatus.NOT_FOUND, "unknown_key", "Nothing is known of this key", None),
    PermanentFailure: (HTTPStatus.CONFLICT, "failed", MessageCode.FAILED.text, None),
    Uncertain: (HTTPStatus.CONFLICT, "uncertain", MessageCode.UNCERTAIN.text, None),
    RecordUnreadable: (
        HTTPStatus.INTERNAL_SERVER_ERROR,
        "unreadable",
        MessageCode.UNREADABLE.text,
        None,
    ),
    **dict.fromkeys((StoreUnavailable, BrokerUnavailable, RescheduleFailed), _UNAVAILABLE),
    LeasesError: (HTTPStatus.INTERNAL_SERVER_ERROR, "error", "The server met an error", None),
}
"""By class, of which the first that matches counts: status code, problem code, text for people, and
seconds to wait.
"""


def _plain(
    code: HTTPStatus, body: Mapping[str, Any], wait: float | None, location: str | None = None
) -> HttpAnswer:
    return HttpAnswer(code.value, _headers(JSON, wait, location), body)


def _problem(
    code: HTTPStatus, name: str, text: str, wait: float | None, instance: str | None, **known: Any
) -> HttpAnswer:
    """A response in the form of RFC 9457. With the type ``about:blank``, the title must be that of
    the status code.
    """
    body: dict[str, Any] = {
        "type": "about:blank",
        "title": code.phrase,
        "status": code.value,
        "detail": text,
    }
    body |= {"instance": instance} if instance is not None else {}
    body |= {"code": name, "retry_after": _whole(wait), **known}
    return HttpAnswer(code.value, _headers(PROBLEM, wait, None), body)


def _headers(content_type: str, wait: float | None, location: str | None) -> dict[str, str]:
    headers = {"Content-Type": content_type, "Cache-Control": "no-store"}
    if location is not None:
        headers["Location"] = location
    if wait is not None:
        headers["Retry-After"] = str(_whole(wait))
    return headers


def _whole(wait: float | None) -> int | None:
    """Whole seconds, as HTTP writes them; rounded up."""
    return max(1, math.ceil(wait)) if wait is not None else None
