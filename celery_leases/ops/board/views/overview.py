"""The overview: keys that need attention, closed groups, and counts by task and state. And the page
of ``leases doctor``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from celery_leases.errors import StoreUnavailable
from celery_leases.ops.board.application import HtmlPage, ViewRequest
from celery_leases.ops.board.cached_reads import value_of
from celery_leases.ops.client import OperatorClient
from celery_leases.ops.doctor import examine
from celery_leases.ops.reports import Page, Stats
from celery_leases.record import State
from celery_leases.status import ABANDONED, LEASE_STORE_UNAVAILABLE, UNREADABLE, GroupStatus
from celery_leases.text.redaction import redact
from celery_leases.worker.answering import NO_WORKER, worker_answers

SHOWN: Final = 10
READ_TIMEOUT: Final = 0.5
"""Seconds for which a page waits for a value that is being read; then it is shown without it."""
NEEDS_ATTENTION: Final = (
    (
        ABANDONED,
        "nothing is heard of their process; the broker delivers them again, or leases rescue publishes them",
    ),
    (State.UNCERTAIN.value, "they may have been executed: look in the other system, then resolve"),
    (State.FAILED.value, "they do not run again: end the cause, then retry or forget them"),
)
STATES: Final = (
    *(ABANDONED, State.UNCERTAIN.value, UNREADABLE, State.FAILED.value, State.COOLING.value),
    *(State.RUNNING.value, State.PENDING.value, State.DONE.value),
)
"""The states in the order of the columns: those that need attention first."""


@dataclass(frozen=True, slots=True)
class _Attention:
    """The part of the page that is read every two seconds."""

    pages: dict[str, Page]
    groups: list[GroupStatus]
    trouble: str | None


def overview(request: ViewRequest) -> HtmlPage:
    """The page; it is shown at once, even if the counts are still being read."""
    board = request.board
    attention = board.cached("attention", lambda: _attention(board.client()), 2.0).get(READ_TIMEOUT)
    counts = board.cached("stats", lambda: board.client().stats(), 10.0)
    counted = counts.get(0.0 if attention is None else READ_TIMEOUT)
    found: _Attention | None = value_of(attention) if attention is not None else None
    stats: Stats | None = value_of(counted) if counted is not None else None
    trouble = (found.trouble if found is not None else None) or (stats.trouble if stats else None)
    if stats is not None and stats.trouble and found is not None and not found.trouble:
        counts.invalidate()  # the lease store is back
    context = {
        "attention": [(state, why, found.pages[state]) for state, why in NEEDS_ATTENTION]
        if found
        else [],
        "shown": SHOWN,
        "groups": found.groups if found else [],
        "counts": [*_counts(stats)] if stats else [],
        "states": STATES,
        "rules": stats.rules if stats else [],
        "counted_at": counted.at if counted is not None else None,
        "counting": counted is None,
        "no_worker": no_worker(request),
        "reading": attention is None,
        "trouble": redact(trouble) if trouble else None,
    }
    return HtmlPage("overview.html", context)


def _attention(client: OperatorClient) -> _Attention:
    """The keys that need attention, and the groups if the lease store answers."""
    pages = {
        state: client.page(client.where(states=[state]), limit=SHOWN)
        for state, _ in NEEDS_ATTENTION
    }
    try:
        return _Attention(pages, [*client.groups()], None)
    except StoreUnavailable as error:
        return _Attention(pages, [], trouble_of(error))


def no_worker(request: ViewRequest) -> str | None:
    """A sentence if no worker answers; it is not waited for."""
    board = request.board
    asked = board.cached("workers", lambda: worker_answers(board.app), 10.0).get(0.0)
    return f"Workers: {NO_WORKER}." if asked is not None and asked.value is False else None


def trouble_of(error: StoreUnavailable) -> str:
    """Why a part of a page is missing."""
    return f"the lease store does not answer: {redact(str(error))}"


def trouble_in(page: Page) -> str | None:
    """Why the lease store did not answer for a page of keys, if it did not."""
    return next(
        (
            redact(each.detail or "the lease store does not answer")
            for each in page.statuses
            if each.reason == LEASE_STORE_UNAVAILABLE
        ),
        None,
    )


def _counts(stats: Stats) -> Iterator[dict[str, Any]]:
    """A row for each task, with a count for each state; tasks that need attention first."""
    tasks: dict[str, dict[str, Any]] = {}
    for each in stats.states:
        tasks.setdefault(each.task, {})[each.state] = each

    def urgency(item: tuple[str, dict[str, Any]]) -> tuple[Any, ...]:
        return (
            *(-(item[1][state].count if state in item[1] else 0) for state in STATES[:3]),
            item[0],
        )

    for task, states in sorted(tasks.items(), key=urgency):
        yield {"task": task, "states": states, "all": sum(each.count for each in states.values())}


def doctor(request: ViewRequest) -> HtmlPage:
    """The latest examination; requests of the next 30 seconds share it."""
    board = request.board
    read = board.cached("doctor", lambda: examine(board.app), 30.0).get(READ_TIMEOUT)
    found = value_of(read) if read is not None else None
    return HtmlPage("doctor.html", {"found": found, "at": read.at if read is not None else None})
