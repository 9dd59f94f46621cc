"""One delivery from acquire to release: asks the decisions, runs the body, does what they say. Knows no Celery."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import assert_never

from celery_leases.core import events, outcomes
from celery_leases.core.endings import Ending, Interrupted, Lost, Passed, Raised, Returned, Terminated
from celery_leases.core.errors import LeaseStoreMismatch, StoreUnavailable
from celery_leases.core.records import Outcome, Record
from celery_leases.core.replies import Again, Answer, Over, Reply, Throw
from celery_leases.core.results import decode
from celery_leases.core.verdicts import Call, Drop, GiveUp, PutBack, Refuse, Replay, Run, StandBack, Verdict, Wait
from celery_leases.entry import SHORT_PAUSE, Away, Entry, Tenancy, about
from celery_leases.renewal import Renewer, Tenure

Body = Callable[[Tenure, Record], Ending]


@dataclass
class Execution:
    """Runs calls whose keys it enters by *entry*, their leases kept by *renewer*."""

    entry: Entry
    renewer: Renewer

    def run(self, call: Call, body: Body, away: int = 0) -> Reply:
        """Take *call* to its end. *away*: how often it was put back before because a store did not answer."""
        taken = self.entry.clock.now()
        try:
            entered = self.entry.enter(call)
        except Away as unavailable:
            return unavailable.again
        except (StoreUnavailable, LeaseStoreMismatch) as error:
            return self.entry.away(error, away)
        if not isinstance(entered, Tenancy):
            return self._reply(call, entered)
        return self._run(call, entered, body, away, taken)

    def _run(self, call: Call, tenancy: Tenancy, body: Body, away: int, taken: float) -> Reply:
        tenure, record = tenancy.tenure, tenancy.record
        self.renewer.add(tenure)
        self.entry.observer.observe(events.LeaseAcquired(**about(call), fence=record.fence, attempt=record.attempt))
        began = self.entry.clock.now()
        ending = body(tenure, record)
        runtime = self.entry.clock.now() - began
        outcome = outcomes.after_run(call, record, ending)
        written = self._settle(call, record, outcome, ending, taken)
        self.renewer.drop(tenure)
        if written is None:
            reason = "the outcome could not be written"
            delay = outcomes.store_pause(away, self.entry.chance())
            return _passing(ending) or Again(delay, reason, started=True, prior=record.owner, away=True)
        if tenure.lost is None:
            self.entry.give_back(tenure.bid)
        if not written:
            return _passing(ending) or self._stale(call, record)
        self.entry.report(call, outcome, runtime)
        return self._ended(ending, outcome)

    def _settle(self, call: Call, record: Record, outcome: Outcome, ending: Ending, taken: float) -> bool | None:
        """Write the outcome; ``None`` when the database did not answer for as long as is allowed."""
        until = outcomes.settle_until(call, self.entry.clock.now(), taken)
        patient = isinstance(ending, Returned | Raised | Passed)
        tries = 0
        while True:
            try:
                return self.entry.records.settle(record, outcome)
            except StoreUnavailable:
                pause = outcomes.settle_pause(tries)
                tries += 1
                if not patient or self.entry.hurried() or self.entry.clock.now() + pause > until:
                    return None
                self.entry.clock.sleep(pause)

    def _ended(self, ending: Ending, outcome: Outcome) -> Reply:
        match ending:
            case Returned(value):
                return Answer(decode(outcome.result) if outcome.result is not None else value)
            case Raised(error):
                return Throw(error)
            case Lost(reason):
                return Again(SHORT_PAUSE + self.entry.chance(), f"the lease was lost: {reason}", started=True)
            case Interrupted(error) | Terminated(error) | Passed(error):
                return Throw(error)
            case _ as never:
                assert_never(never)

    def _stale(self, call: Call, record: Record) -> Reply:
        """A later attempt owns the key, or the row is gone: its answer counts, not ours."""
        try:
            now = self.entry.records.read(record.stored_key)
        except StoreUnavailable as error:
            return self.entry.away(error, 0)
        self.entry.observer.observe(
            events.OutcomeRefused(**about(call), fence=record.fence, state=now.state.value if now else None)
        )
        try:
            verdict = self.entry.decide(replace(call, started=True), now)
        except StoreUnavailable as error:
            return self.entry.away(error, 0)
        if isinstance(verdict, Run | Wait):
            return Again(SHORT_PAUSE + self.entry.chance(), "a later attempt owns the key", started=True)
        return self._reply(call, verdict, started=True)

    def _reply(self, call: Call, verdict: Verdict, *, started: bool = False) -> Reply:
        match verdict:
            case Replay(result, first_call_id):
                self.entry.observer.observe(events.ResultReplayed(**about(call), first_call_id=first_call_id))
                return Answer(decode(result))
            case Drop(reason):
                self.entry.observer.observe(events.CallDropped(**about(call), reason=reason))
                return Over(reason)
            case Refuse(error, own):
                self.entry.observer.observe(events.CallRefused(**about(call), error=str(error)))
                return Throw(error, own)
            case GiveUp(error):
                self.entry.observer.observe(events.CallRefused(**about(call), error=str(error)))
                return Throw(error)
            case PutBack(delay, reason, begun):
                return Again(delay, reason, started=started or begun)
            case Run() | Wait() | StandBack():
                raise AssertionError(f"{verdict} is not an answer")
            case _ as never:
                assert_never(never)


def _passing(ending: Ending) -> Throw | None:
    """What goes on to Celery whatever became of the outcome: it has been published, or the process is ending."""
    return Throw(ending.error) if isinstance(ending, Interrupted | Terminated | Passed) else None
