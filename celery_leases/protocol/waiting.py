"""How long a delivery waits, and the error of another call that is too early. Pure functions of
facts.
"""

from __future__ import annotations

from typing import Final, assert_never

from celery_leases.common.durations import in_words
from celery_leases.common.texts import printable
from celery_leases.errors import CoolingDown
from celery_leases.failures.actions import Reason
from celery_leases.protocol.records import MAY_HAVE_BEEN_EXECUTED, Ended, Record, State
from celery_leases.protocol.verdicts import Call, Drop, Facts, Raise, Reschedule, Verdict, Wait

RETRY_GRACE: Final = 1.0
SHORTEST_DELAY: Final = 0.05
FIRST_PUBLISH_RETRY_TIME: Final = 5.0
LONGEST_PUBLISH_RETRY_TIME: Final = 60.0

FIRST_COUNTDOWN_UNTIL_FREE: Final = 60.0
"""Seconds of the first wait where the worker begins the call as soon as its key is free."""

LONGEST_LOOK: Final = 15.0
"""Seconds for which a delivery waits in its process for the holder of an expired lease, which may
be about to return.
"""


def is_waiting(call_id: str, record: Record) -> bool:
    """Whether the time of the key itself has not come for that call."""
    return record.state in (State.PENDING, State.COOLING) and record.waits > early_grace(
        record, call_id
    )


def early_grace(record: Record, call_id: str) -> float:
    """Seconds by which a call may be early: Celery sends its retry before the row is closed, from
    which the wait counts.

    A call that celery_leases rescheduled is never early, and a time from a server is exact.
    """
    return RETRY_GRACE if record.call_id == call_id and record.ended is Ended.RETRIED else 0.0


def not_due_yet(call: Call, record: Record | None, facts: Facts) -> Verdict:
    """The verdict on a key that does not run, and may not run yet because of its own wait or its
    group's.
    """
    # Also if the key itself has no wait: other calls may have closed the gate since.
    started = record is not None and record.call_id == call.call_id
    retrying = record is not None and started and record.resumes and record.ended is Ended.FAILED
    failure_fence = (
        record.fence if record is not None and started and record.failure_delivered else None
    )
    if record is not None and not is_waiting(call.call_id, record):
        record = None
    waits = max(
        record.waits if record is not None else 0.0,
        facts.gate.blocked_for if facts.gate is not None else 0.0,
    )
    refusal = _cooling_down(call, record, facts, waits)
    probed = facts.gate is not None and facts.gate.half_open and waits <= facts.gate.probe_for
    # A call that waits for a probe runs again before the probe's slot ends: the probe may end at
    # any time.
    delay = min(waits, 2.0 ** min(call.reschedules, 20)) if probed else waits
    pending = facts.gate is None and record is not None and record.state is State.PENDING
    event_type = "backoff" if pending else "cooldown"
    reschedule = Reschedule(
        countdown(call, delay + spread(facts)),
        str(refusal),
        started=started,
        refusal=refusal,
        event_type=event_type,
        retrying=retrying,
        failure_fence=failure_fence,
    )
    if started or call.started or pending:
        return reschedule
    own = record is not None and record.state is State.COOLING
    match call.options.on_cooling or ("raise" if own and not call.canvas else "reschedule"):
        case "reschedule":
            return reschedule
        case "raise":
            return Raise(refusal)
        case "ignore":
            return reschedule if call.canvas else Drop(str(refusal))
        case _ as never:
            assert_never(never)


def _cooling_down(call: Call, record: Record | None, facts: Facts, waits: float) -> CoolingDown:
    gate, failure = facts.gate, record.failure if record is not None else None
    by_gate = gate is not None and (record is None or gate.blocked_for >= record.waits)
    name = (
        f"cooldown group {gate.group}" if by_gate and gate is not None else printable(call.key.key)
    )
    reason = gate.reason if by_gate and gate is not None else failure.reason if failure else None
    rule = gate.rule if by_gate and gate is not None else failure.rule if failure else None
    said = gate.message if by_gate and gate is not None and reason == Reason.ASKED else None
    doubt = (
        MAY_HAVE_BEEN_EXECUTED
        if failure is not None and failure.ambiguous and not by_gate
        else None
    )
    why = "; ".join(part for part in (printable(said) if said else reason, doubt) if part)
    why = f" ({why})" if why else ""
    message = f"Retry available in {in_words(waits)}: {name} is cooling down{why}"
    of_group = by_gate or (failure is not None and failure.group is not None)
    scope = "group" if of_group else "key"
    return CoolingDown(message, call.key.key, facts.wall_time + waits, waits, reason, rule, scope)


def after_store_was_emptied(call: Call, record: Record, age: float, rand: float) -> Reschedule:
    """The verdict on a row that is running under a lease store that lost its leases *age* seconds
    ago.

    A live holder writes its lease again with its next renewal, so the delivery waits until the ttl
    of the row has passed.
    """
    return Reschedule(
        countdown(call, record.lease_ttl - age + 0.4 * rand), "the lease store was emptied"
    )


def after_lapsed_lease(waited: float, rand: float) -> Reschedule | Wait:
    """The verdict on a running row whose lease has expired, but which the claim may not take over.

    The records were unavailable, or that is unknown: the holder gets time to write its outcome or
    to renew its lease.
    """
    if waited < LONGEST_LOOK:
        return Wait(0.2 + 0.3 * rand)
    return Reschedule(
        1.0 + rand, "its lease has ended, and its holder may be about to write the outcome"
    )


def countdown(call: Call, delay: float) -> float:
    """The part of a wait that is short enough for one message."""
    return max(SHORTEST_DELAY, min(delay, call.longest_countdown))


def countdown_until_free(call: Call, facts: Facts) -> float:
    """How long a call waits that begins as soon as its key is free; for a worker that does not
    begin calls early.

    The wait grows with the time waited so far; and calls that began to wait together do not run
    again together.
    """
    return (
        FIRST_COUNTDOWN_UNTIL_FREE * 2.0 ** min(call.reschedules, 20) * (0.75 + 0.25 * facts.rand)
    )


def publish_retry_time(returns: int, limit: int | None, longest: float) -> float:
    """Seconds to retry the publishing of a copy that the broker does not accept, before its
    delivery is returned.

    Each return (*returns* so far) uses one of the deliveries that the queue allows, if it has
    such a *limit*; the last two are held for *longest*.
    """
    if limit is not None and returns >= limit - 1:
        return longest
    return min(
        FIRST_PUBLISH_RETRY_TIME * 2.0 ** min(returns, 10), LONGEST_PUBLISH_RETRY_TIME, longest
    )


def may_be_returned(returns: int, limit: int | None) -> bool:
    """Whether the broker delivers a message again that was returned so often; otherwise it discards
    the message.
    """
    return limit is None or returns < limit


def publish_retry_pause(tries: int) -> float:
    """How long to wait before a copy is published again."""
    return float(min(15.0, 2.0 ** min(tries, 10)))


def jitter(facts: Facts) -> float:
    """Spreads the calls that wait for one key."""
    return 0.1 + 0.4 * facts.rand


def spread(facts: Facts) -> float:
    """Spreads the calls that wait for a time: the calls of one key for a record's time, those of
    all keys for a gate's.
    """
    return jitter(facts) if facts.gate is None else 0.1 + 1.9 * facts.rand
