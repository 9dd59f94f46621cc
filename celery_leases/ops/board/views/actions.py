"""Actions on keys: after a confirmation, those keys are changed that have not changed meanwhile.
And the page of a change of many keys, with its progress and its result.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

from starlette.exceptions import HTTPException

from celery_leases.client import Write
from celery_leases.ops import formatting
from celery_leases.ops.actions import ACTIONS, counted, entered_result
from celery_leases.ops.board.application import HtmlPage, Redirect, ViewRequest, check_confirmed
from celery_leases.ops.board.bulk_jobs import Job, steps_of
from celery_leases.ops.board.forms import (
    action_of,
    bad_request,
    confirmed,
    entered,
    filter_of_form,
    hidden,
    is_time,
    seen_of,
    seen_value,
)
from celery_leases.ops.client import OperatorClient
from celery_leases.record import State
from celery_leases.record_filters import RecordFilter
from celery_leases.status import ABANDONED, LeaseStatus


def confirm(request: ViewRequest) -> HtmlPage | Redirect:
    """Ask for confirmation and show the number of keys; nothing is changed."""
    what = action_of(request.form)
    if _selects_by_filter(request, what):
        return HtmlPage("confirm.html", _texts(what) | _filter_context(request, what))
    return HtmlPage(
        "confirm.html", _texts(what) | _selection_context(request.client, _seen(request))
    )


def _selects_by_filter(request: ViewRequest, what: Write) -> bool:
    by_filter = request.form.get("scope") == "filter"
    if by_filter and not ACTIONS[what].states:
        raise bad_request("Select the keys for this action.")
    return by_filter


def _seen(request: ViewRequest) -> list[LeaseStatus]:
    seen = seen_of(request.form)
    if not seen:
        raise bad_request("Select keys first.")
    return seen


def _texts(what: Write, problem: str | None = None) -> dict[str, Any]:
    action = ACTIONS[what]
    return {"what": what, "label": action.title, "means": action.description, "problem": problem}


def _filter_context(request: ViewRequest, what: Write) -> dict[str, Any]:
    conditions = entered(request.form)
    wanted = filter_of_form(conditions)
    wanted = replace(wanted, states=wanted.states or ACTIONS[what].states)
    wanted = request.client.as_of_now(wanted)
    count = request.client.how_many(wanted)
    return {
        "count": count,
        "keys": [],
        "changed": [],
        "hidden": [*hidden(wanted), ("count", str(count))],
        "scope": "filter",
        "publishable": None,
        "narrowed": [(name, value) for name, value in hidden(wanted) if not is_time(name)],
        "narrows": any(conditions.values()),
    }


def _selection_context(client: OperatorClient, seen: list[LeaseStatus]) -> dict[str, Any]:
    """The selected keys that have not changed since the page was shown, and those that have."""
    now = {each.key: client.status(each.key) for each in seen}
    same = [each for each in seen if _is_unchanged(now[each.key], each)]
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


def _is_unchanged(now: LeaseStatus, seen: LeaseStatus) -> bool:
    """Whether a record is unchanged; the expiry of its lease does not change it."""
    running = (State.RUNNING.value, ABANDONED)
    same = now.state == seen.state or (now.state in running and seen.state in running)
    return now.fence == seen.fence and same


def act(request: ViewRequest) -> HtmlPage | Redirect:
    """Do the action that was confirmed."""
    what, form, client = action_of(request.form), request.form, request.client
    check_confirmed(form)
    change = partial(client.change, what, publish=form.get("publish") == "yes")
    if _selects_by_filter(request, what):
        wanted, count = confirmed(form), form.number("count") or 0
        name = f"{ACTIONS[what].title}: all with {_described(wanted)}"
        return request.start(name, count, steps_of(what, change, client.matching(wanted)))
    seen = _seen(request)
    problem, result = entered_result(form.get("result") if what == "resolve_done" else "")
    if problem is not None:
        context = _texts(what, problem) | _selection_context(client, seen)
        return HtmlPage("confirm.html", context, 400)
    name = f"{ACTIONS[what].title}: {counted(len(seen), 'selected key')}"
    return request.start(name, len(seen), steps_of(what, partial(change, result=result), seen))


def _described(wanted: RecordFilter) -> str:
    """A filter as text for the log, with absolute times."""
    pairs = [
        (name, f"{datetime.fromtimestamp(int(value) / 1e6, UTC):%Y-%m-%dT%H:%M:%SZ}")
        if is_time(name)
        else (name, value)
        for name, value in hidden(wanted)
    ]
    return formatting.printed(" ".join(f"{name}={value}" for name, value in pairs))


def job(request: ViewRequest) -> HtmlPage:
    """The progress or the result of one change."""
    return HtmlPage("job.html", {"job": _job(request, request.query.get("number"))})


def stop(request: ViewRequest) -> Redirect:
    """Stop the change after the key that is being changed."""
    job = _job(request, request.form.get("number"))
    job.stop()
    job.ended.wait(3.0)
    return Redirect(f"/jobs?number={job.number}")


def _job(request: ViewRequest, number: str) -> Job:
    job = request.board.jobs.get(number)
    if job is None:
        raise HTTPException(
            404, "This process of the board does not have this change; its result is in the log."
        )
    return job
