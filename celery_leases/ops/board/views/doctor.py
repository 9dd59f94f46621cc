"""The page with the findings of ``leases doctor``."""

from __future__ import annotations

from celery_leases.ops.board.application import HtmlPage, ViewRequest
from celery_leases.ops.board.cached_reads import value_of
from celery_leases.ops.board.views.overview import READ_TIMEOUT


def doctor(request: ViewRequest) -> HtmlPage:
    """The latest examination; requests of the next 30 seconds share it."""
    read = request.board.cached("doctor", lambda: request.client.examine(), 30.0).get(READ_TIMEOUT)  # noqa: PLW0108
    found = value_of(read) if read is not None else None
    return HtmlPage("doctor.html", {"found": found, "at": read.at if read is not None else None})
