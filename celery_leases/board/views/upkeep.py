"""Upkeep of all records: delete old ones, publish what a crash left behind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from celery_leases.board import formatting
from celery_leases.board.application import Answer, Asked, GoTo
from celery_leases.board.bulk_jobs import Step
from celery_leases.board.forms import Fields, bad
from celery_leases.client import LeaseClient, RecordFilter
from celery_leases.common.durations import seconds
from celery_leases.errors import LeaseConfigurationError
from celery_leases.protocol.records import State

USUAL: Final = {"purge": "30d", "rescue": "15m"}
AT_ONCE: Final = 100
STATES: Final = tuple(state.value for state in State if state is not State.RUNNING)
LABELS: Final = {
    "purge": "Delete records that have not changed for",
    "purge_expired": "Delete records whose retention is over",
    "rescue": "Publish the messages of records that stopped",
    "relay": "Publish enqueued messages that are due",
}


def upkeep(_: Asked) -> Answer:
    """The forms."""
    return Answer("upkeep.html", {"usual": USUAL, "states": STATES})


def confirm(asked: Asked) -> Answer:
    """Ask whether it is meant, with the number of records; nothing is changed."""
    wanted = _wanted(asked.form)
    client, count = asked.client, None
    if wanted["what"] in ("purge", "purge_expired"):
        count = client.how_many(client.purgeable(_filter(client, wanted), wanted["older"]))
    return Answer("confirm_upkeep.html", wanted | {"count": count, "at_most": AT_ONCE})


def act(asked: Asked) -> Answer | GoTo:
    """Do it."""
    if asked.form.get("confirmed") != "yes":
        raise bad("Confirm it first.")
    wanted, client = _wanted(asked.form), asked.client
    told = [wanted["label"], wanted["older"], *wanted["states"], wanted["task"]]
    name = " ".join(formatting.printed(word) for word in told if word)
    steps = (
        _purged(client, wanted)
        if wanted["what"].startswith("purge")
        else _published(client, wanted)
    )
    total = asked.form.number("count") or 0
    return asked.board.begun(asked.board.jobs.start(name, asked.who, total, steps))


def _wanted(form: Fields) -> dict[str, Any]:
    what, states = form.get("action"), form.all("state")
    if what not in LABELS or set(states).difference(STATES):
        raise bad("There is no such action.")
    older = form.get("older") or USUAL.get(what) if what in USUAL else None
    try:
        if older is not None:
            seconds(older, "For")
    except LeaseConfigurationError as error:
        raise bad(formatting.printed(error)) from None
    return {
        "what": what,
        "label": LABELS[what],
        "older": older,
        "states": states if what == "purge" else [],
        "task": form.get("task") if what == "purge" else "",
    }


def _filter(client: LeaseClient, wanted: dict[str, Any]) -> RecordFilter:
    return client.where(states=wanted["states"], task=wanted["task"] or None)


def _purged(client: LeaseClient, wanted: dict[str, Any]) -> Iterator[Step]:
    for deleted in client.purge(_filter(client, wanted), older=wanted["older"]):
        yield Step(f"{deleted} records deleted", changed=deleted, count=deleted)


def _published(client: LeaseClient, wanted: dict[str, Any]) -> Iterator[Step]:
    older = wanted["older"]
    done = client.rescue(older=older, limit=AT_ONCE) if older else client.relay(AT_ONCE)
    for record in done.published:
        yield Step(f"published {formatting.printed(record.stored_key)}", published=True)
    for record in done.refused:
        key = formatting.printed(record.stored_key)
        yield Step(f"not published {key}", changed=0, why=f"{key}: the broker did not take it")
