"""Servers that misbehave as a test wants: each is a context manager factory that gives a URL on
127.0.0.1.

A server lives as long as one call, in the process that calls, so that a case needs nothing from its
test.
"""

import contextlib
import json
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import UTC, datetime
from email.utils import formatdate
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

GIVES_UP_AFTER = 0.3
"""Seconds a client waits where it is to give up."""

Server = Callable[[], AbstractContextManager[str]]
"""Start one misbehaving server and give its URL; leaving ends it with all its threads."""

Behaviour = Callable[[BaseHTTPRequestHandler], None]

HeaderValue = str | Callable[[], str]
"""A value, or what makes it at the moment of the answer: some headers name a point in time."""


class _Patience:
    seconds = 10.0


def patience() -> float:
    """Seconds a client may wait now: long, unless this server wants it to give up."""
    return _Patience.seconds


@contextmanager
def short_patience() -> Iterator[None]:
    """Have the client give up soon; a process calls one server at a time."""
    before, _Patience.seconds = _Patience.seconds, GIVES_UP_AFTER
    try:
        yield
    finally:
        _Patience.seconds = before


class _HttpServer(ThreadingHTTPServer):
    daemon_threads = False
    block_on_close = True

    def __init__(self, behaviour: Behaviour) -> None:
        self.closing = threading.Event()

        class Handler(BaseHTTPRequestHandler):
            timeout = 10.0

            def _behave(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length") or 0))
                behaviour(self)

            do_GET = do_POST = do_PUT = _behave  # noqa: N815 - the names http.server asks for

            def log_message(self, *_: Any) -> None:
                """Log nothing."""

        super().__init__(("127.0.0.1", 0), Handler)

    def handle_error(self, *_: Any) -> None:
        """A client that gave up is what many cases want."""


@contextmanager
def _running(
    behaviour: Behaviour, tls: ssl.SSLContext | None = None, *, answering: bool = True
) -> Iterator[str]:
    with nullcontext() if answering else short_patience(), _HttpServer(behaviour) as server:
        if tls:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http{'s' if tls else ''}://127.0.0.1:{server.server_port}"
        finally:
            server.closing.set()
            server.shutdown()
            thread.join()


def answers(status: int, body: Any = None, **headers: HeaderValue) -> Server:
    """Answer every request so; ``retry_after="20"`` is ``Retry-After: 20``."""

    def behave(handler: BaseHTTPRequestHandler) -> None:
        text = body if isinstance(body, str) else json.dumps({} if body is None else body)
        kind = "application/json" if not isinstance(body, str) else "text/plain"
        said = {"content_type": kind, "content_length": str(len(text.encode())), **headers}
        handler.send_response(status)
        for name, value in said.items():
            handler.send_header(
                name.replace("_", "-").title(), value if isinstance(value, str) else value()
            )
        handler.end_headers()
        handler.wfile.write(text.encode())

    return lambda: _running(behave)


def http_date(seconds: float) -> HeaderValue:
    """The moment so many seconds after the answer, as ``Retry-After`` may name it."""
    return lambda: formatdate(time.time() + seconds, usegmt=True)


def epoch(seconds: float) -> HeaderValue:
    """The moment so many seconds after the answer, in seconds since 1970."""
    return lambda: str(round(time.time() + seconds))


def rfc3339(seconds: float) -> HeaderValue:
    """The moment so many seconds after the answer, as Anthropic names it."""
    return lambda: f"{datetime.fromtimestamp(time.time() + seconds, UTC):%Y-%m-%dT%H:%M:%SZ}"


def never_answers() -> AbstractContextManager[str]:
    """Read the request and never answer."""
    return _running(_wait_for_the_client, answering=False)


def _wait_for_the_client(handler: BaseHTTPRequestHandler) -> None:
    server: Any = handler.server
    while not server.closing.is_set() and not select.select([handler.connection], [], [], 0.02)[0]:
        pass


def answers_slowly(status: int = 200, **headers: str) -> Server:
    """Begin an answer and never end it."""

    def behave(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        for name, value in {"content_length": "1000", **headers}.items():
            handler.send_header(name.replace("_", "-").title(), value)
        handler.end_headers()
        _wait_for_the_client(handler)

    return lambda: _running(behave, answering=False)


def hangs_up() -> AbstractContextManager[str]:
    """Take the request and close the connection in order, without one byte of an answer."""
    return _running(lambda _: None)


@contextmanager
def _accepting(behave: Callable[[socket.socket], None]) -> Iterator[str]:
    """A TCP server for any protocol; accepted connections are closed at the end."""
    with contextlib.ExitStack() as stack, socket.create_server(("127.0.0.1", 0)) as listener:

        def accept_each() -> None:
            with contextlib.suppress(OSError):
                while True:
                    behave(stack.enter_context(listener.accept()[0]))

        thread = threading.Thread(target=accept_each)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            # Closing alone would not wake accept() up.
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


@contextmanager
def never_speaks() -> Iterator[str]:
    """Accept every connection and never send a byte, for any protocol."""
    with short_patience(), _accepting(lambda _: None) as url:
        yield url


def hangs_up_at_once() -> AbstractContextManager[str]:
    """Accept every connection and close it at once, for any protocol."""
    return _accepting(socket.socket.close)


def resets() -> AbstractContextManager[str]:
    """Take the request and reset the connection."""

    def behave(handler: BaseHTTPRequestHandler) -> None:
        handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        handler.connection.close()

    return _running(behave)


def breaks_off() -> AbstractContextManager[str]:
    """Promise an answer of some length and close the connection in the middle of it."""

    def behave(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Type", "application/json")
        handler.send_header("Content-Length", "1000")
        handler.end_headers()
        handler.wfile.write(b'{"id": "ch_')

    return _running(behave)


def speaks_nonsense() -> AbstractContextManager[str]:
    """Answer with something that is not HTTP."""

    def behave(handler: BaseHTTPRequestHandler) -> None:
        handler.wfile.write(b"\x15\x03\x01\x00\x02\x02F nonsense\r\n\r\n")

    return _running(behave)


@contextmanager
def refuses() -> Iterator[str]:
    """A port that is bound, so that no other program can use it, but on which no server listens."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"


@contextmanager
def accepts_no_connection() -> Iterator[str]:
    """A port whose queue is full: the kernel drops what would open a further connection."""
    with short_patience(), contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(2):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listener.getsockname())
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def has_no_name(errno: int, text: str) -> Server:
    """A host name that cannot be resolved; no resolver is asked."""

    @contextmanager
    def unresolvable() -> Iterator[str]:
        asked = socket.getaddrinfo

        def getaddrinfo(host: Any, *args: Any, **options: Any) -> Any:
            if host in {"host.invalid", b"host.invalid"}:
                raise socket.gaierror(errno, text)
            return asked(host, *args, **options)

        socket.getaddrinfo = getaddrinfo
        try:
            yield "http://host.invalid"
        finally:
            socket.getaddrinfo = asked

    return unresolvable


name_servers_away = has_no_name(socket.EAI_AGAIN, "Temporary failure in name resolution")
name_unknown = has_no_name(socket.EAI_NONAME, "Name or service not known")


@cache
def _certificate() -> ssl.SSLContext:
    import trustme

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trustme.CA().issue_cert("127.0.0.1").configure_cert(context)
    return context


def is_not_trusted() -> AbstractContextManager[str]:
    """A TLS server whose certificate is signed by an unknown authority."""
    return _running(lambda _: None, tls=_certificate())


@contextmanager
def nobody() -> Iterator[str]:
    """No server: the case does not need one."""
    yield ""
