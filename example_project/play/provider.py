"""A small fake of a paid model provider: it answers calls, records charges, and has the trouble in
its settings.

``python -m example_project.play.provider [HOST] [PORT]`` listens on 127.0.0.1, by default on a free
port, and prints the port.

* ``POST /summaries`` with ``{"document": 7}``, the account as bearer token and an
  ``Idempotency-Key`` returns a summary and charges for it. The provider stores the key, but does
  not deduplicate by it.
* ``GET /summaries/KEY`` returns the summary that was charged under that key, or 404; 501 if
  look-ups are switched off.
* ``GET /settings`` and ``PUT /settings`` read and change the settings.
* ``GET /books`` returns every charge, and how many calls each account made.
"""

from __future__ import annotations

import math
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from http.server import ThreadingHTTPServer
from typing import Any, Final
from urllib.parse import unquote

from example_project.demo.json_over_http import Handler, serve

PRICE: Final = 2
"""Cents for each summary."""

LATENCY_MAX: Final = 5.0
LIMIT_MAX: Final = 300.0
SILENCE: Final = 20.0
"""Seconds without an answer for a call that "times out"; longer than any caller waits."""

TROUBLES: Final = ("none", "limited", "limited_silently", "quota", "timeout")
"""No trouble; 429 with ``Retry-After``; 429 without it; the quota is used up; the call is charged
but not answered.
"""


@dataclass(frozen=True)
class Settings:
    """How the provider answers. ``limit`` is the length of a rate limit in seconds, from the first
    refused call. ``tells``: whether charges can be looked up.
    """

    latency: float = 1.0
    error_rate: float = 0.0
    trouble: str = "none"
    limit: float = 20.0
    tells: bool = True

    @classmethod
    def of(cls, values: object) -> Settings:
        """The settings from *values*; raises ValueError for a wrong one."""
        known = {field.name for field in fields(cls)}
        if not isinstance(values, dict) or not values.keys() <= known:
            raise ValueError(f"settings are an object with some of {', '.join(sorted(known))}")
        for name, most in (("latency", LATENCY_MAX), ("error_rate", 1.0), ("limit", LIMIT_MAX)):
            value = values.get(name, 0.0)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not 0 <= value <= most:
                raise ValueError(f"{name} is a number from 0 to {most:g}")
        if values.get("trouble", "none") not in TROUBLES:
            raise ValueError(f"trouble is one of {', '.join(TROUBLES)}")
        if not isinstance(values.get("tells", True), bool):
            raise ValueError("tells is true or false")
        return cls(**values)


@dataclass(frozen=True)
class Charge:
    """One charged summary."""

    id: str
    account: str
    document: int
    idempotency_key: str
    cents: int
    answered: bool


@dataclass(frozen=True)
class Answer:
    """Status, body and further headers of a response, sent ``after`` seconds."""

    status: int
    body: Any
    headers: tuple[tuple[str, str], ...] = ()
    after: float = 0.0


def _error(status: int, code: str, message: str, *headers: tuple[str, str]) -> Answer:
    return Answer(status, {"error": {"code": code, "message": message}}, headers)


class Provider:
    """The provider without its HTTP. ``clock`` gives seconds."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        rand: Callable[[], float] = random.random,
    ) -> None:
        self.settings = Settings()
        self._clock = clock
        self._rand = rand
        self._lock = threading.Lock()
        self._limited_since: float | None = None
        self._charges: list[Charge] = []
        self._calls: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()

    def configure(self, settings: Settings) -> None:
        """Use these settings from now on; a rate limit starts again."""
        with self._lock:
            self.settings = settings
            self._limited_since = None

    def summarise(self, account: str, document: int, key: str) -> Answer:
        """Answer one call, and charge for it."""
        with self._lock:
            self._calls[account] += 1
            refusal = self._refusal()
            if refusal is not None:
                self._refused[account] += 1
                return refusal
            answered = self.settings.trouble != "timeout"
            number = f"sum_{len(self._charges) + 1}"
            self._charges.append(Charge(number, account, document, key, PRICE, answered))
        body = _summary(number, document)
        return Answer(200, body, after=self.settings.latency if answered else SILENCE)

    def find(self, key: str) -> Answer:
        """The summary that was charged under an idempotency key."""
        if not self.settings.tells:
            return _error(501, "not_implemented", "look-ups are switched off")
        with self._lock:
            found = next((one for one in self._charges if one.idempotency_key == key), None)
        if found is None:
            return _error(404, "not_found", "nothing was charged under this key")
        return Answer(200, _summary(found.id, found.document))

    def books(self) -> dict[str, Any]:
        """All charges, and the number of calls of each account, including refused ones."""
        with self._lock:
            return {
                "charges": [asdict(charge) for charge in self._charges],
                "calls": dict(self._calls),
                "refused": dict(self._refused),
                "limited_for": self._limited_for(),
            }

    def _refusal(self) -> Answer | None:
        trouble = self.settings.trouble
        if trouble == "quota":
            return _error(429, "insufficient_quota", "the quota of this account is used up")
        if trouble in ("limited", "limited_silently"):
            if self._limited_since is None:
                self._limited_since = self._clock()
            if wait := self._limited_for():
                told = (("Retry-After", str(math.ceil(wait))),) if trouble == "limited" else ()
                return _error(429, "rate_limit_exceeded", "too many calls", *told)
        if self._rand() < self.settings.error_rate:
            return _error(500, "server_error", "something went wrong")
        return None

    def _limited_for(self) -> float:
        if self._limited_since is None or not self.settings.trouble.startswith("limited"):
            return 0.0
        return max(0.0, self._limited_since + self.settings.limit - self._clock())


def _summary(number: str, document: int) -> dict[str, Any]:
    return {"id": number, "summary": f"What matters in document {document}"}


class ProviderServer(ThreadingHTTPServer):
    """The provider on a port."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, host: str, port: int) -> None:
        super().__init__((host, port), _Call)
        self.provider = Provider()


class _Call(Handler):
    server: ProviderServer

    def do_GET(self) -> None:  # noqa: N802 - the name http.server calls
        provider = self.server.provider
        if self.path == "/books":
            self.answer(provider.books())
        elif self.path == "/settings":
            self.answer(asdict(provider.settings))
        elif self.path.startswith("/summaries/"):
            self._send(provider.find(unquote(self.path.removeprefix("/summaries/"))))
        else:
            self.answer({"error": "not found"}, 404)

    def do_PUT(self) -> None:  # noqa: N802 - as above
        try:
            self.server.provider.configure(Settings.of(self.asked()))
        except ValueError as error:
            self.answer({"error": str(error)}, 422)
        else:
            self.answer(asdict(self.server.provider.settings))

    def do_POST(self) -> None:  # noqa: N802 - as above
        document = self.asked()["document"]
        account = self.headers["Authorization"].removeprefix("Bearer ")
        key = self.headers.get("Idempotency-Key", "")
        self._send(self.server.provider.summarise(account, document, key))

    def _send(self, answer: Answer) -> None:
        time.sleep(answer.after)
        self.answer(answer.body, answer.status, dict(answer.headers))


if __name__ == "__main__":
    serve(
        ProviderServer(
            sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1",
            int(sys.argv[2]) if len(sys.argv) > 2 else 0,
        )
    )
