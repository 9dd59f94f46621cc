"""For Django's views: ``submit()`` starts the work of a key, ``leases_urls()`` shows its status.

``docs/how-to/django.md`` explains how to use it, ``docs/reference/http.md`` has the responses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from inspect import isawaitable
from typing import Any, Final
from urllib.parse import urlencode

from asgiref.sync import async_to_sync
from celery import current_app
from django.db import transaction
from django.http import HttpRequest, HttpResponse
from django.urls import NoReverseMatch, path, reverse
from django.views.decorators.http import require_safe

from celery_leases.errors import AlreadyQueued, LeasesError
from celery_leases.status import LeaseStatus
from celery_leases.web import submitting
from celery_leases.web.http import POLL_AFTER, HttpAnswer, answer, forbidden

__all__ = ["leases_urls", "response", "submit"]

Authoriser = Callable[[HttpRequest, str, str | None], object]
"""Gets the request, a key, and the name of its task or ``None``; returns whether the request may
see the key.
"""
URL_NAME: Final = "celery_leases_status"


def submit(
    task: Any,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    location: Callable[[LeaseStatus], str | None] | str | None = None,
    idempotent: bool = False,
    session: Any = None,
    poll_after: float = POLL_AFTER,
    **options: Any,
) -> HttpResponse:
    """Request the work of a leased *task*, publish its call if needed, and build the response; also
    for errors of celery_leases.

    See :func:`celery_leases.web.submitting.submit`. In a transaction of the default database, as
    under ``ATOMIC_REQUESTS``, the call is published after the commit. With ``session=connection``
    the transaction contains it, so that no crash loses it. *location* is by default the URL of the
    status, if :func:`leases_urls` has one.
    """
    try:
        sent = submitting.submit(
            *(task, args, kwargs),
            location=location or (lambda status: _location(status, task)),
            idempotent=idempotent,
            session=session,
            publish=partial(_after_commit, task),
            poll_after=poll_after,
            **options,
        )
    except LeasesError as error:
        return response(submitting.answer_of_error(error, f"submit({getattr(task, 'name', task)})"))
    return response(sent)


def response(sent: HttpAnswer) -> HttpResponse:
    """An :class:`~celery_leases.web.http.HttpAnswer` as a response of Django."""
    return HttpResponse(sent.content(), status=sent.status, headers=dict(sent.headers))


def leases_urls(
    authorise: Authoriser, *, task: str | None = None, poll_after: float = POLL_AFTER
) -> list[Any]:
    """URL patterns for ``include()``: ``GET <key>``, the status of a key;
    ``docs/reference/http.md`` describes it.

    *authorise* is called first, with the request, the key and the task's name. If it returns a
    false value, the response is 403, whether or not the key exists; it may also raise
    ``PermissionDenied`` or ``Http404``, and may be ``async def``. *task* is the only task whose
    keys are shown. Without it, ``?task=`` names the task; that is needed for keys that several
    tasks have. Raises :class:`~celery_leases.errors.LeaseConfigurationError` without an authoriser.
    """
    needed = "a function of the request, the key and the task's name that returns whether the request may see it"
    submitting.checked_authoriser("leases_urls", authorise, needed)

    @require_safe
    def status(request: HttpRequest, key: str) -> HttpResponse:
        """The status of a key."""
        of_task = task or request.GET.get("task") or None
        allowed = authorise(request, key, of_task)
        if isawaitable(allowed):
            allowed = async_to_sync(submitting.decided)(allowed)
        if not allowed:
            return response(forbidden())
        try:
            call = request.GET.get("call")
            found = submitting.requested_status(current_app, key, of_task, call)
        except LeasesError as error:
            return response(submitting.answer_of_error(error, request.path))
        return response(answer(found, poll_after=poll_after))

    return [path("<path:key>", status, name=URL_NAME)]


def _after_commit(task: Any, args: Any, kwargs: Any, **options: Any) -> None:
    """Publish a call now, or after the commit of the transaction that is open."""
    if not transaction.get_connection().in_atomic_block:
        task.apply_async(args, kwargs, **options)
        return

    def publish() -> None:
        with suppress(AlreadyQueued):  # by another request, since the status was read
            task.apply_async(args, kwargs, **options)

    transaction.on_commit(publish)


def _location(status: LeaseStatus, task: Any) -> str | None:
    try:
        url = reverse(URL_NAME, kwargs={"key": status.key})
    except NoReverseMatch:
        return None
    return f"{url}?{urlencode(submitting.query_of(status, task))}"
