"""How an attempt is closed, and how long to wait when a store fails: the tables of ``decisions``
after the run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from enum import Enum
from typing import Final, assert_never

from celery_leases.common.texts import printable
from celery_leases.errors import PermanentFailure
from celery_leases.failures.actions import Reason
from celery_leases.protocol.body_endings import (
    ControlFlow,
    Ending,
    Interrupted,
    Lost,
    Raised,
    Returned,
    Snoozed,
    Terminated,
)
from celery_leases.protocol.failure_decisions import (
    AfterFailure,
    AwaitOperator,
    EnterCooldown,
    Fail,
    RetryAfter,
)
from celery_leases.protocol.records import Attempt, Ended, Failure, Outcome, Record, State
from celery_leases.protocol.verdicts import Call

CRASH_LOOP = Reason.CRASH_LOOP.value
NO_RESULT = ""
WITHOUT_RESULT = (Ended.IGNORED, Ended.REJECTED, Ended.REPLACED)
LONGEST_SETTLE_PAUSE = 2.0
"""The most seconds between two tries to write an outcome."""

REMEMBERED_CALLS = 16
REMEMBERED_RESULT_MAX = 4096


class ExitCause(Enum):
    """Why a pool child is gone; the value is the reason in logs and records."""

    KILLED = "its process died"
    TIME_LIMIT = "hard time limit"
    REVOKED = "revoked"
    STOPPED = "cold shutdown"


ENDS_CALL: Final = (ExitCause.TIME_LIMIT.value, ExitCause.REVOKED.value)
"""The reasons of ended processes whose call Celery has ended too."""


def call_has_ended(record: Record) -> bool:
    """Whether Celery has been told the end of the record's last call, which does not run again by
    itself, though its key may.
    """
    if record.resumes or record.state not in (State.PENDING, State.COOLING):
        return False
    stopped = record.ended is Ended.TERMINATED and record.reason in ENDS_CALL
    return stopped or record.ended is Ended.FAILED


def after_run(
    call: Call, record: Record, ending: Ending, verdict: AfterFailure | None = None
) -> Outcome:
    """How the attempt on *record* is closed; *verdict* is that of ``after_failure`` if the body
    raised.
    """
    return _lasting(call, _closed(call, record, ending, verdict))


def _closed(call: Call, record: Record, ending: Ending, verdict: AfterFailure | None) -> Outcome:
    # With on_done="rerun", crash counts belong to one call; another call's success does not reset
    # them.
    other = call.options.rerun and record.crashed_call not in (None, call.call_id)
    crashes = record.crashes if other else 0
    if isinstance(ending, Returned):
        return Outcome(
            State.DONE,
            Ended.RETURNED,
            record.attempt,
            failures=0,
            crashes=crashes,
            retention=call.options.retention,
            retries=record.retries,
            result=ending.result,
            reason=ending.missing,
            finished=_finished(call, record, ending.result),
            crashed_call=record.crashed_call,
        )
    closed = _kept(call, record)
    unspent = replace(closed, attempt=record.attempt - 1)
    match ending:
        case Raised():
            assert verdict is not None
            closed = replace(
                closed, ended=Ended.FAILED, crashes=crashes, traceback=ending.traceback
            )
            return _failed(call, record, closed, verdict)
        case Snoozed(_, delay, reason):
            resumes = call.reschedulable
            return replace(
                unspent,
                ended=Ended.SNOOZED,
                reason=reason,
                retry_after=delay or None,
                resumes=resumes,
            )
        case Lost(reason):
            return replace(unspent, ended=Ended.LOST, reason=reason, resumes=call.reschedulable)
        case Interrupted():
            return replace(unspent, ended=Ended.INTERRUPTED, resumes=call.reschedulable)
        case Terminated(_, reason):
            died = (0 if other else record.crashes) + 1
            exited = replace(
                closed,
                ended=Ended.TERMINATED,
                reason=reason,
                crashes=died,
                crashed_call=call.call_id,
            )
            return _crashed(call, exited)
        case ControlFlow(_, runs_again, delay, ended):
            passed = replace(closed, ended=ended, crashes=crashes)
            if runs_again:
                retries = record.retries + 1 if ended is Ended.RETRIED else record.retries
                return replace(
                    passed, retry_after=delay, retries=retries, resumes=call.reschedulable
                )
            finished = _finished(call, record, NO_RESULT)
            return replace(
                _cleared(passed), state=State.DONE, reason=ended.value, finished=finished
            )
        case _ as never:
            assert_never(never)


def child_exited(call: Call, record: Record, cause: ExitCause) -> Outcome:
    """How the attempt of a process that died without reporting an outcome is closed, by another
    process.

    After the hard time limit Celery has already failed the call, and a revoked call has ended:
    neither runs again by itself. After a cold shutdown the message comes back.
    """
    kept = replace(_kept(call, record), reason=cause.value)
    if cause is ExitCause.STOPPED:
        stopped = replace(kept, ended=Ended.INTERRUPTED, attempt=record.attempt - 1)
        return _lasting(call, replace(stopped, resumes=call.reschedulable))
    if cause is ExitCause.REVOKED:
        return _lasting(call, replace(kept, ended=Ended.TERMINATED, attempt=record.attempt - 1))
    other = call.options.rerun and record.crashed_call not in (None, call.call_id)
    crashes = (0 if other else record.crashes) + 1
    ended = Ended.CRASHED if cause is ExitCause.KILLED else Ended.TERMINATED
    resumes = cause is ExitCause.KILLED
    crashed = replace(
        kept, ended=ended, crashes=crashes, crashed_call=call.call_id, resumes=resumes
    )
    return _lasting(call, _crashed(call, crashed))


def stopped_by_crash_loop(call: Call, record: Record) -> Outcome:
    """How a claimed attempt that must not run any more is closed."""
    unrun = replace(
        _kept(call, record), ended=Ended.CRASHED, attempt=record.attempt - 1, unrun=True
    )
    return replace(_crashed(call, unrun), finished=_finished(call, record, NO_RESULT))


def unrun(call: Call, record: Record, delay: float) -> Outcome:
    """How a claimed attempt is given back unrun; how the one before it ended is kept."""
    before = record.previous or Attempt(Ended.WAITING)
    unrun = replace(_kept(call, record), ended=before.ended, attempt=record.attempt - 1, unrun=True)
    return _lasting(
        call,
        replace(unrun, retry_after=delay or None, failure=before.error, resumes=call.reschedulable),
    )


def _kept(call: Call, record: Record) -> Outcome:
    """An outcome that leaves all counts as they are."""
    return Outcome(
        State.PENDING,
        Ended.RETURNED,
        record.attempt,
        record.failures,
        record.crashes,
        call.options.retention,
        record.retries,
        quick_retries=record.quick_retries,
        cooldowns=record.cooldowns,
        crashed_call=record.crashed_call,
    )


def _lasting(call: Call, outcome: Outcome) -> Outcome:
    """*outcome*, kept at least until it may run again and for as long as its counts mean
    something.
    """
    if outcome.state not in (State.PENDING, State.COOLING):
        return outcome
    lasts = max(call.options.retention, call.options.cooldown.quiet)
    return replace(outcome, retention=(outcome.retry_after or 0.0) + lasts)


def _cleared(outcome: Outcome) -> Outcome:
    return replace(outcome, failures=0, quick_retries=0, cooldowns=0)


def _failed(call: Call, record: Record, closed: Outcome, verdict: AfterFailure) -> Outcome:
    counts = verdict.counts
    failed = replace(
        closed,
        failures=counts.failures,
        quick_retries=counts.quick_retries,
        cooldowns=counts.cooldowns,
        failed=True,
        failure=verdict.failure,
        reason=verdict.failure.reason,
    )
    match verdict:
        case Fail():
            return replace(failed, state=State.FAILED, finished=_finished(call, record, NO_RESULT))
        case RetryAfter(delay):
            return replace(failed, retry_after=delay, resumes=call.reschedulable)
        case AwaitOperator():
            return replace(failed, state=State.UNCERTAIN, retention=None)
        case EnterCooldown(delay, resume=resume):
            return replace(failed, state=State.COOLING, retry_after=delay, resumes=resume)
        case _ as never:
            assert_never(never)


def crash_loop(record: Record) -> PermanentFailure:
    """The error for the callers of a key that keeps killing its process."""
    died = f"{printable(record.key)}: its process died {record.crashes} times in a row"
    return PermanentFailure(f"{died}; not retried until `leases retry`", CRASH_LOOP)


def _crashed(call: Call, outcome: Outcome) -> Outcome:
    if outcome.crashes < call.options.max_crashes:
        return replace(outcome, retry_after=crash_pause(outcome.crashes) or None)
    message = f"{printable(call.key.key)}: its process died {outcome.crashes} times in a row"
    failure = Failure(PermanentFailure.__qualname__, message, CRASH_LOOP, CRASH_LOOP, operator=True)
    return replace(outcome, state=State.FAILED, failure=failure, reason=CRASH_LOOP)


def _finished(call: Call, record: Record, result: str | None) -> Mapping[str, str | None] | None:
    if not call.options.rerun:
        return None
    results = record.finished_results or {}
    kept = [(name, results.get(name)) for name in record.finished_calls if name != call.call_id]
    small = result if result is not None and len(result) <= REMEMBERED_RESULT_MAX else None
    return dict([*kept, (call.call_id, small)][-REMEMBERED_CALLS:])


def crash_pause(crashes: int) -> float:
    """Seconds to wait before the next attempt after so many crashes in a row."""
    return 0.0 if crashes < 2 else 5.0 if crashes == 2 else 30.0


def store_pause(tries: int, rand: float) -> float:
    """How long a delivery stays away while a store does not answer: 5 s doubling to 60 s, with
    jitter below it.
    """
    return float(min(60.0, 5.0 * 2.0 ** min(tries, 10)) * (0.8 + 0.2 * rand))


def settle_pause(tries: int) -> float:
    """How long to wait before the outcome is written again."""
    return float(min(LONGEST_SETTLE_PAUSE, 0.05 * 2.0 ** min(tries, 10)))


def settle_until(call: Call, now: float, taken: float) -> float:
    """Until when to keep trying to write an outcome: ``leases_settle_timeout``, cut to what the
    hard limit leaves.

    *taken* is when the delivery was taken up, which is about when Celery began to count the limit.
    """
    until = now + call.options.settle_timeout
    return min(until, taken + call.time_limit - 1.0) if call.time_limit else until
