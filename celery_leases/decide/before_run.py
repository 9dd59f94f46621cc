"""What to do with one delivery: pure functions of facts, without a clock, I/O or randomness.

The functions of the first table are here: they give a *verdict*. Those of the second get the
*ending* of a body and give the *outcome* that is written: ``after_failure`` if the body raised, and
``after_run`` otherwise.

Before the run: the first row that matches decides

================================================  ==================================================
the record says                                   verdict
================================================  ==================================================
the callbacks of this call are sent               ``Drop``
this call failed for good, or is ``uncertain``    ``Raise(PermanentFailure)``
this call ended without a result                  ``Drop``
this call finished                                ``Return`` the saved result;
                                                  its callbacks are still being sent: ``Reschedule``
this call failed, its caller has the failure,
and this delivery is a copy                       ``Raise`` the saved failure
a later retry of this call has the record         ``Drop``
another call failed for good (unless each
call runs), or is ``uncertain``                   ``Raise(PermanentFailure)``
the key belongs to a call with other arguments    ``Raise(KeyReused)``
another call finished                             ``lease_on_done``: ``Return``, ``Raise``, ``Drop``;
                                                  it ended by ``replace()``: ``Follow`` instead of ``Return``
an attempt holds the lease                        of this call: ``Reschedule`` until the lease ends;
                                                  of another call: ``lease_on_busy``:
                                                  ``Reschedule``, ``Raise``, ``Drop``
``cooling``, or its group blocks                  this call, or one that has begun: ``Reschedule`` until then;
                                                  another call: ``lease_on_busy``:
                                                  ``Reschedule``, ``Raise(CoolingDown)``, ``Drop``
the group is full, or its rate is used up         as for a group that blocks
``pending``, and ``retry_at`` is in the future    ``Reschedule`` until then
claimed, after ``Failures.crashes`` in a row      ``Raise(PermanentFailure)``
claimed, after the second crash in a row          ``Reschedule`` for 5 s, later for 30 s
anything else                                     ``Run``
================================================  ==================================================

A call that has begun is never dropped or refused because of another call: it is rescheduled, or
gets the saved result. A delivery that carries chain, chord, group or link is never dropped because
of another call either. Without a result ends a call that raises ``Ignore`` or calls ``replace()``.
With ``lease_runs="latest"`` another call ends a call only if it is not older, and
:mod:`~celery_leases.decide.latest` decides which one runs. A call whose caller has its failure no
longer reserves the key for its arguments.

After the run

================================================  ==================================================
the body                                          how the attempt is closed, and what Celery gets
================================================  ==================================================
returned                                          ``done``; the value as it was stored
raised, and the rules say permanent               ``failed``; the exception
raised, and the rules say retry                   ``pending`` for the delay, a quick retry; rescheduled, ``Retry``
raised, and the rules say cooldown                ``cooling`` for the delay, a failure unless its group failed;
                                                  ``Failures.resume``: rescheduled, ``Retry``; or the exception
raised once too often                             a retry above ``Failures.retries`` becomes a cooldown,
                                                  failure number ``Failures.failures`` is ``failed``
raised ``Uncertain``                              ``uncertain``; the exception
raised ``Snooze``                                 ``pending`` for the delay, attempt not counted; rescheduled
lost its lease                                    ``pending``, attempt not counted; rescheduled
was interrupted by a shutdown or revoke           ``pending``, attempt not counted; the interruption continues
ran into the hard time limit, or ended its
pool process                                      ``pending``, a crash, ``failed`` after ``Failures.crashes``;
                                                  the interruption continues
called ``retry()``, published its call again,
or raised ``Reject(requeue=True)``                ``pending`` until the countdown is over; the exception
called ``replace()``, or raised ``Ignore``        ``done`` without a result; the exception
raised ``Reject``, ``Ignore`` after it had set
its state to ``FAILURE``, or its own ``Retry``    ``pending``: the call has failed, the next one runs; the exception
================================================  ==================================================

A failure of the group first closes ``lease_group``. A probe that succeeds opens the group, and so
does a probe that fails for a reason that is clearly not the group's. A quick retry, an ambiguous
failure or no failure leaves the group due for a probe.

When a store fails before the body has run, the delivery is rescheduled. An outcome that cannot be
written is tried again for a minute; then the lease is left to expire, and the
delivery is rescheduled.
"""

from __future__ import annotations

from typing import Final, assert_never

