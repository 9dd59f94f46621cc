"""The workers on a Redis broker, their leases, and the messages that they hold."""

from __future__ import annotations

from celery_leases.errors import BrokerUnavailable, LeaseConfigurationError
from celery_leases.ops.board.application import HtmlPage, ViewRequest
from celery_leases.ops.board.cached_reads import value_of
from celery_leases.ops.board.views.overview import READ_TIMEOUT
from celery_leases.ops.worker_leases import workers_of


def workers(request: ViewRequest) -> HtmlPage:
    """The page; while the broker is being read it says so."""
    board = request.board
    read = board.cached("leases of workers", lambda: workers_of(board.app), 2.0).get(READ_TIMEOUT)
    try:
        found, trouble = value_of(read) if read is not None else [], None
    except (BrokerUnavailable, LeaseConfigurationError) as error:
        found, trouble = [], str(error)
    return HtmlPage("workers.html", {"workers": found, "trouble": trouble, "reading": read is None})
