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

from celery_leases.board.access import Authorise, Guard
from celery_leases.board.application import HERE, Board
from celery_leases.board.views import ROUTES
from celery_leases.errors import LeaseConfigurationError


def leases_board(
    app: Any,
    authorise: Authorise,
    *,
    origins: Iterable[str] = (),
    hosts: Collection[str] | None = None,
) -> Starlette:
    """The board of a Celery *app* as an ASGI application, to be served or mounted.

    *authorise* gets the request (Starlette's) and gives the name of the operator, an
    :class:`~celery_leases.board.Operator` who may look only, ``None`` to refuse with 403, or a
    response of its own; it may be ``async``, and may raise Starlette's ``HTTPException``.
    *origins* are those from which forms are taken beside the board's own, such as
    ``https://ops.example.com`` where a proxy changes the ``Host`` header. *hosts*: the only names
    under which it is served; by default any.

    Raises :class:`~celery_leases.errors.LeaseConfigurationError` without an authoriser.
    """
    if not callable(authorise):
        raise LeaseConfigurationError(
            f"leases_board({authorise!r}): give a function that says who a request is from; without one "
            "everybody could release and forget every key"
        )
    board = Board(app)

    async def refuse(request: Request, error: Exception) -> Response:
        known = error if isinstance(error, HTTPException) else HTTPException(500)
        return board.refused(request, known)

    routes: list[Any] = [
        Route(path, board.endpoint(view), methods=[method], name=f"{method} {path}")
        for method, path, view in ROUTES
    ]
    routes.append(Mount("/static", StaticFiles(directory=HERE / "static")))
    guard = Middleware(
        Guard, authorise=authorise, origins=[*origins], hosts=hosts, refuse=board.refused
    )
    return Starlette(routes=routes, middleware=[guard], exception_handlers={HTTPException: refuse})
