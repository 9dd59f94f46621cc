"""What web requests ask for: ``submit()`` publishes a call if that is needed, and returns the HTTP
response; ``requested_status()`` reads the status of a key that a URL names.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Final
from uuid import uuid4

from celery import Celery
from kombu.exceptions import OperationalError

from celery_leases.client import LeaseClient
from celery_leases.errors import (
    AlreadyQueued,
    BrokerUnavailable,
    LeaseConfigurationError,
    LeasesError,
    UnknownKey,
)
from celery_leases.keys import is_shared, may_be_stored, stored_key
from celery_leases.outbox import calls as outbox
from celery_leases.record import State
from celery_leases.status import ABSENT, UNREADABLE, LeaseStatus
from celery_leases.text.notices import NoticeLogger, logger
from celery_leases.text.redaction import redact
from celery_leases.web.http import POLL_AFTER, HttpAnswer, answer

__all__ = [
    "answer_of_error",
    "checked_authoriser",
    "decided",
    "query_of",
    "requested_status",
    "submit",
]

_BY_HAND: Final = (State.UNCERTAIN.value, UNREADABLE)
"""The states in which no call of a key runs until a person has acted."""


def submit(
    task: Any,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    location: Callable[[LeaseStatus], str | None] | str | None = None,
    idempotent: bool = False,
    session: Any = None,
    publish: Callable[..., Any] | None = None,
    poll_after: float = POLL_AFTER,
    **options: Any,
) -> HttpAnswer:
    """Publish a call of a leased *task* with a ``lease_key`` if its work is not done or
    outstanding, and return the HTTP response; see ``docs/reference/http.md``.

    The call is published only if the status code is 202 and no message and no worker has the work
    already. *location* is the URL of the status, or a function of the status that returns it; with
    ``lease_runs="latest"`` the ``call_id`` of that status is the id of the new call.
    *idempotent*: the key is made of an ``Idempotency-Key``. With *session*, a SQLAlchemy session or
    a connection on the records' database, the call is published by ``apply_async_in`` after the
    caller's commit. *publish* is called instead of ``task.apply_async``, with the same arguments.
    *options* are those of ``apply_async``. Two requests at the same time may both
    publish; then one call gets the saved result of the other. With a *session* one of them waits.

    Raises :class:`~celery_leases.errors.KeyReused` if the key belongs to a call with other
    arguments, :class:`~celery_leases.errors.BrokerUnavailable` if the broker does not answer, and
    the other errors of ``lease_status`` and of publishing. :func:`celery_leases.web.http.answer`
    also makes responses for these.
    """
    given, named = tuple(args), dict(kwargs or {})
    if getattr(task, "lease_options", None) is None:
        raise LeaseConfigurationError(
            f"{getattr(task, 'name', task)!s} is not a leased task: give it base=LeasedTask and a lease_key"
        )

    runs = task.lease_options
    if runs.latest_runs and session is None:
        options.setdefault("task_id", str(uuid4()))

    def answered(status: LeaseStatus, *, idempotent: bool) -> HttpAnswer:
        where = location(status) if callable(location) else location
        asked: Any = {"asked": "work", "idempotent": idempotent, "poll_after": poll_after}
        return answer(status, location=where, **asked)

    def look() -> tuple[LeaseStatus, HttpAnswer]:
        status: LeaseStatus = task.lease_status(*given, **named)
        if runs.latest_runs and not idempotent and status.state not in _BY_HAND:
            status = LeaseStatus(status.key, status.task, ABSENT)  # the new call waits, or runs
        elif runs.reruns and status.state in (State.DONE, State.FAILED):
            status = replace(status, state=ABSENT, result=None)  # the next call runs
        return status, answered(status, idempotent=idempotent)

    status, sent = look()
    if status.state in (State.FAILED, State.UNCERTAIN):
        return sent
    if outbox.must_be_published(task, given, named) and sent.accepted:
        try:
            if session is not None:
                task.apply_async_in(session, given, named, **options)
            else:
                (publish or task.apply_async)(given, named, **options)
        except AlreadyQueued:  # by another request, since the status was read
            return look()[1]
        except OperationalError as error:
            raise BrokerUnavailable(
                f"{status.key}: the broker does not accept the call: {redact(str(error))}",
                status.key,
            ) from error
        queued = replace(status, state=State.PENDING.value, error=None, queued_at=datetime.now(UTC))
        queued = replace(queued, call_id=options.get("task_id", status.call_id))
        return answered(queued, idempotent=False)
    return sent


def query_of(status: LeaseStatus, task: Any) -> dict[str, str]:
    """The query of the URL at which the *status* of a key of *task* is read."""
    call = status.call_id if task.lease_options.latest_runs else None
    return {"task": task.name} | ({"call": call} if call else {})


def requested_status(
    app: Celery, key: str, task: str | None, call: str | None = None
) -> LeaseStatus:
    """The status of a *key* that a URL names, for a request that may see this key of this *task*;
    *call* is that of :meth:`LeaseClient.status`.

    Raises :class:`~celery_leases.errors.UnknownKey` for what is no key of the task, and the errors
    of :meth:`LeaseClient.status`.
    """
    if task is None and key.startswith("t:") and "|" in key:
        # A stored key: it would find a key other than the one that the request may see.
        raise UnknownKey(f"{key} is a stored key; give the key itself and its task", key)
    if task is not None:
        options: Any = getattr(app.tasks.get(task), "lease_options", None)
        template = getattr(options, "key", None)
        shares = isinstance(template, str) and template.startswith("/")
        if shares:
            key = f"/{key.removeprefix('/')}"  # a URL has its slashes merged
        # Likewise: only a task with shared keys has them, and only under their own name.
        if is_shared(key) != shares or (
            shares and not may_be_stored(stored_key(task, key), task, options)
        ):
            raise UnknownKey(f"{key} is no key of {task}", key)
    return LeaseClient.from_app(app).status(key, task=task, call=call)


def answer_of_error(error: LeasesError, where: str, log: NoticeLogger = logger) -> HttpAnswer:
    """The response for an *error* of the request *where*; one with a 5xx status is logged."""
    sent = answer(error)
    if sent.status >= 500:
        log.error("%s: %s", where, error, exc_info=error, code="request-failed")
    return sent


def checked_authoriser(name: str, authorise: object, needed: str) -> None:
    """Raise :class:`~celery_leases.errors.LeaseConfigurationError` unless *authorise*, the argument
    of the function *name*, can be called; *needed* says what to give.
    """
    if not callable(authorise):
        raise LeaseConfigurationError(
            f"{name}({authorise!r}): give {needed}; without one, anyone could see every result"
        )


async def decided(allowed: Awaitable[object]) -> object:
    """What an authoriser decides that is ``async def``."""
    return await allowed
