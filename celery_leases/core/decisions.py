"""What to do with one delivery: pure functions of facts, no clock, no I/O, no randomness.

Before the run (first row that matches)

===========================================  =======================================================
the record says                              verdict
===========================================  =======================================================
this call's callbacks are out                ``Drop``
this call has finished                       ``Replay``;
                                             with callbacks, just now: ``PutBack``, they are being sent
this call was ended by the user's ``Ignore``,
``Reject`` or ``replace()``                  ``Drop``
this call has raised                         ``Refuse`` with the remembered failure
this call has been retried since             ``Drop``
failed for good (``rerun``: this call only)  ``Refuse(PermanentFailure)``
waiting for an operator                      ``Refuse(PermanentFailure)``
another fingerprint, another call            ``Refuse(KeyReused)``
done by another call                         ``lease_on_done``: ``Replay``, ``Drop``, ``Refuse``, ``Run``
running under a live lease, or lease held    this call: ``PutBack`` until the lease ends;
                                             another: ``lease_on_held``: ``PutBack``, ``Wait``, ``Drop``, ``Refuse``
waiting for ``retry_at``                     ``PutBack`` until then
claimed, and crashed too often in a row      ``GiveUp``
claimed, second crash in a row or later      ``StandBack`` 5 s, then 30 s
anything else                                ``Run``
===========================================  =======================================================

A call that has begun before is never dropped or refused because of another one: it is put back, or replayed.
A delivery that carries chain, chord, group or link is never dropped because of another call either.

After the run

===========================================  =======================================================
the body                                     how the attempt is closed, and what Celery gets
===========================================  =======================================================
returned                                     ``done``; the value as it was stored
raised                                       ``pending``, a failure; the exception
lost its lease                               ``pending``, attempt given back; put back
was interrupted by a shutdown or revoke      ``pending``, attempt given back; the interruption goes on
ran into the hard limit, or exited           ``pending``, a crash; the interruption goes on
``Retry``, ``Reject(requeue=True)``          ``pending``, until the countdown is over; passed through
``Ignore``, ``Reject``, ``replace()``        ``done`` without a result; passed through
===========================================  =======================================================

When a store fails: before the body has run the delivery is put back; an outcome is tried again
for ``lease_settle_timeout``, then the lease is left to expire and the delivery is put back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import assert_never

from celery_leases.core.endings import Ending, Interrupted, Lost, Passed, Raised, Returned, Terminated
from celery_leases.core.errors import AlreadyDone, KeyReused, LeaseHeld, LeasesError, PermanentFailure, ResultMissing
from celery_leases.core.keys import CallKey, differing
from celery_leases.core.options import LeaseOptions
from celery_leases.core.ports import Holder
from celery_leases.core.records import Attempt, Ended, Failure, Outcome, Record, State
from celery_leases.core.results import NOT_JSON, TOO_LARGE

CRASH_LOOP = "crash_loop"
NO_RESULT = ""
_WITHOUT_RESULT = (Ended.IGNORED, Ended.REJECTED, Ended.REPLACED)
REMEMBERED_CALLS = 16
REMEMBERED_RESULT_MAX = 4096
RETRY_GRACE = 1.0
DISPATCH_GRACE = 5.0
"""Seconds after its end in which a call may still be sending its callbacks; a replay would send them once more."""
SHORTEST_DELAY = 0.05
LONGEST_HOP = 600.0


@dataclass(frozen=True, slots=True)
class Call:
    """One delivery of one call, as far as decisions look at it."""

    task: str
    call_id: str
    key: CallKey
    options: LeaseOptions
    #: It was delivered before: redelivered by the broker, put back, or retried. Reading the record first is cheaper.
    repeat: bool = False
    #: It carries chain, chord, group or link, which a dropped delivery would leave hanging.
    canvas: bool = False
    #: How often this call was put back before.
    tries: int = 0
    #: It has begun to run before.
    started: bool = False
    #: How often Celery has retried it.
    retries: int = 0
    #: The tokens of earlier attempts of this call which we may have left open.
    prior: tuple[str, ...] = ()
    #: The owner token made for this delivery.
    token: str = ""
    #: The longest countdown the broker can be trusted with, in seconds.
    longest_hop: float = LONGEST_HOP
    #: The hard time limit of this call in seconds, if it has one.
    time_limit: float | None = None


@dataclass(frozen=True, slots=True)
class Run:
    """Go on: acquire, claim, or run the body, whichever is next."""


@dataclass(frozen=True, slots=True)
class Replay:
    """Answer with the saved result (JSON text; ``None``: it has none), first returned to ``first_call_id``."""

    result: str | None
    first_call_id: str


@dataclass(frozen=True, slots=True)
class PutBack:
    """Publish a fresh message that comes in ``delay`` seconds, then end this delivery."""

    delay: float
    reason: str
    #: The call is known to have begun.
    started: bool = False


@dataclass(frozen=True, slots=True)
class Wait:
    """Try again in this process after ``delay`` seconds."""

    delay: float


@dataclass(frozen=True, slots=True)
class Drop:
    """End this delivery without a result; another message or an earlier answer stands for it."""

    reason: str


@dataclass(frozen=True, slots=True)
class Refuse:
    """Raise ``error`` to the caller; ``own``: unless Celery knows the outcome of this very call already."""

    error: LeasesError
    own: bool = False


@dataclass(frozen=True, slots=True)
class StandBack:
    """Give the claimed attempt back and wait ``delay`` seconds: the key has crashed repeatedly."""

    delay: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Close the claimed attempt as failed for good, and raise ``error`` to the caller."""

    error: PermanentFailure


