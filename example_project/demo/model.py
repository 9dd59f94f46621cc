"""A small fake of a paid language model: a server that charges for every call, even a refused one.

``python -m example_project.demo.model LEDGER [PORT]`` listens on 127.0.0.1, by default on a free
port, and prints the port.

* ``POST /summaries`` with ``{"document", "model"}`` and the account as bearer token writes a line
  into the ledger, and returns a summary.
* ``PUT /troubles/MODEL`` sets the trouble of a model: ``{"limited_for": 300}`` answers 429 with
  ``Retry-After`` for as many seconds, counted for each account from its first call;
  ``{"nonsense": 2}`` cuts off the first two responses to each account; ``{}`` ends all trouble.
"""

from __future__ import annotations

import json
import math
import sys
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from socketserver import ThreadingTCPServer

from example_project.demo import jsonlines
from example_project.demo.json_over_http import Handler, serve

PRICE = 2
"""Cents for each call."""

THINKING = 0.2
"""Seconds that a summary takes."""


@dataclass(frozen=True)
class Charge:
    """One line of the ledger; ``t`` is a time of the machine's monotonic clock."""

    t: float
    account: str
    model: str
    document: int
    status: int
    cents: int


@dataclass
class Trouble:
    """The trouble of a model, and how much of it each account has met."""

    limited_for: float = 0.0
    nonsense: int = 0
    since: dict[str, float] = field(default_factory=dict)
    heard: dict[str, int] = field(default_factory=dict)

    def limited(self, account: str) -> float:
        """For how many more seconds *account* is refused."""
        since = self.since.setdefault(account, time.monotonic())
        return max(0.0, since + self.limited_for - time.monotonic())

    def breaks_off(self, account: str) -> bool:
        """Whether this response to *account* is cut off."""
        self.heard[account] = self.heard.get(account, 0) + 1
        return self.heard[account] <= self.nonsense


class Model(ThreadingTCPServer):
    """The server: answers calls, and writes the ledger."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, ledger: Path, port: int) -> None:
        super().__init__(("127.0.0.1", port), _Call)
        self.troubles: dict[str, Trouble] = {}
        self._ledger = ledger
        self._lock = threading.Lock()

    def bill(self, account: str, model: str, document: int) -> tuple[int, dict[str, str], bytes]:
        """Charge for one call, and return status, headers and body of the response."""
        with self._lock:
            trouble = self.troubles.setdefault(model, Trouble())
            wait = trouble.limited(account)
            broken_off = not wait and trouble.breaks_off(account)
            status = 429 if wait else 200
            jsonlines.append(
                self._ledger,
                asdict(Charge(time.monotonic(), account, model, document, status, PRICE)),
            )
        if wait:
            error = {"code": "rate_limit_exceeded", "message": f"{model} is busy"}
            return (
                status,
                {"Retry-After": str(math.ceil(wait))},
                json.dumps({"error": error}).encode(),
            )
        time.sleep(THINKING)
        summary = json.dumps({"summary": f"What matters in document {document}"}).encode()
        return status, {}, summary[: len(summary) // 2] if broken_off else summary


class _Call(Handler):
    server: Model

    def do_POST(self) -> None:  # noqa: N802 - the name http.server calls
        asked = self.asked()
        account = self.headers["Authorization"].removeprefix("Bearer ")
        status, headers, body = self.server.bill(account, asked["model"], asked["document"])
        self.send(body, status, headers)

    def do_PUT(self) -> None:  # noqa: N802 - the name http.server calls
        self.server.troubles[self.path.rpartition("/")[2]] = Trouble(**self.asked())
        self.answer(None)


def charges(ledger: Path) -> list[Charge]:
    """The charges in a ledger."""
    return [Charge(**line) for line in jsonlines.read(ledger)]


if __name__ == "__main__":
    serve(Model(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0))
