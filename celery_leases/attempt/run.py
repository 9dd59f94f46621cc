"""Handles one call: acquires its lease, claims its record, runs the body, settles, releases.

Applies the decisions, and is independent of Celery.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar, assert_never

from celery_leases import events
from celery_leases.attempt.held_lease import HeldLease
from celery_leases.attempt.process import Process
from celery_leases.call import Call
from celery_leases.concurrency import resource_pool
from celery_leases.decide import attempt_history, waiting
from celery_leases.decide.after_failure import after_failure, leaves_probe_due
from celery_leases.decide.after_run import (
    SHORT_PAUSE,
    after_group_closed,
    after_outcome,
    after_run,
    again_soon,
    crashes_of_another_call,
    settle_pause,
    settle_until,
    stopped_by_crash_loop,
    store_pause,
    unrun,
)
from celery_leases.decide.answers import Acquired, Holder, Refusal, Refused
from celery_leases.decide.before_run import after_claim, before_run, holder_of_row, run_or_pause
from celery_leases.decide.claim import finished_by, replaces
from celery_leases.decide.copies import callbacks_mark
from celery_leases.decide.endings import (
    ControlFlow,
    Ending,
    Interrupted,
    Raised,
    Returned,
    Snoozed,
    Terminated,
    error_text,
)
from celery_leases.decide.latest import (
    ORDER_TTL,
    PATIENCE,
    Burst,
    arrival_mark,
    replaced_mark,
    until_turn,
)
from celery_leases.decide.verdicts import (
    Drop,
    Facts,
    Follow,
    Raise,
    Reschedule,
    Return,
    Run,
    Verdict,
    Wait,
)
from celery_leases.decide.waiting import RETRY_GRACE
from celery_leases.errors import (
    CompletionNotCommitted,
    KeyUnusable,
    LeasesError,
    LeaseStoreMismatch,
    RecordUnreadable,
    StoreUnavailable,
)
from celery_leases.groups.group import ClosedGroup
from celery_leases.groups.slots import Room
from celery_leases.record import Ended, Outcome, Record, State
from celery_leases.results import decode, failure_of
from celery_leases.stores.interfaces import Clock
from celery_leases.text.cleaning import printable
from celery_leases.text.notices import logger

T = TypeVar("T")
Body = Callable[[HeldLease, Record], Ending]


READ_PAUSE = 0.05
"""Seconds between two tries while another call reads the record."""
READ_PAUSES = 20


class RowMayBeOpen(Exception):
    """A store did not answer, so the record may still say ``running`` under this attempt's token;
    ``verdict`` is how the delivery ends.
    """

    def __init__(self, verdict: Reschedule) -> None:
        super().__init__(verdict.reason)
        self.verdict = verdict


@dataclass(eq=False)
class Execution:
    """One delivery of *call* in *process*: from the look at its record to the release of its lease.

    ``held_lease`` is set once the lease is acquired, and ``record`` once it is claimed.
    """

    process: Process
    call: Call
    held_lease: HeldLease = field(init=False)
    record: Record = field(init=False)
    #: When the body may begin, by the rate of its group.
    _begins_at: float = field(init=False, default=0.0)
    #: This attempt has, or may have, a slot of its group.
    _may_have_slot: bool = field(init=False, default=False)
    #: A newer call has run instead.
    _replaced: bool = field(init=False, default=False)
    #: The order of a newer call that has not come.
    _missing: int = field(init=False, default=0)

    def run(self, body: Body, store_failures: int = 0) -> Verdict:
        """Handle the call to its end.

        *store_failures*: how often in a row the call was rescheduled because a store did not
        answer.
        """
        # This call may run inside the body of another one, whose limit does not apply to it.
        before = resource_pool.max_wait.set(None)
        try:
            try:
                verdict = self.acquire()
            except RowMayBeOpen as unavailable:
                return unavailable.verdict
            except (StoreUnavailable, LeaseStoreMismatch) as error:
                return self._after_store_failure(error, store_failures)
            except LeasesError:
                raise
            except Exception as error:  # noqa: BLE001 - an error of a store is never the task's failure
                return self._after_unknown_error(error, store_failures)
            if not isinstance(verdict, Run):
                return self._report_verdict(verdict)
            try:
                if self._begins_at:  # by the rate of its group
                    self.process.clock.sleep(self._begins_at - self.process.clock.now())
                    if self.process.clock.now() >= self.held_lease.own_stop:
                        return self._report_verdict(self._released_unstarted(self._lapsed()))
                return self._run(body, store_failures)
            except BaseException:  # an unexpected one: the lease expires
                self.process.renewer.drop(self.held_lease)
                raise
        finally:
            resource_pool.max_wait.reset(before)
            if self._may_have_slot:
                self._free_slot()

    # -- acquire and claim -------------------------------------------------------------------------

    def acquire(self) -> Verdict:
        """Acquire the lease and claim the record, so that the body may run (``Run``), or return how
        the delivery ends.

        Raises :class:`RowMayBeOpen`, :class:`StoreUnavailable` and :class:`LeaseStoreMismatch`:
        after each of these the delivery must be rescheduled.
        """
        call, process = self.call, self.process
        burst = self._burst() if call.options.latest_runs else None
        again = until_turn(call, burst, process.rand()) if burst is not None else None
        # A lease store with groups of its own gives a turn by the rate together with the lease. A
        # replay must not take one.
        rated = call.ask is not None and call.ask.pause and process.leases.row_groups is None
        if call.repeat or again is not None or rated:
            record = process.records.read(call.key.stored)
            verdict = self._decide(record)
            if not isinstance(verdict, Run | Wait):
                return verdict
            if burst is not None:
                again = until_turn(call, burst, process.rand(), record)
        if again is not None:
            return again
        late = call.waited_for_newer >= PATIENCE
        if burst is not None and late and burst.newest > call.order > 0:
            self._missing = burst.newest
        began = process.clock.now()
        while True:
            verdict = self._acquire_once(process.clock.now() - began)
            if not isinstance(verdict, Wait):
                return verdict
            if process.stopping():
                return Reschedule(waiting.SHORTEST_DELAY, "the worker is stopping")
            if process.clock.now() + verdict.delay > call.begin_by:
                return self._too_late()
            process.clock.sleep(verdict.delay)

    def _burst(self) -> Burst:
        """The calls of the key that are published, under ``lease_runs="latest"``. Sets the first
        arrival of the call, if it is not known yet.
        """
        call, leases, stored_key = self.call, self.process.leases, self.call.key.stored
        burst = leases.burst(stored_key)
        arrived = call.arrived or burst.now
        if not call.order and not call.reschedules:
            # The mark is for a message that is delivered again, or that a rescue publishes again.
            name, again = arrival_mark(call.call_id), call.repeat or call.message is not None
            known = leases.mark(stored_key, name) if again else None
            arrived = int(known) if known is not None else arrived
            if known is None and call.reschedulable:
                leases.swap_mark(stored_key, name, None, str(arrived), ORDER_TTL)
        object.__setattr__(call, "arrived", arrived)
        noted = call.order or (arrived if call.options.debounce else 0)
        if noted > burst.newest:  # or the store has lost the note of its publisher
            leases.note_order(stored_key, noted)
            burst = replace(burst, newest=noted)
        return burst

    def _acquire_once(self, waited: float) -> Verdict:
        call, process = self.call, self.process
        sent = process.clock.now()
        if process.leases.in_records:
            return self._acquired(sent, waited)  # the claim takes the lease
        # Known only once the records have answered. A copy would take some 25 function calls.
        object.__setattr__(call, "database", process.database)
        answer = self._acquire()
        if isinstance(answer, Refused) and answer.why is Refusal.COOLING:
            verdict = self._decide(process.records.read(call.key.stored))
            if not isinstance(verdict, Run):
                return verdict
            # The record decides: by the record, the key no longer cools down.
            process.leases.end_cooldown(call.key.stored)
            sent = process.clock.now()
            answer = self._acquire()
        if isinstance(answer, Acquired):
            if answer.starts_in:
                self._begin_in(answer.starts_in)
            return self._acquired(sent, waited, probes=answer.probe)
        if answer.holder is not None:
            return self._key_is_held(answer.holder, waited)
        if answer.closed_group is not None or answer.room is not None:
            # Finished work is replayed, and no body starts.
            record = process.records.read(call.key.stored)
            return self._decide(record, answer.closed_group, answer.room)
        return Reschedule(
            SHORT_PAUSE + process.rand(), "another cooldown of the key has just begun"
        )

    def _begin_in(self, seconds: float) -> None:
        """Note in how many seconds the body may begin."""
        self._begins_at = self.process.clock.now() + seconds

    def _acquire(self) -> Acquired | Refused:
        try:
            answer = self.process.leases.acquire(self.call)
        except StoreUnavailable:
            self._may_have_slot = self.call.group is not None
            self._free()
            raise
        limited = self.call.ask is not None and bool(self.call.ask.limit)
        self._may_have_slot = isinstance(answer, Acquired) and (answer.probe or limited)
        return answer

    def _key_is_held(self, holder: Holder, waited: float) -> Verdict:
        """Decide on a call whose key is held.

        Every attempt holds the lease while it reads the record. If the record shows that the
        holder only reads it, the call waits a moment and is not refused.
        """
        verdict = before_run(self.call, Facts(holder=holder, rand=self.process.rand()))
        if isinstance(verdict, Drop | Raise):
            record = self.process.records.read(self.call.key.stored)
            by_record = self._decide(record)
            if not isinstance(by_record, Run):
                return by_record
            if record is None or not record.is_attempt(State.RUNNING, holder.token):
                return (
                    Wait(READ_PAUSE)
                    if waited < READ_PAUSES * READ_PAUSE
                    else Reschedule(SHORT_PAUSE, "another call is reading the record of the key")
                )
        self._report_held(holder)
        return verdict

    def _acquired(self, sent: float, waited: float, *, probes: bool = False) -> Verdict:
        """Claim the record under the lease that was requested at *sent*; without a run the lease is
        released.
        """
        call, process, options = self.call, self.process, self.call.options
        self.held_lease = held_lease = HeldLease(
            call, sent, process.clock, renew=options.renew, max_hold=options.max_hold
        )
        if probes:
            held_lease.probe()
        if process.leases.row_groups is not None:
            self._may_have_slot = call.group is not None  # until the claim has answered
        resource_pool.max_wait.set(held_lease.connection_wait)
        try:
            if not process.leases.in_records and process.clock.now() >= held_lease.own_stop:
                raise StoreUnavailable(
                    f"{process.leases.name}: the lease was granted too late to be useful"
                )
            answer = self._claim()
            verdict = (
                self._claimed(answer)
                if isinstance(answer, Acquired)
                else self._claim_refused(answer, waited)
            )
        except (StoreUnavailable, LeaseStoreMismatch, KeyUnusable):
            self._free()
            raise
        if not isinstance(verdict, Run):
            self._free()
        return verdict

    def _claim(self) -> Acquired | Refused:
        """Claim, and repeat the claim while its outcome is unknown, but not after ``begin_by``.

        Repeating a claim does no harm. A claim that was executed and is not used leaves a row that
        says ``running``.
        """
        call, process, held_lease = self.call, self.process, self.held_lease
        may_be_ours = False

        def repeatable(error: StoreUnavailable, failures: int) -> bool:
            nonlocal may_be_ours
            # A claim that was certainly not executed leaves no open row. This is the case when a
            # transaction of the holder has locked the row.
            may_be_ours = error.executed is not False or (
                failures > 0 and not isinstance(error, RecordUnreadable)
            )
            return may_be_ours and not process.stopping()

        leases = process.leases
        try:
            return retrying(
                partial(
                    process.records.claim,
                    call,
                    leases.name,
                    age=self._age,
                    groups=leases.row_groups if call.group is not None else None,
                ),
                lambda: min(process.clock.now() + held_lease.remaining(), call.begin_by),
                process.clock,
                repeatable=repeatable,
            )
        except StoreUnavailable as error:
            if not may_be_ours:
                raise
            # The lease expires by itself. The next attempt knows this token, and closes its row.
            again = replace(self._after_store_failure(error), prior=call.token)
            raise RowMayBeOpen(again) from error

    def _age(self) -> float:
        """For how long the lease store had not lost its data when this attempt requested its lease.

        The time since then does not count: since then this attempt's own lease prevents a holder
        from writing a lost lease again.
        """
        process = self.process
        try:
            age = process.leases.age(self.call.key.stored)
        except StoreUnavailable as error:
            raise StoreUnavailable(str(error), False) from error  # nothing was claimed
        if process.clock.now() >= self.held_lease.own_stop:  # another attempt may hold the key
            raise StoreUnavailable("the lease has ended before the claim", False)
        return age - (process.clock.now() - self.held_lease.since)

    def _claim_refused(self, answer: Refused, waited: float) -> Verdict:
        record, rand = answer.record, self.process.rand()
        if self.process.leases.row_groups is not None:
            self._may_have_slot = False  # the claim has given it back
        if answer.why in (Refusal.CLOSED, Refusal.FULL):
            return self._decide(record, answer.closed_group, answer.room)
        if answer.why is Refusal.EMPTIED and record is not None:
            return waiting.after_store_was_emptied(self.call, record, answer.emptied, rand)
        if answer.why is Refusal.LAPSED:
            return waiting.after_lapsed_lease(waited, rand)
        if record is not None and (holder := holder_of_row(record)) is not None:
            self._report_held(holder)
        verdict = self._decide(record)
        if isinstance(verdict, Run):
            return Reschedule(SHORT_PAUSE + rand, "the record changed while it was being claimed")
        return verdict

    def _claimed(self, answer: Acquired) -> Verdict:
        """Let the claimed attempt run, or close it."""
        call, process, held_lease, record = self.call, self.process, self.held_lease, answer.record
        assert record is not None  # it is claimed
        if answer.probe:
            held_lease.probe()
        self._may_have_slot = held_lease.slot is not None
        self.record, held_lease.fence = record, record.fence
        if answer.starts_in:
            self._begin_in(answer.starts_in)
        verdict: Verdict = self._after_crashes() if record.crashes else Run()
        if isinstance(verdict, Raise):
            self._close(stopped_by_crash_loop(call, record))
            return verdict
        if isinstance(verdict, Reschedule):
            self._close_unrun(verdict.delay)
            return verdict
        if call.options.latest_runs:  # before the lease is looked at, because this may take long
            with suppress(StoreUnavailable):  # then the next run begins earlier
                process.leases.end_burst(call.key.stored, call.order or call.arrived)
                if self._missing:  # no other call needs to wait for the newest one in vain
                    process.leases.note_order(call.key.stored, call.order, self._missing)
        if process.clock.now() >= held_lease.own_stop:
            self._close_unrun(0.0)
            return self._lapsed()
        if call.begin_by < math.inf and process.clock.now() > call.begin_by:
            self._close_unrun(0.0)
            return replace(self._too_late(), started=True)
        return verdict

    def _lapsed(self) -> Reschedule:
        return Reschedule(
            SHORT_PAUSE + self.process.rand(),
            "the lease ended before the body could begin",
            started=True,
        )

    def _after_crashes(self) -> Verdict:
        """Decide whether the claimed attempt runs although its key has crashed, and report the
        crash that the claim has counted.
        """
        call, record = self.call, self.record
        if record.just_crashed:
            host = record.previous.host if record.previous else None
            self.process.observer.observe(
                events.AttemptAbandoned(**call.subject, crashes=record.crashes, host=host)
            )
        verdict = after_claim(call, record)
        if isinstance(verdict, Raise) and self._holders_may_live():
            return run_or_pause(record)
        return verdict

    def _too_late(self) -> Reschedule:
        """Reschedule a call whose body would begin with less than half of its time limit left."""
        return Reschedule(
            SHORT_PAUSE + self.process.rand(),
            "half of its time limit was over before it could begin",
        )

    def _holders_may_live(self) -> bool:
        """Whether all crashes in a row of the record are only suspected, and the lease store may
        have lost leases of living holders in that time.
        """
        leases, record = self.process.leases, self.record
        crashes = attempt_history.crashes_in_a_row(record)
        if not attempt_history.only_suspected(record, self.call.options.failures.crashes):
            return False
        since = crashes[-1].started_at if crashes else record.created_at
        try:
            return leases.may_have_lost_leases(record.stored_key, (record.now - since) / 1e6)
        except StoreUnavailable:
            return True

    # -- steps of both halves ----------------------------------------------------------------------

    def _decide(
        self,
        record: Record | None,
        closed_group: ClosedGroup | None = None,
        room: Room | None = None,
    ) -> Verdict:
        """Decide on *record*. The mark that the callbacks were sent is read if it matters."""
        call, process, sent = self.call, self.process, False
        if call.canvas and (
            call.repeat or (record is not None and finished_by(call.call_id, record))
        ):
            mark = process.leases.mark(call.key.stored, callbacks_mark(call.call_id))
            sent = mark is not None
        facts = Facts(
            record,
            callbacks_sent=sent,
            rand=process.rand(),
            closed_group=closed_group,
            room=room,
            wall_time=process.wall_time(),
        )
        verdict = before_run(call, facts)
        if record is not None and replaces(record, call) and isinstance(verdict, Return | Raise):
            self._replaced = True
            with suppress(StoreUnavailable):  # then the status of the call says that it waits
                mark = replaced_mark(call.call_id)
                process.leases.swap_mark(call.key.stored, mark, None, record.call_id, ORDER_TTL)
        return verdict

    def _close(self, outcome: Outcome) -> None:
        """Close an attempt whose body never ran.

        If the database is unavailable, the next claim of the call closes the row.
        """
        try:
            if self.process.records.settle(self.record, outcome):
                self._report(self.record, outcome, 0.0, 0.0)
        except StoreUnavailable as error:
            again = replace(self._after_store_failure(error), prior=self.record.owner)
            raise RowMayBeOpen(again) from error

    def _close_unrun(self, delay: float) -> None:
        """Close an attempt whose body does not run now. Its row keeps what earlier attempts have
        written about their ends since the claim.
        """
        record = self.record
        if record.history and attempt_history.has_suspicions(record):
            self.record = record = self._with_known_ends()
        self._close(unrun(self.call, record, delay))

    def _free(self) -> None:
        """Release the lease. If the store does not answer, it expires by itself."""
        call, leases = self.call, self.process.leases
        if not leases.in_records:  # else closing the row has released it
            with suppress(StoreUnavailable):
                leases.end(call.key.stored, call.token)

    def _free_slot(self) -> None:
        """Release the slot of an attempt that has ended, or never ran."""
        with suppress(StoreUnavailable):  # it expires by itself
            self.process.leases.groups.release_slot(self.call.group or "", self.call.token)

    def _after_store_failure(self, error: Exception | str, failures: int = 0) -> Reschedule:
        """Reschedule the delivery because a store did not answer; *failures*: how often in a row
        that has happened to this call before.
        """
        delay = store_pause(failures, self.process.rand())
        return Reschedule(delay, str(error), event_type="", unavailable=True)

    def _report_held(self, holder: Holder) -> None:
        call = self.call
        self.process.observer.observe(
            events.LeaseHeld(
                **call.subject,
                holder=holder.host,
                holder_call_id=holder.call_id,
                remaining=holder.remaining,
                same_call=holder.call_id == call.call_id,
            )
        )

    def _report(self, record: Record, outcome: Outcome, runtime: float, held: float) -> None:
        """Emit the event that an attempt on *record* was closed. *runtime* is in seconds, and so is
        *held*, for how long it had the lease.
        """
        observer = self.process.observer
        # The log level of a failure may be higher than usual.
        if outcome.failure is not None or observer.wants(events.AttemptSettled):
            subject = self.call.subject
            observer.observe(events.AttemptSettled.by(subject, record, outcome, runtime, held))

    # -- run and settle ----------------------------------------------------------------------------

    def _run(self, body: Body, store_failures: int) -> Verdict:
        call, process, held_lease, record = self.call, self.process, self.held_lease, self.record
        observer, clock, state = process.observer, process.clock, held_lease.body_state
        try:
            process.renewer.add(held_lease)
        except Exception as error:  # noqa: BLE001 - no thread can be started
            return self._released_unstarted(self._after_unknown_error(error, store_failures))
        if observer.wants(events.LeaseAcquired):
            observer.observe(
                events.LeaseAcquired(**call.subject, fence=record.fence, attempt=record.attempt)
            )
        began = clock.now()
        ending = body(held_lease, record)
        runtime = clock.now() - began
        left_open = bool(state.joined) and state.roll_back_open()
        if state.progressed and not crashes_of_another_call(call, record):
            self.record = record = replace(record, crashes=0)
        if state.completing:
            read = self._until_settled(ending, partial(process.records.read, record.stored_key))
            if read is None:
                process.renewer.drop(held_lease)
                return self._outcome_not_written(ending, store_failures)
            (done,) = read
            if done is not None and done.is_attempt(State.DONE, record.owner, record.fence):
                return self._completed(done, ending, runtime)
            ending = self._not_committed(ending, "the body returned after complete(), but")
        elif left_open:
            ending = self._not_committed(ending, "the body returned after guard(), but")
        if record.history and attempt_history.has_suspicions(record):
            self.record = record = self._with_known_ends()
        outcome = (
            self._failed(ending) if isinstance(ending, Raised) else after_run(call, record, ending)
        )
        if state.unsaved_progress is not None:
            outcome = replace(outcome, progress=state.unsaved_progress())
        settled = self._until_settled(ending, partial(process.records.settle, record, outcome))
        process.renewer.drop(held_lease)
        if settled is None:
            return self._outcome_not_written(ending, store_failures)
        (written,) = settled
        self._release(outcome if written else None)
        if not written:
            refused = self._outcome_refused(ending)
            return _for_celery_in_any_case(ending) or refused
        self._report(record, outcome, runtime, clock.now() - held_lease.since)
        return after_outcome(call, ending, outcome, process.rand(), process.wall_time())

    def _with_known_ends(self) -> Record:
        record = self.record
        with suppress(StoreUnavailable):  # a suspicion that stays is taken back by nobody
            now = self.process.records.read(record.stored_key)
            return attempt_history.with_known_ends(record, now)
        return record

    def _after_unknown_error(self, error: Exception, store_failures: int) -> Reschedule:
        """Reschedule a call that got an error which no store is known to raise; its row may say
        ``running`` under its token.
        """
        call = self.call
        described = _type_and_text(error)
        logger.error(
            "%s[%s] did not begin: %s",
            call.task,
            call.call_id,
            described,
            exc_info=error,
            code="did-not-begin",
        )
        return replace(self._after_store_failure(described, store_failures), prior=call.token)

    def _released_unstarted(self, verdict: Reschedule) -> Reschedule:
        """*verdict* for a claimed attempt whose body does not begin; its row is closed and its key
        released.
        """
        with suppress(StoreUnavailable):  # the next attempt of the call knows the token
            self.process.records.settle(self.record, unrun(self.call, self.record, 0.0))
        self._free()
        return replace(verdict, prior=self.record.owner)

    def _outcome_not_written(self, ending: Ending, store_failures: int) -> Verdict:
        again = self._after_store_failure("the outcome could not be written", store_failures)
        again = replace(again, started=True, prior=self.record.owner)
        return _for_celery_in_any_case(ending) or again

    def _completed(self, done: Record, ending: Ending, runtime: float) -> Verdict:
        """The verdict after the body has committed the done record itself: the call has succeeded,
        whatever the body did afterwards.
        """
        call, held_lease = self.call, self.held_lease
        self.process.renewer.drop(held_lease)
        outcome = after_run(call, done, Returned(None, done.result, done.reason))
        self._release(outcome)
        if not isinstance(ending, Returned):
            self.process.observer.observe(
                events.CompletionStands(**call.subject, fence=done.fence, error=error_text(ending))
            )
        self._report(done, outcome, runtime, self.process.clock.now() - held_lease.since)
        if isinstance(ending, Interrupted | Terminated):
            return Raise(ending.error)
        if done.result is None and isinstance(ending, Returned):
            # The result could not be stored, so Celery gets what the body returned.
            return Return(ending.value)
        return Return(decode(done.result))

    def _not_committed(self, ending: Ending, what: str) -> Ending:
        """The ending of an attempt whose own transaction was not committed: a return becomes an
        error, any other ending stays as it is.
        """
        if not isinstance(ending, Returned):
            return ending
        call = self.call
        message = f"{printable(call.key.key)}: {what} its transaction was not committed; commit it before the body ends"
        error = CompletionNotCommitted(message, self.record.key)
        return Raised(
            error,
            failure_of(error),
            call.options.failures.classifier.classify(error, self.process.wall_time()),
        )

    def _failed(self, ending: Raised) -> Outcome:
        """The outcome after a failure. A failure of the group closes it first."""
        call, process = self.call, self.process
        outcome = after_failure(call, self.record, ending, process.rand())
        if outcome.closing is None or call.group is None:
            return outcome
        try:
            closed_group = process.leases.groups.close(
                call.group, outcome.closing, self.record.owner
            )
        except StoreUnavailable:
            # The key cools down all the same, and the next failure of the group closes it.
            return outcome
        process.observer.observe(
            events.GroupClosed(
                **call.subject,
                group=closed_group.group,
                closed_for=closed_group.closed_for,
                in_a_row=closed_group.in_a_row,
                reason=closed_group.reason,
                rule=closed_group.rule,
            )
        )
        return after_group_closed(outcome, closed_group.closed_for)

    def _release(self, outcome: Outcome | None) -> None:
        """Release the key or replace its lease by a cooldown. If the attempt was the probe of its
        group, open the group, or leave it to the next probe.
        """
        call, process, held_lease = self.call, self.process, self.held_lease
        if held_lease.lost is not None:
            return  # another attempt may hold the key
        cooling = (
            outcome.retry_after if outcome is not None and outcome.state is State.COOLING else None
        )
        # If the store does not answer, lease and slot expire by themselves, and the record has the
        # cooldown.
        with suppress(StoreUnavailable):
            if held_lease.probes and outcome is not None and _opens_group(outcome):
                group = call.group or ""
                if process.leases.groups.open(group, call.token):  # which frees the slot
                    self._may_have_slot = False
                    process.observer.observe(events.GroupOpened(**call.subject, group=group))
            if (
                cooling is not None
                and cooling > RETRY_GRACE
                and process.leases.cool(call.key.stored, call.token, cooling - RETRY_GRACE)
            ):
                return
        self._free()

    def _until_settled(self, ending: Ending, step: Callable[[], T]) -> tuple[T] | None:
        """Call *step*, which uses the database, until it succeeds or the time to settle is over;
        ``None`` if it did not succeed.

        After an interrupt of the body the step is tried once only, because the process is about to
        end. It is repeated for a lost lease: while the row says ``running``, the next claim of the
        key takes this process for dead.
        """
        call, process = self.call, self.process
        began = process.clock.now()
        retried = (
            isinstance(ending, Returned | Raised | Snoozed | ControlFlow)
            or self.held_lease.lost is not None
        )

        def repeatable(error: Exception, failures: int) -> bool:
            if not failures and not isinstance(error, StoreUnavailable):
                logger.error(
                    "%s[%s] could not be closed yet: %s",
                    call.task,
                    call.call_id,
                    _type_and_text(error),
                    exc_info=error,
                    code="outcome-not-written",
                )
            return retried and not process.stopping()

        try:
            done = retrying(
                step,
                lambda: settle_until(call, began),
                process.clock,
                errors=Exception,
                repeatable=repeatable,
            )
        except Exception:  # noqa: BLE001 - logged; the next claim of the call closes the row
            return None
        return (done,)

    def _outcome_refused(self, ending: Ending) -> Verdict:
        """The verdict on an attempt whose outcome was refused: a later attempt owns the key, or the
        row was deleted, so what the record says now counts.

        If the later attempt has counted this one as a suspected crash, this is corrected first.
        """
        call, record = self.call, self.record
        ended = Ended.TERMINATED if isinstance(ending, Terminated) else Ended.LOST
        try:
            known = self.process.records.note_end(
                record.stored_key, record.owner, ended, call.counted_for
            )
            now = known or self.process.records.read(record.stored_key)
            self.process.observer.observe(
                events.OutcomeRefused(
                    **call.subject,
                    fence=record.fence,
                    state=now.state.value if now else None,
                    was_suspected=known is not None and ended is Ended.LOST,
                )
            )
            self.call = replace(call, started=True)
            verdict = self._decide(now)
        except StoreUnavailable as error:
            return replace(self._after_store_failure(error), started=True)
        if isinstance(verdict, Run | Wait):
            why = "a later attempt owns the key" if now is not None else "the record was deleted"
            verdict = again_soon(why, self.process.rand())
        self._report_verdict(verdict)
        return replace(verdict, started=True) if isinstance(verdict, Reschedule) else verdict

    def _report_verdict(self, verdict: Verdict) -> Verdict:
        """Emit the event of a verdict without a run; the worker emits those of its messages."""
        call, observe = self.call, self.process.observer.observe
        match verdict:
            case Return(_, first_call_id):
                replayed = partial(events.ResultReplayed, first_call_id=first_call_id)
                observe(replayed(**call.subject, replaced=self._replaced))
            case Raise(error):
                observe(events.CallRefused(**call.subject, error=str(error)))
            case Drop(reason):
                observe(events.CallDropped(**call.subject, reason=reason, why=verdict.why))
            case Reschedule() | Follow():
                pass
            case Run() | Wait():
                raise AssertionError(f"{verdict} does not end a delivery")
            case _ as never:
                assert_never(never)
        return verdict


def retrying(
    step: Callable[[], T],
    until: Callable[[], float],
    clock: Clock,
    *,
    errors: type[Exception] = StoreUnavailable,
    repeatable: Callable[[Any, int], bool] | None = None,
) -> T:
    """Call *step*, and again after each of *errors*, until the time that *until* returns, by
    *clock*; return its result.

    The pauses grow up to two seconds. *repeatable* is called after each failure, with the error and
    the number of earlier failures. The last error is raised if *repeatable* returns false, or if
    the next pause would end after the time of *until*. *until* is called after each failure,
    because a renewal may have extended a lease meanwhile.
    """
    failures = 0
    while True:
        try:
            return step()
        except errors as error:
            pause = settle_pause(failures)
            if repeatable is not None and not repeatable(error, failures):
                raise
            if clock.now() + pause > until():
                raise
            failures += 1
        clock.sleep(pause)


def _for_celery_in_any_case(ending: Ending) -> Raise | None:
    """The exception that Celery gets even if the outcome was not written: the message of the retry
    has been published, or the process is ending.
    """
    return (
        Raise(ending.error) if isinstance(ending, Interrupted | Terminated | ControlFlow) else None
    )


def _opens_group(outcome: Outcome) -> bool:
    """Whether the end of a probe shows that its group works again: the probe succeeded, or failed
    for a reason of its own key.
    """
    if not outcome.failed or outcome.failure is None:
        return outcome.ended is Ended.RETURNED
    return outcome.failure.group is None and not leaves_probe_due(outcome)


def _type_and_text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
