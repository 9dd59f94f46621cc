"""How long a delivery waits before it may run, and the error for a call that does not wait. Pure
functions of facts.
"""

from __future__ import annotations

from typing import Final, assert_never

from celery_leases.call import Call
from celery_leases.decide.verdicts import Drop, Facts, Raise, Reschedule, Verdict, Wait
from celery_leases.errors import CoolingDown, LeasesError
from celery_leases.events import Dropped
from celery_leases.failures.actions import Reason
from celery_leases.groups.slots import AHEAD, NOTHING, Room
from celery_leases.options import OnBusy
from celery_leases.record import MAY_HAVE_BEEN_EXECUTED, Ended, Record, State
from celery_leases.text.cleaning import printable
from celery_leases.text.durations import in_words

RETRY_GRACE: Final = 1.0
"""Seconds by which Celery's own retry of a call may arrive before ``retry_at``."""
SHORTEST_DELAY: Final = 0.05
"""Seconds of the shortest countdown."""
FIRST_PUBLISH_RETRY_TIME: Final = 5.0
LONGEST_PUBLISH_RETRY_TIME: Final = 60.0
FIRST_COUNTDOWN_UNTIL_FREE: Final = 60.0
"""Seconds of the first countdown of a call that its worker begins as soon as the key is free."""
LONGEST_WAIT_FOR_SLOT: Final = 15.0
"""Seconds between two tries of a call whose group is full, at most, if its worker does not begin it
when the group has room.
"""
SLOT_WAIT: Final = 1.0
"""Seconds after which a caller may try again whose group is full: nobody knows when a body ends."""
LAPSED_LEASE_WAIT: Final = 15.0
"""Seconds for which a delivery waits in its process for the holder of an expired lease, which may
still renew it or write its outcome.
"""


def is_waiting(call_id: str, record: Record) -> bool:
    """Whether the key itself must still wait before that call may run."""
    return record.state in (State.PENDING, State.COOLING) and record.waits > early_grace(
        record, call_id
    )


def early_grace(record: Record, call_id: str) -> float:
    """Seconds by which a call may run before ``retry_at``.

    Celery publishes a retry before the row is closed, but ``retry_at`` counts from the closing. A
    call that celery_leases rescheduled is never early.
    """
    return RETRY_GRACE if record.call_id == call_id and record.ended is Ended.RETRIED else 0.0


def not_due_yet(call: Call, record: Record | None, facts: Facts) -> Verdict:
    """The verdict on a key that must wait: until its own ``retry_at``, or until its group no longer
    blocks. *record* is ``None`` if the key has no record.
    """
    # These also hold for a key without a wait of its own, if another key has closed the group.
    started = record is not None and record.call_id == call.call_id
    retrying = record is not None and started and record.resumes and record.ended is Ended.FAILED
    failure_fence = (
        record.fence if record is not None and started and record.failure_delivered else None
    )
    if record is not None and not is_waiting(call.call_id, record):
        record = None
    wait = max(
        record.waits if record is not None else 0.0,
        facts.closed_group.blocked_for if facts.closed_group is not None else 0.0,
    )
    refusal = _cooling_down(call, record, facts, wait)
    probed = (
        facts.closed_group is not None
        and facts.closed_group.probe_due
        and wait <= facts.closed_group.probe_for
    )
    # A call that waits for a probe looks again before the slot ends: the probe may end sooner.
    delay = min(wait, 2.0 ** min(call.reschedules, 20)) if probed else wait
    pending = facts.closed_group is None and record is not None and record.state is State.PENDING
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
    key_cools = record is not None and record.state is State.COOLING
    default: OnBusy = "raise" if key_cools and not call.canvas else "wait"
    return while_busy(call, default, reschedule, refusal, Drop(Dropped.COOLING, str(refusal)))


def while_full(call: Call, facts: Facts, room: Room) -> Verdict:
    """The verdict on a call whose group is full, or whose turn by the rate has not come: it waits,
    unless ``lease_on_busy`` says otherwise.
    """
    refusal = group_is_full(call.key.key, call.group or "", room, facts.wall_time)
    delay = max(room.wait, min(2.0 ** min(call.reschedules, 20), LONGEST_WAIT_FOR_SLOT))
    if call.starts_when_free:
        delay = max(room.wait, countdown_until_free(call, facts.rand))
    since = (call.ask or NOTHING).since or float(round(room.now))
    reschedule = Reschedule(
        countdown(call, delay + jitter(facts)),
        str(refusal),
        refusal=refusal,
        event_type="held",
        full_since=since,
    )
    return while_busy(call, "wait", reschedule, refusal, Drop(Dropped.COOLING, str(refusal)))


def group_is_full(key: str, group: str, room: Room, wall_time: float) -> CoolingDown:
    """The error that says why a call of a full group does not run now."""
    wait = max(room.wait, SLOT_WAIT)
    if room.limit and room.running >= room.limit:
        reason, why = Reason.GROUP_FULL, f"{room.running} of {room.limit} calls run"
    elif room.wait > AHEAD / 1000:
        reason, why = Reason.GROUP_RATE, "as many have begun as its rate allows"
        wait = room.wait
    else:
        reason, why = Reason.GROUP_FULL, "it is the turn of earlier calls"
    message = f"Waits for its turn in the group {printable(group)}: {why}"
    return CoolingDown(message, key, wall_time + wait, wait, reason, None, "group")


