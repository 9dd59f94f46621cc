"""JSON over HTTP between the processes of the demos."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from socketserver import TCPServer
from typing import Any
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

_OPENER = build_opener(ProxyHandler({}))  # these servers are never behind a proxy


class Refused(Exception):
    """The server answered with an error; the failure rules read its status, headers and body."""

    def __init__(self, status: int, headers: Mapping[str, str], body: Any) -> None:
        super().__init__(f"HTTP {status}: {body}")
        self.status = status
        self.headers = headers
        self.body = body


class Handler(BaseHTTPRequestHandler):
    """The base of request handlers, which add methods such as ``do_POST``."""

    def asked(self) -> Any:
        """The JSON value of the request."""
        return json.loads(self.rfile.read(int(self.headers["Content-Length"])))

    def answer(self, value: Any, status: int = 200, headers: Mapping[str, str] = {}) -> None:
        """Send *value* as the JSON response."""
        self.send(json.dumps(value).encode(), status, headers)

    def send(self, body: bytes, status: int = 200, headers: Mapping[str, str] = {}) -> None:
        """Send the response; a closed connection is no error."""
        with suppress(OSError):
            self.send_response(status)
            for name, text in headers.items():
                self.send_header(name, text)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Write no access log."""


def serve(server: TCPServer) -> None:
    """Print the port, and serve until the process ends."""
    with server:
        print(f"listens on port {server.server_address[1]}", flush=True)
        server.serve_forever()


def ask(
    url: str,
    value: Any = None,
    *,
    method: str = "GET",
    headers: Mapping[str, str] = {},
    timeout: float = 5.0,
) -> Any:
    """Send *value*, and return the JSON response. Raises Refused, or an OSError."""
    data = json.dumps(value).encode() if value is not None else None
    request = Request(url, data, dict(headers), method=method)  # noqa: S310 - the address is ours
    try:
        with _OPENER.open(request, timeout=timeout) as answer:
            return json.load(answer)
    except HTTPError as error:
        with error:
            raise Refused(error.code, dict(error.headers), json.load(error)) from None
