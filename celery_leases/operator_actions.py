"""What an operator can do to keys, with the texts that explain it. The command line, the board and
Django's admin share it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from celery_leases.client import Change, LeaseClient, LeaseStatus
from celery_leases.operator_reports import next_step
from celery_leases.record import State
from celery_leases.status import ABANDONED

ActionName = Literal["retry", "release", "forget", "resolve_done", "resolve_retry"]
DEFAULT_DURATION: Final = "5m"
"""How long an operator closes the gate of a group if no other duration is entered."""


@dataclass(frozen=True, slots=True)
class Action:
    """An action on keys.

    ``operation`` is the method of :class:`~celery_leases.client.LeaseClient`, and the name of the
    right. ``states``: the keys that a filter without states selects; empty if the action changes
    only keys that were selected one by one.
    """

    operation: str
    title: str
    description: str
    states: tuple[str, ...] = ()


ACTIONS: Final[Mapping[ActionName, Action]] = {
    "retry": Action(
        "retry",
        "Retry",
        "Their cooldown or countdown ends, and failed keys can run again. Failures and crashes are set to zero.",
        (State.PENDING, State.COOLING, State.FAILED),
    ),
    "release": Action(
        "release",
        "Release",
        "They are taken away from their holders. The outcome that such a holder reports afterwards is refused.",
        (State.RUNNING, ABANDONED),
    ),
    "forget": Action(
        "forget",
        "Forget",
        "Their results, failures and counts are deleted: the next call runs the task again.",
        (State.PENDING, State.DONE, State.COOLING, State.FAILED, State.UNCERTAIN),
    ),
    "resolve_done": Action(
        "resolve",
        "Resolve: the work is done",
        "They do not run again. Later callers get the result that you enter here.",
    ),
    "resolve_retry": Action(
        "resolve",
        "Resolve: it did not happen",
        "The uncertain effects did not happen: the keys may run again.",
    ),
}


def entered_result(text: str) -> tuple[str | None, Any]:
    """What is wrong with the JSON of a result that was entered, and the result."""
    if not text.strip():
        return None, None
    try:
        return None, json.loads(text)
    except (ValueError, RecursionError) as error:
        return f"The result is not JSON: {error}", None


def resolve(
    client: LeaseClient, name: ActionName, found: LeaseStatus, result: Any = None
) -> str | None:
    """Resolve the key that was *found*; returns how its call runs again, ``None`` if it does not.

    Raises the errors of :meth:`~celery_leases.client.LeaseClient.resolve`.
    """
    outcome: Literal["done", "retry"] = "done" if name == "resolve_done" else "retry"
    after = client.resolve(found.stored_key or found.key, outcome, result=result, found=found)
    return next_step("retry", Change(after, True)) if outcome == "retry" else None
