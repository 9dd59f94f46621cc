"""JSON over HTTP for the small servers of the demo: one port of 127.0.0.1, one answer to each
request.
"""

from __future__ import annotations

import json
from http.server import BaseHTTPRequestHandler
from socketserver import TCPServer
from typing import Any
from urllib.request import Request, urlopen


class Conversation(BaseHTTPRequestHandler):
    """What a server's handlers share; they have methods such as ``do_POST``."""

    def asked(self) -> Any:
        """The value in the request."""
        return json.loads(self.rfile.read(int(self.headers["Content-Length"])))

    def answer(self, body: bytes, status: int = 200, **headers: str) -> None:
        """Send the answer."""
        self.send_response(status)
        for name, value in {
            **headers,
            "Content-Type": "application/json",
            "Content-Length": str(len(body)),
        }.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


def serve(server: TCPServer) -> None:
    """Print the port, and answer until the process ends."""
    with server:
        print(f"listens on port {server.server_address[1]}", flush=True)
        server.serve_forever()


def ask(url: str, value: Any, method: str = "POST") -> Any:
    """Send *value*, and give what is answered."""
    request = Request(url, json.dumps(value).encode(), method=method)  # noqa: S310 - a server of the demo's own
    with urlopen(request, timeout=20) as answer:  # noqa: S310 - as above
        return json.load(answer)
