"""Actions on keys: after a confirmation, those keys are changed that have not changed meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final

from celery_leases.client import LeaseClient, LeaseStatus, RecordFilter
from celery_leases.errors import LeasesError, StoreUnavailable
from celery_leases.operator_actions import ACTIONS, ActionName, entered_result, resolve
from celery_leases.ops.board import formatting
from celery_leases.ops.board.application import HtmlPage, Redirect, ViewRequest
from celery_leases.ops.board.bulk_jobs import Step, steps_of
from celery_leases.ops.board.forms import (
    FilterForm,
    action_of,
    bad_request,
    confirmed,
    hidden,
    seen_of,
    seen_value,
)
from celery_leases.record import State
from celery_leases.status import ABANDONED
from celery_leases.text.redaction import redact


def confirm(request: ViewRequest) -> HtmlPage | Redirect:
    """Ask for confirmation and show the number of keys; nothing is changed."""
    what = action_of(request.form)
    action = ACTIONS[what]
    context: dict[str, Any] = _texts(what) | {"problem": None}
    if request.form.get("scope") == "filter":
        if not action.states:
            raise bad_request("Select the keys for this action.")
        return HtmlPage("confirm.html", context | _filter_context(request, what))
    seen = seen_of(request.form)
    if not seen:
        raise bad_request("Select keys first.")
    return HtmlPage("confirm.html", context | _selection_context(request.client, seen))


def _texts(what: ActionName) -> dict[str, Any]:
    return {"what": what, "label": ACTIONS[what].title, "means": ACTIONS[what].description}


def _filter_context(request: ViewRequest, what: ActionName) -> dict[str, Any]:
    filtered = FilterForm.read(request.form)
    wanted = filtered.wanted()
    wanted = replace(wanted, states=tuple(map(str, wanted.states or ACTIONS[what].states)))
    wanted = request.client.as_of_now(wanted)
    count = request.client.how_many(wanted)
    return {
        "count": count,
        "keys": [],
        "changed": [],
        "hidden": [*hidden(wanted), ("count", str(count))],
        "scope": "filter",
        "publishable": None,
        "narrowed": [(name, value) for name, value in hidden(wanted) if name not in _TIMES],
        "narrows": filtered != FilterForm(),
    }


_TIMES: Final = frozenset({"since", "until", "unmoved_since"})


def _selection_context(client: LeaseClient, seen: list[LeaseStatus]) -> dict[str, Any]:
    """The selected keys that have not changed since the page was shown, and those that have."""
    now = {each.key: client.status(each.key) for each in seen}
    same = [each for each in seen if is_unchanged(now[each.key], each)]
    return {
        "count": len(same),
        "keys": [now[each.key] for each in same],
        "changed": [now[each.key] for each in seen if each not in same],
        "hidden": [("seen", seen_value(each)) for each in same],
        "scope": "selection",
        "publishable": sum(now[each.key].message_stored for each in same),
        "narrowed": [],
        "narrows": True,
    }


def is_unchanged(now: LeaseStatus, seen: LeaseStatus) -> bool:
    """Whether a record is unchanged; the expiry of its lease does not change it."""
    running = (State.RUNNING.value, ABANDONED)
    same = now.state == seen.state or (now.state in running and seen.state in running)
    return now.fence == seen.fence and same


def act(request: ViewRequest) -> HtmlPage | Redirect:
    """Do the action that was confirmed."""
    what, form = action_of(request.form), request.form
    if form.get("confirmed") != "yes":
        raise bad_request("Confirm the action first.")
    action, client = ACTIONS[what], request.client
    publish = form.get("publish") == "yes"
    change: Any = partial(client.change, what, publish=publish)  # type: ignore[arg-type]
    if form.get("scope") == "filter":
        if not action.states:
            raise bad_request("Select the keys for this action.")
        wanted, count = confirmed(form), form.number("count") or 0
        name = f"{action.title}: all with {_described(wanted)}"
        steps = steps_of(what, change, client.matching(wanted))
        return request.board.job_page(request.board.jobs.start(name, request.who, count, steps))
    seen = seen_of(form)
    if not seen:
        raise bad_request("Select keys first.")
    name = f"{action.title}: {len(seen)} selected key{'s' if len(seen) > 1 else ''}"
    if action.states:
        steps = steps_of(what, change, seen)
    else:
        entered = form.get("result") if what == "resolve_done" else ""
        problem, result = entered_result(entered)
        if problem is not None:
            context = _texts(what) | {"problem": problem} | _selection_context(client, seen)
            return HtmlPage("confirm.html", context, 400)
        steps = _resolved(client, seen, what, result)
    return request.board.job_page(request.board.jobs.start(name, request.who, len(seen), steps))


def _resolved(
    client: LeaseClient, seen: list[LeaseStatus], what: ActionName, result: Any
) -> Iterator[Step]:
    """Resolve the keys one after the other, except those that have changed meanwhile."""
    for each in seen:
        key = formatting.printed(each.key)
        try:
            step = resolve(client, what, each, result)
        except StoreUnavailable:
            raise
        except LeasesError as error:
            yield Step(f"unchanged: {key}", changed=0, why=formatting.printed(redact(str(error))))
            continue
        yield Step(f"{what} {key}, which was {each.state} at fence {each.fence}", next_step=step)


def _described(wanted: RecordFilter) -> str:
    """A filter as text for the log, with absolute times."""
    pairs = [
        (name, f"{datetime.fromtimestamp(int(value) / 1e6, UTC):%Y-%m-%dT%H:%M:%SZ}")
        if name in _TIMES
        else (name, value)
        for name, value in hidden(wanted)
    ]
    return formatting.printed(" ".join(f"{name}={value}" for name, value in pairs))
