"""FastAPI: a status router with server-sent events, exception handlers, and ``submit()``.

Needs the extra ``fastapi``. ``docs/how-to/fastapi.md`` explains how to use it.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Final
from urllib.parse import urlencode

from fastapi import APIRouter, Depends, FastAPI, Header, Query, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import Response, StreamingResponse
from fastapi.routing import APIRoute

from celery_leases.errors import LeasesError, StoreUnavailable, UnknownKey
from celery_leases.keys import is_shared
from celery_leases.status import LeaseStatus
from celery_leases.text.durations import Duration, seconds
from celery_leases.web.async_client import ENDED, AsyncLeaseClient, version_of
from celery_leases.web.http import (
    POLL_AFTER,
    UNAVAILABLE_AFTER,
    HttpAnswer,
    answer,
    forbidden,
    public,
)
from celery_leases.web.submitting import answer_of_error, checked_authoriser
from celery_leases.web.submitting import submit as submitted

__all__ = ["AsyncLeaseClient", "add_exception_handlers", "leases_router", "response", "submit"]


EVENTS: Final = "text/event-stream"
HEARTBEAT: Final = 15.0
"""Seconds without a change after which a comment is sent, so that proxies keep the stream open."""
MAX_STREAM_TIME: Final = 300.0
"""Seconds after which a stream ends; the browser reconnects and is authorised again."""
RECONNECT: Final = 2000
"""Milliseconds after which a browser reconnects."""


def response(sent: HttpAnswer) -> Response:
    """An :class:`~celery_leases.web.http.HttpAnswer` as a FastAPI response."""
    return Response(sent.content(), sent.status, dict(sent.headers))


def add_exception_handlers(app: FastAPI) -> None:
    """Make *app* answer errors of celery_leases as described in ``docs/reference/http.md``.

    Errors with a 5xx status are logged too.
    """

    async def handle(request: Request, error: Exception) -> Response:
        return _error_response(
            request, error if isinstance(error, LeasesError) else LeasesError(str(error))
        )

    app.add_exception_handler(LeasesError, handle)


def _error_response(request: Request, error: LeasesError) -> Response:
    """The response for an error; one with a 5xx status is logged."""
    return response(answer_of_error(error, f"{request.method} {request.url.path}"))


async def submit(
    task: Any,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    location: Callable[[LeaseStatus], str | None] | str | None = None,
    idempotent: bool = False,
    poll_after: float = POLL_AFTER,
    **options: Any,
) -> Response:
    """Request the work of a leased *task*, publish its call if necessary, and make the response.

    Runs in a thread, because it waits for the stores and the broker; see
    :func:`celery_leases.web.submitting.submit`. For a call in a transaction of your own use
    ``delay_in()``, with the synchronous session or connection.
    """
    sent = await run_in_threadpool(
        submitted,
        *(task, args, kwargs),
        location=location,
        idempotent=idempotent,
        poll_after=poll_after,
        **options,
    )
    return response(sent)


def leases_router(
    authorise: Callable[..., Any],
    client: Callable[[], AsyncLeaseClient] | AsyncLeaseClient,
    *,
    task: str | None = None,
    prefix: str = "/leases",
    poll_after: float = POLL_AFTER,
    heartbeat: Duration = HEARTBEAT,
    longest: Duration = MAX_STREAM_TIME,
    slowest: float = POLL_AFTER,
) -> APIRouter:
    """A router with ``GET /leases/{key}``: the status of a key, or its changes as server-sent
    events.

    *authorise* is a FastAPI dependency, which may have ``key`` and ``request`` among its
    parameters. It is called first. If it returns a false value, the response is 403, whether or
    not the key exists; it may also raise ``HTTPException``. *client* is a client or a dependency
    that returns one. *task* is the only task whose keys are shown, and the one that *authorise*
    gets; a request for another task is answered with 404. Without *task*, ``?task=`` names it. The
    shared keys ``/<name>/<key>`` are those of the task *name*.

    A request that accepts ``text/event-stream``, as ``EventSource`` does, gets a stream: an event
    with the status, an event for each change, and a comment every *heartbeat*. The stream ends
    after *longest*, or after a state that no worker changes. A browser reconnects with
    ``Last-Event-ID``: that event is not sent again, and 204 means that no more will follow.
    Raises :class:`~celery_leases.errors.LeaseConfigurationError` without an authoriser.
    """
    needed = "a dependency that returns whether the request may see the key"
    checked_authoriser("leases_router", authorise, needed)
    router = APIRouter(
        prefix=prefix,
        tags=["leases"],
        route_class=APIRoute if task is None else _route_for(task),
    )
    spans = seconds(heartbeat, "heartbeat"), seconds(longest, "longest")
    get_client: Callable[[], AsyncLeaseClient] = (
        (lambda: client) if isinstance(client, AsyncLeaseClient) else client
    )
    is_allowed, a_client = Depends(authorise), Depends(get_client)

    @router.get("/{key:path}", response_class=Response)
    async def status(
        key: str,
        request: Request,
        allowed: Any = is_allowed,
        leases: Any = a_client,
        asked_task: str | None = Query(None, alias="task"),
        call: str | None = None,
        last_event_id: str | None = Header(None),
    ) -> Response:
        """The status of a key, or with ``Accept: text/event-stream`` its changes."""
        if inspect.isawaitable(allowed):  # authorise is not ``async def`` but returned an awaitable
            allowed = await allowed
        if not allowed:
            return response(forbidden())
        of_task = task or asked_task or None
        if (of_task is None and key.startswith("t:") and "|" in key) or (
            of_task and is_shared(key)
        ):
            # It would find the key of another task than authorise has checked.
            return response(answer(UnknownKey(key=key)))
        identity = {"task": of_task, "call": call}
        try:
            found: LeaseStatus = await leases.status(key, **identity)
        except LeasesError as error:
            return _error_response(request, error)
        if EVENTS not in request.headers.get("accept", ""):
            plain = response(answer(found, poll_after=poll_after))
            plain.headers["Vary"] = "Accept"
            return plain
        if last_event_id == version_of(found) and found.state in ENDED:
            return Response(status_code=204)
        stream = _events(leases, key, identity, last_event_id, *spans, slowest)
        headers = {"Cache-Control": "no-store", "Vary": "Accept", "X-Accel-Buffering": "no"}
        return StreamingResponse(stream, media_type=EVENTS, headers=headers)

    return router


def _route_for(task: str) -> type[APIRoute]:
    """A route that sets ``?task=`` to *task* in each request, also for the authoriser."""

    class OneTaskRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handle = super().get_route_handler()

            async def handle_task(request: Request) -> Response:
                given = request.query_params.multi_items()
                if any(name == "task" and value not in ("", task) for name, value in given):
                    return response(answer(UnknownKey(key=request.path_params["key"])))
                others = [(name, value) for name, value in given if name != "task"]
                query = urlencode([*others, ("task", task)]).encode()
                scope = {**request.scope, "query_string": query}
                return await handle(Request(scope, request.receive))

            return handle_task

    return OneTaskRoute


async def _events(
    leases: AsyncLeaseClient,
    key: str,
    identity: Mapping[str, Any],
    last: str | None,
    heartbeat: float,
    longest: float,
    slowest: float,
) -> AsyncGenerator[str]:
    """The text of a stream: changes, heartbeats, and an event whenever a store does not answer."""
    loop = asyncio.get_running_loop()
    end = loop.time() + longest
    yield f"retry: {RECONNECT}\n\n"
    while loop.time() < end:
        try:
            async with (
                aclosing(leases.changes(key, **identity, slowest=slowest)) as changes,
                aclosing(_until(changes, heartbeat, end)) as coming,
            ):
                async for status in coming:
                    if status is None:
                        yield ":\n\n"
                    elif (version := version_of(status)) != last:
                        last = version
                        yield _event("status", public(status), version)
            return
        except StoreUnavailable as error:
            yield _event("problem", answer(error).body)
            await asyncio.sleep(min(UNAVAILABLE_AFTER, max(0.0, end - loop.time())))
        except LeasesError as error:
            yield _event("problem", answer(error).body)
            return


async def _until(
    changes: AsyncGenerator[LeaseStatus], heartbeat: float, end: float
) -> AsyncGenerator[LeaseStatus | None]:
    """Yield *changes* until the loop's time *end*; ``None`` after each *heartbeat* without one."""
    loop = asyncio.get_running_loop()
    while True:
        coming = asyncio.ensure_future(anext(changes))
        try:
            while not coming.done():
                left = end - loop.time()
                if left <= 0:
                    return
                done, _ = await asyncio.wait({coming}, timeout=min(heartbeat, left))
                if not done and end > loop.time():
                    yield None
            try:
                yield coming.result()
            except StopAsyncIteration:
                return
        finally:
            if not coming.done():
                coming.cancel()
                await asyncio.wait({coming})


def _event(name: str, body: Mapping[str, Any], version: str | None = None) -> str:
    """One event of a stream; the JSON is ASCII and has no line breaks."""
    number = f"id: {version}\n" if version is not None else ""
    return f"event: {name}\n{number}data: {json.dumps(body, allow_nan=False)}\n\n"