from celery_leases.call import Call
from celery_leases.decide import attempt_history, claim
from celery_leases.decide.after_run import (
    FAILED_FOR_GOOD,
    NO_RESULT,
    WITHOUT_RESULT,
    crash_loop,
    crash_pause,
)
from celery_leases.decide.answers import Holder, Refusal
from celery_leases.decide.verdicts import (
    Drop,
    Facts,
    Follow,
    Raise,
    Reschedule,
    Return,
    Run,
    Verdict,
)
from celery_leases.decide.waiting import (
    countdown,
    countdown_until_free,
    jitter,
    not_due_yet,
    while_busy,
    while_full,
)
from celery_leases.errors import AlreadyDone, LeaseHeld, PermanentFailure, ResultMissing
from celery_leases.events import Dropped
from celery_leases.keys import key_reused
from celery_leases.record import Ended, Failure, Record, State
from celery_leases.results import NOT_JSON, TOO_LARGE, decode_stored
from celery_leases.text.cleaning import printable

LONGEST_FOLLOW_DELAY: Final = 60.0
"""Seconds between two looks at the result of the task that replaced a finished one, at most."""
CALLBACK_TIME: Final = 5.0
"""Seconds after the end of a call in which its process may still be sending its callbacks. A replay
in that time would send them a second time.
"""


def before_run(call: Call, facts: Facts) -> Verdict:
    """Decide what the delivery does next: the first table above.

    Raises :class:`RecordUnreadable` for a saved result that cannot be read.
    """
    if facts.callbacks_sent:
        return Drop(Dropped.CALLBACKS_SENT)
    record = facts.record if facts.record is not None and not facts.record.expired else None
    refusal = claim.refusal(record, call)
    if record is not None and refusal not in (Refusal.HELD, Refusal.NOT_DUE, None):
        return _answer_in_record(call, record, refusal, facts)
    holder = facts.holder
    if holder is None and record is not None and refusal is Refusal.HELD:
        holder = holder_of_row(record)
    if holder is not None:
        return _held(call, holder, facts)
    if facts.closed_group is not None or refusal is Refusal.NOT_DUE:
        return not_due_yet(call, record, facts)
    if facts.room is not None:
        return while_full(call, facts, facts.room)
    return Run()


def after_claim(call: Call, record: Record) -> Run | Reschedule | Raise:
    """Decide whether a claimed attempt runs: the last rows of the first table above.

    An attempt that does not run is closed.
    """
    counted = record.crashed_call in (None, call.call_id) or not call.options.reruns
    if not counted:
        return Run()
    if record.crashes >= call.options.failures.crashes:
        return Raise(crash_loop(record))
    return run_or_pause(record)


def run_or_pause(record: Record) -> Run | Reschedule:
    """Decide whether a claimed attempt, which does not fail for its crashes, runs now."""
    pause = crash_pause(record.crashes) if record.just_crashed else 0.0
    if not pause:
        return Run()
    ended = attempt_history.crashes_in_words(record, record.crashes)
    return Reschedule(pause, ended, started=True)


def permanent_failure(record: Record) -> PermanentFailure:
    """The error for callers of a key that has failed for good, or waits for an operator."""
    failure = record.failure or Failure("", f"{record.key} has failed for good")
    return PermanentFailure(printable(failure.text, None), failure.rule, failure.type or None)


def holder_of_row(record: Record) -> Holder | None:
    """The holder that a row names; ``None`` if the row has no lease, or its lease has expired."""
    if record.state is not State.RUNNING or record.lease_remaining <= 0:
        return None
    return Holder(
        record.owner, record.call_id, record.holder, record.lease_ttl, record.lease_remaining
    )


def _answer_in_record(call: Call, record: Record, refusal: Refusal, facts: Facts) -> Verdict:
    """The verdict on a delivery for which the record has an answer, whichever attempt holds the
    lease.
    """
    match refusal:
        case Refusal.FAILED:
            return Raise(permanent_failure(record), own=call.repeat and _is_ours(record, call))
        case Refusal.FINISHED:
            return _finished_by_this_call(call, record, facts)
        case Refusal.REPORTED:
            return Raise(permanent_failure(record), own=True)
        case Refusal.SUPERSEDED:
            return Drop(Dropped.RETRIED_SINCE)
        case Refusal.REUSED:
            return Raise(key_reused(record.key, call.key.digests, record.digests))
        case Refusal.DONE:
            return _finished_by_other_call(call, record, facts)
    raise AssertionError(f"the record has no answer where the refusal is {refusal}")


def _is_ours(record: Record, call: Call) -> bool:
    return record.call_id == call.call_id


# -- finished --------------------------------------------------------------------------------------


