"""Actions on keys: first a page that counts and names them, then the change of those that are still
as they were seen.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final, Literal

from celery_leases.board import formatting
from celery_leases.board.application import Answer, Asked, GoTo
from celery_leases.board.bulk_jobs import Step, steps_of
from celery_leases.board.forms import Asked as AskedFilter
from celery_leases.board.forms import What, action_of, bad, confirmed, hidden, seen_of, seen_value
from celery_leases.client import LeaseClient, LeaseStatus, RecordFilter
from celery_leases.common.redaction import redact
from celery_leases.errors import LeasesError, StoreUnavailable
from celery_leases.protocol.records import State
from celery_leases.protocol.status import ABANDONED

LABELS: Final[dict[What, tuple[str, str]]] = {
    "retry": (
        "Retry",
        "Their cooldown or countdown ends, and failed keys run again: failures and crashes are forgiven.",
    ),
    "release": (
        "Release",
        "They are taken away from their holders. The outcome that such a holder reports afterwards is refused.",
    ),
    "forget": ("Forget", "They become as good as new: results, failures and counts are gone."),
    "resolve_done": (
        "Resolve: the work is done",
        "They are not run again. Later callers get the result that is written here.",
    ),
    "resolve_retry": (
        "Resolve: it has not happened",
        "The effects in doubt have not happened: they may run again.",
    ),
}
"""By name: what the page calls it, and what it does."""
MEANT: Final[dict[str, tuple[str, ...]]] = {
    "retry": (State.PENDING, State.COOLING, State.FAILED),
    "release": (State.RUNNING, ABANDONED),
    "forget": (State.PENDING, State.DONE, State.COOLING, State.FAILED, State.UNCERTAIN),
}
"""The states of what a filter finds for an action, unless it names states itself."""


def confirm(asked: Asked) -> Answer | GoTo:
    """Ask whether the action is meant, with the number of keys; nothing is changed."""
    what = action_of(asked.form)
    label, means = LABELS[what]
    context: dict[str, Any] = {"what": what, "label": label, "means": means, "problem": None}
    if asked.form.get("scope") == "filter":
        if what not in MEANT:
            raise bad("This is done with keys that are selected.")
        return Answer("confirm.html", context | _of_filter(asked, what))
    seen = seen_of(asked.form)
    if not seen:
        raise bad("Select keys first.")
    return Answer("confirm.html", context | _of_selection(asked.client, seen))


def _of_filter(asked: Asked, what: What) -> dict[str, Any]:
    filtered = AskedFilter.read(asked.form)
    wanted = filtered.wanted(datetime.now(UTC))
    wanted = replace(wanted, states=tuple(map(str, wanted.states or MEANT[what])))
    wanted = asked.client.as_of_now(wanted)
    count = asked.client.how_many(wanted)
    return {
        "count": count,
        "keys": [],
        "changed": [],
        "hidden": [*hidden(wanted), ("count", str(count))],
        "scope": "filter",
        "narrowed": [(name, value) for name, value in hidden(wanted) if name not in _MOMENTS],
        "narrows": filtered != AskedFilter(),
    }


_MOMENTS: Final = frozenset({"since", "until", "unmoved_since"})


def _of_selection(client: LeaseClient, seen: list[LeaseStatus]) -> dict[str, Any]:
    """The keys that are still as they were seen, and those that are not."""
    now = {each.key: client.status(each.key) for each in seen}
    same = [each for each in seen if is_as_seen(now[each.key], each)]
    return {
        "count": len(same),
        "keys": [now[each.key] for each in same],
        "changed": [now[each.key] for each in seen if each not in same],
        "hidden": [("seen", seen_value(each)) for each in same],
        "scope": "selection",
        "narrowed": [],
        "narrows": True,
    }


def is_as_seen(now: LeaseStatus, seen: LeaseStatus) -> bool:
    """Whether a key is as it was; a lease that runs out is no change of the record."""
    running = (State.RUNNING.value, ABANDONED)
    same = now.state == seen.state or (now.state in running and seen.state in running)
    return now.fence == seen.fence and same


def act(asked: Asked) -> Answer | GoTo:
    """Do what was confirmed."""
    what, form = action_of(asked.form), asked.form
    if form.get("confirmed") != "yes":
        raise bad("Confirm it first.")
    label, client = LABELS[what][0], asked.client
    publish = form.get("publish") == "yes"
    change: Any = partial(client.change, what, publish=publish)  # type: ignore[arg-type]
    if form.get("scope") == "filter":
        if what not in MEANT:
            raise bad("This is done with keys that are selected.")
        wanted, count = confirmed(form), form.number("count") or 0
        name = f"{label}: all with {_in_words(wanted)}"
        steps = steps_of(what, change, client.matching(wanted))
        return asked.board.begun(asked.board.jobs.start(name, asked.who, count, steps))
    seen = seen_of(form)
    if not seen:
        raise bad("Select keys first.")
    name = f"{label}: {len(seen)} selected key{'s' if len(seen) > 1 else ''}"
    if what in MEANT:
        steps = steps_of(what, change, seen)
    else:
        problem, result = _result(form.get("result")) if what == "resolve_done" else (None, None)
        if problem is not None:
            label, means = LABELS[what]
            context = {"what": what, "label": label, "means": means, "problem": problem}
            return Answer("confirm.html", context | _of_selection(client, seen), 400)
        steps = _resolved(client, seen, what, result)
    return asked.board.begun(asked.board.jobs.start(name, asked.who, len(seen), steps))


def _resolved(
    client: LeaseClient, seen: list[LeaseStatus], what: What, result: Any
) -> Iterator[Step]:
    """Resolve one key after the other, unless it has changed meanwhile."""
    for each in seen:
        key = formatting.printed(each.key)
        try:
            outcome: Literal["done", "retry"] = "done" if what == "resolve_done" else "retry"
            client.resolve(each.key, outcome, result=result, found=each)
        except StoreUnavailable:
            raise
        except LeasesError as error:
            yield Step(f"left alone: {key}", changed=0, why=formatting.printed(redact(str(error))))
            continue
        yield Step(f"{what} {key}, which was {each.state} at fence {each.fence}")


def _result(text: str) -> tuple[str | None, Any]:
    """What is wrong with the result that was written, or the result."""
    if not text:
        return None, None
    try:
        return None, json.loads(text)
    except (ValueError, RecursionError):
        return "The result is no JSON.", None


def _in_words(wanted: RecordFilter) -> str:
    """A filter for the log, with its moments."""
    told = [
        (name, f"{datetime.fromtimestamp(int(value) / 1e6, UTC):%Y-%m-%dT%H:%M:%SZ}")
        if name in _MOMENTS
        else (name, value)
        for name, value in hidden(wanted)
    ]
    return formatting.printed(" ".join(f"{name}={value}" for name, value in told))
