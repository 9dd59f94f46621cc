"""The page's web server: ``python -m example_project.play.web [HOST] [PORT]``.

It sends the state of the desk as server-sent events, or as JSON to a page that polls. Every change
is a POST with JSON.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

from flask import Flask, Response, abort, jsonify, request, send_from_directory
from werkzeug.exceptions import HTTPException

from example_project.demo.json_over_http import Refused
from example_project.play.desk import PRESSES_MAX, Desk, NotPossible

PAGE: Final = Path(__file__).parent / "page"
FILES: Final = {"": "play.html", "play.css": "play.css", "play.js": "play.js"}
LOOK_EVERY: Final = 0.5
HEARTBEAT: Final = 10.0
"""Seconds after which an idle stream sends a comment."""
HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
log = logging.getLogger(__name__)


class PageState:
    """The latest state of the page, shared by all streams; ``look`` returns it."""

    def __init__(self, look: Callable[[], dict[str, Any]]) -> None:
        self._look = look
        self._changed = threading.Condition()
        self._wake = threading.Event()
        self._version = 0
        self._run = uuid4().hex
        self._text = json.dumps({"problem": "The server is starting."})

    def watch(self, every: float = LOOK_EVERY) -> None:
        """Refresh the state in an endless loop."""
        while True:
            self.refresh()
            self._wake.wait(every)
            self._wake.clear()

    def refresh_soon(self) -> None:
        """Let the loop refresh the state now."""
        self._wake.set()

    def refresh(self) -> None:
        """Read the state once; if a server does not answer, the state says so."""
        try:
            text = json.dumps(self._look() | {"run": self._run, "problem": None})
        except Exception as error:  # noqa: BLE001 - any of four servers may be down
            log.warning("cannot read the state: %s", error)
            last = json.loads(self._text)
            text = json.dumps(
                last | {"problem": f"A server does not answer: {type(error).__name__}"}
            )
        with self._changed:
            if text != self._text:
                self._version += 1
                self._text = text
                self._changed.notify_all()

    def latest(self) -> tuple[int, str]:
        """The number and the text of the state."""
        with self._changed:
            return self._version, self._text

    def after(self, seen: int, timeout: float) -> tuple[int, str] | None:
        """The state as soon as its number is not *seen*; ``None`` after *timeout* seconds."""
        with self._changed:
            if self._changed.wait_for(lambda: self._version != seen, timeout):
                return self._version, self._text
            return None


def make_page(
    desk: Desk, news: PageState, *, hosts: Sequence[str] | None = None, events: bool = True
) -> Flask:
    """The page. It answers under the names *hosts*; without *events* it must be polled."""
    page = Flask(__name__, static_folder=None)
    page.config["TRUSTED_HOSTS"] = hosts
    page.after_request(_with_headers)
    page.register_error_handler(NotPossible, lambda error: (jsonify(error=str(error)), 409))
    page.register_error_handler(
        HTTPException, lambda error: (jsonify(error=error.description), error.code)
    )
    page.register_error_handler(
        Refused, lambda error: (jsonify(error=error.body["error"]), error.status)
    )

    @page.before_request
    def only_this_page() -> None:
        if request.method in ("GET", "HEAD"):
            return
        if request.headers.get("Sec-Fetch-Site", "same-origin") != "same-origin":
            abort(403)
        if not request.is_json:  # a form of another site cannot send JSON
            abort(415)

    for path, name in FILES.items():
        page.add_url_rule(f"/{path}", name, lambda name=name: send_from_directory(PAGE, name))

    page.add_url_rule("/favicon.ico", "icon", lambda: ("", 204))

    @page.get("/state")
    def state() -> Response:
        return Response(news.latest()[1], mimetype="application/json")

    @page.get("/events")
    def stream() -> Response:
        if not events:
            abort(404)
        return Response(_stream(news), mimetype="text/event-stream")

    _add_buttons(page, desk, news)
    return page


def _add_buttons(page: Flask, desk: Desk, news: PageState) -> None:
    def done(**values: Any) -> Response:
        news.refresh_soon()
        return jsonify(values)

    @page.post("/documents")
    def submit() -> Response:
        return done(number=desk.submit())

    @page.post("/documents/<int:number>/presses")
    def press(number: int) -> Response:
        times = _value("times")
        if type(times) is not int or not 1 <= times <= PRESSES_MAX:
            abort(422, f"times is a whole number from 1 to {PRESSES_MAX}")
        desk.press(number, times)
        return done()

    @page.post("/documents/<int:number>/retry")
    def retry(number: int) -> Response:
        desk.retry(number)
        return done()

    @page.post("/documents/<int:number>/resolution")
    def resolve(number: int) -> Response:
        outcome = _value("outcome")
        if outcome not in ("done", "retry"):
            abort(422, "outcome is done or retry")
        desk.resolve(number, outcome)
        return done()

    @page.post("/group/opening")
    def open_group() -> Response:
        desk.open_group()
        return done()

    @page.post("/provider")
    def configure() -> Response:
        desk.configure(request.get_json())
        return done()

    @page.post("/workers/<name>/death")
    def kill(name: str) -> Response:
        desk.kill(name)
        return done()


def _value(name: str) -> Any:
    asked = request.get_json()
    if not isinstance(asked, dict):
        abort(422, "write a JSON object")
    return asked.get(name)


def _stream(news: PageState, heartbeat: float = HEARTBEAT) -> Iterator[str]:
    version, text = news.latest()
    yield f"retry: 1000\nid: {version}\ndata: {text}\n\n"
    while True:
        found = news.after(version, heartbeat)
        if found is None:
            yield ": nothing new\n\n"
        else:
            version, text = found
            yield f"id: {version}\ndata: {text}\n\n"


def _with_headers(response: Response) -> Response:
    response.headers.update(HEADERS)
    return response


def main(host: str = "127.0.0.1", port: str = "0") -> None:
    """Serve the page until the process ends."""
    from werkzeug.serving import make_server

    from celery_leases.ops.client import OperatorClient
    from example_project.celery import app
    from example_project.play import tasks

    logging.getLogger("werkzeug").setLevel(logging.WARNING)
    desk = Desk(OperatorClient.from_app(app), tasks.PROVIDER_URL)
    news = PageState(desk.look)
    for job in (desk.look_after, news.watch):
        threading.Thread(target=job, daemon=True).start()
    hosts = os.environ.get("PLAY_HOSTS", "localhost,127.0.0.1").split(",")
    server = make_server(host, int(port), make_page(desk, news, hosts=hosts), threaded=True)
    print(f"listens on port {server.server_port}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
