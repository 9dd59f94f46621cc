"""What ``leases doctor`` finds."""

from __future__ import annotations

from celery_leases.board.application import Answer, Asked
from celery_leases.board.cached_reads import value_of
from celery_leases.board.views.overview import SOON


def doctor(asked: Asked) -> Answer:
    """The latest examination, which everybody shares for a while."""
    read = asked.board.shared("doctor", lambda: asked.client.examine(), 30.0).look(SOON)  # noqa: PLW0108
    found = value_of(read) if read is not None else None
    return Answer("doctor.html", {"found": found, "at": read.at if read is not None else None})
