"""How long a delivery stays away, and what another call is told that comes too early. Pure functions of facts."""

from __future__ import annotations

from typing import Final, assert_never

from celery_leases.core.durations import in_words
from celery_leases.core.errors import CoolingDown
from celery_leases.core.records import Ended, Record, State
from celery_leases.core.rulings import Reason
from celery_leases.core.verdicts import Call, Drop, Facts, PutBack, Refuse, Run, Verdict

RETRY_GRACE: Final = 1.0
SHORTEST_DELAY: Final = 0.05


def still_waits(call: Call, record: Record) -> bool:
    """Whether the key's own time is not come."""
    return record.state in (State.PENDING, State.COOLING) and record.waits > grace_of(record, call.call_id)


def grace_of(record: Record, call_id: str) -> float:
    """Seconds by which a call may come early: Celery sends its retry before the row is closed, from which we count.

    What we put back ourselves is never early, and a server that named a time means it.
    """
    return RETRY_GRACE if record.call_id == call_id and record.ended is Ended.RETRIED else 0.0


def too_early(call: Call, record: Record | None, facts: Facts) -> Verdict:
    """The verdict on a key that nobody runs, and nobody may run yet: its own time or its group's is not come."""
    # Also where the key itself waits for nothing: the gate may have been shut since by others.
    started = record is not None and record.call_id == call.call_id
    if record is not None and not still_waits(call, record):
        record = None
    waits = max(record.waits if record is not None else 0.0, facts.gate.shut_for if facts.gate is not None else 0.0)
    refusal = _cooling_down(call, record, facts, waits)
    probed = facts.gate is not None and facts.gate.half_open and waits <= facts.gate.probe_for
    # Who waits for a probe comes back sooner than its slot lasts: it may end at any moment.
    delay = min(waits, 2.0 ** min(call.tries, 20)) if probed else waits
    pending = facts.gate is None and record is not None and record.state is State.PENDING
    what = "backoff" if pending else "cooldown"
    put_back = PutBack(hop(call, delay + spread(facts)), str(refusal), started, refusal, what)
    if started or call.started or pending:
        return put_back
    match call.options.on_cooldown or ("put_back" if call.canvas else "fail"):
        case "put_back":
            return put_back
        case "fail":
            return Refuse(refusal)
        case "ignore":
            return put_back if call.canvas else Drop(str(refusal))
        case _ as never:
            assert_never(never)


def _cooling_down(call: Call, record: Record | None, facts: Facts, waits: float) -> CoolingDown:
    gate, failure = facts.gate, record.failure if record is not None else None
    by_gate = gate is not None and (record is None or gate.shut_for >= record.waits)
    name = f"cooldown group {gate.group}" if by_gate and gate is not None else call.key.key
    reason = gate.reason if by_gate and gate is not None else failure.reason if failure else None
    rule = gate.rule if by_gate and gate is not None else failure.rule if failure else None
    said = gate.message if by_gate and gate is not None and reason == Reason.ASKED else None
    why = f" ({said or reason})" if said or reason else ""
    message = f"Retry available in {in_words(waits)}: {name} is waiting for its time{why}"
    return CoolingDown(message, call.key.key, facts.today + waits, waits, reason, rule)


def store_came_up_empty(call: Call, record: Record | None, age: float, chance: float) -> PutBack | Run:
    """Whether a key may be claimed under a lease store that lost its data *age* seconds ago.

    Its live holders re-assert their leases with the next renewal; until their ttl is over nobody takes over from them.
    """
    if record is None or record.state is not State.RUNNING:
        return Run()
    wait = record.lease_ttl - age
    return PutBack(hop(call, wait + 0.4 * chance), "the lease store came up empty") if wait > 0 else Run()


def hop(call: Call, delay: float) -> float:
    """The part of a wait that the broker can be trusted with."""
    return max(SHORTEST_DELAY, min(delay, call.longest_hop))


def jitter(facts: Facts) -> float:
    """Keeps those who wait for one key apart."""
    return 0.1 + 0.4 * facts.chance


def spread(facts: Facts) -> float:
    """Keeps those apart who wait for a time: the calls of one key for a record's, those of all keys for a gate's."""
    return jitter(facts) if facts.gate is None else 0.1 + 1.9 * facts.chance
