"""Access to the board: authorisers, passwords, origins, form tokens, and response headers."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import inspect
import logging
import secrets
import stat
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from celery_leases.errors import LeaseConfigurationError
from celery_leases.text.cleaning import printable
from celery_leases.text.notices import NoticeLogger

logger = NoticeLogger(logging.getLogger("celery_leases.ops.board"))

MIN_PASSWORD_LENGTH: Final = 12
COOKIE: Final = "celery_leases_board"
OPERATOR: Final = "celery_leases.operator"
"""The key of the operator in the ASGI scope of an authorised request."""
POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        *(f"{kind}-src 'self'" for kind in ("script", "style", "img", "connect")),
        "form-action 'self'",
        "base-uri 'none'",
        "frame-ancestors 'none'",
    )
)
HEADERS: Final = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    # With no-referrer, browsers send "Origin: null" with the board's own forms.
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_SAFE: Final = frozenset({"GET", "HEAD"})
_COOKIE_LENGTH: Final = 43


@dataclass(frozen=True, slots=True)
class Operator:
    """A user of the board: the *name* for the log, and whether they *may_change* anything."""

    name: str
    may_change: bool = True


Authorise = Callable[[Request], Any]
"""Returns the user of a request: a name, an :class:`Operator`, ``None`` to refuse the request, a
response such as a redirect to a login page, or an awaitable of one of these.
"""


class Passwords:
    """An authoriser that asks for a name and a password of a file with lines ``name:password``.

    The file is read once. Raises :class:`~celery_leases.errors.LeaseConfigurationError` if users
    other than its owner may read or write it, or if it has no usable line.
    """

    def __init__(self, path: Path) -> None:
        try:
            mode = path.stat().st_mode
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, ValueError) as error:
            raise LeaseConfigurationError(f"password file {path}: {error}") from None
        if mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise LeaseConfigurationError(
                f"password file {path} can be read or written by other users than its owner; run: chmod 600 {path}"
            )
        self._known = dict(
            _account(path, number, line) for number, line in enumerate(lines, 1) if line.strip()
        )
        if not self._known:
            raise LeaseConfigurationError(
                f"password file {path} is empty; write a line name:password for each person"
            )

    def __call__(self, request: Request) -> Operator:
        """The operator whose name and password the request has; without them it is refused
        with 401.
        """
        name, password = _basic(request.headers.get("authorization", ""))
        known = self._known.get(name)
        # Compare for unknown names too, so that the response time does not reveal which exist.
        same = hmac.compare_digest(_digest(password), known or bytes(32))
        if known is None or not same:
            if password:
                logger.warning(
                    "refused: a wrong name or password for %s from %s",
                    printable(name),
                    address_of(request),
                    code="wrong-password",
                )
            raise HTTPException(
                401,
                "Give a name and a password.",
                {"WWW-Authenticate": 'Basic realm="celery leases", charset="UTF-8"'},
            )
        return Operator(name)


def local_operator(_: Request) -> Operator:
    """Accepts every request; only for a board that listens on a loopback address alone."""
    return Operator("local")


def _account(path: Path, number: int, line: str) -> tuple[str, bytes]:
    name, colon, password = line.strip().partition(":")
    if not colon or not name.strip() or len(password) < MIN_PASSWORD_LENGTH:
        raise LeaseConfigurationError(
            f"password file {path}, line {number}: write name:password, with at least "
            f"{MIN_PASSWORD_LENGTH} characters of password"
        )
    return name.strip(), _digest(password)


def _basic(header: str) -> tuple[str, str]:
    """The name and password in an ``Authorization`` header; empty if they cannot be read."""
    scheme, _, coded = header.partition(" ")
    if scheme.lower() != "basic":
        return "", ""
    try:
        text = base64.b64decode(coded.strip(), validate=True).decode()
    except (binascii.Error, ValueError):
        return "", ""
    name, _, password = text.partition(":")
    return name, password


def _digest(password: str) -> bytes:
    return hashlib.sha256(password.encode("utf-8", "surrogatepass")).digest()


def is_loopback(host: str) -> bool:
    """Whether *host* can be reached from this machine alone."""
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def address_of(request: Request) -> str:
    """The address of the client, for the log."""
    return request.client.host if request.client is not None else "-"


class AccessMiddleware:
    """Authorises each request, refuses forms of other origins, and adds the security headers."""

    def __init__(
        self,
        app: Any,
        *,
        authorise: Authorise,
        origins: Iterable[str],
        hosts: Collection[str] | None,
        refuse: Callable[[Request, HTTPException], Response],
    ) -> None:
        self._app, self._authorise, self._refuse = app, authorise, refuse
        self._origins = frozenset(origin.rstrip("/").lower() for origin in origins)
        self._hosts = hosts

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve a request, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
                is_file = "etag" in headers  # no-cache: the browser revalidates it and gets a 304
                headers.setdefault("Cache-Control", "no-cache" if is_file else "no-store")
            await send(message)

        request = Request(scope)
        try:
            self._check_host(request)
            if scope["method"] not in _SAFE:
                self._check_origin(request)
            operator = await self._operator(request)
        except HTTPException as error:
            await self._refuse(request, error)(scope, receive, send_with_headers)
            return
        except Exception:
            logger.exception("the authoriser of the board failed", code="authoriser-failed")
            await self._refuse(request, HTTPException(500))(scope, receive, send_with_headers)
            return
        if isinstance(operator, Response):
            await operator(scope, receive, send_with_headers)
            return
        scope = {**scope, OPERATOR: operator}
        await self._app(scope, receive, send_with_headers)

    async def _operator(self, request: Request) -> Operator | Response:
        authorise = self._authorise
        found: Any = (
            authorise(request)
            if inspect.iscoroutinefunction(authorise)
            else await run_in_threadpool(authorise, request)
        )
        if inspect.isawaitable(found):
            found = await found
        if isinstance(found, Operator | Response):
            return found
        if isinstance(found, str) and found:
            return Operator(found)
        if found is None or found is False or found == "":
            raise HTTPException(403, "You may not see this board.")
        raise LeaseConfigurationError(
            f"the authoriser of the board returned a {type(found).__name__}; return a name, an "
            "Operator, a response or None"
        )

    def _check_host(self, request: Request) -> None:
        """Refuse host names other than those of this machine, against DNS rebinding.

        A site whose name resolves to this machine would have the same origin as the board.
        """
        host = request.headers.get("host", "")
        if self._hosts is None or _without_port(host) in self._hosts:
            return
        if any(urlsplit(origin).netloc == host.lower() for origin in self._origins):
            return
        logger.warning(
            "refused: the host %s from %s",
            printable(host),
            address_of(request),
            code="host-refused",
        )
        raise HTTPException(
            403,
            "The board is not served under this name: give its URL with --origin, or use a password file.",
        )

    def _check_origin(self, request: Request) -> None:
        """Refuse a form that a page of another origin sent.

        The scheme is not compared, because a proxy may terminate TLS.
        """
        origin = request.headers.get("origin", "").lower()
        host = request.headers.get("host", "").lower()
        own = bool(host) and _netloc_of(origin) == host
        if not own and origin not in self._origins:
            logger.warning(
                "refused: %s %s by the origin %s from %s",
                request.method,
                printable(request.url.path),
                printable(origin) or "-",
                address_of(request),
                code="origin-refused",
            )
            raise HTTPException(403, "The form was sent by a page of another origin.")


def _netloc_of(origin: str) -> str:
    """The host and port of an origin; empty if it is not one, such as ``null``."""
    try:
        parts = urlsplit(origin)
    except ValueError:
        return ""
    return parts.netloc if parts.scheme in ("http", "https") else ""


def _without_port(host: str) -> str:
    name, _, port = host.lower().rpartition(":")
    return (name if name and port.isdigit() else host.lower()).strip("[]")


# -- form tokens -----------------------------------------------------------------------------------


def cookie_of(request: Request) -> str:
    """The secret in the browser's cookie, or a new one."""
    secret: str = request.cookies.get(COOKIE, "")
    if len(secret) == _COOKIE_LENGTH and secret.isascii():
        return secret
    return secrets.token_urlsafe(32)


def token_of(cookie: str, operator: Operator) -> str:
    """The CSRF token of a form; it depends on the cookie and on the operator."""
    message = f"celery_leases.ops.board:{operator.name}".encode("utf-8", "surrogatepass")
    return hmac.new(cookie.encode(), message, hashlib.sha256).hexdigest()


def check_token(request: Request, operator: Operator, given: str) -> None:
    """Refuse a form that was not made for this browser and this operator."""
    secret = request.cookies.get(COOKIE, "")
    expected = token_of(secret, operator) if secret else ""
    if not expected or not hmac.compare_digest(expected.encode(), given.encode("utf-8", "replace")):
        raise HTTPException(
            403, "The form was made for another browser or is too old: load the page again."
        )
