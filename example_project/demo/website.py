"""The web process of the demo: a button that publishes calls, and a page with the status of a
document.

``python -m example_project.demo.website web-1`` writes the ids of its calls into the journal, under
that name. It imports no task.

* ``POST /button`` with ``{"task", "times", "model", "documents"}`` presses it *times* times for
  each document.
* ``POST /page`` with ``{"task", "key"}`` answers with the message for the reader.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from socketserver import TCPServer

from celery_leases import LeaseClient
from example_project.celery import app
from example_project.demo import journal
from example_project.demo.json_over_http import Handler, serve

PAUSE = 0.05
"""Seconds between two presses."""


class Website(TCPServer):
    """The server; the journal has its name."""

    def __init__(self, name: str) -> None:
        super().__init__(("127.0.0.1", 0), _Visit)
        self.name = name
        self.leases = LeaseClient(app.conf.leases_url, app.conf.leases_database_url)

    def press(self, task: str, times: int, model: str, documents: list[int]) -> None:
        """Publish *times* calls for each document."""
        began, calls = time.monotonic(), []
        for _ in range(times):
            for document in documents:
                call = app.send_task(task, kwargs={"document_id": document, "model": model})
                calls.append((f"document:{document}", call.id))
            time.sleep(PAUSE)
        how = task.removeprefix("example_project.").removeprefix("demo.")
        journal.write("Asked", t=began, worker=self.name, how=how, key=calls[0][0], calls=calls)

    def page(self, task: str, key: str) -> str:
        """The message for the reader of a document."""
        return self.leases.status(key, task=task).message()


class _Visit(Handler):
    server: Website

    def do_POST(self) -> None:  # noqa: N802 - the name http.server calls
        serving: Mapping[str, Callable[..., str | None]] = {
            "/button": self.server.press,
            "/page": self.server.page,
        }
        self.answer(serving[self.path](**self.asked()))


if __name__ == "__main__":
    serve(Website(sys.argv[1]))
