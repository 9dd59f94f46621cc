"""Acquires the lease of a key, then claims its record.

The result is a claimed attempt, or a verdict: the reason why the call does not run now.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass, replace

from celery_leases import events
from celery_leases.attempt.held_lease import HeldLease
from celery_leases.attempt.process import Process, retrying
from celery_leases.call import Call
from celery_leases.concurrency import resource_pool
from celery_leases.decide import after_run as settlement
from celery_leases.decide import attempt_history, waiting
from celery_leases.decide import before_run as decisions
from celery_leases.decide import claim as claim_rules
from celery_leases.decide.answers import Acquired, Holder, Refusal, Refused
from celery_leases.decide.before_run import after_claim, before_run
from celery_leases.decide.copies import callbacks_mark
from celery_leases.decide.verdicts import Drop, Facts, Raise, Reschedule, Run, Verdict, Wait
from celery_leases.errors import KeyUnusable, LeaseStoreMismatch, RecordUnreadable, StoreUnavailable
from celery_leases.groups.group import Gate
from celery_leases.record import Outcome, Record, State
from celery_leases.value_class import value_class

SHORT_PAUSE = 1.0
READ_PAUSE = 0.05
"""Seconds between two tries while another call reads the record."""
READ_PAUSES = 20


class RowMayBeOpen(Exception):
    """A store did not answer, so the record may still say ``running`` under this attempt's token;
    ``answer`` is how the delivery ends.
    """

    def __init__(self, answer: Reschedule) -> None:
        super().__init__(answer.reason)
        self.answer = answer


@value_class(frozen=True, slots=True)
class ClaimedAttempt:
    """An attempt that may run its body: its lease, and its claimed record."""

    held_lease: HeldLease
    record: Record


@dataclass(frozen=True)
class Acquirer:
    """Acquires keys in the stores of *process*."""

    process: Process

    def acquire(self, call: Call) -> ClaimedAttempt | Verdict:
        """Acquire the lease and claim the record of *call*, or return how its delivery ends.

        Raises :class:`RowMayBeOpen`, :class:`StoreUnavailable` and :class:`LeaseStoreMismatch`:
        after each of these the delivery must be rescheduled.
        """
        if call.repeat:
            verdict = self.decide(call, self.process.records.read(call.key.stored))
            if not isinstance(verdict, Run | Wait):
                return verdict
        if database := self.process.leases.records_of(self.process.records):
            # Known only once the records have answered. A copy would take some 25 function calls.
            object.__setattr__(call, "database", database)
        began = self.process.clock.now()
        while True:
            result = self._acquire_once(call, self.process.clock.now() - began)
            if not isinstance(result, Wait):
                return result
            if self.process.stopping():
                return Reschedule(waiting.SHORTEST_DELAY, "the worker is stopping")
            if self.process.clock.now() + result.delay > call.begin_by:
                return self._too_late()
            self.process.clock.sleep(result.delay)

    def _acquire_once(self, call: Call, waited: float) -> ClaimedAttempt | Verdict:
        sent = self.process.clock.now()
        answer = self._acquire(call)
        if isinstance(answer, Refused) and answer.why is Refusal.COOLING:
            verdict = self.decide(call, self.process.records.read(call.key.stored))
            if not isinstance(verdict, Run):
                return verdict
            # The record decides: by the record, the key no longer cools down.
            self.process.leases.end_cooldown(call.key.stored)
            sent = self.process.clock.now()
            answer = self._acquire(call)
        if isinstance(answer, Acquired):
            return self._acquired(call, sent, answer, waited)
        if answer.holder is not None:
            return self._key_is_held(call, answer.holder, waited)
        if answer.gate is not None:
            # Finished work is replayed, and no body starts.
            record = self.process.records.read(call.key.stored)
            return self.decide(call, record, answer.gate)
        return Reschedule(
            SHORT_PAUSE + self.process.rand(), "another cooldown of the key has just begun"
        )

    def _acquired(
        self, call: Call, sent: float, answer: Acquired, waited: float
    ) -> ClaimedAttempt | Verdict:
        options = call.options
        held_lease = HeldLease(
            call, sent, self.process.clock, renew=options.renew, max_hold=options.max_hold
        )
        held_lease.probe = call.group if answer.probe else None
        resource_pool.max_wait.set(held_lease.connection_wait)
        try:
            if not held_lease.held:
                raise StoreUnavailable(
                    f"{self.process.leases.name}: the lease was granted too late to be useful", True
                )
            result = self._claim(call, held_lease, sent, waited)
        except (StoreUnavailable, LeaseStoreMismatch, KeyUnusable):
            self.release(held_lease)
            raise
        except RowMayBeOpen:
            # The lease is not released, because it protects the row that may be open. The probe's
            # slot protects nothing.
            with suppress(StoreUnavailable):
                if call.group is not None:
                    self.process.leases.groups.release_probe(call.group, call.token)
            raise
        if not isinstance(result, ClaimedAttempt):
            self.release(held_lease)
        return result

    def _key_is_held(self, call: Call, holder: Holder, waited: float) -> Verdict:
        """Decide on a call whose key is held.

        Every attempt holds the lease while it reads the record. If the record shows that the
        holder only reads it, the call waits a moment and is not refused.
        """
        verdict = before_run(call, Facts(holder=holder, rand=self.process.rand()))
        if isinstance(verdict, Drop | Raise):
            record = self.process.records.read(call.key.stored)
            answer = self.decide(call, record)
            if not isinstance(answer, Run):
                return answer
            if record is None or not record.is_attempt(State.RUNNING, holder.token):
                return (
                    Wait(READ_PAUSE)
                    if waited < READ_PAUSES * READ_PAUSE
                    else Reschedule(SHORT_PAUSE, "another call is reading the record of the key")
                )
        self._report_held(call, holder)
        return verdict

    def _acquire(self, call: Call) -> Acquired | Refused:
        try:
            return self.process.leases.begin(call)
        except StoreUnavailable:
            self._release(call, call.group)
            raise

    def _claim(
        self, call: Call, held_lease: HeldLease, sent: float, waited: float
    ) -> ClaimedAttempt | Verdict:
        answer = self._claim_until_known(held_lease, sent, call.begin_by)
        record = answer.record
        if isinstance(answer, Acquired):
            assert record is not None  # it is claimed
            return self._claimed(call, held_lease, record)
        if answer.why is Refusal.GATE:
            return self.decide(call, record, answer.gate)
        if answer.why is Refusal.EMPTIED and record is not None:
            rand = self.process.rand()
            return waiting.after_store_was_emptied(call, record, answer.emptied, rand)
        if answer.why is Refusal.LAPSED:
            return waiting.after_lapsed_lease(waited, self.process.rand())
        if record is not None and (holder := decisions.holder_of_row(record)) is not None:
            self._report_held(call, holder)
        verdict = self.decide(call, record)
        if isinstance(verdict, Run):
            return Reschedule(
                SHORT_PAUSE + self.process.rand(), "the record changed while it was being claimed"
            )
        return verdict

    def _claim_until_known(
        self, held_lease: HeldLease, sent: float, begin_by: float
    ) -> Acquired | Refused:
        """Claim, and repeat the claim while its outcome is unknown, but not after *begin_by*.

        Repeating a claim does no harm. A claim that was executed and is not used leaves a row that
        says ``running``.
        """
        may_be_ours = False

        def repeatable(error: StoreUnavailable, failures: int) -> bool:
            nonlocal may_be_ours
            # A claim that was certainly not executed leaves no open row. This is the case when a
            # transaction of the holder has locked the row.
            may_be_ours = error.executed is not False or (
                failures > 0 and not isinstance(error, RecordUnreadable)
            )
            return may_be_ours and not self.process.stopping()

        try:
            return retrying(
                lambda: self._claim_once(held_lease, sent),
                lambda: min(self.process.clock.now() + held_lease.remaining(), begin_by),
                self.process.clock,
                repeatable=repeatable,
            )
        except StoreUnavailable as error:
            if not may_be_ours:
                raise
            # The lease expires by itself. The next attempt knows this token, and closes its row.
            token = held_lease.call.token
            raise RowMayBeOpen(replace(self.after_store_failure(error, 0), prior=token)) from error

    def _claim_once(self, held_lease: HeldLease, sent: float) -> Acquired | Refused:
        call, process = held_lease.call, self.process
        answer = process.leases.claim(
            call, process.records, lambda: self._age(call.key.stored, sent)
        )
        if isinstance(answer, Acquired) and answer.probe:
            held_lease.probe = call.group
        return answer

    def _age(self, stored_key: str, sent: float) -> float:
        """For how long the lease store had not lost its data at *sent*, when this attempt requested
        its lease.

        The time since *sent* does not count: since then this attempt's own lease prevents a holder
        from writing a lost lease again.
        """
        try:
            return self.process.leases.age(stored_key) - (self.process.clock.now() - sent)
        except StoreUnavailable as error:
            raise StoreUnavailable(str(error), False) from error  # nothing was claimed

    def _claimed(
        self, call: Call, held_lease: HeldLease, record: Record
    ) -> ClaimedAttempt | Verdict:
        held_lease.fence = record.fence
        if record.just_crashed:
            host = record.previous.host if record.previous else None
            self.process.observer.observe(
                events.AttemptAbandoned(**call.subject, crashes=record.crashes, host=host)
            )
        verdict: Verdict = after_claim(call, record)
        if isinstance(verdict, Raise) and self._holders_may_live(record):
            verdict = decisions.although_leases_were_lost(record)
        if isinstance(verdict, Raise):
            self._close(call, record, settlement.stopped_by_crash_loop(call, record))
            return verdict
        if isinstance(verdict, Reschedule):
            self._close(call, record, settlement.unrun(call, record, verdict.delay))
            return verdict
        if not held_lease.held:
            self._close(call, record, settlement.unrun(call, record, 0.0))
            return Reschedule(
                SHORT_PAUSE + self.process.rand(),
                "the claim took longer than the lease lasts",
                started=True,
            )
        if call.begin_by < math.inf and self.process.clock.now() > call.begin_by:
            self._close(call, record, settlement.unrun(call, record, 0.0))
            return replace(self._too_late(), started=True)
        return ClaimedAttempt(held_lease, record)

    def _too_late(self) -> Reschedule:
        """Reschedule a call whose body would begin with less than half of its time limit left."""
        return Reschedule(
            SHORT_PAUSE + self.process.rand(),
            "half of its time limit was over before it could begin",
        )

    def _holders_may_live(self, record: Record) -> bool:
        """Whether all crashes in a row of *record* are only suspected, and the lease store may have
        lost leases of living holders in that time.
        """
        leases = self.process.leases
        crashes = attempt_history.crashes_in_a_row(record)
        if not attempt_history.only_suspected(record):
            return False
        since = crashes[-1].started_at if crashes else record.created_at
        try:
            return leases.may_have_lost_leases(record.stored_key, (record.now - since) / 1e6)
        except StoreUnavailable:
            return True

    # -- steps, some of which attempt.run uses too -------------------------------------------------

    def decide(self, call: Call, record: Record | None, gate: Gate | None = None) -> Verdict:
        """Decide on *record*. The mark that the callbacks were sent is read if it matters."""
        sent = False
        if call.canvas and (
            call.repeat or (record is not None and claim_rules.finished_by(call.call_id, record))
        ):
            mark = self.process.leases.mark(call.key.stored, callbacks_mark(call.call_id))
            sent = mark is not None
        facts = Facts(
            record,
            callbacks_sent=sent,
            rand=self.process.rand(),
            gate=gate,
            wall_time=self.process.wall_time(),
        )
        return before_run(call, facts)

    def _close(self, call: Call, record: Record, outcome: Outcome) -> None:
        """Close an attempt whose body never ran.

        If the database is unavailable, the next claim of the call closes the row.
        """
        try:
            if self.process.records.settle(record, outcome):
                self.report(call, record, outcome, 0.0)
        except StoreUnavailable as error:
            raise RowMayBeOpen(
                replace(self.after_store_failure(error, 0), prior=record.owner)
            ) from error

    def release(self, held_lease: HeldLease) -> None:
        """Release the lease, and the probe's slot that was acquired with it."""
        self._release(held_lease.call, held_lease.probe)

    def _release(self, call: Call, probe: str | None) -> None:
        if probe is not None:
            with suppress(StoreUnavailable):  # it expires by itself
                self.process.leases.groups.release_probe(probe, call.token)
        with suppress(StoreUnavailable):  # it expires by itself too
            self.process.leases.end(call.key.stored, call.token)

    def after_store_failure(self, error: Exception | str, failures: int) -> Reschedule:
        """Reschedule the delivery because a store did not answer; *failures*: how often in a row
        that has happened to this call before.
        """
        delay = settlement.store_pause(failures, self.process.rand())
        return Reschedule(delay, str(error), event_type="", unavailable=True)

    def _report_held(self, call: Call, holder: Holder) -> None:
        self.process.observer.observe(
            events.LeaseHeld(
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
        if outcome.failure is None and not self.process.observer.wants(events.AttemptSettled):
            return  # the log level of a failure may be higher than usual
        held = self.process.clock.now() - held_lease.since if held_lease is not None else 0.0
        self.process.observer.observe(
            events.AttemptSettled.by(call.subject, record, outcome, runtime, held)
        )
