"""From a delivery to a claimed record: look, acquire, claim.

The result is a claimed attempt, or the reason why the call does not run now.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace

from celery_leases.attempt.context import Context
from celery_leases.attempt.held_lease import HeldLease
from celery_leases.attempt.store_retries import retrying
from celery_leases.common.values import value_class
from celery_leases.concurrency import resource_pool
from celery_leases.errors import KeyUnusable, LeaseStoreMismatch, RecordUnreadable, StoreUnavailable
from celery_leases.protocol import claims, decisions, events, settlement, waiting
from celery_leases.protocol.decisions import after_claim, before_run
from celery_leases.protocol.groups import Gate
from celery_leases.protocol.message_copies import callbacks_mark
from celery_leases.protocol.ports import (
    Acquired,
    BlockedByGate,
    Claimed,
    Cooling,
    Held,
    Holder,
)
from celery_leases.protocol.records import (
    ClaimRequest,
    Outcome,
    Record,
    Refusal,
    Refused,
    State,
    Won,
)
from celery_leases.protocol.verdicts import (
    Call,
    Drop,
    Facts,
    Raise,
    Reschedule,
    Run,
    Verdict,
    Wait,
)

SHORT_PAUSE = 1.0
PEEK = 0.05
PEEKS = 20


class Away(Exception):
    """A store did not answer and a row may be open; ``again`` is the answer to the delivery."""

    def __init__(self, again: Reschedule) -> None:
        super().__init__(again.reason)
        self.again = again


@value_class(frozen=True, slots=True)
class ClaimedAttempt:
    """The attempt has the key: its lease, and its claimed record."""

    held_lease: HeldLease
    record: Record


@dataclass(frozen=True)
class Entry:
    """Acquires keys on the stores of *context*."""

    context: Context

    def enter(self, call: Call) -> ClaimedAttempt | Verdict:
        """Claim the key of *call*, or return how its delivery ends.

        Raises :class:`Away`, :class:`StoreUnavailable` and :class:`LeaseStoreMismatch`: the
        delivery must be rescheduled.
        """
        if call.repeat:
            verdict = self.decide(call, self.context.records.read(call.key.stored))
            if not isinstance(verdict, Run | Wait):
                return verdict
        began = self.context.clock.now()
        while True:
            entered = self._try_to_enter(call, self.context.clock.now() - began)
            if not isinstance(entered, Wait):
                return entered
            if self.context.stopping():
                return Reschedule(waiting.SHORTEST_DELAY, "the worker is stopping")
            self.context.clock.sleep(entered.delay)

    def _try_to_enter(self, call: Call, waited: float) -> ClaimedAttempt | Verdict:
        claim_request = self._claim_request(call)
        sent = self.context.clock.now()
        answer = self._acquire(claim_request)
        if isinstance(answer, Cooling):
            verdict = self.decide(call, self.context.records.read(claim_request.stored_key), waited)
            if not isinstance(verdict, Run):
                return verdict
            # The record decides, and says that there is nothing to wait for.
            self.context.leases.end_cooldown(claim_request.stored_key)
            sent = self.context.clock.now()
            answer = self._acquire(claim_request)
        match answer:
            case Held(holder):
                return self._held(call, holder, waited)
            case BlockedByGate():
                return self._shut(call, answer, waited)
            case Acquired():
                return self._acquired(call, claim_request, sent, answer, waited)
            case _:
                return Reschedule(
                    SHORT_PAUSE + self.context.rand(), "the key began to cool down again just now"
                )

    def _acquired(
        self, call: Call, claim_request: ClaimRequest, sent: float, answer: Acquired, waited: float
    ) -> ClaimedAttempt | Verdict:
        options = call.options
        held_lease = HeldLease(
            claim_request, sent, self.context.clock, renew=options.renew, max_hold=options.max_hold
        )
        held_lease.probe = claim_request.group if answer.probe else None
        resource_pool.patience.set(held_lease.patience)
        try:
            if not held_lease.held:
                raise StoreUnavailable(
                    f"{self.context.leases.name}: the lease was granted too late to be useful", True
                )
            entered = self._claim(call, held_lease, sent, waited)
        except (StoreUnavailable, LeaseStoreMismatch, KeyUnusable):
            self.give_back(held_lease)
            raise
        except Away:
            # The lease protects a row that may be open; the probe's slot protects nothing.
            with suppress(StoreUnavailable):
                if claim_request.group is not None:
                    self.context.gates.release_probe(claim_request.group, claim_request.token)
            raise
        if not isinstance(entered, ClaimedAttempt):
            self.give_back(held_lease)
        return entered

    def _shut(self, call: Call, shut: BlockedByGate, waited: float) -> Verdict:
        """A closed gate stops bodies only: finished work is replayed."""
        record = shut.record if shut.record_read else self.context.records.read(call.key.stored)
        return self.decide(call, record, waited, shut.gate)

    def _held(self, call: Call, holder: Holder, waited: float) -> Verdict:
        """The holder of the key may only be reading the record: that does not refuse the call."""
        verdict = before_run(call, Facts(holder=holder, waited=waited, rand=self.context.rand()))
        if isinstance(verdict, Drop | Raise):
            record = self.context.records.read(call.key.stored)
            answer = self.decide(call, record, waited)
            if not isinstance(answer, Run):
                return answer
            if record is None or not record.is_attempt(State.RUNNING, holder.token):
                return (
                    Wait(PEEK)
                    if waited < PEEKS * PEEK
                    else Reschedule(SHORT_PAUSE, "another call is reading the record of the key")
                )
        self._report_held(call, holder)
        return verdict

    def _acquire(
        self, claim_request: ClaimRequest
    ) -> Acquired | Held | Cooling | BlockedByGate | Claimed:
        if self.context.leases.in_records:
            return Acquired()  # the claim acquires the lease
        try:
            return self.context.leases.acquire(claim_request)
        except StoreUnavailable:
            self._give_back(claim_request, claim_request.group)
            raise

    def _claim(
        self, call: Call, held_lease: HeldLease, sent: float, waited: float
    ) -> ClaimedAttempt | Verdict:
        claim = self._claim_until_known(held_lease, sent)
        if isinstance(claim, Won):
            return self._claimed(call, held_lease, claim.record)
        if isinstance(claim, BlockedByGate):
            return self._shut(call, claim, waited)
        if claim.why is Refusal.EMPTIED and claim.record is not None and claim.age is not None:
            return waiting.after_store_was_emptied(
                call, claim.record, claim.age, self.context.rand()
            )
        if claim.why is Refusal.LAPSED:
            return waiting.after_lapsed_lease(waited, self.context.rand())
        if (
            claim.record is not None
            and (holder := decisions.holder_of_row(claim.record)) is not None
        ):
            self._report_held(call, holder)
        verdict = self.decide(call, claim.record, waited)
        if isinstance(verdict, Run):
            return Reschedule(
                SHORT_PAUSE + self.context.rand(), "the record changed while it was being claimed"
            )
        return verdict

    def _claim_until_known(
        self, held_lease: HeldLease, sent: float
    ) -> Won | Refused | BlockedByGate:
        """Claim, and repeat while the outcome is unknown: repeating a claim does no harm, but an
        open claim does.
        """
        may_be_ours = False

        def repeatable(error: StoreUnavailable, tries: int) -> bool:
            nonlocal may_be_ours
            # A claim that was certainly not executed leaves no open row: a transaction of the
            # holder may have locked the row.
            may_be_ours = error.executed is not False or (
                tries > 0 and not isinstance(error, RecordUnreadable)
            )
            return may_be_ours and not self.context.stopping()

        try:
            return retrying(
                lambda: self._claim_once(held_lease, sent),
                lambda: self.context.clock.now() + held_lease.remaining(),
                self.context.clock,
                repeatable=repeatable,
            )
        except StoreUnavailable as error:
            if not may_be_ours:
                raise
            # The lease expires by itself, and the next attempt knows the token.
            token = held_lease.claim_request.token
            raise Away(replace(self.away(error, 0), prior=token)) from error

    def _claim_once(self, held_lease: HeldLease, sent: float) -> Won | Refused | BlockedByGate:
        claim_request = held_lease.claim_request
        if not self.context.leases.in_records:
            return self.context.records.claim(
                claim_request,
                self.context.leases.name,
                age=lambda: self._age(claim_request.stored_key, sent),
            )
        answer = self.context.leases.acquire(claim_request)
        if isinstance(answer, BlockedByGate):
            return answer
        if not isinstance(answer, Claimed):
            raise TypeError(
                f"{self.context.leases.name} says its rows are the leases, but acquire answered {answer}"
            )
        held_lease.probe = claim_request.group if answer.probe else None
        return answer.claim

    def _age(self, stored_key: str, sent: float) -> float:
        """For how long the lease store had had its leases when this one was requested, by a request
        sent at *sent*.

        A holder that wrote its lease again since then may have found this attempt's lease there.
        """
        try:
            return self.context.leases.age(stored_key) - (self.context.clock.now() - sent)
        except StoreUnavailable as error:
            raise StoreUnavailable(str(error), False) from error  # nothing was claimed

    def _claimed(
        self, call: Call, held_lease: HeldLease, record: Record
    ) -> ClaimedAttempt | Verdict:
        held_lease.fence = record.fence
        if record.just_crashed:
            host = record.previous.host if record.previous else None
            self.context.observer.observe(
                events.CrashSeen(**call.subject, crashes=record.crashes, host=host)
            )
        verdict = after_claim(call, record)
        if isinstance(verdict, Raise):
            self._close(call, record, settlement.stopped_by_crash_loop(call, record))
            return verdict
        if isinstance(verdict, Reschedule):
            self._close(call, record, settlement.unrun(call, record, verdict.delay))
            return verdict
        if not held_lease.held:
            self._close(call, record, settlement.unrun(call, record, 0.0))
            return Reschedule(
                SHORT_PAUSE + self.context.rand(),
                "the claim took longer than the lease lasts",
                started=True,
            )
        return ClaimedAttempt(held_lease, record)

    # -- small steps, some of which the run takes too ----------------------------------------------

    def _claim_request(self, call: Call) -> ClaimRequest:
        key, options = call.key, call.options
        return ClaimRequest(
            stored_key=key.stored,
            task=call.task,
            key=key.key,
            token=call.token,
            call_id=call.call_id,
            ttl=options.ttl,
            holder=self.context.host,
            fingerprint=key.fingerprint,
            digests=key.digests,
            rerun=options.rerun,
            prior=call.prior,
            retries=call.retries,
            repeat=not call.fresh,
            failure_fence=call.failure_fence,
            group=call.group,
            message=call.message,
            retention=options.retention,
            database="" if self.context.leases.in_records else self.context.records.identity(),
        )

    def decide(
        self, call: Call, record: Record | None, waited: float = 0.0, gate: Gate | None = None
    ) -> Verdict:
        """Decide on a record, with the callbacks mark if it matters."""
        out = False
        if call.canvas and (
            call.repeat or (record is not None and claims.finished_by(call.call_id, record))
        ):
            out = self.context.marks.mark(call.key.stored, callbacks_mark(call.call_id)) is not None
        facts = Facts(
            record,
            callbacks_sent=out,
            waited=waited,
            rand=self.context.rand(),
            gate=gate,
            wall_time=self.context.wall_time(),
        )
        return before_run(call, facts)

    def _close(self, call: Call, record: Record, outcome: Outcome) -> None:
        """Close an attempt that never ran; if the database is unavailable, the next claim of the
        call closes its row.
        """
        try:
            if self.context.records.settle(record, outcome):
                self.report(call, record, outcome, 0.0)
        except StoreUnavailable as error:
            raise Away(replace(self.away(error, 0), prior=record.owner)) from error

    def give_back(self, held_lease: HeldLease) -> None:
        """Release the lease, and the probe's slot that was taken with it."""
        self._give_back(held_lease.claim_request, held_lease.probe)

    def _give_back(self, claim_request: ClaimRequest, probe: str | None) -> None:
        if probe is not None:
            with suppress(StoreUnavailable):  # it expires by itself
                self.context.gates.release_probe(probe, claim_request.token)
        if (
            not self.context.leases.in_records
        ):  # where the claimed row is the lease, closing it was the release
            with suppress(StoreUnavailable):  # it expires by itself too
                self.context.leases.release(claim_request.stored_key, claim_request.token)

    def away(self, error: Exception | str, tries: int) -> Reschedule:
        """Reschedule the delivery, because a store did not answer for the *tries*-th time
        in a row.
        """
        delay = settlement.store_pause(tries, self.context.rand())
        return Reschedule(delay, str(error), event_type="", unavailable=True)

    def _report_held(self, call: Call, holder: Holder) -> None:
        self.context.observer.observe(
            events.LeaseHeldElsewhere(
                **call.subject,
                holder=holder.host,
                holder_call_id=holder.call_id,
                remaining=holder.remaining,
                same_call=holder.call_id == call.call_id,
            )
        )

    def report(
        self,
        call: Call,
        record: Record,
        outcome: Outcome,
        runtime: float,
        held_lease: HeldLease | None = None,
    ) -> None:
        """Emit the event that an attempt on *record* was closed; *runtime* is in seconds."""
        if outcome.failure is None and not self.context.observer.wants(events.AttemptSettled):
            return  # the log level of a failure may be higher than usual
        held = self.context.clock.now() - held_lease.since if held_lease is not None else 0.0
        self.context.observer.observe(
            events.AttemptSettled.by(call.subject, record, outcome, runtime, held)
        )
