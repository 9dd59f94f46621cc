"""How an attempt is closed, and how long to wait when a store fails: the second table of
``decisions``, but for failures.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final, assert_never

from celery_leases.call import Call
from celery_leases.decide import attempt_history
from celery_leases.decide.endings import (
    ControlFlow,
    Ending,
    ExitCause,
    Interrupted,
    Lost,
    Raised,
    Returned,
    Snoozed,
    Terminated,
)
from celery_leases.decide.verdicts import Raise, Reschedule, Return, TaskEvent
from celery_leases.errors import (
    Cooldown,
    CoolingDown,
    PermanentFailure,
    RecordUnreadable,
    RetryLater,
)
from celery_leases.failures.actions import Reason
from celery_leases.failures.default_rules import ANYTHING_ELSE
from celery_leases.record import (
    CALLER_HAS_FAILURE,
    Attempt,
    Ended,
    Failure,
    Outcome,
    Record,
    State,
)
from celery_leases.results import MESSAGE_MAX, as_decoded
from celery_leases.text.cleaning import printable
from celery_leases.text.durations import in_words
from celery_leases.text.redaction import message_of

CRASH_LOOP = Reason.CRASH_LOOP.value
NO_RESULT = ""
"""Stands for the result of a finished call that has none."""
FAILED_FOR_GOOD = "!"
"""Stands before the error of a call that has failed for good, in the place of its result. No JSON
text begins with it.
"""
WITHOUT_RESULT = (Ended.IGNORED, Ended.REPLACED)
LONGEST_SETTLE_PAUSE = 2.0
"""Seconds between two tries to write an outcome, at most."""
FINISHED_CALLS_MAX = 16
"""How many finished calls a record of a task whose calls all run lists."""
FINISHED_RESULT_MAX = 4096
"""Characters of the longest result that is stored in that list."""


SHORT_PAUSE: Final = 1.0
"""Seconds to wait at least before a call that could not run for a reason of a moment runs."""


SETTLE_TIMEOUT = 60.0
"""Seconds for which a process tries to write an outcome, while it renews the lease."""
CALL_ENDING_CAUSES: Final = (ExitCause.TIME_LIMIT.value, ExitCause.REVOKED.value)
"""After these, Celery gives the call a final state too."""


def call_has_ended(record: Record) -> bool:
    """Whether Celery has a final state for the record's last call, although its key is ``pending``
    or ``cooling``: that call does not run again by itself.
    """
    if record.resumes or record.state not in (State.PENDING, State.COOLING):
        return False
    stopped = record.ended is Ended.TERMINATED and record.reason in CALL_ENDING_CAUSES
    return stopped or record.ended in (*CALLER_HAS_FAILURE, Ended.CRASHED)


def after_run(
    call: Call,
    record: Record,
    ending: Returned | Snoozed | Lost | Interrupted | Terminated | ControlFlow,
) -> Outcome:
    """The outcome of the attempt on *record*; see ``after_failure`` for a body that raised."""
    crashes = record.crashes if record.crashes and crashes_of_another_call(call, record) else 0
    if isinstance(ending, Returned):  # at once, because replace() is slow
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
            finished=finished(call, record, ending.result) if call.options.reruns else None,
            crashed_call=record.crashed_call,
            other_crashes=record.other_crashes,
        )
    return with_retention(call, _closed(call, record, ending, crashes))


def after_group_closed(outcome: Outcome, closed_for: float) -> Outcome:
    """*outcome*, a cooldown of the group, once its group is closed for so many seconds."""
    longer = closed_for - (outcome.retry_after or 0.0)
    retention = outcome.retention + longer if outcome.retention is not None else None
    return replace(outcome, retry_after=closed_for, retention=retention)


def _closed(
    call: Call,
    record: Record,
    ending: Snoozed | Lost | Interrupted | Terminated | ControlFlow,
    crashes: int,
) -> Outcome:
    closed = unchanged(call, record)
    not_counted = replace(closed, attempt=record.attempt - 1)
    match ending:
        case Snoozed(_, delay, reason):
            return replace(
                not_counted,
                ended=Ended.SNOOZED,
                reason=reason,
                retry_after=delay or None,
                resumes=call.reschedulable,
            )
        case Lost(reason):
            return replace(not_counted, ended=Ended.LOST, reason=reason, resumes=call.reschedulable)
        case Interrupted():
            return replace(not_counted, ended=Ended.INTERRUPTED, resumes=call.reschedulable)
        case Terminated(_, reason):
            exited = replace(closed, ended=Ended.TERMINATED, reason=reason)
            return _after_crash(call, record, _with_crash(call, record, exited))
        case ControlFlow(_, runs_again, delay, ended, retries, failure):
            closed = replace(closed, ended=ended, crashes=crashes)
            if runs_again:
                if retries is None:
                    retries = record.retries + (ended is Ended.RETRIED)
                return replace(
                    closed, retry_after=delay, retries=retries, resumes=call.reschedulable
                )
            if ended in CALLER_HAS_FAILURE:  # the next call runs
                return replace(closed, failure=failure)
            return replace(
                without_failures(closed),
                state=State.DONE,
                reason=ended.value,
                finished=finished(call, record, NO_RESULT),
            )
        case _ as never:
            assert_never(never)


def child_exited(
    call: Call, record: Record, cause: ExitCause, *, final: bool | None = None
) -> Outcome:
    """The outcome of an attempt that Celery has ended without a report of its own; another process
    writes it.

    *final*: Celery has a final state for the call, which does not run again by itself. By default
    this is so after the hard time limit, a revoke and an error; otherwise the broker delivers the
    message again.
    """
    if final is None:
        final = cause not in (ExitCause.KILLED, ExitCause.STOPPED)
    closed = replace(unchanged(call, record), reason=cause.value, resumes=not final)
    not_counted = replace(closed, attempt=record.attempt - 1)
    match cause:
        case ExitCause.STOPPED:
            return with_retention(call, replace(not_counted, ended=Ended.INTERRUPTED))
        case ExitCause.REVOKED | ExitCause.ERROR:
            return with_retention(call, replace(not_counted, ended=Ended.TERMINATED))
        case ExitCause.TIME_LIMIT:
            crashed = replace(closed, ended=Ended.TERMINATED)
        case ExitCause.KILLED:
            crashed = replace(closed, ended=Ended.CRASHED)
        case _ as never:
            assert_never(never)
    counted = _with_crash(call, record, crashed)
    return with_retention(call, _after_crash(call, record, counted))


def closed_for_celery(
    call: Call, row: Record, token: str, cause: ExitCause, *, final: bool, failure: Failure | None
) -> Outcome | None:
    """The outcome of *row*, which does not run, after Celery has ended a delivery of *call* under
    *token*; ``None`` if nothing has to be changed.

    The body was killed while it closed its attempt as an interrupted one: a hard time limit ended
    it. Or the call still waits in the row, and no delivery of it will come: the process was killed
    before it had published a copy. Only the message of a ``Retry`` is published before the row is
    closed.
    """
    if cause is ExitCause.TIME_LIMIT and row.is_attempt(State.PENDING, token):
        if row.ended is Ended.INTERRUPTED:
            return child_exited(call, replace(row, attempt=row.attempt + 1), cause, final=final)
        if row.ended is Ended.RETRIED:
            return None
    waits = row.state in (State.PENDING, State.COOLING) and (row.resumes or row.queued)
    if not (final and waits and row.call_id == call.call_id):
        return None
    return replace(
        unchanged(call, row),
        state=row.state,
        ended=Ended.TERMINATED if failure is None else Ended.FAILED,
        reason=cause.value,
        failure=failure or row.failure,
        retry_after=row.waits or None,
        unrun=True,
    )


def stopped_by_crash_loop(call: Call, record: Record) -> Outcome:
    """The outcome of a claimed attempt that does not run, because its key has crashed too often."""
    ended = record.previous.ended if record.previous is not None else Ended.CRASHED
    closed = replace(unchanged(call, record), ended=ended, attempt=record.attempt - 1, unrun=True)
    stopped = _after_crash(call, record, closed, one_known=False)
    return replace(stopped, finished=failed_for_good(call, record, stopped.failure))


def unrun(call: Call, record: Record, delay: float) -> Outcome:
    """The outcome of a claimed attempt that does not run now. The row shows again how the previous
    attempt ended.
    """
    previous = record.previous or Attempt(Ended.WAITING)
    closed = replace(
        unchanged(call, record),
        ended=previous.ended,
        failure=previous.error,
        attempt=record.attempt - 1,
        unrun=True,
        retry_after=delay or None,
        resumes=call.reschedulable,
    )
    return with_retention(call, closed)


def crashes_of_another_call(call: Call, record: Record) -> bool:
    """Unless runs="once", crash counts belong to one call: another call's success does not reset
    them.
    """
    return call.options.reruns and record.crashed_call not in (None, call.call_id)


def unchanged(call: Call, record: Record) -> Outcome:
    """A ``pending`` outcome with all counts of *record*."""
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
        other_crashes=record.other_crashes,
    )


def with_retention(call: Call, outcome: Outcome) -> Outcome:
    """*outcome* with a retention that ends after its wait, and not before its counts are reset."""
    if outcome.state not in (State.PENDING, State.COOLING):
        return outcome
    retention = max(call.options.retention, call.options.failures.cooldown.quiet)
    return replace(outcome, retention=(outcome.retry_after or 0.0) + retention)


def without_failures(outcome: Outcome) -> Outcome:
    """*outcome* with the counts of failures at zero."""
    return replace(outcome, failures=0, quick_retries=0, cooldowns=0)


def crash_loop(record: Record) -> PermanentFailure:
    """The error for callers of a key with too many crashes in a row, known or suspected."""
    died = attempt_history.crashes_in_words(record, record.crashes)
    return PermanentFailure(
        f"{printable(record.key)}: {died}; not retried until `leases retry`", CRASH_LOOP
    )


def _with_crash(call: Call, record: Record, outcome: Outcome) -> Outcome:
    """*outcome* with one crash more."""
    if call.options.reruns:
        most = call.options.failures.crashes
        record = attempt_history.crashes_counted_for(record, call.call_id, most)
    return replace(
        outcome,
        crashes=record.crashes + 1,
        crashed_call=call.call_id,
        other_crashes=record.other_crashes,
    )


def _after_crash(
    call: Call, record: Record, outcome: Outcome, *, one_known: bool = True
) -> Outcome:
    """*outcome*, which counts the crash: a pause before the next attempt, or ``failed``.

    *one_known*: the attempt on *record* has crashed.
    """
    if outcome.crashes < call.options.failures.crashes:
        return replace(outcome, retry_after=crash_pause(outcome.crashes) or None)
    died = attempt_history.crashes_in_words(record, outcome.crashes, one_known=one_known)
    message = f"{printable(call.key.key)}: {died}"
    failure = Failure(PermanentFailure.__qualname__, message, CRASH_LOOP, CRASH_LOOP, operator=True)
    return replace(outcome, state=State.FAILED, failure=failure, reason=CRASH_LOOP)


def finished(call: Call, record: Record, result: str | None) -> Mapping[str, str | None] | None:
    """The finished calls of the key once *call* is one of them, with *result*; ``None`` under
    ``lease_runs="once"``.
    """
    if not call.options.reruns:
        return None
    results = record.finished_results or {}
    others = [(name, results.get(name)) for name in record.finished_calls if name != call.call_id]
    stored = result if result is not None and len(result) <= FINISHED_RESULT_MAX else None
    return dict([*others, (call.call_id, stored)][-FINISHED_CALLS_MAX:])


def failed_for_good(
    call: Call, record: Record, failure: Failure | None
) -> Mapping[str, str | None] | None:
    """The finished calls of the key once *call* has failed for good."""
    text = failure.text if failure is not None else ""
    return finished(call, record, f"{FAILED_FOR_GOOD}{text}"[:FINISHED_RESULT_MAX])


def crash_pause(crashes: int) -> float:
    """Seconds to wait before the next attempt after *crashes* in a row."""
    return 0.0 if crashes < 2 else 5.0 if crashes == 2 else 30.0


def store_pause(tries: int, rand: float) -> float:
    """Seconds by which a delivery is rescheduled because a store did not answer: 5 s, doubling with
    *tries* up to 60 s, with jitter that only shortens.
    """
    return float(min(60.0, 5.0 * 2.0 ** min(tries, 10)) * (0.8 + 0.2 * rand))


def settle_pause(tries: int) -> float:
    """Seconds to wait before the next try to write an outcome."""
    return float(min(LONGEST_SETTLE_PAUSE, 0.05 * 2.0 ** min(tries, 10)))


def settle_until(call: Call, now: float) -> float:
    """Until when to try to write an outcome: for :data:`SETTLE_TIMEOUT`, but not beyond the hard
    time limit.
    """
    until = now + SETTLE_TIMEOUT
    return min(until, call.received_at + call.time_limit - 1.0) if call.time_limit else until


def after_outcome(
    call: Call, ending: Ending, outcome: Outcome, rand: float, wall_time: float
) -> Return | Raise | Reschedule:
    """What Celery gets once *outcome* is written."""
    match ending:
        case Returned(value):
            return Return(value if outcome.result is None else as_decoded(value, outcome.result))
        case Raised() | Snoozed():
            return _after_failed_outcome(call, ending, outcome, wall_time)
        case Lost(reason):
            return again_soon(f"the lease was lost: {reason}", rand)
        case Interrupted(error) | Terminated(error) | ControlFlow(error):
            return Raise(error)
        case _ as never:
            assert_never(never)


def again_soon(reason: str, rand: float) -> Reschedule:
    """Reschedule a call that has lost its lease while it ran."""
    return Reschedule(SHORT_PAUSE + rand, reason, started=True, event_type="")


def _after_failed_outcome(
    call: Call, ending: Raised | Snoozed, outcome: Outcome, wall_time: float
) -> Raise | Reschedule:
    """Reschedule a call that runs again by itself. Otherwise the caller gets the error, or learns
    when the key may run again.
    """
    wait, why = outcome.retry_after or 0.0, outcome.reason or "the body asked for it"
    cooling, failure = outcome.state is State.COOLING, outcome.failure
    event_type = "snoozed" if isinstance(ending, Snoozed) else "cooldown" if cooling else "backoff"
    task_event = TaskEvent(event_type, wait, why)
    asked = isinstance(ending, Snoozed) or isinstance(ending.error, Cooldown | RetryLater)
    if outcome.resumes:
        return Reschedule(
            wait,
            f"{outcome.state.value}: {why}",
            started=True,
            event_type=event_type,
            event_reason=why,
            unavailable=isinstance(ending.error, RecordUnreadable),
            cause=ending.error if isinstance(ending, Raised) else None,
            unknown=failure is not None and failure.rule == ANYTHING_ELSE.name,
        )
    if not asked:
        return Raise(ending.error, task_event=task_event if cooling else None)
    rule = failure.rule if failure else None
    if failure is not None and outcome.state is State.FAILED:
        failed = PermanentFailure(printable(failure.text, None), rule, failure.type)
        failed.__cause__ = ending.error
        return Raise(failed)
    # Redacted, because the text of the body may contain that of a client library.
    text = printable(message_of(ending.error, MESSAGE_MAX), None)
    message = f"Retry available in {in_words(wait)}: {text}"
    reason = failure.reason if failure else outcome.ended.value
    scope = "group" if failure is not None and failure.group is not None else "key"
    refusal = CoolingDown(message, call.key.key, wall_time + wait, wait, reason, rule, scope)
    refusal.__cause__ = ending.error
    return Raise(refusal, task_event=task_event)
