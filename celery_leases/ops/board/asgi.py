"""The board as an ASGI application."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from celery_leases.errors import LeaseConfigurationError
from celery_leases.ops.board.access import AccessMiddleware, Authorise
from celery_leases.ops.board.application import PACKAGE, Board
from celery_leases.ops.board.views import ROUTES


def leases_board(
    app: Any,
    authorise: Authorise,
    *,
    origins: Iterable[str] = (),
    hosts: Collection[str] | None = None,
) -> Starlette:
    """The board of a Celery *app* as an ASGI application, to be served or mounted.

    *authorise* gets Starlette's request and returns the name of the operator, or an
    :class:`~celery_leases.ops.board.Operator`, or ``None`` to refuse the request with 403, or a
    response. It may be ``async``, and may raise Starlette's ``HTTPException``. *origins* are
    further origins from which forms are accepted, such as ``https://ops.example.com`` if a proxy
    changes the ``Host`` header. *hosts* are the only host names that are served; by default all
    are.

    Raises :class:`~celery_leases.errors.LeaseConfigurationError` without an authoriser.
    """
    if not callable(authorise):
        raise LeaseConfigurationError(
            f"leases_board({authorise!r}): give a function that returns the user of a request; without one, "
            "anyone could release and forget every key"
        )
    board = Board(app)

    async def refuse(request: Request, error: Exception) -> Response:
        known = error if isinstance(error, HTTPException) else HTTPException(500)
        return board.refused(request, known)

    routes: list[Any] = [
        Route(path, board.endpoint(view), methods=[method], name=f"{method} {path}")
        for method, path, view in ROUTES
    ]
    routes.append(Mount("/static", StaticFiles(directory=PACKAGE / "static")))
    access = Middleware(
        AccessMiddleware, authorise=authorise, origins=[*origins], hosts=hosts, refuse=board.refused
    )
    return Starlette(routes=routes, middleware=[access], exception_handlers={HTTPException: refuse})
