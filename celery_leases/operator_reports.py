"""What operators get when they list, count or change many records: pages, counts, and the change of
each key. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from celery_leases.record import State
from celery_leases.status import ABANDONED, GroupStatus, LeaseStatus


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

    def as_json(self) -> dict[str, Any]:
        """Plain values, datetimes in ISO 8601."""
        return {
            "task": self.task,
            "state": self.state,
            "count": self.count,
            "oldest": self.oldest.isoformat(),
        }


@dataclass(frozen=True, slots=True)
class RuleCount:
    """How many records are not done and failed last by this rule."""

    rule: str
    reason: str
    count: int

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {"rule": self.rule, "reason": self.reason, "count": self.count}


@dataclass(frozen=True, slots=True)
class SavedRuns:
    """Deliveries and calls of a task that did not run the body again, since processes count them.

    ``replayed``: they got the saved result. ``dropped``: the work was done, or was running.
    """

    task: str
    replayed: int
    dropped: int

    @property
    def count(self) -> int:
        """The sum of both."""
        return self.replayed + self.dropped

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        parts = {"replayed": self.replayed, "dropped": self.dropped}
        return {"task": self.task, "count": self.count} | parts


@dataclass(frozen=True, slots=True)
class Stats:
    """Counts by task and state, failures by rule, and the groups whose gate is not open.

    ``trouble``: why the lease store did not answer; then abandoned records count as running, and
    ``groups`` is empty. ``saved``: the saved runs by task, the most first; ``None`` if no process
    counts them.
    """

    states: Sequence[StateCount]
    rules: Sequence[RuleCount]
    groups: Sequence[GroupStatus]
    trouble: str | None = None
    saved: Sequence[SavedRuns] | None = None

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        parts = (("states", self.states), ("rules", self.rules), ("groups", self.groups))
        plain: dict[str, Any] = {
            name: [each.as_json() for each in listed] for name, listed in parts
        }
        saved = None if self.saved is None else [each.as_json() for each in self.saved]
        return plain | {"saved_runs": saved, "trouble": self.trouble}


@dataclass(frozen=True, slots=True)
class Change:
    """What was done to one key: ``done``, or ``why`` it was not changed.

    ``published``: whether the broker has confirmed its stored message; ``None`` if there is none,
    or if none was to be published.
    """

    status: LeaseStatus
    done: bool
    why: str | None = None
    published: bool | None = None

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        known = {"key": self.status.key, "task": self.status.task, "state": self.status.state}
        return known | {"done": self.done, "why": self.why, "published": self.published}


def next_step(what: str, change: Change) -> str | None:
    """What an operator must know after *what* (``retry``, ``release``, ``forget``) has changed a
    key: what was published, and how its call runs again; ``None`` if nothing was changed.
    """
    if not change.done:
        return None
    if change.published:
        return "its stored message was published: the call runs when a worker receives it"
    if change.published is False:
        return "the broker did not accept its stored message; the next relay or rescue tries again"
    if change.status.resumes:
        return "a copy of the call waits at the broker; it is delivered within 10 minutes"
    wait = ", or wait until its message is delivered" if what == "release" else ""
    name = f" ({change.status.task}.delay(…))" if change.status.task else ""
    call = f"call the task again with the arguments of the key{name}"
    return f"no message was published: {call}{wait}"


def why_unchanged(what: str, seen: LeaseStatus, *, force: bool = False) -> str | None:
    """Why the operation *what* (``retry``, ``release`` or ``forget``) does not change a key with
    the status *seen*; ``None`` if it does.
    """
    if what == "release":
        held = seen.state in (State.RUNNING, ABANDONED)
        return None if held else f"it is {seen.state}: no attempt holds it"
    if what == "retry" and seen.state == State.DONE:
        return "it is done: there is nothing to retry"
    if seen.state == State.RUNNING and not force:
        return f"it is running: {seen.holder or 'an attempt'} holds it"
    return None
