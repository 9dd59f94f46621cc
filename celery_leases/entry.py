"""The way in, up to a claimed record: look, acquire, claim. It answers with a tenancy, or with why there is none."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from celery_leases.core import claims, decisions, events, outcomes, waiting
from celery_leases.core.decisions import before_run
from celery_leases.core.errors import KeyUnusable, LeaseStoreMismatch, RecordUnreadable, StoreUnavailable
from celery_leases.core.gates import Gate
from celery_leases.core.ports import (
    Acquired,
    Claimed,
    Clock,
    Cooling,
    GateStore,
    Held,
    Holder,
    LeaseStore,
    MarkStore,
    Observer,
    RecordStore,
    Shut,
)
from celery_leases.core.records import Bid, Outcome, Record, Refusal, Refused, State, Won
from celery_leases.core.replies import Again, callbacks_mark
from celery_leases.core.verdicts import Call, Drop, Facts, GiveUp, PutBack, Refuse, Run, StandBack, Verdict, Wait
from celery_leases.process import lending
from celery_leases.tenure import Tenure

SHORT_PAUSE = 1.0
PEEK = 0.05
PEEKS = 20


class Away(Exception):
    """A store did not answer and a row may stand open; ``again`` is what is to be done about the delivery."""

    def __init__(self, again: Again) -> None:
        super().__init__(again.reason)
        self.again = again


@dataclass(frozen=True, slots=True)
class Tenancy:
    """The key is ours: the lease as we hold it, and the record as we claimed it."""

    tenure: Tenure
    record: Record


@dataclass
class Entry:
    """Enters keys on one pair of stores. ``chance`` gives random numbers in [0, 1); ``host`` is ``hostname/pid``."""

    leases: LeaseStore
    records: RecordStore
    marks: MarkStore
    gates: GateStore
    observer: Observer
    clock: Clock
    chance: Callable[[], float]
    host: str
    #: Whether the process has been told to end, so that nothing is tried for long any more.
    hurried: Callable[[], bool] = field(default=lambda: False)
    #: The wall clock in seconds since the epoch, for what is shown to people.
    today: Callable[[], float] = field(default=lambda: 0.0)

    def enter(self, call: Call) -> Tenancy | Verdict:
        """Claim the key of *call*, or say what to do instead.

        Raises :class:`Away`, :class:`StoreUnavailable` and :class:`LeaseStoreMismatch`: the delivery must come back.
        """
        if call.repeat:
            verdict = self.decide(call, self.records.read(call.key.stored))
            if not isinstance(verdict, Run | Wait):
                return verdict
        began = self.clock.now()
        while True:
            entered = self._try_to_enter(call, self.clock.now() - began)
            if not isinstance(entered, Wait):
                return entered
            if self.hurried():
                return PutBack(waiting.SHORTEST_DELAY, "the worker is stopping")
            self.clock.sleep(entered.delay)

    def _try_to_enter(self, call: Call, waited: float) -> Tenancy | Verdict:
        bid = self._bid(call)
        sent = self.clock.now()
        answer = self._acquire(bid)
        if isinstance(answer, Cooling):
            verdict = self.decide(call, self.records.read(bid.stored_key), waited)
            if not isinstance(verdict, Run):
                return verdict
            # The record is the truth, and says that nothing is to be waited for.
            self.leases.end_cooldown(bid.stored_key)
            sent = self.clock.now()
            answer = self._acquire(bid)
        match answer:
            case Held(holder):
                return self._held(call, holder, waited)
            case Shut():
                return self._shut(call, answer, waited)
            case Acquired():
                return self._acquired(call, bid, sent, answer, waited)
            case _:
                return PutBack(SHORT_PAUSE + self.chance(), "the key has just begun to cool down again")

    def _acquired(self, call: Call, bid: Bid, sent: float, answer: Acquired, waited: float) -> Tenancy | Verdict:
        options = call.options
        tenure = Tenure(bid, sent, self.clock, renew=options.renew, max_hold=options.max_hold)
        tenure.probe = bid.group if answer.probe else None
        lending.patience.set(tenure.patience)
        try:
            if not tenure.held:
                raise StoreUnavailable(f"{self.leases.name}: the lease was granted too late to be of use", True)
            entered = self._claim(call, tenure, sent, waited)
        except (StoreUnavailable, LeaseStoreMismatch, KeyUnusable):
            self.give_back(tenure)
            raise
        except Away:
            # The lease stands guard over a row that may be open; the probe's slot guards nothing.
            with suppress(StoreUnavailable):
                if bid.group is not None:
                    self.gates.give_back_probe(bid.group, bid.token)
            raise
        if not isinstance(entered, Tenancy):
            self.give_back(tenure)
        return entered

    def _shut(self, call: Call, shut: Shut, waited: float) -> Verdict:
        """A closed gate stops bodies only: work that is finished is replayed."""
        record = shut.record if shut.looked else self.records.read(call.key.stored)
        return self.decide(call, record, waited, shut.gate)

    def _held(self, call: Call, holder: Holder, waited: float) -> Verdict:
        """What holds the key may only be looking at the record: nobody is turned away for that."""
        verdict = before_run(call, Facts(holder=holder, waited=waited, chance=self.chance()))
        if isinstance(verdict, Drop | Refuse):
            record = self.records.read(call.key.stored)
            answer = self.decide(call, record, waited)
            if not isinstance(answer, Run):
                return answer
            if record is None or (record.state, record.owner) != (State.RUNNING, holder.token):
                return Wait(PEEK) if waited < PEEKS * PEEK else PutBack(SHORT_PAUSE, "the key is being looked at")
        self._report_held(call, holder)
        return verdict

    def _acquire(self, bid: Bid) -> Acquired | Held | Cooling | Shut | Claimed:
        if self.leases.in_records:
            return Acquired()  # the claim is what acquires
        try:
            return self.leases.acquire(bid)
        except StoreUnavailable:
            self._give_back(bid, bid.group)
            raise

    def _claim(self, call: Call, tenure: Tenure, sent: float, waited: float) -> Tenancy | Verdict:
        claim = self._claim_until_known(tenure, sent)
        if isinstance(claim, Won):
            return self._claimed(call, tenure, claim.record)
        if isinstance(claim, Shut):
            return self._shut(call, claim, waited)
        if claim.why is Refusal.EMPTIED and claim.record is not None and claim.age is not None:
            return waiting.store_came_up_empty(call, claim.record, claim.age, self.chance())
        if claim.why is Refusal.LAPSED:
            return waiting.holder_may_return(waited, self.chance())
        if claim.record is not None and (holder := decisions.holder_in(claim.record)) is not None:
            self._report_held(call, holder)
        verdict = self.decide(call, claim.record, waited)
        if isinstance(verdict, Run):
            return PutBack(SHORT_PAUSE + self.chance(), "the record changed while it was being claimed")
        return verdict

    def _claim_until_known(self, tenure: Tenure, sent: float) -> Won | Refused | Shut:
        """Claim, again while the outcome is unknown: repeating a claim is harmless, leaving one open is not."""
        tries = 0
        while True:
            try:
                return self._claim_once(tenure, sent)
            except StoreUnavailable as error:
                if error.executed is False and (not tries or isinstance(error, RecordUnreadable)):
                    raise  # nothing is open: its row may be locked by a transaction of its holder's
                pause = outcomes.settle_pause(tries)
                tries += 1
                if self.hurried() or not tenure.remaining() > pause:
                    # The row may be ours: the lease is left to expire, and the next attempt is told of the token.
                    again = self.away(error, tries=0)
                    raise Away(Again(again.delay, again.reason, prior=tenure.bid.token, away=True)) from error
                self.clock.sleep(pause)

    def _claim_once(self, tenure: Tenure, sent: float) -> Won | Refused | Shut:
        bid = tenure.bid
        if not self.leases.in_records:
            return self.records.claim(bid, self.leases.name, age=lambda: self._age(bid.stored_key, sent))
        answer = self.leases.acquire(bid)
        if isinstance(answer, Shut):
            return answer
        if not isinstance(answer, Claimed):
            raise TypeError(f"{self.leases.name} says its rows are the leases, but acquire answered {answer}")
        tenure.probe = bid.group if answer.probe else None
        return answer.claim

    def _age(self, stored_key: str, sent: float) -> float:
        """For how long the lease store had had its leases when it was asked for this one, by a request sent at *sent*.

        A holder that came back to an emptied store since then may have met our lease there.
        """
        try:
            return self.leases.age(stored_key) - (self.clock.now() - sent)
        except StoreUnavailable as error:
            raise StoreUnavailable(str(error), False) from error  # nothing was claimed

    def _claimed(self, call: Call, tenure: Tenure, record: Record) -> Tenancy | Verdict:
        tenure.fence = record.fence
        if record.just_crashed:
            host = record.previous.host if record.previous else None
            self.observer.observe(events.CrashSeen(**call.subject, crashes=record.crashes, host=host))
        verdict = before_run(call, Facts(record=record, claimed=True))
        if isinstance(verdict, GiveUp):
            self._close(call, record, outcomes.gave_up(call, record))
            return verdict
        if isinstance(verdict, StandBack):
            self._close(call, record, outcomes.stood_back(call, record, verdict.delay))
            return PutBack(verdict.delay, "it crashed repeatedly", started=True)
        if not tenure.held:
            self._close(call, record, outcomes.stood_back(call, record, 0.0))
            return PutBack(SHORT_PAUSE + self.chance(), "the claim took longer than the lease lasts", started=True)
        return Tenancy(tenure, record)

    # -- small steps, some of which the run takes too ------------------------------------------------------

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
            repeat=not call.fresh,
            met=call.met,
            group=call.group,
            message=call.message,
            retention=options.retention,
            database="" if self.leases.in_records else self.records.identity(),
        )

    def decide(self, call: Call, record: Record | None, waited: float = 0.0, gate: Gate | None = None) -> Verdict:
        """Decide on a record, with the callbacks mark where it counts."""
        out = False
        if call.canvas and (call.repeat or (record is not None and claims.finished_by(call.call_id, record))):
            out = self.marks.mark(call.key.stored, callbacks_mark(call.call_id)) is not None
        facts = Facts(record, callbacks_out=out, waited=waited, chance=self.chance(), gate=gate, today=self.today())
        return before_run(call, facts)

    def _close(self, call: Call, record: Record, outcome: Outcome) -> None:
        """Close an attempt that never ran; if the database is away, its row waits for the next claim of the call."""
        try:
            if self.records.settle(record, outcome):
                self.report(call, outcome, 0.0)
        except StoreUnavailable as error:
            again = self.away(error, 0)
            raise Away(Again(again.delay, again.reason, prior=record.owner, away=True)) from error

    def give_back(self, tenure: Tenure) -> None:
        """Release the lease, and the probe's slot that came with it."""
        self._give_back(tenure.bid, tenure.probe)

    def _give_back(self, bid: Bid, probe: str | None) -> None:
        if probe is not None:
            with suppress(StoreUnavailable):  # it ends by itself
                self.gates.give_back_probe(probe, bid.token)
        if not self.leases.in_records:  # where the claimed row is the lease, closing it was the release
            with suppress(StoreUnavailable):  # it ends by itself too
                self.leases.release(bid.stored_key, bid.token)

    def away(self, error: Exception, tries: int) -> Again:
        """Come back later, as a store did not answer for the *tries*-th time in a row."""
        return Again(outcomes.store_pause(tries, self.chance()), str(error), away=True)

    def _report_held(self, call: Call, holder: Holder) -> None:
        self.observer.observe(
            events.LeaseHeldElsewhere(
                **call.subject,
                holder=holder.host,
                holder_call_id=holder.call_id,
                remaining=holder.remaining,
                same_call=holder.call_id == call.call_id,
            )
        )

    def report(self, call: Call, outcome: Outcome, runtime: float) -> None:
        """Tell that an attempt was closed; *runtime* is in seconds."""
        if outcome.failure is None and not self.observer.hears(events.AttemptSettled):
            return  # a failure may be told of at a higher level than is usual
        self.observer.observe(events.AttemptSettled.by(call.subject, outcome, runtime))
