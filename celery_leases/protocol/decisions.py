"""What to do with one delivery: pure functions of facts, no clock, no I/O, no randomness.

The functions of the first table are here, those of the second in ``failures`` and ``outcomes``,
with those of failing stores.

Before the run (first row that matches)

===========================================  =======================================================
the record says                              verdict
===========================================  =======================================================
this call's callbacks are sent               ``Drop``
this call has finished                       ``Return`` with the saved result;
                                             with callbacks, just now: ``Reschedule``, they are being sent
this call was ended by the user's ``Ignore``,
``Reject`` or ``replace()``                  ``Drop``
this call's caller got its failure,
and this is a copy                           ``Raise`` with the remembered failure
this call has been retried since             ``Drop``
failed for good (``rerun``: this call only)  ``Raise(PermanentFailure)``
waiting for an operator                      ``Raise(PermanentFailure)``
another fingerprint, another call            ``Raise(KeyReused)``
done by another call                         ``lease_on_done``: ``Return``, ``Drop``, ``Raise``, ``Run``;
                                             by its ``replace()``: ``Follow`` for ``Return``
running under a live lease, or lease held    this call: ``Reschedule`` until the lease ends;
                                             another: ``Wait`` for ``lease_wait``, then
                                             ``lease_on_held``: ``Reschedule``, ``Drop``, ``Raise``
waiting for ``retry_at``                     ``Reschedule`` until then
cooling, or the gate of its group is shut    this call, or one that has begun: ``Reschedule`` until then;
                                             another: ``lease_on_cooling``:
                                             ``Raise(CoolingDown)``, ``Reschedule``, ``Drop``
claimed, and crashed too often in a row      ``Raise(PermanentFailure)``
claimed, second crash in a row or later      ``Reschedule`` for 5 s, then 30 s
anything else                                ``Run``
===========================================  =======================================================

A call that has begun before is never dropped or refused because of another one: it is rescheduled,
or replayed. A delivery that carries chain, chord, group or link is never dropped because of another
call either.

After the run

===========================================  =======================================================
the body                                     how the attempt is closed, and what Celery gets
===========================================  =======================================================
returned                                     ``done``; the value as it was stored
raised, and the rules say: permanent         ``failed``; the exception
raised, and the rules say: retry             ``pending`` for the delay, a quick retry; rescheduled, ``Retry``
raised, and the rules say: cooldown          ``cooling`` for the delay, a failure unless it is its group's;
                                             ``lease_resume``: rescheduled, ``Retry``; or the exception
raised once too often                        a retry above ``lease_max_retries`` becomes a cooldown,
                                             failure number ``lease_max_failures`` is ``failed``
``Snooze``                                   ``pending`` for the delay, attempt given back; rescheduled
lost its lease                               ``pending``, attempt given back; rescheduled
was interrupted by a shutdown or revoke      ``pending``, attempt given back; the interruption continues
ran into the hard limit, or exited           ``pending``, a crash; the interruption continues
``Retry``, ``Reject(requeue=True)``          ``pending``, until the countdown is over; passed through
``Ignore``, ``Reject``, ``replace()``        ``done`` without a result; passed through
===========================================  =======================================================

A failure of the group closes the gate of ``lease_cooldown_group`` first. A probe's success opens
it, and so does its failure if that is clearly not the group's; a quick retry, an ambiguous failure
or no failure leave it half-open.

When a store fails: before the body has run the delivery is rescheduled; an outcome is tried again
for ``leases_settle_timeout``, then the lease is left to expire and the delivery is rescheduled.
"""

from __future__ import annotations

from typing import Final, assert_never

from celery_leases.common.texts import printable
from celery_leases.errors import AlreadyDone, KeyReused, LeaseHeld, PermanentFailure, ResultMissing
from celery_leases.protocol import claims
from celery_leases.protocol.keys import differing
from celery_leases.protocol.ports import Holder
from celery_leases.protocol.records import Ended, Failure, Record, Refusal, State
from celery_leases.protocol.results import NOT_JSON, TOO_LARGE, decode_stored
from celery_leases.protocol.settlement import NO_RESULT, WITHOUT_RESULT, crash_loop, crash_pause
from celery_leases.protocol.verdicts import (
    Call,
    Drop,
    Facts,
    Follow,
    Raise,
    Reschedule,
    Return,
    Run,
    Verdict,
    Wait,
)
from celery_leases.protocol.waiting import countdown, countdown_until_free, jitter, not_due_yet

