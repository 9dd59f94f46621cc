"""Mutations that no test can notice, each with the reason: they change nothing that is promised."""

from __future__ import annotations

from typing import Final

_AT_THAT_MOMENT: Final = "it differs at one moment of the clock only, and the next look is soon"
_ABOVE: Final = "the longest countdown is shorter in any case"
_REPORTED: Final = "only what is reported"

EXPLAINED: Final[dict[str, str]] = {
    "celery_leases.attempt.renewal Renewer._watch_deadlines: held_lease.next_interrupt <= now"
    "  ->  held_lease.next_interrupt < now": _AT_THAT_MOMENT,
    "celery_leases.attempt.renewal Renewer.close: self._clock.sleep(0.002)  ->  pass": (
        "it waits without a pause"
    ),
    "celery_leases.attempt.run Execution._report_verdict: raise AssertionError("
    "f'{verdict} does not end a delivery')  ->  pass": "never reached",
    "celery_leases.attempt.run Execution._report_held: events.LeaseHeld(remaining="
    "holder.remaining)  ->  events.LeaseHeld()": _REPORTED,
    "celery_leases.decide.waiting countdown_until_free: 20  ->  21": _ABOVE,
    "celery_leases.decide.latest until_turn: 20  ->  21": _ABOVE,
    "celery_leases.decide.waiting group_is_full: 1000  ->  1001": (
        "a bound of which 0.1 % more is as good"
    ),
}
"""By the name of the mutation."""
