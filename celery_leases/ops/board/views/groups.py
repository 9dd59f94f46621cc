"""The page of cooldown groups, and the actions that open and close them."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, Final

from celery_leases.errors import LeaseConfigurationError, StoreUnavailable
from celery_leases.ops import formatting
from celery_leases.ops.actions import DEFAULT_DURATION, GROUP_ACTIONS, counted
from celery_leases.ops.board.application import HtmlPage, Redirect, ViewRequest, check_confirmed
from celery_leases.ops.board.bulk_jobs import Step
from celery_leases.ops.board.charts import closings
from celery_leases.ops.board.forms import Fields, bad_request
from celery_leases.ops.board.views.overview import trouble_of
from celery_leases.ops.client import OperatorClient
from celery_leases.text.durations import in_words, seconds

MAX_GROUPS: Final = 200
GROUPS_DRAWN: Final = 30
"""For how many groups the closings are drawn."""


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
    check_confirmed(request.form)
    wanted = _wanted(request.form)
    count = len(wanted["groups"])
    name = f"{wanted['label']}: {counted(count, 'group')}"
    return request.start(name, count, _steps(request.client, wanted))


def _wanted(form: Fields) -> dict[str, Any]:
    what, groups = form.get("action"), [*dict.fromkeys(form.all("group"))]
    if what not in GROUP_ACTIONS:
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
        "label": GROUP_ACTIONS[what],
        "groups": groups,
        "span": span,
        "wait": in_words(wait),
        "why": form.get("why")[:500],
    }


def _steps(client: OperatorClient, wanted: dict[str, Any]) -> Iterator[Step]:
    for group in wanted["groups"]:
        shown = formatting.printed(group)
        if wanted["what"] == "close":
            client.close_group(group, wanted["span"], wanted["why"])
            yield Step(f"close group {shown} for {wanted['wait']}")
        elif client.open_group(group):
            yield Step(f"open group {shown}")
        else:
            yield Step(f"open group {shown}", changed=0, why=f"{shown} was already open")