Verdict = Run | Replay | PutBack | Wait | Drop | Refuse | StandBack | GiveUp


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known before the run: of the lease, of the record, and of this delivery's past."""

    record: Record | None = None
    holder: Holder | None = None
    #: The record was claimed by this delivery.
    claimed: bool = False
    #: The callbacks of this very call are known to have been sent, whoever finished the work.
    callbacks_out: bool = False
    #: Seconds this delivery has been waiting in this process (``lease_on_held="wait"``).
    waited: float = 0.0
    #: A random number in [0, 1) for jitter.
    chance: float = 0.0


def before_run(call: Call, facts: Facts) -> Verdict:
    """Decide what the delivery does next; see the table above."""
    record = facts.record
    if facts.claimed:
        assert record is not None
        return _after_claim(call, record)
    if facts.callbacks_out:
        return Drop("its result and callbacks are out")
    if record is not None and record.expired:
        record = None
    if record is not None:
        answer = _answered(call, record, facts)
        if answer is not None:
            return answer
    holder = facts.holder or (holder_in(record) if record is not None else None)
    if holder is not None:
        return _held(call, holder, facts)
    if record is not None and record.state in (State.PENDING, State.COOLING) and may_run_in(call, record) > 0:
        started = record.call_id == call.call_id
        return PutBack(_hop(call, record.waits + _jitter(facts)), "waiting for its retry time", started)
    return Run()


def store_came_up_empty(call: Call, record: Record | None, age: float, chance: float) -> PutBack | Run:
    """Whether a key may be claimed under a lease store that lost its data *age* seconds ago.

    Its live holders re-assert their leases with the next renewal; until their ttl is over nobody takes over from them.
    """
    if record is None or record.state is not State.RUNNING:
        return Run()
    wait = record.lease_ttl - age
    return PutBack(_hop(call, wait + 0.4 * chance), "the lease store came up empty") if wait > 0 else Run()


def finished_by(call: Call, record: Record) -> bool:
    """Whether this very call is known to have finished the key."""
    return call.call_id in record.finished_calls or (record.state is State.DONE and record.call_id == call.call_id)


def holder_in(record: Record) -> Holder | None:
    """The holder a row names, while the lease in it lasts."""
    if record.state is not State.RUNNING or record.lease_remaining <= 0:
        return None
    return Holder(record.owner, record.call_id, record.holder, record.lease_ttl, record.lease_remaining)


def may_run_in(call: Call, record: Record) -> float:
    """Seconds until this call may run the key; the call that waits is granted the travel time of its message."""
    grace = RETRY_GRACE if record.call_id == call.call_id else 0.0
    return max(0.0, record.waits - grace)


def crash_pause(crashes: int) -> float:
    """Seconds to wait before the next attempt after so many crashes in a row."""
    return 0.0 if crashes < 2 else 5.0 if crashes == 2 else 30.0


def _answered(call: Call, record: Record, facts: Facts) -> Verdict | None:
    """The verdict where the record has an answer for this delivery, whoever holds the lease."""
    ours = record.call_id == call.call_id
    if finished_by(call, record):
        return _own_answer(call, record, facts)
    if ours and record.state is State.PENDING and record.ended is Ended.FAILED:
        return Refuse(_remembered(record), own=True)
    if ours and record.retries > call.retries and (record.state is State.RUNNING or record.ended is Ended.RETRIED):
        return Drop("a retry of this call has taken its place")
    if record.state is State.UNCERTAIN or (record.state is State.FAILED and (ours or not call.options.rerun)):
        return Refuse(_remembered(record))
    freed = record.state is State.PENDING and record.ended is Ended.FAILED
    if not (ours or freed or call.options.rerun or _agree(record.fingerprint, call.key.fingerprint)):
        return Refuse(_reused(call, record))
    return _done_by_other(call, record) if record.state is State.DONE else None


