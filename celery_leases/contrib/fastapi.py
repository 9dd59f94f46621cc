"""FastAPI: a status router with server-sent events, exception handlers, and publishing without
blocking the loop.

Needs the extra ``fastapi``. ``docs/fastapi.md`` shows all of it.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Final
from urllib.parse import urlencode

from fastapi import APIRouter, Depends, FastAPI, Header, Query, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import Response, StreamingResponse
from fastapi.routing import APIRoute

from celery_leases.async_client import ENDED, AsyncLeaseClient, version_of
from celery_leases.common.durations import Duration, seconds
from celery_leases.errors import LeaseConfigurationError, LeasesError, StoreUnavailable, UnknownKey
from celery_leases.http import AWAY_AFTER, POLL_AFTER, HttpAnswer, answer, forbidden, public
from celery_leases.protocol.status import LeaseStatus
from celery_leases.submitting import submit as submitted

__all__ = ["AsyncLeaseClient", "add_exception_handlers", "leases_router", "response", "submit"]

logger = logging.getLogger("celery_leases")

EVENTS: Final = "text/event-stream"
HEARTBEAT: Final = 15.0
"""Seconds without a change after which a comment is sent, so that nobody on the way takes the
stream for dead.
"""
LONGEST: Final = 300.0
"""Seconds after which a stream ends; the browser comes back by itself, and is authorised anew."""
RECONNECT: Final = 2000
"""Milliseconds after which a browser comes back."""


def response(sent: HttpAnswer) -> Response:
    """An answer as a response of FastAPI's."""
    return Response(sent.content(), sent.status, dict(sent.headers))


def add_exception_handlers(app: FastAPI) -> None:
    """Have *app* answer errors of celery_leases as ``docs/http.md`` says; those of the server are
    logged too.
    """

    async def handle(request: Request, error: Exception) -> Response:
        return _answered(
            request, error if isinstance(error, LeasesError) else LeasesError(str(error))
        )

    app.add_exception_handler(LeasesError, handle)


def _answered(request: Request, error: LeasesError) -> Response:
    """The response for an error; what it says is logged where it is the server's."""
    sent = answer(error)
    if sent.status >= 500:
        logger.error("%s %s: %s", request.method, request.url.path, error, exc_info=error)
    return response(sent)


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
    """Ask for the work of a leased *task*, publish its call if need be, and make the response.

    Done in a thread, as stores and the broker are waited for; see
    :func:`celery_leases.submitting.submit`. A call in a transaction of your own goes through
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
    namespace: str | None = None,
    prefix: str = "/leases",
    poll_after: float = POLL_AFTER,
    heartbeat: Duration = HEARTBEAT,
    longest: Duration = LONGEST,
    slowest: float = POLL_AFTER,
) -> APIRouter:
    """A router with ``GET /leases/{key}``: the status of a key, or its changes as server-sent
    events.

    *authorise* is a dependency of FastAPI's, which may have ``key`` and ``request`` among its
    parameters. It is asked first: it raises ``HTTPException``, or what it gives and is not true is
    answered with 403, whether the key exists or not. *client*, or a dependency that gives it.
    *task*: the only task whose keys are shown, and the one that *authorise* is asked about; a
    request for another is answered with 404. Without it ``?task=`` names the task. *namespace*: its
    ``lease_namespace``, if it has one.

    A request that accepts ``text/event-stream``, as ``EventSource`` does, gets an event for the
    status and one for each change; a comment every *heartbeat*; the end after *longest*, or after a
    state that no worker changes. A browser comes back with ``Last-Event-ID``: what it has seen is
    not sent again, and 204 tells it that nothing more will come. Raises
    :class:`~celery_leases.errors.LeaseConfigurationError` without an authoriser.
    """
    if not callable(authorise):
        raise LeaseConfigurationError(
            f"leases_router({authorise!r}): give a dependency that says whether the request may see the key; "
            "without one everybody could see every result"
        )
    router = APIRouter(
        prefix=prefix, tags=["leases"], route_class=APIRoute if task is None else _only(task)
    )
    spans = seconds(heartbeat, "heartbeat"), seconds(longest, "longest")
    of_client: Callable[[], AsyncLeaseClient] = (
        (lambda: client) if isinstance(client, AsyncLeaseClient) else client
    )
    may_see, its_client = Depends(authorise), Depends(of_client)

    @router.get("/{key:path}", response_class=Response)
    async def status(
        key: str,
        request: Request,
        allowed: Any = may_see,
        reads: Any = its_client,
        asked_task: str | None = Query(None, alias="task"),
        last_event_id: str | None = Header(None),
    ) -> Response:
        """The status of a key, or with ``Accept: text/event-stream`` its changes."""
        if inspect.isawaitable(allowed):  # of a function that is not itself ``async def``
            allowed = await allowed
        if not allowed:
            return response(forbidden())
        of_task = task or asked_task or None
        if of_task is None and key.startswith("t:") and "|" in key:
            # A stored key, by which the key that the authoriser has not seen would be found.
            return response(answer(UnknownKey(key=key)))
        whose = {"task": of_task, "namespace": namespace}
        try:
            found: LeaseStatus = await reads.status(key, **whose)
        except LeasesError as error:
            return _answered(request, error)
        if EVENTS not in request.headers.get("accept", ""):
            plain = response(answer(found, poll_after=poll_after))
            plain.headers["Vary"] = "Accept"
            return plain
        if last_event_id == version_of(found) and found.state in ENDED:
            return Response(status_code=204)
        stream = _events(reads, key, whose, last_event_id, *spans, slowest)
        headers = {"Cache-Control": "no-store", "Vary": "Accept", "X-Accel-Buffering": "no"}
        return StreamingResponse(stream, media_type=EVENTS, headers=headers)

    return router


def _only(task: str) -> type[APIRoute]:
    """A route whose requests are all for *task*, whatever they name, also for the authoriser."""

    class OfOneTask(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handle = super().get_route_handler()

            async def only(request: Request) -> Response:
                given = request.query_params.multi_items()
                if any(name == "task" and value not in ("", task) for name, value in given):
                    return response(answer(UnknownKey(key=request.path_params["key"])))
                kept = [(name, value) for name, value in given if name != "task"]
                query = urlencode([*kept, ("task", task)]).encode()
                scope = {**request.scope, "query_string": query}
                return await handle(Request(scope, request.receive))

            return only

    return OfOneTask


async def _events(
    reads: AsyncLeaseClient,
    key: str,
    whose: Mapping[str, Any],
    last: str | None,
    heartbeat: float,
    longest: float,
    slowest: float,
) -> AsyncGenerator[str]:
    """The text of a stream: changes, heartbeats, and a problem each time a store does not
    answer.
    """
    loop = asyncio.get_running_loop()
    end = loop.time() + longest
    yield f"retry: {RECONNECT}\n\n"
    while loop.time() < end:
        try:
            async with (
                aclosing(reads.changes(key, **whose, slowest=slowest)) as changes,
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
            await asyncio.sleep(min(AWAY_AFTER, max(0.0, end - loop.time())))
        except LeasesError as error:
            yield _event("problem", answer(error).body)
            return


async def _until(
    changes: AsyncGenerator[LeaseStatus], heartbeat: float, end: float
) -> AsyncGenerator[LeaseStatus | None]:
    """Pass *changes* on until the time *end* of the loop; ``None`` after each *heartbeat* without
    one.
    """
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
    """One event of a stream; JSON in ASCII has no line breaks."""
    number = f"id: {version}\n" if version is not None else ""
    return f"event: {name}\n{number}data: {json.dumps(body, allow_nan=False)}\n\n"
