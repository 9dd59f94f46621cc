"""The page of cooldown groups, and the actions that open and close their gates."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, Final

from celery_leases.client import LeaseClient
from celery_leases.errors import LeaseConfigurationError, StoreUnavailable
from celery_leases.operator_actions import DEFAULT_DURATION
from celery_leases.ops.board import formatting
from celery_leases.ops.board.application import HtmlPage, Redirect, ViewRequest
from celery_leases.ops.board.bulk_jobs import Step
from celery_leases.ops.board.charts import closings
from celery_leases.ops.board.forms import Fields, bad_request
from celery_leases.ops.board.views.overview import trouble_of
from celery_leases.text.durations import in_words, seconds

MAX_GROUPS: Final = 200
GROUPS_DRAWN: Final = 30
"""For how many groups the closings are drawn."""
LABELS: Final = {"open": "Open", "close": "Close"}


def listed(request: ViewRequest) -> HtmlPage:
    """The groups that are not open, and the last closings of all groups."""
    try:
        known, trouble = [*request.client.groups(opened=True)], None
    except StoreUnavailable as error:
        known, trouble = [], trouble_of(error)
    context = {
        "groups": [group for group in known if group.state != "open"],
        "closings": closings(known[:GROUPS_DRAWN], datetime.now(UTC)),
        "left_out": max(0, len(known) - GROUPS_DRAWN),
        "trouble": trouble,
        "span": DEFAULT_DURATION,
    }
    return HtmlPage("groups.html", context)


def confirm(request: ViewRequest) -> HtmlPage:
    """Ask for confirmation; nothing is changed."""
    return HtmlPage("confirm_groups.html", _wanted(request.form))


def act(request: ViewRequest) -> HtmlPage | Redirect:
    """Open or close the groups."""
    if request.form.get("confirmed") != "yes":
        raise bad_request("Confirm the action first.")
    wanted = _wanted(request.form)
    name = f"{wanted['label']}: {len(wanted['groups'])} group{'s' * (len(wanted['groups']) > 1)}"
    steps = _steps(request.client, wanted)
    return request.board.job_page(
        request.board.jobs.start(name, request.who, len(wanted["groups"]), steps)
    )


def _wanted(form: Fields) -> dict[str, Any]:
    what, groups = form.get("action"), [*dict.fromkeys(form.all("group"))]
    if what not in LABELS:
        raise bad_request("There is no such action.")
    if not groups or len(groups) > MAX_GROUPS:
        raise bad_request(
            f"Select at least one group and at most {MAX_GROUPS}, or enter the name of one."
        )
    span = form.get("span") or DEFAULT_DURATION
    try:
        wait = seconds(span, "For")
    except LeaseConfigurationError as error:
        raise bad_request(formatting.printed(error)) from None
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
