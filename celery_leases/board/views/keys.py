"""The keys: a list without counts, and one key with all that is known of it."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any, Final

from starlette.exceptions import HTTPException

from celery_leases.board import formatting
from celery_leases.board.application import Answer, Asked
from celery_leases.board.charts import timeline
from celery_leases.board.forms import Asked as AskedFilter
from celery_leases.board.forms import bad, is_stored_key, order_of, place_of, seen_value
from celery_leases.board.views.overview import trouble_in
from celery_leases.client import LeaseClient, LeaseStatus
from celery_leases.errors import RecordUnreadable
from celery_leases.failures.actions import Reason
from celery_leases.protocol.filters import KNOWN_STATES
from celery_leases.protocol.status import LEASE_STORE_UNAVAILABLE
from celery_leases.worker.app_settings import leased_tasks

ON_A_PAGE: Final = 50
SOONEST: Final = 5.0
"""Seconds until the list is read again; longer where the reading takes long."""
PART_OF_TIME: Final = 20


def listed(asked: Asked) -> Answer:
    """One page of the keys that a filter finds; nothing is counted."""
    filtered = AskedFilter.read(asked.query)
    wanted = filtered.wanted(datetime.now(UTC))
    order, after = order_of(asked.query), place_of(asked.query)
    began = time.monotonic()
    page = asked.client.page(wanted, order=order, limit=ON_A_PAGE, after=after)
    took = time.monotonic() - began
    said_order = order if order != "latest" else None
    context = {
        "filter": filtered,
        "filtered": filtered != AskedFilter(),
        "order": order,
        "known_states": KNOWN_STATES,
        "tasks": sorted(leased_tasks(asked.board.app)),
        "reasons": [reason.value for reason in Reason],
        "rows": [(status, seen_value(status)) for status in page.statuses],
        "first": f"/keys{filtered.query(order=said_order)}" if after else None,
        "next": f"/keys{filtered.query(order=said_order, after=page.next)}" if page.next else None,
        "trouble": trouble_in(page),
        "every": round(max(SOONEST, PART_OF_TIME * took)),
    }
    return Answer("keys.html", context)


def one(asked: Asked) -> Answer:
    """One key: where it stands, what happened, and what can be done."""
    stored = next(iter(asked.query.all("stored")), "")  # blanks at its end belong to a key
    if not is_stored_key(stored):
        raise bad("There is no such key: take it from the list.")
    client = asked.client
    status = client.status(stored)
    if status.stored_key is None:
        raise HTTPException(404, f"There is no record for {formatting.printed(stored)}.")
    trouble = status.detail if status.reason == LEASE_STORE_UNAVAILABLE else None
    context = {
        "status": status,
        "seen": seen_value(status),
        "facts": [(name, text) for name, text in _facts(status) if text],
        "timeline": timeline(status.attempts, datetime.now(UTC)),
        "arguments": _arguments(client, stored),
        "trouble": formatting.redacted(trouble) if trouble else None,
    }
    return Answer("key.html", context)


def _arguments(client: LeaseClient, stored: str) -> Any:
    try:
        return client.arguments(stored)
    except RecordUnreadable as error:
        return str(error)


def _facts(status: LeaseStatus) -> list[tuple[str, str]]:
    waits_of = f"group {status.group}" if status.scope == "group" else status.scope
    return [
        ("Task", formatting.printed(status.task)),
        ("In this state for", formatting.short(status.age)),
        ("Retry at", formatting.moment(status.retry_at)),
        ("Wait of", formatting.printed(waits_of)),
        ("Reason", formatting.printed(status.reason)),
        ("Detail", formatting.redacted(status.detail)),
        ("Rule", formatting.printed(status.rule)),
        ("Attempt", str(status.attempt)),
        ("Failures", str(status.failures)),
        ("Crashes in a row", str(status.crashes)),
        ("Call id", formatting.printed(status.call_id)),
        ("Fence", str(status.fence)),
        ("Holder", formatting.printed(status.holder)),
        ("Lease ends in", formatting.short(status.lease_remaining)),
        ("Reference", formatting.redacted(status.reference)),
        ("Created", formatting.moment(status.created_at)),
        ("Started", formatting.moment(status.started_at)),
        ("Finished", formatting.moment(status.finished_at)),
        ("Stored key", formatting.printed(status.stored_key)),
    ]
