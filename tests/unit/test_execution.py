"""One delivery from acquire to release: the steps in the stores and their order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from celery_leases.attempt.run import Execution
from celery_leases.concurrency import resource_pool
from celery_leases.decide import after_run
from celery_leases.decide.answers import Refusal, Refused
from celery_leases.decide.copies import callbacks_mark
from celery_leases.decide.endings import (
    ControlFlow,
    Ending,
    Interrupted,
    Lost,
    Raised,
    Returned,
    Snoozed,
    Terminated,
    error_text,
)
from celery_leases.decide.latest import replaced_mark
from celery_leases.decide.verdicts import Drop, Raise, Reschedule, Return, TaskEvent
from celery_leases.decide.waiting import RETRY_GRACE
from celery_leases.errors import (
    CompletionNotCommitted,
    Cooldown,
    CoolingDown,
    KeyUnusable,
    PermanentFailure,
    RetryLater,
    Snooze,
    StoreUnavailable,
)
from celery_leases.errors import LeaseHeld as LeaseHeldError
from celery_leases.events import (
    AttemptSettled,
    CallDropped,
    CallRefused,
    CompletionStands,
    Dropped,
    GroupClosed,
    GroupOpened,
    LeaseAcquired,
    LeaseHeld,
    OutcomeRefused,
    ResultReplayed,
)
from celery_leases.failures.actions import Reason, cooldown, retry
from celery_leases.record import Ended, State
from celery_leases.results import failure_of
from tests.unit.decision_inputs import FAILURE, GROUP, KEY, OURS, THEIRS, TODAY, classified, raised
from tests.unit.memory_worker import (
    DONE,
    FOR_GOOD,
    KINDS,
    OF_THE_GROUP,
    OF_THE_KEY,
    RATE_LIMITED,
    SOON,
    Bench,
    error,
)


@pytest.fixture
def bench() -> Bench:
    """A worker with leases apart from the records."""
    return Bench()


class TestAFailure:
    def test_a_success_is_settled_and_released(self, bench: Bench) -> None:
        assert bench.run(bench.call()) == Return(1)
        assert bench.steps() == ["acquire", "claim", "settle", "release"]
        assert (bench.state, bench.held, bench.renewer.kept) == (State.DONE, False, set())

    @pytest.mark.parametrize(
        ("ending", "seconds", "lasts"),
        [(DONE, 0.5, 98.5), (DONE, 3.0, 99.0), (SOON, 3.0, 86_404.0)],
    )
    def test_the_row_has_the_time_of_the_end_and_no_lease(self, ending, seconds, lasts) -> None:
        """A body that was short changes no expiry."""
        bench = Bench(in_records=True)
        bench.run(bench.call(retention=99.0), ending, during=lambda _: bench.clock.sleep(seconds))
        row = bench.row
        assert (row.finished_at, row.lease_until, row.lease_store) == (row.now, None, "")
        assert row.expires_at == row.now + lasts * 1_000_000

    @pytest.mark.parametrize("renew", [True, False])
    def test_the_lease_is_renewed_unless_the_options_say_no(self, bench, renew: bool) -> None:
        seen: list[bool] = []
        bench.run(bench.call(renew=renew), during=lambda held: seen.append(held.renewable(1000.0)))
        assert seen == [renew]

    def test_events_without_a_receiver_are_not_built_except_for_a_failure(self, bench, monkeypatch):
        monkeypatch.setattr(bench.seen, "wants", lambda _: False, raising=False)
        bench.run(bench.call())
        assert not bench.seen
        bench.run(
            replace(
                bench.call(), call_id="another", key=replace(KEY, stored="t:billing.send|other")
            ),
            OF_THE_KEY,
        )
        assert [type(event) for event in bench.seen] == [AttemptSettled]

    def test_a_failure_of_the_key_is_settled_before_the_lease_becomes_its_cooldown(self, bench):
        reply = bench.run(bench.call(), OF_THE_KEY)
        assert bench.steps() == ["acquire", "claim", "settle", "cool"]
        expected: dict[str, Any] = {
            "started": True,
            "event_type": "cooldown",
            "event_reason": "error",
            "cause": OF_THE_KEY.error,
        }
        assert reply == Reschedule(60.0, "cooling: error", **expected)
        assert reply.task_event == TaskEvent("cooldown", 60.0, "error")
        assert (bench.state, bench.row.waits, bench.held, bench.cools) == (
            State.COOLING, 60.0, False, True,
        )  # fmt: skip
        bench.clock.sleep(60.0 - RETRY_GRACE)
        assert not bench.cools, "the call that comes back may be a little early"

    def test_a_failure_of_the_group_closes_the_group_before_anything_else(self, bench) -> None:
        """Others must not start while this one is still writing."""
        reply = bench.run(bench.call(), OF_THE_GROUP)
        assert bench.steps() == ["acquire", "claim", "close_group", "settle", "cool"]
        assert isinstance(reply, Reschedule)
        assert bench.closed_group is not None
        assert (bench.closed_group.closed_for, bench.closed_group.in_a_row, bench.row.waits, reply.delay) == (
            60.0, 1, 60.0, 60.0,
        )  # fmt: skip
        (event,) = bench.seen.of(GroupClosed)
        assert isinstance(event, GroupClosed)
        assert (event.group, event.closed_for) == (GROUP, 60.0)

    def test_the_key_waits_as_long_as_its_group(self, bench: Bench) -> None:
        longer = replace(RATE_LIMITED, server_delay=600.0)
        reply = bench.run(bench.call(), OF_THE_GROUP, during=lambda _: bench.close_group(longer))
        assert isinstance(reply, Reschedule)
        assert (reply.delay, bench.row.waits) == (600.0, 600.0)

    def test_a_group_that_cannot_be_closed_does_not_keep_the_key_from_cooling(self, bench) -> None:
        bench.journal.away("close_group")
        reply = bench.run(bench.call(), OF_THE_GROUP)
        assert isinstance(reply, Reschedule)
        assert (reply.delay, bench.state, bench.closed_group) == (60.0, State.COOLING, None)

    def test_a_quick_retry_is_released_and_rescheduled(self, bench: Bench) -> None:
        reply = bench.run(bench.call(), SOON)
        assert bench.steps() == ["acquire", "claim", "settle", "release"]
        expected: dict[str, Any] = {
            "started": True, "event_type": "backoff", "event_reason": "error", "cause": SOON.error,
        }  # fmt: skip
        assert reply == Reschedule(2.0, "pending: error", **expected)
        assert reply.task_event == TaskEvent("backoff", 2.0, "error")
        assert (bench.state, bench.row.waits, bench.held) == (State.PENDING, 2.0, False)

    def test_a_permanent_failure_is_raised_as_it_was(self, bench: Bench) -> None:
        assert bench.run(bench.call(), FOR_GOOD) == Raise(FOR_GOOD.error)
        assert (bench.state, bench.held, bench.cools) == (State.FAILED, False, False)

    def test_an_unknown_failure_is_raised_and_cools(self, bench: Bench) -> None:
        assert bench.run(bench.call(resume="transient"), OF_THE_KEY) == Raise(
            OF_THE_KEY.error, task_event=TaskEvent("cooldown", 60.0, "error")
        )
        assert (bench.state, bench.row.resumes, bench.cools) == (State.COOLING, False, True)
        bench.clock.sleep(60.0)
        reply = bench.run(bench.call(resume="transient", call_id=THEIRS), OF_THE_GROUP)
        assert isinstance(reply, Reschedule)
        assert (reply.cause, bench.row.resumes) == (OF_THE_GROUP.error, True)

    def test_a_call_that_shall_stop_raises_and_cools(self, bench: Bench) -> None:
        reply = bench.run(bench.call(resume="never"), OF_THE_KEY)
        assert reply == Raise(OF_THE_KEY.error, task_event=TaskEvent("cooldown", 60.0, "error"))
        assert (bench.state, bench.row.resumes, bench.cools) == (State.COOLING, False, True)

    def test_a_snooze_is_rescheduled_without_an_attempt(self, bench: Bench) -> None:
        reply = bench.run(bench.call(), Snoozed(Snooze(60), 60.0, "draft not ready"))
        assert isinstance(reply, Reschedule)
        assert (reply.delay, reply.reason, reply.started, reply.cause) == (
            60.0, "pending: draft not ready", True, None,
        )  # fmt: skip
        assert reply.task_event == TaskEvent("snoozed", 60.0, "draft not ready")
        assert (bench.state, bench.row.attempt, bench.row.failures, bench.held) == (
            State.PENDING, 0, 0, False,
        )  # fmt: skip

    def test_a_cooldown_no_longer_than_the_grace_is_not_worth_a_value(self, bench: Bench) -> None:
        bench.run(bench.call(), raised(cooldown("1s", jitter=0.0)))
        assert bench.steps() == ["acquire", "claim", "settle", "release"]
        assert not bench.cools


class TestWhatTheBodyAskedFor:
    """``Cooldown`` and ``RetryLater`` are for the lease; a caller gets an answer instead."""

    @pytest.mark.parametrize("reschedulable", [True, False])
    @pytest.mark.parametrize("error", [Cooldown(60), RetryLater(60)], ids=["cooldown", "retry"])
    def test_the_last_allowed_failure_raises_a_permanent_failure(self, bench, error, reschedulable):
        ending = Raised(error, FAILURE, classified(cooldown("60s"), reason=Reason.ASKED))
        reply = bench.run(bench.call(max_failures=1, reschedulable=reschedulable), ending)
        assert isinstance(reply, Raise)
        assert isinstance(reply.error, PermanentFailure)
        assert (reply.error.rule, reply.error.error, reply.task_event) == (
            "row",
            "ValueError",
            None,
        )
        assert reply.error.__cause__ is error
        assert bench.state is State.FAILED

    def test_a_call_that_does_not_resume_gets_the_time_of_the_next_try(self, bench: Bench) -> None:
        ending = Raised(
            Cooldown(60), FAILURE, classified(cooldown("60s", jitter=0.0), reason=Reason.ASKED)
        )
        reply = bench.run(bench.call(resume="never"), ending)
        assert isinstance(reply, Raise)
        assert isinstance(reply.error, CoolingDown)
        assert str(reply.error).startswith("Retry available in 60 seconds: ")


class TestEagerCalls:
    """They cannot be rescheduled, so their callers get an error."""

    @pytest.mark.parametrize("ending", [OF_THE_KEY, OF_THE_GROUP, SOON, FOR_GOOD])
    def test_an_error_is_raised_as_it_was(self, bench: Bench, ending: Raised) -> None:
        reply = bench.run(bench.call(reschedulable=False), ending)
        assert isinstance(reply, Raise)
        assert reply.error is ending.error
        assert not bench.row.resumes

    @pytest.mark.parametrize(
        ("error", "action"),
        [(Cooldown(60), cooldown("60s", jitter=0.0)), (RetryLater(60), retry("60s", jitter=0.0))],
    )
    def test_a_wait_that_the_body_asked_for_is_raised_as_a_cooldown(self, bench, error, action):
        ending = Raised(error, FAILURE, classified(action, reason=Reason.ASKED))
        reply = bench.run(bench.call(reschedulable=False), ending)
        assert isinstance(reply, Raise)
        assert isinstance(reply.error, CoolingDown)
        assert (reply.error.key, reply.error.retry_after, reply.error.retry_at) == (
            KEY.key,
            60.0,
            TODAY + 60.0,
        )
        assert (reply.error.reason, reply.error.rule) == ("asked", "row")
        assert reply.error.__cause__ is error

    @pytest.mark.parametrize("max_failures", [1, 10])
    def test_the_error_for_the_caller_has_no_secret_and_is_one_printable_line(
        self, bench: Bench, max_failures: int
    ) -> None:
        error = Cooldown(60, "password=one-nobody-sees\x1b[2J\nforged " + "x" * 5000)
        ending = Raised(
            error, failure_of(error), classified(cooldown("60s", jitter=0.0), reason=Reason.ASKED)
        )
        reply = bench.run(bench.call(reschedulable=False, max_failures=max_failures), ending)
        again = bench.run(
            bench.call(reschedulable=False, max_failures=max_failures, call_id=THEIRS)
        )
        assert isinstance(reply, Raise)
        assert isinstance(again, Raise)
        for told in (str(reply.error), str(again.error)):
            assert "one-nobody-sees" not in told
            assert told.isprintable()
            assert len(told) < 3000

    def test_a_snooze_is_raised_as_a_cooldown(self, bench: Bench) -> None:
        """An exception that no ``except Exception`` sees must not reach the caller."""
        reply = bench.run(bench.call(reschedulable=False), Snoozed(Snooze(60), 60.0))
        assert isinstance(reply, Raise)
        assert isinstance(reply.error, CoolingDown)
        assert reply.error.retry_after == 60.0
        assert reply.error.scope == "key"

    @pytest.mark.parametrize("ending", [OF_THE_KEY, SOON])
    def test_the_next_call_gets_the_time_of_the_next_try(self, bench, ending) -> None:
        """A cooldown refuses it; a countdown would reschedule it, and carries what to raise
        instead.
        """
        bench.run(bench.call(reschedulable=False), ending)
        reply = bench.run(bench.call(reschedulable=False, call_id=THEIRS))
        told = (
            reply.error
            if isinstance(reply, Raise)
            else reply.refusal
            if isinstance(reply, Reschedule)
            else None
        )
        assert isinstance(told, CoolingDown)
        assert (told.retry_after, told.retry_at) == (bench.row.waits, TODAY + bench.row.waits)
        assert len(bench.ran) == 1


class TestStoresAwayAfterTheRun:
    """Lease, slot and cooldown value end by themselves; the record is the truth."""

    def test_a_cooldown_that_cannot_be_set_leaves_the_lease_to_its_release(self, bench) -> None:
        bench.journal.away("cool")
        reply = bench.run(bench.call(), OF_THE_KEY)
        assert isinstance(reply, Reschedule)
        assert bench.steps() == ["acquire", "claim", "settle", "cool", "release"]
        assert isinstance(bench.run(bench.call(call_id=THEIRS)), Raise)
        assert len(bench.ran) == 1

    def test_a_cooldown_whose_reply_was_lost_stays(self, bench: Bench) -> None:
        bench.journal.away("cool", done=True)
        bench.run(bench.call(), OF_THE_KEY)
        assert bench.cools

    def test_a_lost_reply_of_the_database_counts_nothing_twice(self, bench: Bench) -> None:
        bench.journal.away("settle", times=1, done=True)
        bench.run(bench.call(), OF_THE_KEY)
        assert bench.steps("settle", "cool") == ["settle", "settle", "cool"]
        assert (bench.row.failures, bench.row.cooldowns) == (1, 1)

    def test_a_call_whose_outcome_cannot_be_written_is_rescheduled_and_its_lease_expires(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(after_run, "SETTLE_TIMEOUT", 5.0)
        bench.journal.away("settle")
        call = bench.call()
        reply = bench.run(call, OF_THE_GROUP)
        assert isinstance(reply, Reschedule)
        assert (reply.unavailable, reply.started, reply.prior) == (True, True, call.token)
        assert bench.steps("close_group", "cool", "release") == ["close_group"]
        assert bench.held

    @pytest.mark.parametrize("step", ["note_end", "mark"])
    def test_a_call_whose_outcome_was_refused_has_begun(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch, step: str
    ) -> None:
        """Its message does not expire, though it is not known what the record says."""

        def lose(_: Any) -> None:
            bench.records.retry(KEY.stored)
            for store in (bench.records, bench.stores):
                monkeypatch.setattr(
                    store, step, _raise(StoreUnavailable("away", False)), raising=False
                )

        reply = bench.run(bench.call(canvas=True, repeat=True), during=lose)
        assert isinstance(reply, Reschedule)
        assert (reply.reason, reply.delay, reply.started) == ("away", 4.0, True)
        assert (reply.unavailable, reply.task_event) == (True, None)

    @pytest.mark.parametrize(
        ("ending", "stopping"), [(Interrupted(SystemExit()), False), (Returned(1, "1"), True)]
    )
    def test_a_process_that_ends_tries_once_to_write_an_outcome(
        self, bench: Bench, ending: Ending, stopping: bool
    ) -> None:
        bench.journal.away("settle")
        bench.run(bench.call(), ending, during=lambda _: setattr(bench, "stopping", stopping))
        assert bench.steps("settle") == ["settle"]


class TestALostLease:
    """Another owner has it: no command is sent for it."""

    def test_its_row_is_closed_though_the_database_comes_back_later(self, bench: Bench) -> None:
        def lose(held_lease: Any) -> None:
            held_lease.lost = "not renewed in time"
            bench.journal.away("settle", times=3)

        bench.run(bench.call(), Lost("not renewed in time"), during=lose)
        assert bench.steps("settle") == ["settle"] * 4
        assert (bench.state, bench.row.ended, bench.row.crashes) == (State.PENDING, Ended.LOST, 0)

    @pytest.mark.parametrize("ending", [Lost("taken"), Returned(1, "1"), OF_THE_KEY, SOON])
    def test_nothing_of_it_is_touched(self, bench: Bench, ending: Ending) -> None:
        bench.probe_due()

        def lose(held_lease: Any) -> None:
            held_lease.lost = "held by another owner"

        bench.run(bench.call(), ending, during=lose)
        assert bench.steps("cool", "release", "open_group") == []

    def test_an_outcome_that_is_refused_releases_but_does_not_cool(self, bench: Bench) -> None:
        """An operator has reset the row; the retry must not wait for this cooldown."""
        reply = bench.run(
            bench.call(), OF_THE_KEY, during=lambda _: bench.records.retry(KEY.stored)
        )
        assert isinstance(reply, Reschedule)
        assert bench.steps("cool", "release") == ["release"]
        assert (bench.state, bench.held) == (State.PENDING, False)


class TestPassingThrough:
    @pytest.mark.parametrize(
        ("ending", "state"),
        [
            (ControlFlow(Exception(), runs_again=True, delay=9.0), State.PENDING),
            (ControlFlow(Exception(), runs_again=False, ended=Ended.IGNORED), State.DONE),
            (Interrupted(SystemExit()), State.PENDING),
            (Terminated(SystemExit(), "hard time limit"), State.PENDING),
        ],
    )
    def test_it_goes_on_to_celery_and_frees_the_key(self, bench, ending, state) -> None:
        assert bench.run(bench.call(), ending) == Raise(ending.error)
        assert (bench.state, bench.held, bench.cools, bench.row.failures) == (
            state, False, False, 0,
        )  # fmt: skip

    def test_every_later_call_gets_a_permanent_failure(self, bench: Bench) -> None:
        call = bench.call()
        bench.run(call, FOR_GOOD)
        told = bench.run(bench.call(call_id=THEIRS))
        assert isinstance(told, Raise)
        assert isinstance(told.error, PermanentFailure)
        copy = bench.run(bench.again(call))
        assert isinstance(copy, Raise)
        assert (copy.own, len(bench.ran)) == (True, 1)

    def test_under_rerun_a_copy_of_a_finished_call_is_dropped_or_replayed(self, bench) -> None:
        first = bench.call(runs="each")
        bench.run(first)
        bench.run(bench.call(runs="each", call_id=THEIRS), OF_THE_KEY)
        assert bench.run(bench.again(first)) == Return(1, OURS)
        assert not isinstance(bench.run(bench.again(first)), Drop)
        assert len(bench.ran) == 2

    def test_no_group_is_opened_without_a_probe(self, bench: Bench) -> None:
        bench.run(bench.call(), during=lambda _: bench.probe_due())
        assert bench.closed_group is not None
        assert bench.seen.of(GroupOpened) == []


class TestProgress:
    def test_what_the_body_has_not_saved_is_written_with_its_outcome_and_stays(self, bench) -> None:
        text = '{"generation":0,"value":"1"}'

        def during(held_lease: Any) -> None:
            held_lease.body_state.unsaved_progress = lambda: text

        bench.run(bench.call(), SOON, during=during)
        assert bench.row.progress == text
        bench.clock.sleep(60.0)
        bench.run(bench.call(), SOON)
        assert (bench.row.progress, bench.row.quick_retries) == (text, 2)

    @pytest.mark.parametrize(("progressed", "crashes"), [(False, 2), (True, 1)])
    def test_a_body_that_gets_further_each_time_is_in_no_crash_loop(
        self, bench: Bench, progressed: bool, crashes: int
    ) -> None:
        def during(held_lease: Any) -> None:
            held_lease.body_state.progressed |= progressed

        for _ in range(2):
            bench.run(bench.call(), Terminated(SystemExit(), "hard time limit"), during=during)
        assert bench.row.crashes == crashes

    def test_a_body_that_gets_further_keeps_the_crashes_of_another_call(self, bench: Bench) -> None:
        def during(held_lease: Any) -> None:
            held_lease.body_state.progressed = True

        bench.run(bench.call(runs="each"), Terminated(SystemExit(), "hard time limit"))
        bench.run(bench.call(runs="each", call_id="another"), SOON, during=during)
        assert (bench.row.crashes, bench.row.crashed_call) == (1, OURS)


def _raise(error: Exception) -> Callable[..., Any]:
    def step(*_: object) -> object:
        raise error

    return step


STOP = SystemExit()


def committed(bench: Bench, result: str | None) -> Callable[[Any], None]:
    """The body commits the done record itself, after three seconds."""

    def during(held_lease: Any) -> None:
        held_lease.body_state.completing = True
        bench.clock.sleep(3.0)
        done = replace(bench.row, state=State.DONE, ended=Ended.RETURNED, result=result)
        bench.records.rows[KEY.stored] = replace(done, finished_at=done.now, lease_until=None)

    return during


class TestACompletedBody:
    @pytest.mark.parametrize(
        ("ending", "result", "reply"),
        [
            (Returned("value", '"value"'), '"committed"', Return("committed")),
            (Returned("value", '"value"'), None, Return("value")),
            (FOR_GOOD, '"committed"', Return("committed")),
            (FOR_GOOD, None, Return(None)),
            (Interrupted(STOP), '"committed"', Raise(STOP)),
            (Terminated(STOP, "hard time limit"), '"committed"', Raise(STOP)),
        ],
    )
    def test_has_succeeded_whatever_it_did_afterwards(self, bench, ending, result, reply) -> None:
        assert bench.run(bench.call(), ending, during=committed(bench, result)) == reply
        assert (bench.held, bench.renewer.kept) == (False, set())
        stands = [(each.fence, each.error) for each in bench.seen.of(CompletionStands)]
        fails = not isinstance(ending, Returned)
        assert stands == ([(bench.row.fence, error_text(ending))] if fails else [])
        (event,) = bench.seen.of(AttemptSettled)
        assert (event.state, event.runtime, event.held) == ("done", 3.0, 3.0)

    @pytest.mark.parametrize("ending", [Returned(1, "1"), FOR_GOOD])
    def test_has_failed_if_its_transaction_was_not_committed(self, bench, ending) -> None:
        def complete(held_lease: Any) -> None:
            held_lease.body_state.completing = True

        reply = bench.run(bench.call(resume="never"), ending, during=complete)
        assert isinstance(reply, Raise)
        assert isinstance(
            reply.error, CompletionNotCommitted if isinstance(ending, Returned) else ValueError
        )
        assert bench.row.state is not State.DONE

    def test_is_rescheduled_if_it_is_not_known_whether_it_was_committed(self, bench) -> None:
        call = bench.call()
        bench.journal.away("read")
        reply = bench.run(call, during=committed(bench, "1"))
        assert isinstance(reply, Reschedule)
        assert (reply.started, reply.unavailable, reply.prior) == (True, True, call.token)
        assert bench.renewer.kept == set()


class TestEvents:
    def test_a_run_says_under_which_fence_it_has_begun(self, bench: Bench) -> None:
        bench.run(bench.call())
        (event,) = bench.seen.of(LeaseAcquired)
        assert (event.fence, event.attempt) == (bench.row.fence, 1)

    def test_a_call_that_does_not_run_says_how_it_was_answered(self, bench: Bench) -> None:
        bench.run(bench.call())
        bench.run(bench.call(call_id=THEIRS))
        dropped = bench.run(bench.call(call_id=THEIRS, on_done="ignore"))
        refused = bench.run(bench.call(call_id=THEIRS, on_done="raise"))
        assert [(each.first_call_id, each.replaced) for each in bench.seen.of(ResultReplayed)] == [
            (OURS, False)
        ]
        assert isinstance(dropped, Drop)
        assert [(each.reason, each.why) for each in bench.seen.of(CallDropped)] == [
            (Dropped.DONE_BY_OTHER, dropped.why)
        ]
        assert [each.error for each in bench.seen.of(CallRefused)] == [str(error(refused))]

    @KINDS
    @pytest.mark.parametrize(("call_id", "delay"), [(OURS, 15.2), (THEIRS, 1.2)])
    def test_a_held_key_says_who_holds_it(
        self, in_records: bool, call_id: str, delay: float
    ) -> None:
        bench = Bench(in_records)
        Execution(bench.process, bench.call()).acquire()
        bench.process.rand = lambda: 0.25
        reply = bench.run(bench.call(call_id=call_id))
        assert isinstance(reply, Reschedule)
        assert reply.delay == pytest.approx(delay)
        assert bench.steps("release_slot") == []
        (event,) = bench.seen.of(LeaseHeld)
        assert (event.holder_call_id, event.same_call) == (OURS, call_id == OURS)
        assert event.remaining == pytest.approx(15.0, abs=0.1)

    def test_an_outcome_that_is_refused_says_what_the_record_has(self, bench: Bench) -> None:
        bench.process.rand = lambda: 0.25
        for change, why in (
            (bench.records.retry, "a later attempt owns the key"),
            (bench.records.rows.pop, "the record was deleted"),
        ):
            reply = bench.run(bench.call(), during=lambda _: change(KEY.stored))  # noqa: B023 - called at once
            assert isinstance(reply, Reschedule)
            assert (reply.started, reply.reason, reply.delay) == (True, why, 1.25)
        states = [(each.state, each.was_suspected) for each in bench.seen.of(OutcomeRefused)]
        assert states == [("pending", False), (None, False)]

    def test_a_call_whose_outcome_is_refused_is_never_refused_itself(self) -> None:
        bench = Bench(in_records=True)

        def lose(_: Any) -> None:
            row = bench.row
            theirs = replace(row, owner="another", call_id=THEIRS, fence=row.fence + 1)
            bench.records.rows[KEY.stored] = theirs

        reply = bench.run(bench.call(on_busy="raise"), during=lose)
        assert isinstance(reply, Reschedule)
        assert (reply.started, reply.held) == (True, True)

    def test_a_call_whose_outcome_is_refused_is_answered_by_the_other_attempt(self, bench) -> None:
        def lose(_: Any) -> None:
            theirs = replace(bench.row, owner="another", call_id=THEIRS, fence=bench.row.fence + 1)
            bench.records.rows[KEY.stored] = replace(theirs, state=State.DONE, result="5")

        assert bench.run(bench.call(), during=lose) == Return(5, THEIRS)
        assert [each.first_call_id for each in bench.seen.of(ResultReplayed)] == [THEIRS]

    def test_a_call_that_a_newer_one_has_replaced_says_so(self, bench: Bench) -> None:
        newer = bench.call(runs="latest", order=2)
        bench.run(newer)
        for call in (bench.call(runs="latest", order=1, call_id=THEIRS), bench.again(newer)):
            assert bench.run(call) == Return(1, OURS)
        assert [each.replaced for each in bench.seen.of(ResultReplayed)] == [True, False]
        marks = [bench.stores.mark(KEY.stored, replaced_mark(each)) for each in (THEIRS, OURS)]
        assert marks == [OURS, None]


class TestCallbacks:
    @pytest.mark.parametrize("repeat", [False, True])
    @pytest.mark.parametrize("canvas", [False, True])
    def test_of_a_finished_call_are_sent_once(self, bench, repeat: bool, canvas: bool) -> None:
        call = bench.call(canvas=canvas)
        bench.run(call)
        bench.stores.swap_mark(KEY.stored, callbacks_mark(OURS), None, "sent", 600.0)
        bench.clock.sleep(60.0)
        reply = bench.run(bench.again(call, repeat=repeat, started=False))
        assert reply == (Drop(Dropped.CALLBACKS_SENT) if canvas else Return(1, OURS))

    @pytest.mark.parametrize("repeat", [False, True])
    def test_are_looked_for_before_a_repeated_delivery_runs(self, bench, repeat: bool) -> None:
        bench.stores.swap_mark(KEY.stored, callbacks_mark(OURS), None, "sent", 600.0)
        reply = bench.run(bench.call(canvas=True, repeat=repeat))
        assert reply == (Drop(Dropped.CALLBACKS_SENT) if repeat else Return(1))


class TestAHolderThatOnlyReads:
    """Every call holds the lease while it reads the record."""

    def test_does_not_refuse_another_call(self, bench: Bench) -> None:
        bench.stores.acquire(bench.call(call_id=THEIRS, database=bench.process.database))
        began = bench.clock.now()
        reply = bench.run(bench.call(on_busy="raise"))
        assert isinstance(reply, Reschedule)
        assert reply.delay == 1.0
        assert bench.clock.now() - began == pytest.approx(1.0, abs=0.051)
        assert bench.seen.of(LeaseHeld) == []

    def test_has_no_say_about_work_that_is_done(self, bench: Bench) -> None:
        bench.run(bench.call())
        bench.stores.acquire(bench.call(call_id=THEIRS, database=bench.process.database))
        assert bench.run(bench.call(call_id="third", on_busy="raise")) == Return(1, OURS)

    def test_refuses_once_it_runs(self, bench: Bench) -> None:
        Execution(bench.process, bench.call(call_id=THEIRS)).acquire()
        began = bench.clock.now()
        assert isinstance(error(bench.run(bench.call(on_busy="raise"))), LeaseHeldError)
        assert bench.clock.now() == began


def test_an_error_of_the_body_stops_the_renewal_of_its_lease(bench: Bench) -> None:
    limit = resource_pool.max_wait.set(before := lambda: 1.0)
    with pytest.raises(KeyError):
        bench.run(bench.call(), during=lambda _: _raise(KeyError())())  # type: ignore[arg-type]
    assert (bench.renewer.kept, bench.held) == (set(), True)
    assert resource_pool.max_wait.get() is before
    resource_pool.max_wait.reset(limit)


def test_a_key_that_cannot_be_used_is_an_error_of_the_call(bench: Bench) -> None:
    bench.journal.before("claim", _raise(KeyUnusable("too long")))
    with pytest.raises(KeyUnusable):
        bench.run(bench.call())
    assert not bench.held


@pytest.mark.parametrize(
    ("changes", "seconds"), [({}, 15.0), ({"begin_by": 1005.0}, 6.0)], ids=["lease", "time limit"]
)
@pytest.mark.parametrize("away", [False, True])
def test_a_claim_that_took_too_long_is_given_back_and_tried_again(
    bench: Bench, changes: dict[str, Any], seconds: float, away: bool
) -> None:
    bench.process.rand = lambda: 0.25
    bench.journal.before("claim", lambda: bench.clock.sleep(seconds))
    if away:
        bench.journal.away("settle")
    call = bench.call(**changes)
    reply = bench.run(call)
    assert isinstance(reply, Reschedule)
    assert (reply.unavailable, bench.ran) == (away, [])
    if away:  # the row is still running, and the next attempt of the call knows whose it is
        assert (reply.delay, reply.prior, reply.reason) == (4.25, call.token, "settle is away")
        return
    assert (reply.delay, reply.started) == (1.25, True)
    assert (bench.state, bench.row.attempt, bench.row.retry_at) == (State.PENDING, 0, None)
    (event,) = bench.seen.of(AttemptSettled)
    assert (event.state, event.runtime, event.held) == ("pending", 0.0, 0.0)


def test_a_lease_that_was_granted_too_late_is_not_used(bench: Bench) -> None:
    bench.journal.before("acquire", lambda: bench.clock.sleep(15.0))
    reply = bench.run(bench.call())
    assert isinstance(reply, Reschedule)
    assert (reply.unavailable, bench.ran, "too late" in reply.reason) == (True, [], True)
    assert bench.steps("claim", "release") == ["release"]


def test_a_lease_that_has_ended_before_the_claim_takes_no_row_over(bench: Bench) -> None:
    """The attempt that runs in it may have got the key since."""
    holder = bench.call()
    Execution(bench.process, holder).acquire()
    bench.clock.sleep(60.0)
    bench.journal.before("age", lambda: bench.clock.sleep(15.0))
    reply = bench.run(bench.call())
    assert isinstance(reply, Reschedule)
    assert (reply.unavailable, bench.ran) == (True, [])
    assert "ended before the claim" in reply.reason
    assert bench.row.owner == holder.token


@pytest.mark.parametrize(
    ("store", "step", "answer", "reason"),
    [
        ("records", "claim", Refusal.CHANGED, "the record changed while it was being claimed"),
        ("stores", "acquire", Refusal.COOLING, "another cooldown of the key has just begun"),
    ],
)
def test_a_call_that_meets_a_change_comes_again_soon(
    bench: Bench, store: str, step: str, answer: Refusal, reason: str
) -> None:
    bench.process.rand = lambda: 0.25
    setattr(getattr(bench, store), step, lambda *_, **__: Refused(answer))
    reply = bench.run(bench.call())
    assert isinstance(reply, Reschedule)
    assert (reply.reason, reply.delay) == (reason, 1.25)


@KINDS
@pytest.mark.parametrize("group", [GROUP, None])
def test_a_lease_that_may_have_been_granted_is_given_back_with_its_slot(
    in_records: bool, group: str | None
) -> None:
    bench = Bench(in_records)
    bench.journal.away("acquire", done=True)
    reply = bench.run(bench.call(group=group))
    assert isinstance(reply, Reschedule)
    assert (reply.reason, reply.prior is None) == ("acquire is away", not in_records)
    assert bench.steps("release_slot") == ["release_slot"] * (group is not None)


class TestAClaimWithoutAnAnswer:
    """It is repeated where its row may be ours, and not where nothing was written."""

    def test_one_that_was_not_executed_is_not_repeated(self, bench: Bench) -> None:
        bench.journal.away("claim", times=1)
        reply = bench.run(bench.call())
        assert isinstance(reply, Reschedule)
        assert (reply.unavailable, reply.prior, bench.ran) == (True, None, [])
        assert bench.steps() == ["acquire", "claim", "release"]

    def test_one_that_was_executed_is_repeated_and_won(self, bench: Bench) -> None:
        bench.journal.away("claim", times=2, done=True)
        assert bench.run(bench.call()) == Return(1)
        assert bench.steps() == ["acquire", "claim", "claim", "claim", "settle", "release"]
        assert bench.row.attempt == 1

    def test_one_that_stays_unknown_leaves_the_lease_and_names_its_token(self, bench) -> None:
        bench.journal.away("claim", done=True)
        call = bench.call()
        reply = bench.run(call)
        assert isinstance(reply, Reschedule)
        assert (reply.unavailable, reply.prior, bench.ran) == (True, call.token, [])
        assert (reply.reason, reply.delay, bench.steps("release")) == ("claim is away", 4.0, [])


class TestAnUnexpectedError:
    """Of a store: a driver, a pool or a callable of the user's may raise anything."""

    @pytest.mark.parametrize("step", ["acquire", "claim"])
    @pytest.mark.parametrize(
        "error", [OSError(24, "Too many open files"), RuntimeError("pool"), TypeError("row")]
    )
    def test_before_the_body_brings_the_delivery_back(self, bench, step, error) -> None:
        call = bench.call()
        bench.journal.before(step, _raise(error))
        reply = bench.run(call)
        assert isinstance(reply, Reschedule)
        assert (reply.unavailable, reply.prior, bench.ran) == (True, call.token, [])
        assert str(error) in reply.reason
        bench.clock.sleep(60.0)
        assert bench.run(bench.again(call, prior=(call.token,))) == Return(1)
        assert bench.row.crashes == 0

    def test_after_the_body_is_met_by_writing_the_outcome_again(self, bench: Bench) -> None:
        bench.journal.before("settle", _raise(RuntimeError("pool")))
        assert bench.run(bench.call()) == Return(1)
        assert (len(bench.ran), bench.state) == (1, State.DONE)

    def test_of_the_renewer_gives_the_attempt_back(self, bench: Bench) -> None:
        """No thread can be started: the body would lose its lease."""
        call = bench.call()
        bench.renewer.add = lambda _: _raise(RuntimeError("can't start new thread"))()  # type: ignore[method-assign]
        reply = bench.run(call)
        assert isinstance(reply, Reschedule)
        assert (bench.ran, bench.state, bench.row.attempt, bench.held) == (
            [], State.PENDING, 0, False,
        )  # fmt: skip
        assert bench.row.retry_at is None

    def test_a_result_that_cannot_be_read_does_not_lose_the_delivery(self, bench: Bench) -> None:
        assert bench.run(bench.call()) == Return(1)
        bench.records.rows[KEY.stored] = replace(bench.row, result="{")
        reply = bench.run(bench.call(call_id=THEIRS))
        assert isinstance(reply, Reschedule)
        assert "column result" in reply.reason
        assert "leases forget" in reply.reason
