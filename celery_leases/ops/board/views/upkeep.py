"""Upkeep: delete old records, and publish messages that a crashed process did not publish."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

from celery_leases.errors import LeaseConfigurationError
from celery_leases.ops import formatting
from celery_leases.ops.board.application import HtmlPage, Redirect, ViewRequest, check_confirmed
from celery_leases.ops.board.bulk_jobs import Step
from celery_leases.ops.board.forms import TIME_MAX, Fields, bad_request
from celery_leases.ops.client import OperatorClient
from celery_leases.record import State
from celery_leases.record_filters import RecordFilter
from celery_leases.text.durations import seconds

DEFAULT_AGES: Final = {"purge": "30d", "rescue": "15m"}
MAX_MESSAGES: Final = 100
"""How many messages are published at once."""
STATES: Final = tuple(state.value for state in State if state is not State.RUNNING)
LABELS: Final = {
    "purge": "Delete records that have not changed for",
    "purge_expired": "Delete records whose retention is over",
    "rescue": "Publish the messages of records that have stopped for",
    "relay": "Publish messages of delay_in() that are due",
}


def upkeep(_: ViewRequest) -> HtmlPage:
    """The forms."""
    return HtmlPage("upkeep.html", {"default_ages": DEFAULT_AGES, "states": STATES})


def confirm(request: ViewRequest) -> HtmlPage:
    """Ask for confirmation and show the number of records; nothing is changed."""
    wanted = _wanted(request.form)
    count, since = None, None
    if wanted["what"] in ("purge", "purge_expired"):
        doomed = _purgeable(request.client, wanted)
        count, since = request.client.how_many(doomed), doomed.unmoved_since
    counted = {"count": count, "at_most": MAX_MESSAGES, "since": since}
    return HtmlPage("confirm_upkeep.html", wanted | counted)


def act(request: ViewRequest) -> HtmlPage | Redirect:
    """Delete the records, or publish the messages."""
    check_confirmed(request.form)
    wanted, client = _wanted(request.form), request.client
    words = [wanted["label"], wanted["older"], *wanted["states"], wanted["task"]]
    name = " ".join(formatting.printed(word) for word in words if word)
    since = request.form.number("since", TIME_MAX)
    if since is None and wanted["what"] == "purge":
        raise bad_request("The form cannot be read.")
    steps = (
        _purged(client, wanted, since)
        if wanted["what"].startswith("purge")
        else _published(client, wanted)
    )
    total = request.form.number("count") or 0
    return request.start(name, total, steps)


def _wanted(form: Fields) -> dict[str, Any]:
    what, states = form.get("action"), form.all("state")
    if what not in LABELS or set(states).difference(STATES):
        raise bad_request("There is no such action.")
    older = form.get("older") or DEFAULT_AGES.get(what) if what in DEFAULT_AGES else None
    try:
        if older is not None:
            seconds(older, "For")
    except LeaseConfigurationError as error:
        raise bad_request(formatting.printed(error)) from None
    return {
        "what": what,
        "label": LABELS[what],
        "older": older,
        "states": states if what == "purge" else [],
        "task": form.get("task") if what == "purge" else "",
    }


def _purgeable(client: OperatorClient, wanted: dict[str, Any]) -> RecordFilter:
    conditions = client.where(states=wanted["states"], task=wanted["task"])
    return client.purgeable(conditions, wanted["older"])


def _purged(client: OperatorClient, wanted: dict[str, Any], since: int | None) -> Iterator[Step]:
    """Delete what was counted: nothing that has changed since, or has become old enough since."""
    for deleted in client.purge(replace(_purgeable(client, wanted), unmoved_since=since)):
        yield Step(f"{deleted} records deleted", changed=deleted, count=deleted)


def _published(client: OperatorClient, wanted: dict[str, Any]) -> Iterator[Step]:
    older = wanted["older"]
    done = client.rescue(older=older, limit=MAX_MESSAGES) if older else client.relay(MAX_MESSAGES)
    for record in done.published:
        yield Step(f"published {formatting.printed(record.stored_key)}", published=True)
    for record in done.refused:
        key = formatting.printed(record.stored_key)
        yield Step(f"not published {key}", changed=0, why=f"{key}: the broker did not accept it")
