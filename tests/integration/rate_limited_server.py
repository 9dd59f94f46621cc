"""A server with a rate limit that also counts rejected requests, and the error of its client.

``python -m tests.integration.rate_limited_server LIMIT WINDOW`` serves a sliding window on
127.0.0.1 and prints its port.
"""

import json
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self
from urllib.request import urlopen

from tests.support.process import GuardedProcess


class Answered(Exception):
    """A response with an error status, as a client library raises it.

    Result backends can rebuild it from ``args``.
    """

    def __init__(
        self, status: int, headers: Mapping[str, str] | None = None, message: str = ""
    ) -> None:
        super().__init__(status, dict(headers or {}), message)
        self.status = status
        self.headers = dict(headers or {})

    def __str__(self) -> str:
        return str(self.args[2]) or f"status {self.status}"


class Window:
    """At most *limit* calls in *seconds*; rejected calls count too, as with real providers."""

    def __init__(self, limit: int, seconds: float) -> None:
        self._limit = limit
        self._seconds = seconds
        self._lifted = False
        self._calls: deque[float] = deque()
        self._lock = threading.Lock()
        self._counts = {"accepted": 0, "rejected": 0}

    def call(self) -> float | None:
        """Count one call; ``None`` if it is accepted, otherwise the seconds until one would be."""
        with self._lock:
            now = time.monotonic()
            while self._calls and self._calls[0] <= now - self._seconds:
                self._calls.popleft()
            self._calls.append(now)
            if self._lifted or len(self._calls) <= self._limit:
                self._counts["accepted"] += 1
                return None
            self._counts["rejected"] += 1
            return self._calls[-self._limit] + self._seconds - now

    def lift(self) -> None:
        self._lifted = True

    @property
    def counts(self) -> dict[str, int]:
        """How many calls were accepted and how many rejected."""
        with self._lock:
            return dict(self._counts)


def _handler(window: Window) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/lift":
                window.lift()
            wait = window.call() if self.path == "/call" else None
            body = json.dumps(window.counts).encode()
            self.send_response(200 if wait is None else 429)
            if wait is not None:
                self.send_header("Retry-After", f"{wait:.3f}")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Log nothing."""

    return Handler


class Limiter:
    """The server as a child process; a context manager."""

    def __init__(self, limit: int, window: float, log: Path) -> None:
        argv = [sys.executable, "-m", __name__, str(limit), str(window)]
        self._process = GuardedProcess(argv, log=log, cwd=Path.cwd())
        port = self._process.wait_for_log(r"listening on (\d+)", 20)[1]
        self.url = f"http://127.0.0.1:{port}/call"

    @property
    def counts(self) -> dict[str, int]:
        """The server's count of calls: ``accepted`` and ``rejected``."""
        counts: dict[str, int] = self._ask("counts")
        return counts

    def lift(self) -> None:
        """Make it accept everything from now on."""
        self._ask("lift")

    def _ask(self, what: str) -> Any:
        with urlopen(self.url.replace("/call", f"/{what}"), timeout=10) as answer:  # noqa: S310 - our own server
            return json.load(answer)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.end()


if __name__ == "__main__":
    server = ThreadingHTTPServer(
        ("127.0.0.1", 0), _handler(Window(int(sys.argv[1]), float(sys.argv[2])))
    )
    print(f"listening on {server.server_port}", flush=True)
    server.serve_forever()
