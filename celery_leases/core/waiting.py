"""How long a delivery stays away, and what another call is told that comes too early. Pure functions of facts."""

from __future__ import annotations

from typing import Final, assert_never

from celery_leases.core.durations import in_words
from celery_leases.core.errors import CoolingDown
from celery_leases.core.records import MAY_HAVE_BEEN_EXECUTED, Ended, Record, State
from celery_leases.core.rulings import Reason
from celery_leases.core.texts import printable
from celery_leases.core.verdicts import Call, Drop, Facts, PutBack, Refuse, Verdict, Wait

RETRY_GRACE: Final = 1.0
SHORTEST_DELAY: Final = 0.05
HELD_FIRST: Final = 5.0
HELD_LONGEST: Final = 60.0

WOKEN_FIRST: Final = 60.0
"""Seconds for which a call stays away at first where its worker begins it as soon as its key is free."""

LONGEST_LOOK: Final = 15.0
"""Seconds for which a delivery waits in its process for the holder of a lapsed lease, which may be about to return."""


def still_waits(call_id: str, record: Record) -> bool:
    """Whether the time of the key itself has not come for that call."""
    return record.state in (State.PENDING, State.COOLING) and record.waits > grace_of(record, call_id)


def grace_of(record: Record, call_id: str) -> float:
    """Seconds by which a call may come early: Celery sends its retry before the row is closed, from which we count.

    What we put back ourselves is never early, and a server that named a time means it.
    """
    return RETRY_GRACE if record.call_id == call_id and record.ended is Ended.RETRIED else 0.0


def too_early(call: Call, record: Record | None, facts: Facts) -> Verdict:
    """The verdict on a key that nobody runs, and nobody may run yet: its own time or its group's is not come."""
    # Also where the key itself waits for nothing: the gate may have been shut since by others.
    started = record is not None and record.call_id == call.call_id
    retrying = record is not None and started and record.resumes and record.ended is Ended.FAILED
    met = record.fence if record is not None and started and record.told else None
    if record is not None and not still_waits(call.call_id, record):
        record = None
    waits = max(record.waits if record is not None else 0.0, facts.gate.shut_for if facts.gate is not None else 0.0)
    refusal = _cooling_down(call, record, facts, waits)
    probed = facts.gate is not None and facts.gate.half_open and waits <= facts.gate.probe_for
    # Who waits for a probe comes back sooner than its slot lasts: it may end at any moment.
    delay = min(waits, 2.0 ** min(call.tries, 20)) if probed else waits
    pending = facts.gate is None and record is not None and record.state is State.PENDING
    what = "backoff" if pending else "cooldown"
    put_back = PutBack(hop(call, delay + spread(facts)), str(refusal), started, refusal, what, retrying, met)
    if started or call.started or pending:
        return put_back
    own = record is not None and record.state is State.COOLING
    match call.options.on_cooling or ("raise" if own and not call.canvas else "reschedule"):
        case "reschedule":
            return put_back
        case "raise":
            return Refuse(refusal)
        case "ignore":
            return put_back if call.canvas else Drop(str(refusal))
        case _ as never:
            assert_never(never)


def _cooling_down(call: Call, record: Record | None, facts: Facts, waits: float) -> CoolingDown:
    gate, failure = facts.gate, record.failure if record is not None else None
    by_gate = gate is not None and (record is None or gate.shut_for >= record.waits)
    name = f"cooldown group {gate.group}" if by_gate and gate is not None else printable(call.key.key)
    reason = gate.reason if by_gate and gate is not None else failure.reason if failure else None
    rule = gate.rule if by_gate and gate is not None else failure.rule if failure else None
    said = gate.message if by_gate and gate is not None and reason == Reason.ASKED else None
    doubt = MAY_HAVE_BEEN_EXECUTED if failure is not None and failure.ambiguous and not by_gate else None
    why = "; ".join(part for part in (printable(said) if said else reason, doubt) if part)
    why = f" ({why})" if why else ""
    message = f"Retry available in {in_words(waits)}: {name} is waiting for its time{why}"
    return CoolingDown(message, call.key.key, facts.today + waits, waits, reason, rule)


def store_came_up_empty(call: Call, record: Record, age: float, chance: float) -> PutBack:
    """What to do where a row is running under a lease store that lost its leases *age* seconds ago.

    A live holder asserts its lease again with its next renewal: until the ttl of its row is over, it is waited for.
    """
    return PutBack(hop(call, record.lease_ttl - age + 0.4 * chance), "the lease store came up empty")


def holder_may_return(waited: float, chance: float) -> PutBack | Wait:
    """What to do where a row is running whose lease has ended, and the claim may not take it over.

    The records were away, or it is not known whether they were: the holder has a moment to write its outcome or to
    renew its lease.
    """
    if waited < LONGEST_LOOK:
        return Wait(0.2 + 0.3 * chance)
    return PutBack(1.0 + chance, "its lease has ended, and its holder may be about to write the outcome")


def hop(call: Call, delay: float) -> float:
    """The part of a wait that the broker can be trusted with."""
    return max(SHORTEST_DELAY, min(delay, call.longest_hop))


def hop_until_woken(call: Call, facts: Facts) -> float:
    """How long a call stays away that is begun as soon as its key is free: this is for a worker that does not do so.

    The longer it has waited, the longer; and calls that began to wait together do not come back together.
    """
    return WOKEN_FIRST * 2.0 ** min(call.tries, 20) * (0.75 + 0.25 * facts.chance)


def held_for(given_back: int, limit: int | None, longest: float) -> float:
    """Seconds to go on publishing a copy that the broker does not take, before its delivery is given back.

    Each time a delivery is *given_back* costs one of those the queue allows, if it has such a *limit*; the last two are
    held for *longest*.
    """
    if limit is not None and given_back >= limit - 1:
        return longest
    return min(HELD_FIRST * 2.0 ** min(given_back, 10), HELD_LONGEST, longest)


def may_be_given_back(given_back: int, limit: int | None) -> bool:
    """Whether the broker delivers a message again that it has got back so often already; else it discards it."""
    return limit is None or given_back < limit


def unconfirmed_pause(tries: int) -> float:
    """How long to wait before a copy is published again."""
    return float(min(15.0, 2.0 ** min(tries, 10)))


def jitter(facts: Facts) -> float:
    """Keeps those who wait for one key apart."""
    return 0.1 + 0.4 * facts.chance


def spread(facts: Facts) -> float:
    """Keeps those apart who wait for a time: the calls of one key for a record's, those of all keys for a gate's."""
    return jitter(facts) if facts.gate is None else 0.1 + 1.9 * facts.chance
