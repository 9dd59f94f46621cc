"""One delivery from acquire to release: gathers facts, asks the decisions, does what they say. Knows no Celery."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, assert_never

from celery_leases.core import decisions, events
from celery_leases.core.decisions import (
    Call,
    Drop,
    Facts,
    GiveUp,
    PutBack,
    Refuse,
    Replay,
    Run,
    StandBack,
    Verdict,
    Wait,
    before_run,
)
from celery_leases.core.endings import Ending, Interrupted, Lost, Passed, Raised, Returned, Terminated
from celery_leases.core.errors import LeaseStoreMismatch, StoreUnavailable
from celery_leases.core.ports import (
    Acquired,
    Claimed,
    Clock,
    Held,
    Holder,
    LeaseStore,
    MarkStore,
    Observer,
    RecordStore,
    Unsettled,
)
from celery_leases.core.records import Bid, Outcome, Record, Refused, State, Won
from celery_leases.core.results import decode
from celery_leases.renewal import Renewer, Tenure

CLAIM_TRIES = 4
LOST_PAUSE = 1.0
PEEK = 0.05
PEEKS = 20


@dataclass(frozen=True, slots=True)
class Answer:
    """Celery gets this value as the task's result."""

    value: Any


@dataclass(frozen=True, slots=True)
class Throw:
    """Celery gets this exception, as the body or a decision raised it.

    ``own``: it is what is remembered of this very call, and is not wanted where Celery knows its outcome already.
    """

    error: BaseException
    own: bool = False


@dataclass(frozen=True, slots=True)
class Again:
    """A fresh message must be published before this delivery ends.

    ``started``: the call has begun, so that it may no longer expire. ``prior``: the token of an attempt whose row may
    still stand open, through no crash of it. ``away``: a store did not answer.
    """

    delay: float
    reason: str
    started: bool = False
    prior: str | None = None
    away: bool = False


@dataclass(frozen=True, slots=True)
class Over:
    """This delivery ends without a result."""

    reason: str


Reply = Answer | Throw | Again | Over


class _Away(Exception):
    """A store did not answer before the body ran; what is to be done about the delivery."""

    def __init__(self, again: Again) -> None:
        super().__init__(again.reason)
        self.again = again


@dataclass(frozen=True, slots=True)
class _Tenancy:
    tenure: Tenure
    record: Record


Body = Callable[[Tenure, Record], Ending]