SENT: Final = "its result and callbacks are already sent"
ENDED_ALREADY: Final = "it has ended without a result"
DONE_ELSEWHERE: Final = "another call has done it"
HELD_ELSEWHERE: Final = "another call holds the key"
OUTCOME_KNOWN: Final = "its outcome is already known"
_BY_THE_TASK: Final = "it was {} by the task itself"
RUN_SAVED: Final = (
    *(SENT, ENDED_ALREADY, DONE_ELSEWHERE, HELD_ELSEWHERE, OUTCOME_KNOWN),
    *map(_BY_THE_TASK.format, WITHOUT_RESULT),
)
"""Why a delivery is dropped whose work is done, or is being done: a run is saved."""
LONGEST_LOOK = 60.0
"""Seconds between two looks at the result of a task that stands for another one."""
DISPATCH_GRACE = 5.0
"""Seconds after its end in which a call may still be sending its callbacks; a replay would send
them once more.
"""


def before_run(call: Call, facts: Facts) -> Verdict:
    """Decide what the delivery does next; see the table above. Raises :class:`RecordUnreadable` for
    a saved result that cannot be read.
    """
    record = facts.record
    if facts.callbacks_sent:
        return Drop(SENT)
    why = claims.refusal(record, call)
    if why is not None and record is not None and why not in (Refusal.HELD, Refusal.NOT_DUE):
        return _answered(call, record, why, facts)
    holder = facts.holder or (
        holder_of_row(record) if record is not None and why is Refusal.HELD else None
    )
    if holder is not None:
        return _held(call, holder, facts)
    if facts.gate is not None or why is Refusal.NOT_DUE:
        return not_due_yet(call, None if record is not None and record.expired else record, facts)
    return Run()


def permanent_failure(record: Record) -> PermanentFailure:
    """The error for the callers of a key that has failed for good, or waits for an operator."""
    failure = record.failure or Failure("", f"{record.key} has failed for good")
    return PermanentFailure(printable(failure.text, None), failure.rule, failure.type or None)


def holder_of_row(record: Record) -> Holder | None:
    """The holder a row names, while the lease in it lasts."""
    if record.state is not State.RUNNING or record.lease_remaining <= 0:
        return None
    return Holder(
        record.owner, record.call_id, record.holder, record.lease_ttl, record.lease_remaining
    )


def _answered(call: Call, record: Record, why: Refusal, facts: Facts) -> Verdict:
    """The verdict where the record has an answer for this delivery, whoever holds the lease."""
    match why:
        case Refusal.FAILED:
            return Raise(
                permanent_failure(record), own=call.repeat and record.call_id == call.call_id
            )
        case Refusal.FINISHED:
            return _own_answer(call, record, facts)
        case Refusal.REPORTED:
            return Raise(permanent_failure(record), own=True)
        case Refusal.SUPERSEDED:
            return Drop("a retry of this call has replaced it")
        case Refusal.REUSED:
            return Raise(_reused(call, record))
        case _:
            return _done_by_other(call, record, facts)


def _own_answer(call: Call, record: Record, facts: Facts) -> Verdict:
    if record.state is State.DONE and record.call_id == call.call_id:
        if record.reason in WITHOUT_RESULT:
            return Drop(_BY_THE_TASK.format(record.reason))
        if call.canvas and (wait := _dispatching(record)) > 0:
            return Reschedule(
                countdown(call, wait + jitter(facts)),
                "its callbacks are being sent",
                started=True,
                event_type="",
            )
        return _saved(record, own=True)
    result = (record.finished_results or {}).get(call.call_id)
    if result == NO_RESULT:
        return Drop(ENDED_ALREADY)
    if result is not None:
        return _replay(record, result, call.call_id)
    message = f"{printable(record.key)}: this call is done, but its result was not stored"
    return Raise(ResultMissing(message, record.key, "overwritten"), own=True)


def _dispatching(record: Record) -> float:
    """Seconds for which the attempt that wrote this outcome may still be sending its callbacks."""
    return (
        DISPATCH_GRACE - (record.now - record.finished_at) / 1e6
        if record.finished_at is not None
        else 0.0
    )


