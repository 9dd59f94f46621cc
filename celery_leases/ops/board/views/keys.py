"""The list of keys, and the page of one key."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any, Final

from starlette.exceptions import HTTPException

from celery_leases.errors import RecordUnreadable
from celery_leases.failures.actions import Reason
from celery_leases.ops import formatting
from celery_leases.ops.board.application import HtmlPage, ViewRequest
from celery_leases.ops.board.charts import timeline
from celery_leases.ops.board.forms import (
    bad_request,
    entered,
    filter_of_form,
    filter_query,
    is_stored_key,
    order_of,
    page_token_of,
    seen_value,
)
from celery_leases.ops.board.views.overview import no_worker, trouble_in
from celery_leases.ops.client import OperatorClient
from celery_leases.ops.reports import facts_of
from celery_leases.record_filters import KNOWN_STATES
from celery_leases.status import LEASE_STORE_UNAVAILABLE
from celery_leases.worker.app_settings import leased_tasks

PAGE_SIZE: Final = 50
MIN_REFRESH: Final = 5.0
"""Seconds until the page refreshes its list, unless reading it takes long."""
REFRESH_FACTOR: Final = 20
"""The list is refreshed after at least this many times the time that reading it took."""


def listed(request: ViewRequest) -> HtmlPage:
    """One page of the keys that a filter selects; they are not counted."""
    conditions = entered(request.query)
    wanted = filter_of_form(conditions)
    order, after = order_of(request.query), page_token_of(request.query)
    started = time.monotonic()
    page = request.client.page(wanted, order=order, limit=PAGE_SIZE, after=after)
    took = time.monotonic() - started
    shown_order = order if order != "latest" else None
    context = {
        "filter": conditions,
        "filtered": any(conditions.values()),
        "order": order,
        "known_states": KNOWN_STATES,
        "tasks": sorted(leased_tasks(request.board.app)),
        "reasons": [reason.value for reason in Reason],
        "rows": [(status, seen_value(status)) for status in page.statuses],
        "first": f"/keys{filter_query(conditions, order=shown_order)}" if after else None,
        "next": f"/keys{filter_query(conditions, order=shown_order, after=page.next)}"
        if page.next
        else None,
        "trouble": trouble_in(page),
        "every": round(max(MIN_REFRESH, REFRESH_FACTOR * took)),
    }
    return HtmlPage("keys.html", context)


def one(request: ViewRequest) -> HtmlPage:
    """One key: its status, its attempts, and the actions for it."""
    stored = next(iter(request.query.all("stored")), "")  # not stripped: a key may end with blanks
    if not is_stored_key(stored):
        raise bad_request("There is no such key: open it from the list.")
    client = request.client
    status = client.status(stored)
    if status.stored_key is None:
        raise HTTPException(404, f"There is no record of {formatting.printed(stored)}.")
    trouble = status.detail if status.reason == LEASE_STORE_UNAVAILABLE else None
    context = {
        "status": status,
        "seen": seen_value(status),
        "facts": facts_of(status),
        "timeline": timeline(status.attempts, datetime.now(UTC)),
        "arguments": _arguments(client, stored),
        "trouble": formatting.redacted(trouble) if trouble else None,
        "no_worker": no_worker(request),
    }
    return HtmlPage("key.html", context)


def _arguments(client: OperatorClient, stored: str) -> Any:
    try:
        return client.arguments(stored)
    except RecordUnreadable as error:
        return str(error)
