"""One delivery from acquire to release: applies the decisions and runs the body. Independent of
Celery.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TypeVar, assert_never

from celery_leases.attempt.acquire import SHORT_PAUSE, Away, ClaimedAttempt, Entry
from celery_leases.attempt.context import Context
from celery_leases.attempt.held_lease import HeldLease
from celery_leases.attempt.renewal import Renewer
from celery_leases.attempt.store_retries import retrying
from celery_leases.common.durations import in_words
from celery_leases.common.redaction import message_of
from celery_leases.common.texts import printable
from celery_leases.concurrency import resource_pool
from celery_leases.errors import (
    CompletionNotCommitted,
    Cooldown,
    CoolingDown,
    LeasesError,
    LeaseStoreMismatch,
    PermanentFailure,
    RecordUnreadable,
    RetryLater,
    StoreUnavailable,
)
from celery_leases.failures.default_rules import ANYTHING_ELSE
from celery_leases.protocol import events, settlement
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
    EnterCooldown,
    after_failure,
    leaves_gate_half_open,
)
from celery_leases.protocol.records import Ended, Outcome, Record, State
from celery_leases.protocol.results import MESSAGE_MAX, as_decoded, decode, failure_of
from celery_leases.protocol.verdicts import (
    Answer,
    Call,
    Drop,
    Follow,
    Raise,
    Reschedule,
    Return,
    Run,
    TaskEvent,
    Verdict,
    Wait,
)
from celery_leases.protocol.waiting import RETRY_GRACE

logger = logging.getLogger("celery_leases")

T = TypeVar("T")
Body = Callable[[HeldLease, Record], Ending]


@dataclass
class Execution:
    """Runs calls on the stores of *context*; *renewer* keeps their leases."""

    context: Context
    renewer: Renewer
    entry: Entry = field(init=False)

    def __post_init__(self) -> None:
        self.entry = Entry(self.context)

    def run(self, call: Call, body: Body, away: int = 0) -> Answer:
        """Handle *call* to its end. *away*: how often it was rescheduled before because a store did
        not answer.
        """
        before = resource_pool.patience.set(
            None
        )  # that of another call, if this one runs inside its body
        try:
            return self._taken(call, body, away)
        finally:
            resource_pool.patience.reset(before)

    def _taken(self, call: Call, body: Body, away: int) -> Answer:
        taken = self.context.clock.now()
        try:
            entered = self.entry.enter(call)
        except Away as unavailable:
            return unavailable.again
        except (StoreUnavailable, LeaseStoreMismatch) as error:
            return self.entry.away(error, away)
        except LeasesError:
            raise
        except Exception as error:  # noqa: BLE001 - a store's own trouble is never the task's failure
            return self._unexpected(call, error, away)
        if not isinstance(entered, ClaimedAttempt):
            return self._answered(call, entered)
        try:
            return self._run(call, entered, body, away, taken)
        finally:
            self.renewer.drop(
                entered.held_lease
            )  # also after an unexpected exception: then the lease expires

    def _run(
        self, call: Call, claimed_attempt: ClaimedAttempt, body: Body, away: int, taken: float
    ) -> Answer:
        held_lease, record = claimed_attempt.held_lease, claimed_attempt.record
        try:
            self.renewer.add(held_lease)
        except Exception as error:  # noqa: BLE001 - no thread can be started
            return self._not_begun(call, claimed_attempt, error, away)
        observer = self.context.observer
        if observer.wants(events.LeaseAcquired):
            observer.observe(
                events.LeaseAcquired(**call.subject, fence=record.fence, attempt=record.attempt)
            )
        began = self.context.clock.now()
        ending = body(held_lease, record)
        runtime = self.context.clock.now() - began
        left_open = held_lease.work.end()
        if held_lease.work.progressed:
            record = replace(record, crashes=0)
        if held_lease.work.completing:
            seen = self._patiently(
                call,
                held_lease,
                ending,
                taken,
                lambda: self.context.records.read(record.stored_key),
            )
            if seen is None:
                self.renewer.drop(held_lease)
                return self._unwritten(ending, record, away)
            done = seen[0]
            if done is not None and done.is_attempt(State.DONE, record.owner, record.fence):
                return self._completed(call, held_lease, done, ending, runtime)
            ending = self._not_committed(
                call, record, ending, "the body returned after complete(), but"
            )
        elif left_open:
            ending = self._not_committed(
                call, record, ending, "the body returned after guard(), but"
            )
        verdict = self._failed(call, record, ending) if isinstance(ending, Raised) else None
        outcome = settlement.after_run(call, record, ending, verdict)
        if held_lease.work.has_unsaved:
            outcome = replace(outcome, progress=held_lease.work.unsaved)
        settled = self._patiently(
            call, held_lease, ending, taken, lambda: self.context.records.settle(record, outcome)
        )
        self.renewer.drop(held_lease)
        if settled is None:
            return self._unwritten(ending, record, away)
        (written,) = settled
        self._let_go(call, held_lease, outcome if written else None, verdict)
        if not written:
            return _passing(ending) or self._stale(call, record)
        self.entry.report(call, record, outcome, runtime, held_lease)
        return self._ended(call, ending, outcome)

    def _unexpected(self, call: Call, error: Exception, away: int) -> Reschedule:
        """Reschedule what met an error that no store is known to raise; its row may stand open
        under its token.
        """
        logger.error(
            "%s[%s] did not begin: %s", call.task, call.call_id, _named(error), exc_info=error
        )
        return replace(self.entry.away(_named(error), away), prior=call.token)

    def _not_begun(
        self, call: Call, claimed_attempt: ClaimedAttempt, error: Exception, away: int
    ) -> Reschedule:
        """Give back an attempt whose lease cannot be renewed."""
        with suppress(StoreUnavailable):  # then the next attempt has its token
            self.context.records.settle(
                claimed_attempt.record, settlement.unrun(call, claimed_attempt.record, 0.0)
            )
        self.entry.give_back(claimed_attempt.held_lease)
        return self._unexpected(call, error, away)

    def _unwritten(self, ending: Ending, record: Record, away: int) -> Answer:
        again = self.entry.away("the outcome could not be written", away)
        return _passing(ending) or replace(again, started=True, prior=record.owner)

    def _completed(
        self, call: Call, held_lease: HeldLease, done: Record, ending: Ending, runtime: float
    ) -> Answer:
        """The done record was committed by the body itself: it has succeeded, whatever it did
        afterwards.
        """
        self.renewer.drop(held_lease)
        outcome = settlement.after_run(call, done, Returned(None, done.result, done.reason))
        self._let_go(call, held_lease, outcome, None)
        if not isinstance(ending, Returned):
            self.context.observer.observe(
                events.CompletionStands(**call.subject, fence=done.fence, error=_said(ending))
            )
        self.entry.report(call, done, outcome, runtime, held_lease)
        if isinstance(ending, Interrupted | Terminated):
            return Raise(ending.error)
        if done.result is None and isinstance(ending, Returned):
            return Return(
                ending.value
            )  # as it could not be kept, what the body returned is all there is
        return Return(decode(done.result))

    def _not_committed(self, call: Call, record: Record, ending: Ending, what: str) -> Ending:
        """The ending of an attempt whose own transaction was never committed: the same ending, but
        not a success.
        """
        if not isinstance(ending, Returned):
            return ending
        message = f"{printable(call.key.key)}: {what} its transaction was not committed; commit it before the body ends"
        error = CompletionNotCommitted(message, record.key)
        return Raised(
            error,
            failure_of(error),
            call.options.classifier.classify(error, self.context.wall_time()),
        )

    def _failed(self, call: Call, record: Record, ending: Raised) -> AfterFailure:
        """The decision after a failure; a failure of the group has closed its gate by then, and the
        gate may set a longer wait.
        """
        verdict = after_failure(call, record, ending, self.context.rand())
        if not isinstance(verdict, EnterCooldown) or verdict.closing is None or call.group is None:
            return verdict
        try:
            gate = self.context.gates.close_gate(call.group, verdict.closing, record.owner)
        except StoreUnavailable:
            return verdict  # the key still cools down, and the next failure of the group closes the gate
        self.context.observer.observe(
            events.GateClosed(
                **call.subject,
                group=gate.group,
                closed_for=gate.closed_for,
                trips=gate.trips,
                reason=gate.reason,
                rule=gate.rule,
            )
        )
        return replace(verdict, delay=gate.closed_for)

    def _let_go(
        self,
        call: Call,
        held_lease: HeldLease,
        outcome: Outcome | None,
        verdict: AfterFailure | None,
    ) -> None:
        """Free the key, or leave it cooling; and report the probe's result to the gate of the
        group.
        """
        if held_lease.lost is not None:
            return  # another attempt has the key now, and may have the probe's slot too
        entry, context = self.entry, self.context
        claim_request = held_lease.claim_request
        cooling = (
            outcome.retry_after if outcome is not None and outcome.state is State.COOLING else None
        )
        if held_lease.probe is None and cooling is None:
            entry.give_back(held_lease)
            return
        with suppress(
            StoreUnavailable
        ):  # lease and slot expire by themselves, and the record has the cooldown
            clears = (
                held_lease.probe is not None and outcome is not None and _clears(outcome, verdict)
            )
            if (
                held_lease.probe is not None
                and clears
                and context.gates.open_gate(held_lease.probe, claim_request.token)
            ):
                context.observer.observe(events.GateOpened(**call.subject, group=held_lease.probe))
                held_lease.probe = None
            if (
                cooling is not None
                and cooling > RETRY_GRACE
                and context.leases.cool(
                    claim_request.stored_key, claim_request.token, cooling - RETRY_GRACE
                )
            ):
                if held_lease.probe is not None:
                    context.gates.release_probe(held_lease.probe, claim_request.token)
                return
        entry.give_back(held_lease)

    def _patiently(
        self, call: Call, held_lease: HeldLease, ending: Ending, taken: float, step: Callable[[], T]
    ) -> tuple[T] | None:
        """Take a step in the database; ``None`` if the database did not answer for as long as is
        allowed.

        The attempt of a lost lease is closed as patiently as any other: while its row is open, the
        next claim of the key counts this process as dead. An attempt that was given back for
        another reason is closed without long retries.
        """
        until = settlement.settle_until(call, self.context.clock.now(), taken)
        patient = (
            isinstance(ending, Returned | Raised | Snoozed | ControlFlow)
            or held_lease.lost is not None
        )

        def repeatable(error: Exception, tries: int) -> bool:
            if not tries and not isinstance(error, StoreUnavailable):
                logger.error(
                    "%s[%s] could not be closed yet: %s",
                    call.task,
                    call.call_id,
                    _named(error),
                    exc_info=error,
                )
            return patient and not self.context.stopping()

        clock = self.context.clock
        try:
            return (retrying(step, lambda: until, clock, errors=Exception, repeatable=repeatable),)
        except Exception:  # noqa: BLE001 - logged; the row waits for the next claim of the call
            return None

    def _ended(self, call: Call, ending: Ending, outcome: Outcome) -> Answer:
        match ending:
            case Returned(value):
                return Return(
                    as_decoded(value, outcome.result) if outcome.result is not None else value
                )
            case Raised() | Snoozed():
                return self._deferred(call, ending, outcome)
            case Lost(reason):
                return self._soon(f"the lease was lost: {reason}")
            case Interrupted(error) | Terminated(error) | ControlFlow(error):
                return Raise(error)
            case _ as never:
                assert_never(never)

    def _deferred(self, call: Call, ending: Raised | Snoozed, outcome: Outcome) -> Answer:
        """Reschedule a call that runs again by itself; otherwise the caller gets the error, or the
        time of the next try.
        """
        wait, why = outcome.retry_after or 0.0, outcome.reason or "it asked for it"
        cooling = outcome.state is State.COOLING
        event_type = (
            "snoozed" if isinstance(ending, Snoozed) else "cooldown" if cooling else "backoff"
        )
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
                unknown=outcome.failure is not None and outcome.failure.rule == ANYTHING_ELSE.name,
            )
        if not asked:
            return Raise(ending.error, task_event=task_event if cooling else None)
        rule = outcome.failure.rule if outcome.failure else None
        if outcome.failure is not None and outcome.state is State.FAILED:
            failed = PermanentFailure(
                printable(outcome.failure.text, None), rule, outcome.failure.type
            )
            failed.__cause__ = ending.error
            return Raise(failed)
        said = printable(
            message_of(ending.error, MESSAGE_MAX), None
        )  # a body may put a client library's own text into it
        message = f"Retry available in {in_words(wait)}: {said}"
        reason = outcome.failure.reason if outcome.failure else outcome.ended.value
        scope = (
            "group" if outcome.failure is not None and outcome.failure.group is not None else "key"
        )
        refusal = CoolingDown(
            message, call.key.key, self.context.wall_time() + wait, wait, reason, rule, scope
        )
        refusal.__cause__ = ending.error
        return Raise(refusal, task_event=task_event)

    def _stale(self, call: Call, record: Record) -> Answer:
        """A later attempt owns the key, or the row was deleted: that attempt's answer counts."""
        try:
            now = self.context.records.read(record.stored_key)
        except StoreUnavailable as error:
            return self.entry.away(error, 0)
        self.context.observer.observe(
            events.OutcomeRefused(
                **call.subject, fence=record.fence, state=now.state.value if now else None
            )
        )
        try:
            verdict = self.entry.decide(replace(call, started=True), now)
        except StoreUnavailable as error:
            return self.entry.away(error, 0)
        if isinstance(verdict, Run | Wait):
            why = "a later attempt owns the key" if now is not None else "the record was deleted"
            verdict = self._soon(why)
        answer = self._answered(call, verdict)
        return replace(answer, started=True) if isinstance(answer, Reschedule) else answer

    def _soon(self, reason: str) -> Reschedule:
        """Run a call again that has lost its lease while it ran."""
        return Reschedule(SHORT_PAUSE + self.context.rand(), reason, started=True, event_type="")

    def _answered(self, call: Call, verdict: Verdict) -> Answer:
        """Report what was decided without a run; the worker reports what it publishes."""
        observe = self.context.observer.observe
        match verdict:
            case Return(_, first_call_id):
                observe(events.ResultReplayed(**call.subject, first_call_id=first_call_id))
            case Raise(error):
                observe(events.CallRefused(**call.subject, error=str(error)))
            case Drop(reason):
                observe(events.CallDropped(**call.subject, reason=reason))
            case Reschedule() | Follow():
                pass
            case Run() | Wait():
                raise AssertionError(f"{verdict} is not an answer")
            case _ as never:
                assert_never(never)
        return verdict


def _passing(ending: Ending) -> Raise | None:
    """The exception that Celery gets whatever happened to the outcome: it has been published, or
    the process is ending.
    """
    return (
        Raise(ending.error) if isinstance(ending, Interrupted | Terminated | ControlFlow) else None
    )


def _clears(outcome: Outcome, verdict: AfterFailure | None) -> bool:
    """Whether the end of a probe shows that its group works again: it succeeded, or failed for
    another reason.
    """
    if verdict is None:
        return outcome.ended is Ended.RETURNED
    return verdict.failure.group is None and not leaves_gate_half_open(verdict)


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _said(ending: Ending) -> str:
    match ending:
        case Raised(_, failure):
            return f"{failure.type}: {failure.message}"
        case Lost(reason):
            return f"the lease was lost: {reason}"
        case Returned():
            return ""
        case _:
            return type(ending.error).__name__
