"""One delivery from acquire to release: asks the decisions, runs the body, does what they say. Knows no Celery."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TypeVar, assert_never

from celery_leases.core import events, outcomes
from celery_leases.core.classifier.default_rules import ANYTHING_ELSE
from celery_leases.core.durations import in_words
from celery_leases.core.endings import Ending, Interrupted, Lost, Passed, Raised, Returned, Snoozed, Terminated
from celery_leases.core.errors import (
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
from celery_leases.core.failures import AfterFailure, CoolDown, after_failure, says_nothing_of_the_group
from celery_leases.core.records import Ended, Outcome, Record, State
from celery_leases.core.redaction import message_of
from celery_leases.core.replies import Again, Answer, Elsewhere, News, Over, Reply, Throw
from celery_leases.core.results import MESSAGE_MAX, decode, failure_of, given_back, kept_value
from celery_leases.core.texts import printable
from celery_leases.core.verdicts import (
    Call,
    Drop,
    Follow,
    GiveUp,
    PutBack,
    Refuse,
    Replay,
    Run,
    StandBack,
    Verdict,
    Wait,
)
from celery_leases.core.waiting import RETRY_GRACE
from celery_leases.entry import SHORT_PAUSE, Away, Entry, Tenancy
from celery_leases.process import lending
from celery_leases.renewal import Renewer
from celery_leases.tenure import Tenure

logger = logging.getLogger("celery_leases")

T = TypeVar("T")
Body = Callable[[Tenure, Record], Ending]


@dataclass
class Execution:
    """Runs calls whose keys it enters by *entry*, their leases kept by *renewer*."""

    entry: Entry
    renewer: Renewer

    def run(self, call: Call, body: Body, away: int = 0) -> Reply:
        """Take *call* to its end. *away*: how often it was put back before because a store did not answer."""
        before = lending.patience.set(None)  # that of another call, if this one runs in its body
        try:
            return self._taken(call, body, away)
        finally:
            lending.patience.reset(before)

    def _taken(self, call: Call, body: Body, away: int) -> Reply:
        taken = self.entry.clock.now()
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
        if not isinstance(entered, Tenancy):
            return self._reply(call, entered)
        try:
            return self._run(call, entered, body, away, taken)
        finally:
            self.renewer.drop(entered.tenure)  # also where something raised that never should: the lease then expires

    def _run(self, call: Call, tenancy: Tenancy, body: Body, away: int, taken: float) -> Reply:
        tenure, record = tenancy.tenure, tenancy.record
        try:
            self.renewer.add(tenure)
        except Exception as error:  # noqa: BLE001 - no thread can be started
            return self._not_begun(call, tenancy, error, away)
        observer = self.entry.observer
        if observer.hears(events.LeaseAcquired):
            observer.observe(events.LeaseAcquired(**call.subject, fence=record.fence, attempt=record.attempt))
        began = self.entry.clock.now()
        ending = body(tenure, record)
        runtime = self.entry.clock.now() - began
        left_open = tenure.work.end()
        if tenure.work.progressed:
            record = replace(record, crashes=0)
        if tenure.work.completing:
            seen = self._patiently(call, tenure, ending, taken, lambda: self.entry.records.read(record.stored_key))
            if seen is None:
                self.renewer.drop(tenure)
                return self._unwritten(ending, record, away)
            if seen[0] is not None and _is_done_by(seen[0], record):
                return self._completed(call, tenure, seen[0], ending, runtime)
            ending = self._not_committed(call, record, ending, "the body returned after complete(), but")
        elif left_open:
            ending = self._not_committed(call, record, ending, "the body returned after guard(), but")
        verdict = self._failed(call, record, ending) if isinstance(ending, Raised) else None
        outcome = outcomes.after_run(call, record, ending, verdict)
        if tenure.work.has_unsaved:
            outcome = replace(outcome, progress=tenure.work.unsaved)
        settled = self._patiently(call, tenure, ending, taken, lambda: self.entry.records.settle(record, outcome))
        self.renewer.drop(tenure)
        if settled is None:
            return self._unwritten(ending, record, away)
        (written,) = settled
        self._let_go(call, tenure, outcome if written else None, verdict)
        if not written:
            return _passing(ending) or self._stale(call, record)
        self.entry.report(call, outcome, runtime)
        return self._ended(call, ending, outcome)

    def _unexpected(self, call: Call, error: Exception, away: int) -> Again:
        """Put back what met an error that no store is known to raise; its row may stand open under its token."""
        logger.error("%s[%s] was not begun: %s", call.task, call.call_id, _named(error), exc_info=error)
        again = self.entry.away(error, away)
        return replace(again, reason=_named(error), prior=call.token)

    def _not_begun(self, call: Call, tenancy: Tenancy, error: Exception, away: int) -> Again:
        """Give an attempt back whose lease nobody would renew."""
        with suppress(StoreUnavailable):  # then the next attempt has its token
            self.entry.records.settle(tenancy.record, outcomes.stood_back(call, tenancy.record, 0.0))
        self.entry.give_back(tenancy.tenure)
        return self._unexpected(call, error, away)

    def _unwritten(self, ending: Ending, record: Record, away: int) -> Reply:
        delay = outcomes.store_pause(away, self.entry.chance())
        reason = "the outcome could not be written"
        return _passing(ending) or Again(delay, reason, started=True, prior=record.owner, away=True)

    def _completed(self, call: Call, tenure: Tenure, done: Record, ending: Ending, runtime: float) -> Reply:
        """The done record was committed by the body itself: it has succeeded, whatever it did afterwards."""
        self.renewer.drop(tenure)
        outcome = outcomes.after_run(call, done, Returned(None, done.result, done.reason))
        self._let_go(call, tenure, outcome, None)
        if not isinstance(ending, Returned):
            self.entry.observer.observe(events.CompletionStands(**call.subject, fence=done.fence, error=_said(ending)))
        self.entry.report(call, outcome, runtime)
        if isinstance(ending, Interrupted | Terminated):
            return Throw(ending.error)
        if done.result is None and isinstance(ending, Returned):
            return Answer(ending.value)  # as it could not be kept, what the body returned is all there is
        return Answer(decode(done.result))

    def _not_committed(self, call: Call, record: Record, ending: Ending, what: str) -> Ending:
        """How an attempt has ended whose own transaction was never committed: as it did, but not in success."""
        if not isinstance(ending, Returned):
            return ending
        message = f"{printable(call.key.key)}: {what} its transaction was not committed; commit it before the body ends"
        error = CompletionNotCommitted(message, record.key)
        return Raised(error, failure_of(error), call.options.classifier.judge(error, self.entry.today()))

    def _failed(self, call: Call, record: Record, ending: Raised) -> AfterFailure:
        """What a failure means; one of the group has closed its gate then, which knows best for how long."""
        verdict = after_failure(call, record, ending, self.entry.chance())
        if not isinstance(verdict, CoolDown) or verdict.closing is None or call.group is None:
            return verdict
        try:
            gate = self.entry.gates.close_gate(call.group, verdict.closing, record.owner)
        except StoreUnavailable:
            return verdict  # the key cools down all the same, and the next failure of the group closes the gate
        self.entry.observer.observe(
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

    def _let_go(self, call: Call, tenure: Tenure, outcome: Outcome | None, verdict: AfterFailure | None) -> None:
        """Free the key, or leave it cooling; and tell the gate of the group what its probe has found."""
        if tenure.lost is not None:
            return  # it is somebody else's now, and so may the probe's slot be
        entry, bid = self.entry, tenure.bid
        cooling = outcome.retry_after if outcome is not None and outcome.state is State.COOLING else None
        if tenure.probe is None and cooling is None:
            entry.give_back(tenure)
            return
        with suppress(StoreUnavailable):  # lease and slot end by themselves, and the record holds the cooldown
            clears = tenure.probe is not None and outcome is not None and _clears(outcome, verdict)
            if tenure.probe is not None and clears and entry.gates.open_gate(tenure.probe, bid.token):
                entry.observer.observe(events.GateOpened(**call.subject, group=tenure.probe))
                tenure.probe = None
            if (
                cooling is not None
                and cooling > RETRY_GRACE
                and entry.leases.cool(bid.stored_key, bid.token, cooling - RETRY_GRACE)
            ):
                if tenure.probe is not None:
                    entry.gates.give_back_probe(tenure.probe, bid.token)
                return
        entry.give_back(tenure)

    def _patiently(
        self, call: Call, tenure: Tenure, ending: Ending, taken: float, step: Callable[[], T]
    ) -> tuple[T] | None:
        """Take a step in the database; ``None`` when it did not answer for as long as is allowed.

        A body whose lease was lost is closed as patiently as any other: while its row is open, the next claim of the
        key takes this process for dead. One that was given back for another reason ends in a hurry.
        """
        until = outcomes.settle_until(call, self.entry.clock.now(), taken)
        patient = isinstance(ending, Returned | Raised | Snoozed | Passed) or tenure.lost is not None
        tries = 0
        while True:
            try:
                return (step(),)
            except Exception as error:
                if not tries and not isinstance(error, StoreUnavailable):
                    logger.error("%s[%s] is to be closed: %s", call.task, call.call_id, _named(error), exc_info=error)
                pause = outcomes.settle_pause(tries)
                tries += 1
                if not patient or self.entry.hurried() or self.entry.clock.now() + pause > until:
                    return None
                self.entry.clock.sleep(pause)

    def _ended(self, call: Call, ending: Ending, outcome: Outcome) -> Reply:
        match ending:
            case Returned(value):
                return Answer(given_back(value, outcome.result) if outcome.result is not None else value)
            case Raised() | Snoozed():
                return self._deferred(call, ending, outcome)
            case Lost(reason):
                return Again(SHORT_PAUSE + self.entry.chance(), f"the lease was lost: {reason}", started=True)
            case Interrupted(error) | Terminated(error) | Passed(error):
                return Throw(error)
            case _ as never:
                assert_never(never)

    def _deferred(self, call: Call, ending: Raised | Snoozed, outcome: Outcome) -> Reply:
        """Put back what comes back by itself; else the caller gets the error, or is told when to ask again."""
        wait, why = outcome.retry_after or 0.0, outcome.reason or "it asked for it"
        cooling = outcome.state is State.COOLING
        news = News("snoozed" if isinstance(ending, Snoozed) else "cooldown" if cooling else "backoff", wait, why)
        asked = isinstance(ending, Snoozed) or isinstance(ending.error, Cooldown | RetryLater)
        if outcome.resumes:
            cause = ending.error if isinstance(ending, Raised) else None
            unknown = outcome.failure is not None and outcome.failure.rule == ANYTHING_ELSE.name
            known = f"{outcome.state.value}: {why}"
            unread = isinstance(ending.error, RecordUnreadable)
            return Again(wait, known, started=True, news=news, cause=cause, unknown=unknown, away=unread)
        if not asked:
            return Throw(ending.error, news=news if cooling else None)
        rule = outcome.failure.rule if outcome.failure else None
        if outcome.failure is not None and outcome.state is State.FAILED:
            failed = PermanentFailure(printable(outcome.failure.text, None), rule, outcome.failure.type)
            failed.__cause__ = ending.error
            return Throw(failed)
        said = printable(message_of(ending.error, MESSAGE_MAX), None)  # a body may put a client's own text into it
        message = f"Retry available in {in_words(wait)}: {said}"
        reason = outcome.failure.reason if outcome.failure else outcome.ended.value
        refusal = CoolingDown(message, call.key.key, self.entry.today() + wait, wait, reason, rule)
        refusal.__cause__ = ending.error
        return Throw(refusal, news=news)

    def _stale(self, call: Call, record: Record) -> Reply:
        """A later attempt owns the key, or the row is gone: its answer counts, not ours."""
        try:
            now = self.entry.records.read(record.stored_key)
        except StoreUnavailable as error:
            return self.entry.away(error, 0)
        self.entry.observer.observe(
            events.OutcomeRefused(**call.subject, fence=record.fence, state=now.state.value if now else None)
        )
        try:
            verdict = self.entry.decide(replace(call, started=True), now)
        except StoreUnavailable as error:
            return self.entry.away(error, 0)
        if isinstance(verdict, Run | Wait):
            why = "a later attempt owns the key" if now is not None else "the record was deleted"
            return Again(SHORT_PAUSE + self.entry.chance(), why, started=True)
        return self._reply(call, verdict, started=True)

    def _reply(self, call: Call, verdict: Verdict, *, started: bool = False) -> Reply:
        match verdict:
            case Replay(result, first_call_id):
                try:
                    value = kept_value(result, call.key.key, "result", call.task)
                except RecordUnreadable as error:
                    return replace(self.entry.away(error, 0), started=started)
                self.entry.observer.observe(events.ResultReplayed(**call.subject, first_call_id=first_call_id))
                return Answer(value)
            case Follow(call_id, age, delay, missing):
                reason = f"call {call_id} goes on as another task, which has not ended"
                again = Again(delay, reason, started=started, refusal=missing, news=News("put-back", delay, reason))
                return Elsewhere(call_id, age, again, missing)
            case Drop(reason):
                self.entry.observer.observe(events.CallDropped(**call.subject, reason=reason))
                return Over(reason)
            case Refuse(error, own):
                self.entry.observer.observe(events.CallRefused(**call.subject, error=str(error)))
                return Throw(error, own)
            case GiveUp(error):
                self.entry.observer.observe(events.CallRefused(**call.subject, error=str(error)))
                return Throw(error)
            case PutBack(delay, reason, begun, refusal, what, retrying, met, held):
                # A hop is not the whole wait.
                wait = refusal.retry_after if isinstance(refusal, CoolingDown) else delay
                news = News(what, wait, reason) if what else None
                begun = started or begun
                again = Again(delay, reason, started=begun, refusal=refusal, news=news, retrying=retrying)
                return replace(again, met=met, held=held)
            case Run() | Wait() | StandBack():
                raise AssertionError(f"{verdict} is not an answer")
            case _ as never:
                assert_never(never)


def _passing(ending: Ending) -> Throw | None:
    """What goes on to Celery whatever became of the outcome: it has been published, or the process is ending."""
    return Throw(ending.error) if isinstance(ending, Interrupted | Terminated | Passed) else None


def _clears(outcome: Outcome, verdict: AfterFailure | None) -> bool:
    """Whether a probe that ended so shows that its group is back: it succeeded, or failed of something else."""
    if verdict is None:
        return outcome.ended is Ended.RETURNED
    return verdict.failure.group is None and not says_nothing_of_the_group(verdict)


def _is_done_by(now: Record, ours: Record) -> bool:
    return (now.state, now.fence, now.owner) == (State.DONE, ours.fence, ours.owner)


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