def _agree(ours: str | None, theirs: str | None) -> bool:
    return ours is None or theirs is None or ours == theirs


def _own_answer(call: Call, record: Record, facts: Facts) -> Verdict:
    if record.state is State.DONE and record.call_id == call.call_id:
        if record.reason in _WITHOUT_RESULT:
            return Drop(f"it was {record.reason} by the task itself")
        if call.canvas and (wait := _dispatching(record)) > 0:
            return PutBack(_hop(call, wait + _jitter(facts)), "its callbacks are being sent", started=True)
        return _saved(record, own=True)
    result = (record.finished_results or {}).get(call.call_id)
    if result == NO_RESULT:
        return Drop("it has ended without a result")
    if result is not None:
        return Replay(result, call.call_id)
    message = f"{record.key}: this call is done, but its result was not kept"
    return Refuse(ResultMissing(message, record.key, "overwritten"), own=True)


def _dispatching(record: Record) -> float:
    """Seconds for which the attempt that wrote this outcome may still be sending its callbacks."""
    return DISPATCH_GRACE - (record.now - record.finished_at) / 1e6 if record.finished_at is not None else 0.0


def _done_by_other(call: Call, record: Record) -> Verdict | None:
    on_done = "replay" if call.started and not call.options.rerun else call.options.on_done
    match on_done:
        case "rerun":
            return None
        case "fail":
            return Refuse(AlreadyDone(f"{record.key} was done by call {record.call_id}", record.key, record.call_id))
        case "ignore" if not call.canvas:
            return Drop("another call has done it")
        case "replay" | "ignore":
            return _saved(record)
        case _ as never:
            assert_never(never)


def _saved(record: Record, *, own: bool = False) -> Verdict:
    if record.reason in (TOO_LARGE, NOT_JSON, *_WITHOUT_RESULT):
        message = f"{record.key} is done, but it has no result to give ({record.reason})"
        return Refuse(ResultMissing(message, record.key, record.reason), own)
    return Replay(record.result, record.call_id)


def _held(call: Call, holder: Holder, facts: Facts) -> Verdict:
    longest = max(1.0, holder.remaining)
    growing = min(2.0 ** min(call.tries, 20), longest) + _jitter(facts)
    if holder.call_id == call.call_id:
        # The message of a retry may overtake the end of the attempt that sent it.
        delay = growing if call.retries and not call.tries else holder.remaining + _jitter(facts)
        return PutBack(_hop(call, delay), "a copy of this call is running", started=True)
    put_back = PutBack(_hop(call, growing), "another call holds the key")
    match "put_back" if call.started else call.options.on_held:
        case "put_back":
            return put_back
        case "wait":
            patience = min(call.options.wait, call.time_limit / 2) if call.time_limit else call.options.wait
            left = patience - facts.waited
            return Wait(min(left, 0.2 + 0.3 * facts.chance)) if left > 0 else put_back
        case "ignore":
            return put_back if call.canvas else Drop("another call holds the key")
        case "fail":
            more = f"for another {holder.remaining:.1f} s"
            message = f"{call.key.key} is held by call {holder.call_id} on {holder.host} {more}"
            return Refuse(LeaseHeld(message, call.key.key, holder.remaining, holder.host))
        case _ as never:
            assert_never(never)


def _after_claim(call: Call, record: Record) -> Verdict:
    ours = record.crashed_call in (None, call.call_id) or not call.options.rerun
    if record.crashes >= call.options.max_crashes and ours and (record.just_crashed or call.options.rerun):
        return GiveUp(crash_loop(record))
    pause = crash_pause(record.crashes) if record.just_crashed and ours else 0.0
    return StandBack(pause) if pause else Run()


def _remembered(record: Record) -> PermanentFailure:
    failure = record.failure or Failure("", f"{record.key} has failed for good")
    return PermanentFailure(failure.message, failure.rule, failure.type or None)


def _reused(call: Call, record: Record) -> KeyReused:
    names = differing(call.key.digests, record.digests)
    listed = ", ".join(names) or "their fingerprint"
    return KeyReused(f"{record.key} stands for a call with other arguments; they differ in {listed}", record.key, names)


def _hop(call: Call, delay: float) -> float:
    return max(SHORTEST_DELAY, min(delay, call.longest_hop))


def _jitter(facts: Facts) -> float:
    return 0.1 + 0.4 * facts.chance


# -- when a store fails ------------------------------------------------------------------------------------


