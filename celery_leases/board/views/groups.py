"""The cooldown groups: those whose gate is not open; open them, or close one."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, Final

from celery_leases.board import formatting
from celery_leases.board.application import Answer, Asked, GoTo
from celery_leases.board.bulk_jobs import Step
from celery_leases.board.charts import closings
from celery_leases.board.forms import Fields, bad
from celery_leases.board.views.overview import trouble_of
from celery_leases.client import LeaseClient
from celery_leases.common.durations import in_words, seconds
from celery_leases.errors import LeaseConfigurationError, StoreUnavailable

USUAL_SPAN: Final = "5m"
MOST: Final = 200
DRAWN: Final = 30
"""The closings of so many groups are drawn."""
LABELS: Final = {"open": "Open", "close": "Close"}


def listed(asked: Asked) -> Answer:
    """The groups that are not open, and when groups were closed lately."""
    try:
        known, trouble = [*asked.client.groups(opened=True)], None
    except StoreUnavailable as error:
        known, trouble = [], trouble_of(error)
    context = {
        "groups": [group for group in known if group.state != "open"],
        "closings": closings(known[:DRAWN], datetime.now(UTC)),
        "left_out": max(0, len(known) - DRAWN),
        "trouble": trouble,
        "span": USUAL_SPAN,
    }
    return Answer("groups.html", context)


def confirm(asked: Asked) -> Answer:
    """Ask whether it is meant; nothing is changed."""
    return Answer("confirm_groups.html", _wanted(asked.form))


def act(asked: Asked) -> Answer | GoTo:
    """Open or close the groups."""
    if asked.form.get("confirmed") != "yes":
        raise bad("Confirm it first.")
    wanted = _wanted(asked.form)
    name = f"{wanted['label']}: {len(wanted['groups'])} group{'s' * (len(wanted['groups']) > 1)}"
    steps = _steps(asked.client, wanted)
    return asked.board.begun(asked.board.jobs.start(name, asked.who, len(wanted["groups"]), steps))


def _wanted(form: Fields) -> dict[str, Any]:
    what, groups = form.get("action"), [*dict.fromkeys(form.all("group"))]
    if what not in LABELS:
        raise bad("There is no such action.")
    if not groups or len(groups) > MOST:
        raise bad("Select a group, or write the name of one.")
    span = form.get("span") or USUAL_SPAN
    try:
        wait = seconds(span, "For")
    except LeaseConfigurationError as error:
        raise bad(formatting.printed(error)) from None
    return {
        "what": what,
        "label": LABELS[what],
        "groups": groups,
        "span": span,
        "wait": in_words(wait),
        "why": form.get("why")[:500],
    }


def _steps(client: LeaseClient, wanted: dict[str, Any]) -> Iterator[Step]:
    for group in wanted["groups"]:
        shown = formatting.printed(group)
        if wanted["what"] == "close":
            client.close_group(group, wanted["span"], wanted["why"])
            yield Step(f"close group {shown} for {wanted['wait']}")
        elif client.open_group(group):
            yield Step(f"open group {shown}")
        else:
            yield Step(f"open group {shown}", changed=0, why=f"{shown} was already open")