@dataclass
class Execution:
    """Runs calls on one pair of stores. ``chance`` gives random numbers in [0, 1); ``host`` is ``hostname/pid``."""

    leases: LeaseStore
    records: RecordStore
    marks: MarkStore
    renewer: Renewer
    observer: Observer
    clock: Clock
    chance: Callable[[], float]
    host: str
    #: Whether the process has been told to end, so that nothing is tried for long any more.
    hurried: Callable[[], bool] = field(default=lambda: False)

    def run(self, call: Call, body: Body, away: int = 0) -> Reply:
        """Take *call* to its end. *away*: how often it was put back before because a store did not answer."""
        taken = self.clock.now()
        try:
            entered = self._enter(call)
        except _Away as unavailable:
            return unavailable.again
        except StoreUnavailable as error:
            return self._away(error, away)
        except LeaseStoreMismatch as error:
            return self._away(error, away)
        if not isinstance(entered, _Tenancy):
            return self._reply(call, entered)
        return self._run(call, entered, body, away, taken)

    # -- until the body may run ----------------------------------------------------------------------------

    def _enter(self, call: Call) -> _Tenancy | Verdict:
        if call.repeat:
            verdict = self._decide(call, self.records.read(call.key.stored))
            if not isinstance(verdict, Run | Wait):
                return verdict
        began = self.clock.now()
        while True:
            entered = self._try_to_enter(call, self.clock.now() - began)
            if not isinstance(entered, Wait):
                return entered
            if self.hurried():
                return PutBack(decisions.SHORTEST_DELAY, "the worker is stopping")
            self.clock.sleep(entered.delay)

    def _try_to_enter(self, call: Call, waited: float) -> _Tenancy | Verdict:
        bid = self._bid(call)
        sent = self.clock.now()
        answer = self._acquire(bid)
        if isinstance(answer, Unsettled):
            record = self.records.read(bid.stored_key)
            pause = decisions.store_came_up_empty(call, record, answer.age, self.chance())
            if isinstance(pause, PutBack):
                return pause
            sent = self.clock.now()
            answer = self._acquire(bid, settled=True)
        if isinstance(answer, Held):
            return self._held(call, answer.holder, waited)
        options = call.options
        tenure = Tenure(bid, sent, self.clock, renew=options.renew, max_hold=options.max_hold)
        try:
            if not tenure.held:
                raise StoreUnavailable(f"{self.leases.name}: the lease was granted too late to be of use", True)
            entered = self._claim(call, tenure, waited)
        except (StoreUnavailable, LeaseStoreMismatch):
            self._give_back(bid)
            raise
        if not isinstance(entered, _Tenancy):
            self._give_back(bid)
        return entered

    def _held(self, call: Call, holder: Holder, waited: float) -> Verdict:
        """What holds the key may only be looking at the record: nobody is turned away for that."""
        verdict = before_run(call, Facts(holder=holder, waited=waited, chance=self.chance()))
        if isinstance(verdict, Drop | Refuse):
            record = self.records.read(call.key.stored)
            answer = self._decide(call, record, waited)
            if not isinstance(answer, Run):
                return answer
            if record is None or (record.state, record.owner) != (State.RUNNING, holder.token):
                return Wait(PEEK) if waited < PEEKS * PEEK else PutBack(LOST_PAUSE, "the key is being looked at")
        self._report_held(call, holder)
        return verdict

    def _acquire(self, bid: Bid, *, settled: bool = False) -> Acquired | Held | Unsettled | Claimed:
        if self.leases.in_records:
            return Acquired()  # the claim is what acquires
        try:
            return self.leases.acquire(bid, settled=settled)
        except StoreUnavailable:
            self._give_back(bid)
            raise

    def _claim(self, call: Call, tenure: Tenure, waited: float) -> _Tenancy | Verdict:
        for _ in range(CLAIM_TRIES):
            claim = self._claim_until_known(tenure)
            if isinstance(claim, Won):
                return self._claimed(call, tenure, claim.record)
            if claim.record is not None and (holder := decisions.holder_in(claim.record)) is not None:
                self._report_held(call, holder)
            verdict = self._decide(call, claim.record, waited)
            if not isinstance(verdict, Run):
                return verdict
        return PutBack(LOST_PAUSE + self.chance(), "the record could not be seen")

    def _claim_until_known(self, tenure: Tenure) -> Won | Refused:
        """Claim, again while the outcome is unknown: repeating a claim is harmless, leaving one open is not."""
        tries = 0
        while True:
            try:
                return self._claim_once(tenure.bid)
            except StoreUnavailable as error:
                pause = decisions.settle_pause(tries)
                tries += 1
                if self.hurried() or not tenure.remaining() > pause:
                    # The row may be ours: the lease is left to expire, and the next attempt is told of the token.
                    again = self._away(error, tries=0)
                    raise _Away(Again(again.delay, again.reason, prior=tenure.bid.token, away=True)) from error
                self.clock.sleep(pause)

    def _claim_once(self, bid: Bid) -> Won | Refused:
        if not self.leases.in_records:
            return self.records.claim(bid, self.leases.name)
        answer = self.leases.acquire(bid)
        if not isinstance(answer, Claimed):
            raise TypeError(f"{self.leases.name} says its rows are the leases, but acquire answered {answer}")
        return answer.claim

    def _claimed(self, call: Call, tenure: Tenure, record: Record) -> _Tenancy | Verdict:
        tenure.fence = record.fence
        if record.just_crashed:
            host = record.previous.host if record.previous else None
            self.observer.observe(events.CrashSeen(**_of(call), crashes=record.crashes, host=host))
        verdict = before_run(call, Facts(record=record, claimed=True))
        if isinstance(verdict, GiveUp):
            self._close(call, record, decisions.gave_up(call, record))
            return verdict
        if isinstance(verdict, StandBack):
            self._close(call, record, decisions.stood_back(call, record, verdict.delay))
            return PutBack(verdict.delay, "it crashed repeatedly", started=True)
        if not tenure.held:
            self._close(call, record, decisions.stood_back(call, record, 0.0))
            return PutBack(LOST_PAUSE + self.chance(), "the claim took longer than the lease lasts", started=True)
        return _Tenancy(tenure, record)

    # -- the run and its end -------------------------------------------------------------------------------

    def _run(self, call: Call, tenancy: _Tenancy, body: Body, away: int, taken: float) -> Reply:
        tenure, record = tenancy.tenure, tenancy.record
        self.renewer.add(tenure)
        self.observer.observe(events.LeaseAcquired(**_of(call), fence=record.fence, attempt=record.attempt))
        began = self.clock.now()
        ending = body(tenure, record)
        runtime = self.clock.now() - began
        outcome = decisions.after_run(call, record, ending)
        written = self._settle(call, record, outcome, ending, taken)
        self.renewer.drop(tenure)
        if written is None:
            reason = "the outcome could not be written"
            delay = decisions.store_pause(away, self.chance())
            return _passing(ending) or Again(delay, reason, started=True, prior=record.owner, away=True)
        if tenure.lost is None:
            self._give_back(tenure.bid)
        if not written:
            return _passing(ending) or self._stale(call, record)
        self._report(call, outcome, runtime)
        return self._ended(ending, outcome)

    def _settle(self, call: Call, record: Record, outcome: Outcome, ending: Ending, taken: float) -> bool | None:
        """Write the outcome; ``None`` when the database did not answer for as long as is allowed."""
        until = decisions.settle_until(call, self.clock.now(), taken)
        patient = isinstance(ending, Returned | Raised | Passed)
        tries = 0
        while True:
            try:
                return self.records.settle(record, outcome)
            except StoreUnavailable:
                pause = decisions.settle_pause(tries)
                tries += 1
                if not patient or self.hurried() or self.clock.now() + pause > until:
                    return None
                self.clock.sleep(pause)

    def _ended(self, ending: Ending, outcome: Outcome) -> Reply:
        match ending:
            case Returned(value):
                return Answer(decode(outcome.result) if outcome.result is not None else value)
            case Raised(error):
                return Throw(error)
            case Lost(reason):
                return Again(LOST_PAUSE + self.chance(), f"the lease was lost: {reason}", started=True)
            case Interrupted(error) | Terminated(error) | Passed(error):
                return Throw(error)
            case _ as never:
                assert_never(never)

    def _stale(self, call: Call, record: Record) -> Reply:
        """A later attempt owns the key, or the row is gone: its answer counts, not ours."""
        try:
            now = self.records.read(record.stored_key)
        except StoreUnavailable as error:
            return self._away(error, 0)
        self.observer.observe(
            events.OutcomeRefused(**_of(call), fence=record.fence, state=now.state.value if now else None)
        )
        try:
            verdict = self._decide(replace(call, started=True), now)
        except StoreUnavailable as error:
            return self._away(error, 0)
        if isinstance(verdict, Run | Wait):
            return Again(LOST_PAUSE + self.chance(), "a later attempt owns the key", started=True)
        return self._reply(call, verdict, started=True)

    # -- small steps ---------------------------------------------------------------------------------------

    def _bid(self, call: Call) -> Bid:
        key, options = call.key, call.options
        return Bid(
            stored_key=key.stored,
            task=call.task,
            key=key.key,
            token=call.token,
            call_id=call.call_id,
            ttl=options.ttl,
            holder=self.host,
            fingerprint=key.fingerprint,
            digests=key.digests,
            rerun=options.rerun,
            prior=call.prior,
            retries=call.retries,
        )

    def _decide(self, call: Call, record: Record | None, waited: float = 0.0) -> Verdict:
        out = False
        if call.canvas and (call.repeat or (record is not None and decisions.finished_by(call, record))):
            out = self.marks.mark(call.key.stored, callbacks_mark(call.call_id)) is not None
        return before_run(call, Facts(record=record, callbacks_out=out, waited=waited, chance=self.chance()))

    def _reply(self, call: Call, verdict: Verdict, *, started: bool = False) -> Reply:
        match verdict:
            case Replay(result, first_call_id):
                self.observer.observe(events.ResultReplayed(**_of(call), first_call_id=first_call_id))
                return Answer(decode(result))
            case Drop(reason):
                self.observer.observe(events.CallDropped(**_of(call), reason=reason))
                return Over(reason)
            case Refuse(error, own):
                self.observer.observe(events.CallRefused(**_of(call), error=str(error)))
                return Throw(error, own)
            case GiveUp(error):
                self.observer.observe(events.CallRefused(**_of(call), error=str(error)))
                return Throw(error)
            case PutBack(delay, reason, begun):
                return Again(delay, reason, started=started or begun)
            case Run() | Wait() | StandBack():
                raise AssertionError(f"{verdict} is not an answer")
            case _ as never:
                assert_never(never)

    def _close(self, call: Call, record: Record, outcome: Outcome) -> None:
        """Close an attempt that never ran; if the database is away, its row waits for the next claim of the call."""
        try:
            if self.records.settle(record, outcome):
                self._report(call, outcome, 0.0)
        except StoreUnavailable as error:
            again = self._away(error, 0)
            raise _Away(Again(again.delay, again.reason, prior=record.owner, away=True)) from error

    def _give_back(self, bid: Bid) -> None:
        if self.leases.in_records:
            return  # closing the row was the release
        with suppress(StoreUnavailable):  # it expires by itself
            self.leases.release(bid.stored_key, bid.token)

    def _away(self, error: Exception, tries: int) -> Again:
        return Again(decisions.store_pause(tries, self.chance()), str(error), away=True)

    def _report_held(self, call: Call, holder: Holder) -> None:
        self.observer.observe(
            events.LeaseHeldElsewhere(
                **_of(call),
                holder=holder.host,
                holder_call_id=holder.call_id,
                remaining=holder.remaining,
                same_call=holder.call_id == call.call_id,
            )
        )

    def _report(self, call: Call, outcome: Outcome, runtime: float) -> None:
        self.observer.observe(
            events.AttemptSettled(
                **_of(call),
                state=outcome.state.value,
                ended=outcome.ended.value,
                attempt=outcome.attempt,
                runtime=runtime,
                failure=outcome.failure,
                reason=outcome.reason,
            )
        )


def callbacks_mark(call_id: str) -> str:
    """The mark that the callbacks of a call are out."""
    return f"callbacks:{call_id}"


def waiter_mark(call_id: str) -> str:
    """The mark that names the one copy of a call which is to come back."""
    return f"waiter:{call_id}"


def _passing(ending: Ending) -> Throw | None:
    """What goes on to Celery whatever became of the outcome: it has been published, or the process is ending."""
    return Throw(ending.error) if isinstance(ending, Interrupted | Terminated | Passed) else None


def _of(call: Call) -> events.Subject:
    return {"task": call.task, "key": call.key.key, "call_id": call.call_id}