def _done_by_other(call: Call, record: Record, facts: Facts) -> Verdict:
    match "replay" if call.started else call.options.on_done:
        case "raise":
            message = f"{printable(record.key)} was done by call {record.call_id}"
            return Raise(AlreadyDone(message, record.key, record.call_id))
        case "ignore" if not call.canvas:
            return Drop(DONE_ELSEWHERE)
        case "replay" | "ignore":
            return (
                _gone_on(call, record, facts) if record.reason == Ended.REPLACED else _saved(record)
            )
        case "rerun":
            raise AssertionError("done work does not hold back a call of a rerun task")
        case _ as never:
            assert_never(never)


def _gone_on(call: Call, record: Record, facts: Facts) -> Verdict:
    """The call has replaced itself by another task, of which Celery alone knows the result."""
    age = (record.now - record.finished_at) / 1e6 if record.finished_at is not None else 0.0
    growing = min(2.0 ** min(call.reschedules, 20), LONGEST_LOOK) + jitter(facts)
    reason = f"call {record.call_id} continues as another task, which has not ended"
    missing = _missing(record)
    again = Reschedule(countdown(call, growing), reason, refusal=missing, event_reason=reason)
    return Follow(record.call_id, age, again, missing)


def _saved(record: Record, *, own: bool = False) -> Verdict:
    if record.reason in (TOO_LARGE, NOT_JSON, *WITHOUT_RESULT):
        return Raise(_missing(record), own)
    return _replay(record, record.result, record.call_id)


def _replay(record: Record, result: str | None, first_call_id: str) -> Return:
    return Return(decode_stored(result, record.key, "result", record.task), first_call_id)


def _missing(record: Record) -> ResultMissing:
    message = f"{record.key} is done, but has no result to return ({record.reason})"
    return ResultMissing(message, record.key, record.reason)


def _held(call: Call, holder: Holder, facts: Facts) -> Verdict:
    longest = max(1.0, holder.remaining)
    growing = min(2.0 ** min(call.reschedules, 20), longest) + jitter(facts)
    if holder.call_id == call.call_id:
        # The message of a retry may overtake the end of the attempt that sent it.
        delay = (
            growing if call.retries and not call.reschedules else holder.remaining + jitter(facts)
        )
        return Reschedule(
            countdown(call, delay), "a copy of this call is running", started=True, event_type=""
        )
    delay = countdown_until_free(call, facts) if call.starts_when_free else growing
    reason = "another call holds the key" + (
        "; this call begins when the key is free" if call.starts_when_free else ""
    )
    reschedule = Reschedule(countdown(call, delay), reason, event_type="held", held=True)
    patience = min(call.options.wait, call.time_limit / 2) if call.time_limit else call.options.wait
    if not call.started and (left := patience - facts.waited) > 0:
        return Wait(min(left, 0.2 + 0.3 * facts.rand))
    match "reschedule" if call.started else call.options.on_held:
        case "reschedule":
            return reschedule
        case "ignore":
            return reschedule if call.canvas else Drop(HELD_ELSEWHERE)
        case "raise":
            more = f"for another {holder.remaining:.1f} s"
            message = f"{printable(call.key.key)} is held by call {holder.call_id} on {holder.host} {more}"
            return Raise(LeaseHeld(message, call.key.key, holder.remaining, holder.host))
        case _ as never:
            assert_never(never)


def after_claim(call: Call, record: Record) -> Run | Reschedule | Raise:
    """Decide whether a claimed attempt runs; see the table above. One that does not is closed."""
    ours = record.crashed_call in (None, call.call_id) or not call.options.rerun
    if (
        record.crashes >= call.options.max_crashes
        and ours
        and (record.just_crashed or call.options.rerun)
    ):
        return Raise(crash_loop(record))
    pause = crash_pause(record.crashes) if record.just_crashed and ours else 0.0
    return Reschedule(pause, "it crashed repeatedly", started=True) if pause else Run()


def _reused(call: Call, record: Record) -> KeyReused:
    names = differing(call.key.digests, record.digests)
    listed = ", ".join(names) or "their fingerprint"
    message = (
        f"{printable(record.key)} stands for a call with other arguments; they differ in {listed}"
    )
    return KeyReused(message, record.key, names)
