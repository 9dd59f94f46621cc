"""Celery's own log lines about a call that waits: one when it begins to wait, and none for each
further hop of a wait that goes on.

The filters are only added in a process that has met such a call.
"""

from __future__ import annotations

import logging
import re
from typing import Any, Final

from celery_leases.decide.verdicts import Reschedule
from celery_leases.errors import CoolingDown

RESCHEDULED: Final = "rescheduled: "
STILL: Final = "still waits: "
"""The beginning of the reason with which a delivery ends that was rescheduled: for the first time,
and once more for the same cause.
"""
AGAIN: Final = "~"
LONGEST_CAUSE: Final = 100
_ENDED: Final = re.compile(rf"\w+\(['\"]({RESCHEDULED}|{STILL})")
_TRACE: Final = "celery.app.trace"
_STRATEGY: Final = "celery.worker.strategy"


def cause_after(before: str, again: Reschedule) -> str:
    """What a call waits for after the reschedule *again*, if it waited for *before*: the same
    cause once more begins with :data:`AGAIN`.
    """
    cause = _cause_of(again)
    return AGAIN + cause if again.cause is None and before.removeprefix(AGAIN) == cause else cause


def _cause_of(again: Reschedule) -> str:
    """What a call waits for, without the times that change with each hop; stable within a wait."""
    if again.held or again.full_since is not None:
        return "held" if again.held else "full"
    if isinstance(again.refusal, CoolingDown):
        return f"{again.refusal.scope} {again.refusal.reason}"[: LONGEST_CAUSE - 1]
    return re.sub(r"\d+", "#", again.reason).split("\n")[0][: LONGEST_CAUSE - 1]


class _Ends(logging.Filter):
    """Celery calls a delivery that ends with a reschedule ``ignored``, as if its work was lost."""

    def filter(self, record: logging.LogRecord) -> bool:
        fields: Any = record.args
        if not isinstance(fields, dict) or fields.get("description") != "ignored":
            return True
        found = _ENDED.match(str(fields.get("exc")))
        if found is not None:
            fields["description"] = "rescheduled"
        return found is None or found[1] != STILL


class _Arrivals(logging.Filter):
    """Leaves out that the message of a call arrived that only waits on."""

    def __init__(self) -> None:
        super().__init__()
        #: The id of the message that has just arrived, of which Celery writes a line next.
        self.expected: str | None = None

    def filter(self, record: logging.LogRecord) -> bool:
        fields: Any = record.args
        if self.expected is None or not isinstance(fields, dict):
            return True
        if fields.get("id") != self.expected:
            return True
        self.expected = None
        return False


_ends, _arrivals = _Ends(), _Arrivals()


def name_reschedules() -> None:
    """Let Celery's lines in this process say ``rescheduled`` where they would say ``ignored``."""
    logging.getLogger(_TRACE).addFilter(_ends)  # once, however often it is called


def leave_out_arrival(call_id: str) -> None:
    """Leave out Celery's line about the message of this call, which it writes next, unless the
    hops of a wait are logged for debugging.
    """
    if logging.getLogger("celery_leases").isEnabledFor(logging.DEBUG):
        return
    _arrivals.expected = call_id
    logging.getLogger(_STRATEGY).addFilter(_arrivals)