def while_busy(
    call: Call, default: OnBusy, reschedule: Reschedule, refusal: LeasesError, drop: Drop
) -> Reschedule | Raise | Drop:
    """The verdict on a call that cannot run now because of another call: what ``lease_on_busy``
    says, or *default*. A call that has begun waits, and so does one of ``lease_runs="latest"``,
    which would be a lost change otherwise.
    """
    waits = call.started or call.options.latest_runs
    match "wait" if waits else call.options.on_busy or default:
        case "wait" | None:
            return reschedule
        case "raise":
            return Raise(refusal)
        case "ignore":
            return reschedule if call.canvas else drop
        case _ as never:
            assert_never(never)


def _cooling_down(call: Call, record: Record | None, facts: Facts, wait: float) -> CoolingDown:
    closed_group, failure = facts.closed_group, record.failure if record is not None else None
    if record is not None and closed_group is not None and closed_group.blocked_for < record.waits:
        closed_group = None  # the key itself waits for longer
    cause = closed_group or failure
    name = f"cooldown group {closed_group.group}" if closed_group else printable(call.key.key)
    reason, rule = (cause.reason, cause.rule) if cause is not None else (None, None)
    parts: list[str | None] = [reason]
    if closed_group is not None and closed_group.message and reason == Reason.ASKED:
        parts = [printable(closed_group.message)]
    if failure is not None and failure.ambiguous and closed_group is None:
        parts.append(MAY_HAVE_BEEN_EXECUTED)
    why = "; ".join(part for part in parts if part)
    why = f" ({why})" if why else ""
    message = f"Retry available in {in_words(wait)}: {name} is cooling down{why}"
    of_group = closed_group is not None or (failure is not None and failure.group is not None)
    scope = "group" if of_group else "key"
    return CoolingDown(message, call.key.key, facts.wall_time + wait, wait, reason, rule, scope)


def after_store_was_emptied(call: Call, record: Record, age: float, rand: float) -> Reschedule:
    """The verdict on a running row whose lease store lost its leases *age* seconds ago.

    A live holder writes its lease again with its next renewal, so the delivery waits until the ttl
    of the row is over.
    """
    return Reschedule(
        countdown(call, record.lease_ttl - age + 0.4 * rand), "the lease store was emptied"
    )


def after_lapsed_lease(waited: float, rand: float) -> Reschedule | Wait:
    """The verdict on a running row whose lease has expired, but which a claim may not take over
    yet. *waited*: seconds for which the delivery has waited in this process.

    The database may not have answered meanwhile, so the holder gets time to renew its lease or to
    write its outcome.
    """
    if waited < LAPSED_LEASE_WAIT:
        return Wait(0.2 + 0.3 * rand)
    return Reschedule(
        1.0 + rand, "its lease has expired, and its holder may still write the outcome"
    )


def countdown(call: Call, delay: float) -> float:
    """The countdown of the next message of a call that must wait *delay* seconds."""
    return max(SHORTEST_DELAY, min(delay, call.longest_countdown))


def countdown_until_free(call: Call, rand: float) -> float:
    """The countdown of a call that its worker begins as soon as the key is free.

    It only matters if that worker does not begin the call. It doubles with each reschedule, and is
    spread so that calls of one key do not run at the same time.
    """
    return FIRST_COUNTDOWN_UNTIL_FREE * 2.0 ** min(call.reschedules, 20) * (0.75 + 0.25 * rand)


def publish_retry_time(returns: int, limit: int | None, longest: float) -> float:
    """Seconds for which a copy that the broker does not accept is published again, before its
    delivery is returned to the broker.

    *returns*: how often it was returned before. *limit*: how many deliveries the queue allows, if
    it has a limit; each return uses one. The last two deliveries are kept for *longest* seconds.
    """
    if limit is not None and returns >= limit - 1:
        return longest
    return min(
        FIRST_PUBLISH_RETRY_TIME * 2.0 ** min(returns, 10), LONGEST_PUBLISH_RETRY_TIME, longest
    )


def may_be_returned(returns: int, limit: int | None) -> bool:
    """Whether the broker delivers a message again that was returned *returns* times. Above the
    queue's *limit* the broker discards it.
    """
    return limit is None or returns < limit


def publish_retry_pause(tries: int) -> float:
    """Seconds to wait before a copy is published again."""
    return float(min(15.0, 2.0 ** min(tries, 10)))


def jitter(facts: Facts) -> float:
    """Seconds to add to a wait for one key, so that its calls do not run at the same time."""
    return 0.1 + 0.4 * facts.rand


def spread(facts: Facts) -> float:
    """Seconds to add to a wait that ends at a fixed time: more for a group, for which all keys of a
    group wait.
    """
    return jitter(facts) if facts.closed_group is None else 0.1 + 1.9 * facts.rand
