"""Actions on keys: after a confirmation, those keys are changed that have not changed meanwhile."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final, Literal

from celery_leases.board import formatting
from celery_leases.board.application import HtmlPage, Redirect, ViewRequest
from celery_leases.board.bulk_jobs import Step, steps_of
from celery_leases.board.forms import (
    Action,
    FilterForm,
    action_of,
    bad_request,
    confirmed,
    hidden,
    seen_of,
    seen_value,
)
from celery_leases.client import Change, LeaseClient, LeaseStatus, RecordFilter
from celery_leases.common.redaction import redact
from celery_leases.errors import LeasesError, StoreUnavailable
from celery_leases.protocol.operator_reports import next_step
from celery_leases.protocol.records import State
from celery_leases.protocol.status import ABANDONED

LABELS: Final[dict[Action, tuple[str, str]]] = {
    "retry": (
        "Retry",
        "Their cooldown or countdown ends, and failed keys can run again. Failures and crashes are set to zero.",
    ),
    "release": (
        "Release",
        "They are taken away from their holders. The outcome that such a holder reports afterwards is refused.",
    ),
    "forget": (
        "Forget",
        "Their results, failures and counts are deleted: the next call runs the task again.",
    ),
    "resolve_done": (
        "Resolve: the work is done",
        "They do not run again. Later callers get the result that you enter here.",
    ),
    "resolve_retry": (
        "Resolve: it did not happen",
        "The uncertain effects did not happen: the keys may run again.",
    ),
}
"""The title and the description of each action."""
DEFAULT_STATES: Final[dict[str, tuple[str, ...]]] = {
    "retry": (State.PENDING, State.COOLING, State.FAILED),
    "release": (State.RUNNING, ABANDONED),
    "forget": (State.PENDING, State.DONE, State.COOLING, State.FAILED, State.UNCERTAIN),
}
"""The states that an action selects if its filter has none."""


def confirm(request: ViewRequest) -> HtmlPage | Redirect:
    """Ask for confirmation and show the number of keys; nothing is changed."""
    what = action_of(request.form)
    label, means = LABELS[what]
    context: dict[str, Any] = {"what": what, "label": label, "means": means, "problem": None}
    if request.form.get("scope") == "filter":
        if what not in DEFAULT_STATES:
            raise bad_request("Select the keys for this action.")
        return HtmlPage("confirm.html", context | _filter_context(request, what))
    seen = seen_of(request.form)
    if not seen:
        raise bad_request("Select keys first.")
    return HtmlPage("confirm.html", context | _selection_context(request.client, seen))


def _filter_context(request: ViewRequest, what: Action) -> dict[str, Any]:
    filtered = FilterForm.read(request.form)
    wanted = filtered.wanted()
    wanted = replace(wanted, states=tuple(map(str, wanted.states or DEFAULT_STATES[what])))
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
    label, client = LABELS[what][0], request.client
    publish = form.get("publish") == "yes"
    change: Any = partial(client.change, what, publish=publish)  # type: ignore[arg-type]
    if form.get("scope") == "filter":
        if what not in DEFAULT_STATES:
            raise bad_request("Select the keys for this action.")
        wanted, count = confirmed(form), form.number("count") or 0
        name = f"{label}: all with {_described(wanted)}"
        steps = steps_of(what, change, client.matching(wanted))
        return request.board.job_page(request.board.jobs.start(name, request.who, count, steps))
    seen = seen_of(form)
    if not seen:
        raise bad_request("Select keys first.")
    name = f"{label}: {len(seen)} selected key{'s' if len(seen) > 1 else ''}"
    if what in DEFAULT_STATES:
        steps = steps_of(what, change, seen)
    else:
        problem, result = _result(form.get("result")) if what == "resolve_done" else (None, None)
        if problem is not None:
            label, means = LABELS[what]
            context = {"what": what, "label": label, "means": means, "problem": problem}
            return HtmlPage("confirm.html", context | _selection_context(client, seen), 400)
        steps = _resolved(client, seen, what, result)
    return request.board.job_page(request.board.jobs.start(name, request.who, len(seen), steps))


def _resolved(
    client: LeaseClient, seen: list[LeaseStatus], what: Action, result: Any
) -> Iterator[Step]:
    """Resolve the keys one after the other, except those that have changed meanwhile."""
    for each in seen:
        key = formatting.printed(each.key)
        try:
            outcome: Literal["done", "retry"] = "done" if what == "resolve_done" else "retry"
            after = client.resolve(each.key, outcome, result=result, found=each)
        except StoreUnavailable:
            raise
        except LeasesError as error:
            yield Step(f"unchanged: {key}", changed=0, why=formatting.printed(redact(str(error))))
            continue
        step = next_step("retry", Change(after, True)) if outcome == "retry" else None
        yield Step(f"{what} {key}, which was {each.state} at fence {each.fence}", next_step=step)


def _result(text: str) -> tuple[str | None, Any]:
    """What is wrong with the result that was entered, and the result."""
    if not text:
        return None, None
    try:
        return None, json.loads(text)
    except (ValueError, RecursionError):
        return "The result is not JSON.", None


def _described(wanted: RecordFilter) -> str:
    """A filter as text for the log, with absolute times."""
    pairs = [
        (name, f"{datetime.fromtimestamp(int(value) / 1e6, UTC):%Y-%m-%dT%H:%M:%SZ}")
        if name in _TIMES
        else (name, value)
        for name, value in hidden(wanted)
    ]
    return formatting.printed(" ".join(f"{name}={value}" for name, value in pairs))