def _finished_by_this_call(call: Call, record: Record, facts: Facts) -> Verdict:
    if record.state is not State.DONE or not _is_ours(record, call):
        return _finished_before(call, record)
    if record.reason in WITHOUT_RESULT:
        return Drop(Dropped.NO_RESULT, f"it was {record.reason} by the task itself")
    sending = CALLBACK_TIME - _seconds_since_end(record)
    if call.canvas and record.finished_at is not None and sending > 0:
        return Reschedule(
            countdown(call, sending + jitter(facts)),
            "its callbacks are being sent",
            started=True,
            event_type="",
        )
    return _replay(record, own=True)


def _finished_before(call: Call, record: Record) -> Verdict:
    """The verdict on a call that finished before the record's latest call
    (``lease_runs="each"``).
    """
    result = (record.finished_results or {}).get(call.call_id)
    if result == NO_RESULT:
        return Drop(Dropped.NO_RESULT)
    if result is not None and result.startswith(FAILED_FOR_GOOD):
        text = printable(result.removeprefix(FAILED_FOR_GOOD), None)
        return Raise(
            PermanentFailure(text or f"{printable(record.key)} has failed for good"), own=True
        )
    if result is not None:
        return _return(record, result, call.call_id)
    message = f"{printable(record.key)}: this call is done, but its result was not stored"
    return Raise(ResultMissing(message, record.key, "overwritten"), own=True)


def _finished_by_other_call(call: Call, record: Record, facts: Facts) -> Verdict:
    replays = call.started or call.options.latest_runs
    match "replay" if replays else call.options.on_done:
        case "raise":
            message = f"{printable(record.key)} was done by call {record.call_id}"
            return Raise(AlreadyDone(message, record.key, record.call_id))
        case "ignore" if not call.canvas:
            return Drop(Dropped.DONE_BY_OTHER)
        case "replay" | "ignore" if record.reason == Ended.REPLACED:
            return _follow(call, record, facts)
        case "replay" | "ignore":
            return _replay(record)
        case _ as never:
            assert_never(never)


def _follow(call: Call, record: Record, facts: Facts) -> Follow:
    """Wait for the task that replaced a finished one: only Celery knows its result."""
    delay = min(2.0 ** min(call.reschedules, 20), LONGEST_FOLLOW_DELAY) + jitter(facts)
    reason = f"call {record.call_id} continues as another task, which has not ended"
    missing = _result_missing(record)
    again = Reschedule(countdown(call, delay), reason, refusal=missing)
    return Follow(record.call_id, _seconds_since_end(record), again, missing)


def _replay(record: Record, *, own: bool = False) -> Return | Raise:
    if record.reason in (TOO_LARGE, NOT_JSON, *WITHOUT_RESULT):
        return Raise(_result_missing(record), own)
    return _return(record, record.result, record.call_id)


def _return(record: Record, result: str | None, first_call_id: str) -> Return:
    return Return(decode_stored(result, record.key, "result", record.task), first_call_id)


def _result_missing(record: Record) -> ResultMissing:
    message = f"{record.key} is done, but has no result to return ({record.reason})"
    return ResultMissing(message, record.key, record.reason)


def _seconds_since_end(record: Record) -> float:
    """Seconds since the outcome was written; 0 if the record does not have that time."""
    return (record.now - record.finished_at) / 1e6 if record.finished_at is not None else 0.0


# -- held ------------------------------------------------------------------------------------------


def _held(call: Call, holder: Holder, facts: Facts) -> Verdict:
    backoff = min(2.0 ** min(call.reschedules, 20), max(1.0, holder.remaining)) + jitter(facts)
    if holder.call_id == call.call_id:
        # Celery's retry may arrive before the attempt that sent it has ended.
        just_retried = call.retries and not call.reschedules
        delay = backoff if just_retried else holder.remaining + jitter(facts)
        reason = "a copy of this call is running"
        return Reschedule(countdown(call, delay), reason, started=True, event_type="")
    reschedule = _reschedule_until_free(call, backoff, facts)
    drop = Drop(Dropped.HELD_BY_OTHER)
    return while_busy(call, "wait", reschedule, _lease_held(call, holder), drop)


def _reschedule_until_free(call: Call, backoff: float, facts: Facts) -> Reschedule:
    delay, reason = backoff, Dropped.HELD_BY_OTHER.words
    if call.starts_when_free:
        delay = countdown_until_free(call, facts.rand)
        reason = f"{reason}; this call begins when the key is free"
    return Reschedule(countdown(call, delay), reason, event_type="held", held=True)


def _lease_held(call: Call, holder: Holder) -> LeaseHeld:
    more = f"for another {holder.remaining:.1f} s"
    message = f"{printable(call.key.key)} is held by call {holder.call_id} on {holder.host} {more}"
    return LeaseHeld(message, call.key.key, holder.remaining, holder.host)