def store_pause(tries: int, chance: float) -> float:
    """How long a delivery stays away while a store does not answer: 5 s doubling to 60 s, with jitter below it."""
    return float(min(60.0, 5.0 * 2.0 ** min(tries, 10)) * (0.8 + 0.2 * chance))


def settle_pause(tries: int) -> float:
    """How long to wait before the outcome is written again."""
    return float(min(2.0, 0.05 * 2.0 ** min(tries, 10)))


def settle_until(call: Call, now: float, taken: float) -> float:
    """Until when to keep trying to write an outcome: ``lease_settle_timeout``, cut to what the hard limit leaves.

    *taken* is when the delivery was taken up, which is about when Celery began to count the limit.
    """
    until = now + call.options.settle_timeout
    return min(until, taken + call.time_limit - 1.0) if call.time_limit else until


# -- after the run -----------------------------------------------------------------------------------------


def after_run(call: Call, record: Record, ending: Ending) -> Outcome:
    """How the attempt that ran on *record* is closed; see the table above."""
    closed = Outcome(
        State.PENDING,
        Ended.RETURNED,
        record.attempt,
        record.failures,
        record.crashes,
        call.options.retention,
        record.retries,
    )
    # Under ``rerun`` the crashes are those of the call that crashed, and another call's success says nothing of it.
    other = call.options.rerun and record.crashed_call not in (None, call.call_id)
    crashes = record.crashes if other else 0
    unspent = replace(closed, attempt=record.attempt - 1)
    match ending:
        case Returned(_, result, missing):
            finished = _finished(call, record, result)
            done = replace(closed, state=State.DONE, failures=0, crashes=crashes)
            return replace(done, result=result, reason=missing, finished=finished)
        case Raised(_, failure):
            failures = record.failures + 1
            return replace(closed, ended=Ended.FAILED, failure=failure, failures=failures, crashes=crashes)
        case Lost(reason):
            return replace(unspent, ended=Ended.LOST, reason=reason)
        case Interrupted():
            return replace(unspent, ended=Ended.INTERRUPTED)
        case Terminated(_, reason):
            return _crashed(
                call,
                replace(closed, ended=Ended.TERMINATED, reason=reason, crashes=(0 if other else record.crashes) + 1),
            )
        case Passed(_, again, delay, ended):
            passed = replace(closed, ended=ended, crashes=crashes)
            if again:
                retries = record.retries + 1 if ended is Ended.RETRIED else record.retries
                return replace(passed, retry_after=delay, retries=retries)
            finished = _finished(call, record, NO_RESULT)
            return replace(passed, state=State.DONE, reason=ended.value, failures=0, finished=finished)
        case _ as never:
            assert_never(never)


def gave_up(call: Call, record: Record) -> Outcome:
    """How a claimed attempt is closed that must not run any more."""
    unrun = Outcome(
        State.PENDING,
        Ended.CRASHED,
        record.attempt - 1,
        record.failures,
        record.crashes,
        call.options.retention,
        record.retries,
    )
    return replace(_crashed(call, unrun), finished=_finished(call, record, NO_RESULT))


def stood_back(call: Call, record: Record, delay: float) -> Outcome:
    """How a claimed attempt is given back unrun; how the one before it ended is kept."""
    before = record.previous or Attempt(Ended.WAITING)
    attempt, keep = record.attempt - 1, call.options.retention
    return Outcome(
        State.PENDING,
        before.ended,
        attempt,
        record.failures,
        record.crashes,
        keep,
        record.retries,
        retry_after=delay or None,
        failure=before.error,
    )


def crash_loop(record: Record) -> PermanentFailure:
    """What a caller is told of a key that keeps killing its process."""
    message = f"{record.key}: its process died {record.crashes} times in a row; not tried again until `leases forget`"
    return PermanentFailure(message, CRASH_LOOP)


def _crashed(call: Call, outcome: Outcome) -> Outcome:
    if outcome.crashes < call.options.max_crashes:
        return replace(outcome, retry_after=crash_pause(outcome.crashes) or None)
    message = f"{call.key.key}: its process died {outcome.crashes} times in a row"
    failure = Failure(PermanentFailure.__qualname__, message, CRASH_LOOP)
    return replace(outcome, state=State.FAILED, failure=failure, reason=CRASH_LOOP)


def _finished(call: Call, record: Record, result: str | None) -> Mapping[str, str | None] | None:
    if not call.options.rerun:
        return None
    results = record.finished_results or {}
    kept = [(name, results.get(name)) for name in record.finished_calls if name != call.call_id]
    small = result if result is not None and len(result) <= REMEMBERED_RESULT_MAX else None
    return dict([*kept, (call.call_id, small)][-REMEMBERED_CALLS:])
