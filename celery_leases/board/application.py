"""The ASGI application: routes, one way for each request, and how errors are answered."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from celery_leases.async_client import AsyncLeaseClient
from celery_leases.board import formatting
from celery_leases.board.access import (
    COOKIE,
    OPERATOR,
    Operator,
    address_of,
    check_token,
    cookie_of,
    token_of,
)
from celery_leases.board.bulk_jobs import Job, Jobs, TooManyJobs
from celery_leases.board.cached_reads import Shared
from celery_leases.board.forms import Fields, form_of
from celery_leases.client import LeaseClient
from celery_leases.common.redaction import redact
from celery_leases.errors import (
    AlreadyDone,
    KeyUnusable,
    LeaseIsLive,
    LeaseMisuse,
    LeasesError,
    SchemaOutdated,
    StoreUnavailable,
    UnknownKey,
)

logger = logging.getLogger("celery_leases.board")

HERE: Final = Path(__file__).parent
THREADS: Final = 16
"""As many requests wait for the stores at once; more wait for their turn."""
_STATUS: Final[tuple[tuple[type[LeasesError], int], ...]] = (
    (UnknownKey, 404),
    (LeaseIsLive, 409),
    (AlreadyDone, 409),
    (StoreUnavailable, 503),
    (SchemaOutdated, 503),
    (KeyUnusable, 400),
    (LeaseMisuse, 400),
)


@dataclass(frozen=True, slots=True)
class Asked:
    """A request, as a view gets it."""

    board: Board
    operator: Operator
    who: str
    path: str
    query: Fields
    form: Fields

    @property
    def client(self) -> LeaseClient:
        """The client of the app."""
        return self.board.client()


@dataclass(frozen=True, slots=True)
class Answer:
    """A page: its template, and what is in it."""

    template: str
    context: dict[str, Any] = field(default_factory=dict)
    status: int = 200


@dataclass(frozen=True, slots=True)
class GoTo:
    """Another page of the board, by its path in it."""

    path: str


View = Callable[[Asked], Answer | GoTo]


class Board:
    """What the pages of one board share: the app, its client, what is read for all, and its
    jobs.
    """

    def __init__(self, app: Any) -> None:
        self.app = app
        self.jobs = Jobs()
        self._threads = AsyncLeaseClient(self.client, threads=THREADS)
        self._shared: dict[str, Shared[Any]] = {}
        self._templates = Environment(
            loader=PackageLoader("celery_leases.board", "templates"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._templates.filters.update(formatting.FILTERS)

    def client(self) -> LeaseClient:
        """The client of the app, on the stores of its workers."""
        return LeaseClient.from_app(self.app, eager=False)

    def shared(self, name: str, read: Callable[[], Any], fresh_for: float) -> Shared[Any]:
        """What is read once for all who look, by its name."""
        return self._shared.setdefault(name, Shared(read, fresh_for))

    def shared_anew(self, name: str) -> None:
        """Read it anew at the next look."""
        self._shared[name].forget()

    def begun(self, job: Job) -> Answer | GoTo:
        """The page of a job that has begun: what became of it, if that is known soon."""
        for shared in self._shared.values():
            shared.forget()
        if job.ended.wait(3.0):
            for shared in self._shared.values():
                shared.forget()
            return Answer("job.html", {"job": job})
        return GoTo(f"/jobs?number={job.number}")

    # -- one request -------------------------------------------------------------------------------

    def endpoint(self, view: View) -> Callable[[Request], Any]:
        """What answers the requests of a route by *view*."""

        async def answer(request: Request) -> Response:
            operator: Operator = request.scope[OPERATOR]
            try:
                query, form = Fields(request.scope["query_string"]), Fields(b"")
                if request.method == "POST":
                    if not operator.may_change:
                        raise HTTPException(403, "You may look, and change nothing.")
                    form = await form_of(request)
                    check_token(request, operator, form.get("token"))
                who = f"{formatting.printed(operator.name)} ({address_of(request)})"
                base = request.scope.get("root_path", "")
                asked = Asked(self, operator, who, request.url.path.removeprefix(base), query, form)
                return await self._threads.run(lambda: self._answered(request, asked, view))
            except HTTPException as error:
                return self.refused(request, error)
            except Exception:
                logger.exception("%s %s", request.method, formatting.printed(request.url.path))
                return self.refused(request, HTTPException(500))

        return answer

    def _answered(self, request: Request, asked: Asked, view: View) -> Response:
        try:
            answer = view(asked)
        except TooManyJobs:
            raise HTTPException(429, "Other changes are still being made: wait for them.") from None
        except LeasesError as error:
            status = next((code for kind, code in _STATUS if isinstance(error, kind)), 500)
            if status == 500:
                logger.exception("%s %s", request.method, formatting.printed(request.url.path))
            raise HTTPException(status, redact(str(error))) from None
        if isinstance(answer, GoTo):
            return RedirectResponse(request.scope.get("root_path", "") + answer.path, 303)
        return self.rendered(request, answer)

    def rendered(self, request: Request, answer: Answer) -> Response:
        """A page; each form in it has the token of the browser's cookie."""
        base = request.scope.get("root_path", "")
        operator = request.scope.get(OPERATOR)
        cookie = cookie_of(request)
        context = {
            "base": base,
            "path": request.url.path.removeprefix(base),
            "here": request.url.path + (f"?{request.url.query}" if request.url.query else ""),
            "operator": operator,
            "may_change": operator is not None and operator.may_change,
            "token": token_of(cookie, operator) if operator is not None else "",
            "running_jobs": self.jobs.running() if operator is not None else [],
            **answer.context,
        }
        text = self._templates.get_template(answer.template).render(context)
        response = HTMLResponse(text, answer.status)
        if operator is not None and request.cookies.get(COOKIE) != cookie:
            response.set_cookie(
                COOKIE,
                cookie,
                path=base or "/",
                secure=request.url.scheme == "https",
                httponly=True,
                samesite="strict",
            )
        return response

    def refused(self, request: Request, error: HTTPException) -> Response:
        """The page of an error, with the text that was written for it and no other."""
        what = HTTPStatus(error.status_code).phrase
        said = error.detail if error.detail != what else ""
        if error.status_code == 500:
            said = "The log of the board says more."
        answer = Answer("error.html", {"what": what, "said": said}, error.status_code)
        response = self.rendered(request, answer)
        response.headers.update(error.headers or {})
        return response
