"""The overview: what needs a look, groups that count down, and counts by task and state."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from celery_leases.board.application import Answer, Asked
from celery_leases.board.cached_reads import value_of
from celery_leases.client import GroupStatus, LeaseClient, Page, Stats
from celery_leases.common.redaction import redact
from celery_leases.errors import StoreUnavailable
from celery_leases.protocol.records import State
from celery_leases.protocol.status import ABANDONED, LEASE_STORE_UNAVAILABLE, UNREADABLE

SHOWN: Final = 10
SOON: Final = 0.5
"""Seconds for which the page waits for what is being read; it comes without it then."""
LOOKS: Final = (
    (
        ABANDONED,
        "their process died; the broker delivers them again, or leases rescue publishes them",
    ),
    (State.UNCERTAIN.value, "they may have been executed: look in the other system, then resolve"),
)
STATES: Final = (
    *(ABANDONED, State.UNCERTAIN.value, UNREADABLE, State.FAILED.value, State.COOLING.value),
    *(State.RUNNING.value, State.PENDING.value, State.DONE.value),
)
"""In this order: what needs a look first."""


@dataclass(frozen=True, slots=True)
class _Urgent:
    """What changes while somebody looks."""

    pages: dict[str, Page]
    groups: list[GroupStatus]
    trouble: str | None


def overview(asked: Asked) -> Answer:
    """The page: at once, also where the counts still take their time."""
    board = asked.board

    def count() -> Stats:
        return board.client().stats()

    urgent = board.shared("urgent", lambda: _urgent(board.client()), 2.0).look(SOON)
    counted = board.shared("stats", count, 10.0).look(0.0 if urgent is None else SOON)
    found: _Urgent | None = value_of(urgent) if urgent is not None else None
    stats: Stats | None = value_of(counted) if counted is not None else None
    trouble = (found.trouble if found is not None else None) or (stats.trouble if stats else None)
    if stats is not None and stats.trouble and found is not None and not found.trouble:
        board.shared_anew("stats")  # the lease store is back
    context = {
        "looks": [(state, why, found.pages[state]) for state, why in LOOKS] if found else [],
        "shown": SHOWN,
        "groups": found.groups if found else [],
        "counts": [*_counts(stats)] if stats else [],
        "states": STATES,
        "rules": stats.rules if stats else [],
        "counted_at": counted.at if counted is not None else None,
        "counting": counted is None,
        "looking": urgent is None,
        "trouble": redact(trouble) if trouble else None,
    }
    return Answer("overview.html", context)


def _urgent(client: LeaseClient) -> _Urgent:
    """The keys that need a look, and the groups, as far as the lease store tells."""
    pages = {state: client.page(client.where(states=[state]), limit=SHOWN) for state, _ in LOOKS}
    try:
        return _Urgent(pages, [*client.groups()], None)
    except StoreUnavailable as error:
        return _Urgent(pages, [], trouble_of(error))


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
    """A row for each task, with a count for each state; what needs a look first."""
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
