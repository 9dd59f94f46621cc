"""What operators get when they list, count or change many records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from celery_leases.status import GroupStatus, LeaseStatus, plain


@dataclass(frozen=True, slots=True)
class Page:
    """Some records in an order; ``next`` is the position of the next page, ``None`` on the last.

    A page may have fewer records than its limit and still have a next one: for one page only a
    limited number of records is read.
    """

    statuses: Sequence[LeaseStatus]
    next: str | None


@dataclass(frozen=True, slots=True)
class StateCount:
    """How many records of a task are in a state; ``oldest``: when the oldest of them entered it
    (aware, UTC).
    """

    task: str
    state: str
    count: int
    oldest: datetime


@dataclass(frozen=True, slots=True)
class RuleCount:
    """How many records are not done and failed last by this rule."""

    rule: str
    reason: str
    count: int


@dataclass(frozen=True, slots=True)
class SavedRuns:
    """Deliveries and calls of a task that did not run the body again, since processes count them.

    ``replayed``: they got the saved result. ``dropped``: the work was done, or was running.
    ``count`` is the sum of both.
    """

    task: str
    count: int
    replayed: int
    dropped: int


@dataclass(frozen=True, slots=True)
class Stats:
    """Counts by task and state, failures by rule, and the groups that are not open.

    ``trouble``: why the lease store did not answer; then abandoned records count as running, and
    ``groups`` is empty. ``saved_runs``: those that the processes of this host have counted, by
    task, the most first; ``None`` if metrics are off.
    """

    states: Sequence[StateCount]
    rules: Sequence[RuleCount]
    groups: Sequence[GroupStatus]
    trouble: str | None = None
    saved_runs: Sequence[SavedRuns] | None = None

    def as_json(self) -> dict[str, Any]:
        """Plain values, datetimes in ISO 8601."""
        return plain(asdict(self))


@dataclass(frozen=True, slots=True)
class Change:
    """What was done to one key: ``done``, or ``why`` it was not changed.

    ``published``: whether the broker has confirmed its stored message; ``None`` if the record
    stores no message, or nothing was to be published. ``next_step``: how its call runs again.
    """

    status: LeaseStatus
    done: bool
    why: str | None = None
    published: bool | None = None
    next_step: str | None = None

    @property
    def why_of_key(self) -> str:
        """``why`` with the key."""
        why, key = self.why or "", self.status.key
        return why if key in why else f"{key}: {why}"

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        known = {"key": self.status.key, "task": self.status.task, "state": self.status.state}
        return known | {"done": self.done, "why": self.why, "published": self.published}


def facts_of(status: LeaseStatus) -> list[tuple[str, Any]]:
    """What a page shows of a key beside its message: names, and texts, durations or times."""
    waits_for = f"group {status.group}" if status.scope == "group" else status.scope
    facts = {
        "Task": status.task,
        "In this state for": status.age,
        "Retry at": status.retry_at,
        "Waits for": waits_for,
        "Reason": status.reason,
        "Detail": status.detail,
        "Rule": status.rule,
        "Attempt": str(status.attempt),
        "Failures": str(status.failures),
        "Crashes in a row": str(status.crashes),
        "Call id": status.call_id,
        "Fence": str(status.fence),
        "Holder": status.holder,
        "Waiting calls": ", ".join(status.waiting),
        "Lease ends in": status.lease_remaining,
        "Reference": status.reference,
        "Created": status.created_at,
        "Queued": status.queued_at,
        "Started": status.started_at,
        "Finished": status.finished_at,
        "Stored key": status.stored_key,
    }
    return [(name, value) for name, value in facts.items() if value not in (None, "")]
