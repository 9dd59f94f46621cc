"""What operators can do to keys and groups, with the texts that explain it: one table for
programs, commands, the board and Django's admin.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from celery_leases.client import Write
from celery_leases.record import State
from celery_leases.status import ABANDONED, LeaseStatus

DEFAULT_DURATION: Final = "5m"
"""How long an operator closes a group if no other duration is entered."""
GROUP_ACTIONS: Final = {"open": "Open", "close": "Close"}


@dataclass(frozen=True, slots=True)
class Action:
    """An action on keys.

    ``operation`` is the method of :class:`~celery_leases.client.LeaseClient`, and the name of the
    right; ``past`` what was done to a key. ``states``: the keys that a filter without states
    selects; empty if the action changes only keys that were selected one by one.
    """

    operation: str
    past: str
    title: str
    description: str
    states: tuple[str, ...] = ()


ACTIONS: Final[Mapping[Write, Action]] = {
    "retry": Action(
        *("retry", "retried", "Retry"),
        "Their cooldown or countdown ends, and failed keys can run again. Failures and crashes are set to zero.",
        (State.PENDING, State.COOLING, State.FAILED),
    ),
    "release": Action(
        *("release", "released", "Release"),
        "They are taken away from their holders. The outcome that such a holder reports afterwards is refused.",
        (State.RUNNING, ABANDONED),
    ),
    "forget": Action(
        *("forget", "forgotten", "Forget"),
        "Their results, failures and counts are deleted: the next call runs the task again.",
        (State.PENDING, State.DONE, State.COOLING, State.FAILED, State.UNCERTAIN),
    ),
    "resolve_done": Action(
        *("resolve", "resolved", "Resolve: the work is done"),
        "They do not run again. Later callers get the result that you enter here.",
    ),
    "resolve_retry": Action(
        *("resolve", "resolved", "Resolve: it did not happen"),
        "The uncertain effects did not happen: the keys may run again.",
    ),
}


def entered_result(text: str) -> tuple[str | None, Any]:
    """What is wrong with the JSON of a result that was entered, and the result."""
    try:
        return None, json.loads(text) if text.strip() else None
    except (ValueError, RecursionError) as error:
        return f"The result is not JSON: {error}", None


def counted(number: int, what: str = "key") -> str:
    """A number of things in words."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def next_step(what: Write, status: LeaseStatus, published: bool | None = None) -> str | None:
    """What an operator must know after *what* has changed a key to *status*: whether its message
    was *published*, and how its call runs again; ``None`` if it does not.
    """
    if what == "resolve_done":
        return None
    if published:
        return "its stored message was published: the call runs when a worker receives it"
    if published is False:
        return "the broker did not accept its stored message; the next relay or rescue tries again"
    if status.resumes:
        return "a copy of the call waits at the broker; it is delivered within 10 minutes"
    wait = ", or wait until its message is delivered" if what == "release" else ""
    name = f" ({status.task}.delay(…))" if status.task else ""
    call = f"call the task again with the arguments of the key{name}"
    return f"no message was published: {call}{wait}"


def why_unchanged(what: Write, seen: LeaseStatus, *, force: bool = False) -> str | None:
    """Why *what* does not change a key with the status *seen*; ``None`` if it does."""
    if what == "release":
        held = seen.state in ACTIONS["release"].states
        return None if held else f"it is {seen.state}: no attempt holds it"
    if what == "retry" and seen.state == State.DONE:
        return "it is done: there is nothing to retry"
    if seen.state == State.RUNNING and not force:
        return f"it is running: {seen.holder or 'an attempt'} holds it"
    return None
