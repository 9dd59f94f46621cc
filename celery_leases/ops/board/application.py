"""What the board does with each request: it calls a view, and renders its page or an error."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

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
from celery_leases.ops import formatting
from celery_leases.ops.board.access import (
    COOKIE,
    OPERATOR,
    Operator,
    address_of,
    check_token,
    cookie_of,
    token_of,
)
from celery_leases.ops.board.bulk_jobs import Jobs, Step, TooManyJobs
from celery_leases.ops.board.cached_reads import CachedRead
from celery_leases.ops.board.forms import Fields, bad_request, form_of
from celery_leases.ops.client import OperatorClient
from celery_leases.text.notices import NoticeLogger
from celery_leases.text.redaction import redact
from celery_leases.web.async_client import AsyncLeaseClient

logger = NoticeLogger(logging.getLogger("celery_leases.ops.board"))

PACKAGE: Final = Path(__file__).parent
THREADS: Final = 16
"""How many requests may use the stores at the same time; further ones wait for a thread."""
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
class ViewRequest:
    """A request as views get it; ``who`` is the operator and the address, for the log."""

    board: Board
    operator: Operator
    who: str
    path: str
    query: Fields
    form: Fields

    @property
    def client(self) -> OperatorClient:
        """The client of the app."""
        return self.board.client()

    def start(self, name: str, total: int, steps: Iterable[Step]) -> HtmlPage | Redirect:
        """Start a job; its result, if it ends within 3 seconds, or a redirect to its page."""
        job = self.board.jobs.start(name, self.who, total, steps)
        self.board.invalidate()
        if job.ended.wait(3.0):
            self.board.invalidate()
            return HtmlPage("job.html", {"job": job})
        return Redirect(f"/jobs?number={job.number}")


@dataclass(frozen=True, slots=True)
class HtmlPage:
    """A page to render: its template and the context of the template."""

    template: str
    context: dict[str, Any] = field(default_factory=dict)
    status: int = 200


@dataclass(frozen=True, slots=True)
class Redirect:
    """A redirect to another page of the board; *path* begins below the board's root."""

    path: str


def check_confirmed(form: Fields) -> None:
    """Refuse a form that does not come from the page that asks for confirmation."""
    if form.get("confirmed") != "yes":
        raise bad_request("Confirm the action first.")


View = Callable[[ViewRequest], HtmlPage | Redirect]


class Board:
    """What the pages of one board share: the app, its client, cached reads, and jobs."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self.jobs = Jobs()
        self._threads = AsyncLeaseClient(self.client, threads=THREADS)
        self._cached: dict[str, CachedRead[Any]] = {}
        self._templates = Environment(
            loader=PackageLoader("celery_leases.ops.board", "templates"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._templates.filters.update(formatting.FILTERS)

    def client(self) -> OperatorClient:
        """A client for the stores that the app's workers use."""
        return OperatorClient.from_app(self.app, eager=False)

    def cached(self, name: str, read: Callable[[], Any], fresh_for: float) -> CachedRead[Any]:
        """The read with this name, which all requests share."""
        return self._cached.setdefault(name, CachedRead(read, fresh_for))

    def invalidate(self) -> None:
        """Let the next request read all values again."""
        for read in self._cached.values():
            read.invalidate()

    # -- one request -------------------------------------------------------------------------------

    def endpoint(self, view: View) -> Callable[[Request], Any]:
        """The endpoint of a route whose requests *view* answers."""

        async def answer(request: Request) -> Response:
            operator: Operator = request.scope[OPERATOR]
            try:
                query, form = Fields(request.scope["query_string"]), Fields(b"")
                if request.method == "POST":
                    if not operator.may_change:
                        raise HTTPException(403, "You may only read this board.")
                    form = await form_of(request)
                    check_token(request, operator, form.get("token"))
                who = f"{formatting.printed(operator.name)} ({address_of(request)})"
                base = request.scope.get("root_path", "")
                path = request.url.path.removeprefix(base)
                view_request = ViewRequest(self, operator, who, path, query, form)
                return await self._threads.run(lambda: self._respond(request, view_request, view))
            except HTTPException as error:
                return self.refused(request, error)
            except Exception:
                logger.exception(
                    "%s %s failed",
                    request.method,
                    formatting.printed(request.url.path),
                    code="board-error",
                )
                return self.refused(request, HTTPException(500))

        return answer

    def _respond(self, request: Request, view_request: ViewRequest, view: View) -> Response:
        try:
            page = view(view_request)
        except TooManyJobs:
            raise HTTPException(
                429, "Too many changes are running: wait until one has ended."
            ) from None
        except LeasesError as error:
            status = next((code for kind, code in _STATUS if isinstance(error, kind)), 500)
            if status == 500:
                logger.exception(
                    "%s %s failed",
                    request.method,
                    formatting.printed(request.url.path),
                    code="board-error",
                )
            raise HTTPException(status, redact(str(error))) from None
        if isinstance(page, Redirect):
            return RedirectResponse(request.scope.get("root_path", "") + page.path, 303)
        return self.rendered(request, page)

    def rendered(self, request: Request, page: HtmlPage) -> Response:
        """The response with a page; each form on it has a token that belongs to the cookie."""
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
            **page.context,
        }
        text = self._templates.get_template(page.template).render(context)
        response = HTMLResponse(text, page.status)
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
        """The page of an error; an unexpected one is described in the log alone."""
        what = HTTPStatus(error.status_code).phrase
        text = error.detail if error.detail != what else ""
        if error.status_code == 500:
            text = "The log of the board has the details."
        page = HtmlPage("error.html", {"what": what, "text": text}, error.status_code)
        response = self.rendered(request, page)
        response.headers.update(error.headers or {})
        return response
