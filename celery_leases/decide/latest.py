"""Which of the calls that wait for a key runs under ``lease_runs="latest"``, and when. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from celery_leases.call import Call
from celery_leases.decide.verdicts import Reschedule
from celery_leases.decide.waiting import countdown, countdown_until_free
from celery_leases.keys import bounded
from celery_leases.options import DEBOUNCE_MAX
from celery_leases.record import Record

MICROSECONDS: Final = 1_000_000
NEWEST: Final = "newest"
"""The name of the mark with the newest call of a key."""
ORDER_TTL: Final = 7 * 86_400
"""Seconds for which the lease store notes the newest call of a key."""
PATIENCE: Final = 10.0
"""Seconds for which a call waits for a newer one that has not begun. Its publisher may have died
before it published the message, or a revoke has ended it.
"""
QUIET: Final = 1.0
"""Seconds in which a burst without ``lease_debounce`` has another call."""
BEGUN: Final = 0.001
"""Seconds for which a call has waited that has just begun to wait."""


@dataclass(frozen=True, slots=True)
class Burst:
    """The calls of a key that are published, as the lease store notes them at ``now``.

    All are times of that store, in microseconds: ``newest``, the order of the newest call, and
    ``first``, that of the first call since a run began; 0 if none is noted. A call without an order
    is only noted under ``lease_debounce``, with its arrival.
    """

    now: int
    newest: int = 0
    first: int = 0

    @property
    def quiet_for(self) -> float:
        """Seconds since the newest call."""
        return (self.now - self.newest) / MICROSECONDS

    @property
    def waited(self) -> float:
        """Seconds since the first call of which no run has begun."""
        return (self.now - (self.first or self.newest)) / MICROSECONDS


def until_turn(
    call: Call, burst: Burst, rand: float, record: Record | None = None
) -> Reschedule | None:
    """How *call* waits for a newer call, which then runs instead, or for the end of its burst;
    ``None`` if it may run now.

    A newer call only makes the older one wait. So no change is lost if the newer one never comes:
    the older one then runs after :data:`PATIENCE`, which begins again when a run in *record* has
    ended: the newer one could not begin before. Then the note of the newer one is replaced, so only
    one call waits for it in vain. If the clock of the lease store was set back, no call waits until
    it has caught up. Time for which the message was in the queue does not count: the newer one may
    be there too, right behind this one.
    """
    if not call.reschedulable:
        return None
    debounce = call.options.debounce
    quiet = debounce or QUIET
    overdue = burst.waited - (call.options.debounce_max or DEBOUNCE_MAX * quiet)
    if debounce and 0 < (left := min(debounce - burst.quiet_for, -overdue)) <= 2 * debounce:
        reason = f"a newer call may come within {debounce:g} s"
        return Reschedule(countdown(call, left), reason, event_type="")
    behind = (burst.newest - (call.order or call.arrived)) / MICROSECONDS
    if behind <= 0:
        return None
    if record is not None and record.finished_at is not None:
        overdue = min(overdue, (record.now - record.finished_at) / MICROSECONDS - quiet)
    if burst.quiet_for < quiet and behind <= quiet + overdue and overdue >= 0:
        return None  # calls come so fast that each one is replaced before it can begin
    waited = call.waited_for_newer
    if burst.newest <= burst.now:
        waited = min(waited, burst.quiet_for)
    if record is not None and record.finished_at is not None:
        waited = min(waited, (record.now - record.finished_at) / MICROSECONDS)
    if waited >= PATIENCE:
        return None
    backoff = min(2.0 ** min(call.reschedules, 20), PATIENCE) * (0.75 + 0.25 * rand)
    return Reschedule(
        countdown(call, countdown_until_free(call, rand) if call.starts_when_free else backoff),
        "a newer call of the key runs instead, and answers this one",
        event_type="held",
        held=True,
        waited_for_newer=call.waited_for_newer or BEGUN,
    )


def replaced_mark(call_id: str) -> str:
    """The name of the mark with the call that has run instead of a call."""
    return bounded(f"replaced:{call_id}")


def arrival_mark(call_id: str) -> str:
    """The name of the mark with the first arrival of a call that has no order."""
    return bounded(f"arrival:{call_id}")
