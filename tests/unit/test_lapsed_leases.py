"""Rows that are running without a lease: whether their holder may be alive, and who waits for
it.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from celery_leases.attempt.run import Execution
from celery_leases.call import Call
from celery_leases.decide import attempt_history
from celery_leases.decide.after_run import after_run
from celery_leases.decide.claim import ALWAYS
from celery_leases.decide.endings import Ending, ExitCause, Interrupted, Terminated
from celery_leases.decide.verdicts import Raise, Reschedule, Return, Run, Verdict
from celery_leases.decide.waiting import LAPSED_LEASE_WAIT
from celery_leases.errors import PermanentFailure, StoreUnavailable
from celery_leases.events import AttemptAbandoned, CrashSeen, OutcomeRefused
from celery_leases.record import Attempt, Ended, PastAttempt, Record, State
from celery_leases.stores.sql import database
from celery_leases.stores.sql.database import GRACE, NEVER, SILENCE, Availability
from tests.unit.decision_inputs import NOW, OURS, SECOND, THEIRS, a_record, reschedule
from tests.unit.memory_worker import DONE, SOON, Bench, error


def runs_elsewhere(bench: Bench, ttl: float = 15.0, **changes: object) -> Call:
    """Another call whose body runs in another process: the row is running, the lease is held."""
    other = bench.call(call_id=THEIRS, ttl=ttl, **changes)
    assert Execution(bench.process, other).acquire() == Run()
    bench.journal.clear()
    return other


def emptied(bench: Bench) -> None:
    """The lease store has lost its data a moment ago."""
    bench.memory.leases.clear()
    bench.memory.began = bench.clock.now()


class TestAnEmptiedLeaseStore:
    @pytest.fixture
    def bench(self) -> Bench:
        return Bench()

    @pytest.mark.parametrize("age", [0.0, 2.0, 10.0, 14.9])
    def test_a_newcomer_with_a_shorter_ttl_leaves_the_key_to_its_holder(self, bench, age) -> None:
        runs_elsewhere(bench, ttl=15.0)
        emptied(bench)
        bench.clock.sleep(age)
        reply = reschedule(bench.run(bench.call(ttl=2.0)))
        assert (reply.reason, bench.ran, bench.state) == (
            "the lease store was emptied",
            [],
            State.RUNNING,
        )
        assert reply.delay == pytest.approx(15.0 - age)

    def test_after_the_holders_ttl_it_takes_over(self, bench: Bench) -> None:
        runs_elsewhere(bench, ttl=15.0)
        emptied(bench)
        bench.clock.sleep(15.0)
        assert bench.run(bench.call(ttl=2.0)) == Return(1)
        assert bench.seen.of(AttemptAbandoned)

    @pytest.mark.parametrize("age", [0.0, 1.0, 100.0])
    def test_a_key_that_does_not_run_costs_what_it_always_does(self, bench, age) -> None:
        emptied(bench)
        bench.clock.sleep(age)
        bench.run(bench.call(ttl=600.0))
        assert bench.steps() == ["acquire", "claim", "settle", "release"]
        bench.journal.clear()
        bench.run(bench.call(ttl=600.0, runs="each", call_id="second"))
        assert bench.steps() == ["acquire", "claim", "swap", "settle", "release"]

    def test_the_lease_goes_back_at_once_where_the_row_runs(self, bench: Bench) -> None:
        runs_elsewhere(bench)
        emptied(bench)
        bench.run(bench.call())
        assert bench.steps() == ["acquire", "claim", "age", "release"]
        assert not bench.held

    def test_a_store_that_does_not_return_its_age_is_unavailable(self, bench: Bench) -> None:
        runs_elsewhere(bench)
        bench.memory.leases.clear()
        bench.journal.away("age")
        began = bench.clock.now()
        reply = reschedule(bench.run(bench.call()))
        assert (reply.unavailable, reply.prior, bench.clock.now() - began) == (True, None, 0.0)
        assert bench.steps() == ["acquire", "claim", "age", "release"]
        assert (bench.ran, bench.row.call_id, bench.held) == ([], THEIRS, False)

    def test_the_age_counts_up_to_when_the_lease_was_asked_for(self, bench: Bench) -> None:
        runs_elsewhere(bench, ttl=15.0)
        emptied(bench)
        bench.clock.sleep(5.0)
        bench.journal.before("age", lambda: bench.clock.sleep(12.0))
        reply = reschedule(bench.run(bench.call(ttl=600.0)))
        assert reply.delay == pytest.approx(10.0)
        assert (bench.ran, bench.state) == ([], State.RUNNING)

    def test_a_claim_that_lands_after_the_lease_was_given_is_not_taken_over(self, bench) -> None:
        emptied(bench)

        def claims() -> None:
            bench.records.others.claim(bench.call(call_id=THEIRS), "fake")

        bench.journal.before("claim", claims)
        reschedule(bench.run(bench.call()))
        assert (bench.ran, bench.row.call_id, bench.held) == ([], THEIRS, False)
        assert not bench.seen.of(AttemptAbandoned)


class TestAfterAnOutageOfTheRecords:
    @pytest.fixture
    def bench(self) -> Bench:
        """Rows are leases, and the process does not know whether the database was there for their
        holders.
        """
        made = Bench(in_records=True)
        made.records.availability.answering = False
        return made

    def test_a_lapsed_lease_is_waited_for_and_its_holder_settles(self, bench: Bench) -> None:
        other = runs_elsewhere(bench)
        bench.clock.sleep(20.0)
        record = bench.row

        def settles() -> None:
            if bench.clock.now() > 1021.0 and bench.state is State.RUNNING:
                assert bench.records.others.settle(record, after_run(other, record, DONE))
            bench.journal.before("acquire", settles)

        settles()
        assert bench.run(bench.call()) == Return(1, THEIRS)
        assert (bench.ran, bench.seen.of(AttemptAbandoned)) == ([], [])

    def test_once_there_is_evidence_the_key_is_taken_over(self, bench: Bench) -> None:
        runs_elsewhere(bench)
        bench.clock.sleep(20.0)

        def answers() -> None:
            bench.records.availability.answering = bench.clock.now() > 1022.0
            bench.journal.before("acquire", answers)

        answers()
        assert bench.run(bench.call()) == Return(1)
        assert len(bench.ran) == len(bench.seen.of(AttemptAbandoned)) == 1

    @pytest.mark.parametrize("on_busy", ["wait", "ignore", "raise"])
    def test_a_call_that_may_not_take_over_is_rescheduled(self, bench: Bench, on_busy: str) -> None:
        """It is neither dropped nor refused, because no holder is known."""
        runs_elsewhere(bench)
        bench.clock.sleep(20.0)
        began = bench.clock.now()
        reply = reschedule(bench.run(bench.call(on_busy=on_busy)))
        assert "may still write" in reply.reason
        assert LAPSED_LEASE_WAIT <= bench.clock.now() - began < LAPSED_LEASE_WAIT + 1
        assert bench.state is State.RUNNING

    def test_a_worker_that_stops_does_not_wait(self, bench: Bench) -> None:
        runs_elsewhere(bench)
        bench.clock.sleep(20.0)
        bench.stopping = True
        reply = reschedule(bench.run(bench.call()))
        assert reply.reason == "the worker is stopping"

    def test_what_we_left_open_ourselves_is_taken_at_once(self, bench: Bench) -> None:
        other = runs_elsewhere(bench, prior=())
        bench.clock.sleep(20.0)
        assert bench.run(bench.again(other, prior=(other.token,))) == Return(1)
        assert not bench.seen.of(AttemptAbandoned)


class TestAvailability:
    """Seconds of a local clock, with times of the database's clock."""

    @pytest.fixture
    def availability(self) -> Availability:
        return Availability()

    def asks(self, availability: Availability, *times: float, takes: float = 0.01) -> None:
        for time in times:
            availability.answered(time, time + takes, int((time + takes) * 1e6))

    def every(self, begin: float, end: float, step: float = 0.25) -> list[float]:
        return [begin + step * number for number in range(round((end - begin) / step) + 1)]

    def test_a_process_that_has_asked_nothing_knows_nothing(self, availability) -> None:
        assert availability.takeover_until(100.0) == NEVER

    def test_it_knows_after_the_time_of_grace(self, availability: Availability) -> None:
        self.asks(availability, *self.every(100.0, 100.0 + GRACE - 0.25))
        assert availability.takeover_until(100.0 + GRACE - 0.1) == NEVER
        self.asks(availability, 100.0 + GRACE)
        assert availability.takeover_until(100.5 + GRACE) == pytest.approx(
            (100.5 + GRACE) * 1e6, abs=2
        )

    def test_a_failure_ends_what_was_known(self, availability: Availability) -> None:
        self.asks(availability, *self.every(100.0, 105.0))
        availability.failed(105.1)
        assert availability.takeover_until(105.2) == NEVER
        self.asks(availability, *self.every(105.2, 105.2 + GRACE - 0.3))
        assert availability.takeover_until(105.2 + GRACE - 0.1) == NEVER

    def test_so_does_silence(self, availability: Availability) -> None:
        self.asks(availability, *self.every(100.0, 105.0))
        assert availability.takeover_until(105.0 + SILENCE) != NEVER
        assert availability.takeover_until(105.1 + SILENCE) == NEVER

    def test_an_answer_that_took_long_counts_for_no_more_than_silence(self, availability) -> None:
        self.asks(availability, 100.0)
        self.asks(availability, 100.1, takes=60.0)
        assert availability.takeover_until(160.2) == NEVER

    def test_a_database_that_is_always_slow_counts_too(self, availability: Availability) -> None:
        """Or what has died would never be taken over."""
        for number in range(5):
            self.asks(availability, 100.0 + 4 * number, takes=3.5)
        assert availability.takeover_until(120.0) != NEVER

    def late(self, availability: Availability, sent: float, takes: float = 0.01) -> float:
        """How late an answer is that comes after so many seconds, or one of the latest was."""
        now = int((sent + takes) * 1e6)
        return (now - availability.answered(sent, sent + takes, now)) / 1e6

    def test_a_late_answer_counts_for_the_time_of_grace(self, availability: Availability) -> None:
        """If it was late by more than a third of a row's ttl, a renewal of its holder may have
        failed, and the holder needs as long to try again.
        """
        self.asks(availability, *self.every(100.0, 105.0))
        assert self.late(availability, 105.1, takes=60.0) == pytest.approx(60.0)
        for sent in self.every(165.2, 165.0 + GRACE):
            assert self.late(availability, sent) == pytest.approx(60.0)
        for sent in self.every(165.2 + GRACE, 166.2 + 2 * GRACE):
            latest = self.late(availability, sent)
        assert latest == pytest.approx(0.01)

    def test_so_does_one_that_the_process_was_late_to_read(self, availability) -> None:
        """It does not know what the database did meanwhile."""
        self.asks(availability, *self.every(100.0, 105.0))
        availability.answered(105.1, 165.1, int(105.11 * 1e6))
        for sent in self.every(165.2, 165.0 + GRACE):
            assert self.late(availability, sent) == pytest.approx(60.0, abs=0.02)

    def test_so_does_one_that_the_main_process_has_seen(
        self, availability: Availability, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(database, "_memory", bytearray(len(database._memory)))
        main = Availability()
        self.asks(main, *self.every(100.0, 105.0))
        self.asks(main, 105.1, takes=60.0)
        main.share()
        assert self.late(availability, 165.2) == pytest.approx(60.0)

    def test_of_a_database_that_is_always_slow_it_is_no_later(self, availability) -> None:
        for number in range(5):
            self.asks(availability, 100.0 + 4 * number, takes=3.5)
        assert self.late(availability, 120.0, takes=3.5) == pytest.approx(3.5)

    def test_without_grace_there_is_nothing_to_know(self) -> None:
        assert Availability(0.0).takeover_until(1.0) == ALWAYS


HOUR = 3600.0


@pytest.fixture(params=[False, True], ids=["redis", "database"])
def bench(request: pytest.FixtureRequest) -> Bench:
    """With leases beside the records, and in them."""
    return Bench(in_records=request.param)


def begun(bench: Bench, **changes: object) -> tuple[Call, Execution]:
    """A call of its own whose body runs in another process."""
    call = bench.call(**changes)
    execution = Execution(bench.process, call)
    assert execution.acquire() == Run()
    return call, execution


def unheard(bench: Bench, **changes: object) -> tuple[Call, Execution]:
    """The same, and its lease has ended."""
    found = begun(bench, **changes)
    bench.clock.sleep(HOUR)
    return found


def ends(bench: Bench, call: Call, execution: Execution, ending: Ending = DONE) -> Verdict:
    """The body of that process ends."""
    return execution._run(lambda *_: ending, 0)


def histories(bench: Bench) -> list[Ended]:
    """How the earlier attempts of the row ended."""
    return [past.ended for past in bench.row.history]


class TestTheOldHolder:
    @pytest.mark.parametrize("ending", [Interrupted(SystemExit()), SOON])
    def test_it_takes_the_count_back_while_the_next_attempt_runs(self, bench, ending) -> None:
        zombie = unheard(bench, call_id="zombie")

        def zombie_ends(_: object) -> None:
            assert bench.row.crashes == 1
            assert histories(bench) == [Ended.ABANDONED]
            assert isinstance(ends(bench, *zombie), Reschedule)
            assert (bench.row.crashes, histories(bench)) == (0, [Ended.LOST])
            assert bench.row.previous == Attempt(Ended.LOST, None, bench.row.holder)

        bench.run(bench.call(), ending, during=zombie_ends)
        assert (bench.state, bench.row.crashes) == (State.PENDING, 0)
        assert (histories(bench), bench.row.crashed_at) == ([Ended.LOST], None)
        assert bench.row.previous == Attempt(Ended.LOST, None, bench.row.holder)
        assert [event.was_suspected for event in bench.seen.of(OutcomeRefused)] == [True]
        assert not bench.seen.of(CrashSeen)
        assert [event.host for event in bench.seen.of(AttemptAbandoned)] == [bench.row.holder]

    @pytest.mark.parametrize("ending", [Interrupted(SystemExit()), SOON])
    def test_it_takes_the_count_back_while_a_later_attempt_runs(self, bench, ending) -> None:
        zombie = unheard(bench, call_id="zombie")
        bench.run(bench.call(), Interrupted(SystemExit()))
        bench.clock.sleep(HOUR)
        assert (bench.row.crashes, histories(bench)) == (1, [Ended.ABANDONED])
        bench.run(bench.call(), ending, during=lambda _: ends(bench, *zombie))
        assert (bench.row.crashes, histories(bench)[0]) == (0, Ended.LOST)

    def test_the_next_attempt_ends_though_the_record_was_deleted(self, bench: Bench) -> None:
        unheard(bench, call_id="zombie")
        key = bench.row.stored_key
        reschedule(bench.run(bench.call(), SOON, during=lambda _: bench.records.rows.pop(key)))

    def test_its_owner_is_stored_only_while_nobody_knows(self, bench: Bench) -> None:
        zombie = unheard(bench, call_id="zombie")
        bench.run(bench.call())
        assert [past.owner for past in bench.row.history] == [zombie[0].token]
        assert isinstance(ends(bench, *zombie), Return)
        assert [past.owner for past in bench.row.history] == [None]
        assert histories(bench) == [Ended.LOST]

    def test_a_key_that_failed_because_of_it_runs_again(self, bench: Bench) -> None:
        zombie = unheard(bench, max_crashes=1, call_id="zombie")
        refused = bench.run(bench.call(max_crashes=1))
        assert isinstance(error(refused), PermanentFailure)
        assert bench.state is State.FAILED
        reschedule(ends(bench, *zombie))
        assert (bench.state, bench.row.crashes, bench.row.failure) == (State.PENDING, 0, None)
        bench.clock.sleep(HOUR)
        assert bench.run(bench.again(zombie[0])) == Return(1)

    def test_one_that_ran_into_its_hard_limit_confirms_the_crash(self, bench: Bench) -> None:
        zombie = unheard(bench, call_id="zombie")
        bench.run(
            bench.call(),
            Interrupted(SystemExit()),
            during=lambda _: ends(bench, *zombie, Terminated(SystemExit(), "hard time limit")),
        )
        assert (bench.row.crashes, histories(bench)) == (1, [Ended.TERMINATED])

    def test_one_that_could_not_write_takes_it_back_when_its_call_comes_again(self, bench) -> None:
        zombie = unheard(bench, call_id="zombie")
        bench.run(bench.call(), Interrupted(SystemExit()))
        assert bench.row.crashes == 1
        bench.run(bench.again(zombie[0], prior=(zombie[0].token,)), Interrupted(SystemExit()))
        assert bench.row.crashes == 0
        assert histories(bench)[0] is Ended.LOST

    def test_nothing_else_changes_for_an_attempt_whose_key_an_operator_has_taken(self, bench):
        zombie = begun(bench, call_id="zombie")
        bench.records.others.reset(bench.row.stored_key, keep=True)
        before = bench.row
        ends(bench, *zombie)
        assert replace(bench.row, now=before.now) == before
        assert [event.was_suspected for event in bench.seen.of(OutcomeRefused)] == [False]


class TestSuspicionsAlone:
    @pytest.fixture
    def bench(self) -> Bench:
        return Bench()

    def lossy(self, bench: Bench, answer: bool | Exception) -> list[float]:
        """The lease store answers so; returns the times for which it was asked."""
        asked: list[float] = []

        def may_have_lost_leases(_: str, seconds: float) -> bool:
            asked.append(seconds)
            if isinstance(answer, Exception):
                raise answer
            return answer

        bench.stores.may_have_lost_leases = may_have_lost_leases  # type: ignore[union-attr]
        return asked

    @pytest.mark.parametrize(
        "answer", [True, StoreUnavailable("away", False)], ids=["lost", "away"]
    )
    def test_a_key_does_not_fail_while_its_lease_store_loses_leases(self, bench, answer) -> None:
        asked = self.lossy(bench, answer)
        bench.run(bench.call(), SOON)  # the row is older than the first crash
        bench.clock.sleep(HOUR)
        for _ in range(2):
            unheard(bench, call_id="first", max_crashes=2)
        reply = reschedule(bench.run(bench.call(max_crashes=2)))
        assert (reply.delay, bench.state) == (5.0, State.PENDING)
        assert (
            "its lease ended 2 times in a row and nothing was heard of its process" in reply.reason
        )
        assert asked == [pytest.approx(2 * HOUR)]
        bench.clock.sleep(5.0)
        assert bench.run(bench.call(max_crashes=2)) == Return(1)

    def test_it_fails_all_the_same_after_three_times_as_many(self, bench: Bench) -> None:
        """A store that evicts keys does so for ever, and a call that kills its process too."""
        self.lossy(bench, answer=True)
        for crashes in range(6):
            if crashes > 1:
                reply = reschedule(bench.run(bench.call(max_crashes=2)))
                bench.clock.sleep(reply.delay)
            unheard(bench, max_crashes=2)
        assert isinstance(error(bench.run(bench.call(max_crashes=2))), PermanentFailure)
        assert bench.state is State.FAILED

    def test_one_that_is_taken_back_before_the_pause_stays_so(self, bench: Bench) -> None:
        """The attempt that pauses has claimed the row, and has not closed it yet."""
        zombie = unheard(bench, call_id="zombie", max_crashes=2)
        unheard(bench, max_crashes=2)

        def may_have_lost_leases(_: str, __: float) -> bool:
            ends(bench, *zombie)
            return True

        bench.stores.may_have_lost_leases = may_have_lost_leases  # type: ignore[union-attr]
        assert reschedule(bench.run(bench.call(max_crashes=2))).delay == 5.0
        assert (bench.row.crashes, histories(bench)) == (1, [Ended.LOST, Ended.ABANDONED])

    def test_a_key_fails_if_the_store_has_lost_nothing(self, bench: Bench) -> None:
        self.lossy(bench, answer=False)
        unheard(bench, max_crashes=1)
        assert isinstance(error(bench.run(bench.call(max_crashes=1))), PermanentFailure)
        assert "its lease ended 1 times in a row and nothing was heard" in str(bench.row.failure)

    def test_a_known_crash_is_no_suspicion(self, bench: Bench) -> None:
        asked = self.lossy(bench, answer=True)
        zombie, _ = unheard(bench, max_crashes=2)
        bench.run(bench.call(max_crashes=2), Interrupted(SystemExit()))
        assert bench.records.others.note_end(bench.row.stored_key, zombie.token, Ended.CRASHED)
        unheard(bench, max_crashes=2)
        reply = bench.run(bench.call(max_crashes=2))
        assert isinstance(reply, Raise)
        assert "its process died, or its lease ended" in str(reply.error)
        assert asked == []


PAST = PastAttempt(NOW - 60 * SECOND, None, Ended.ABANDONED, "vm/1", owner="theirs")


class TestWithEnd:
    def row(self, *after: Ended, state: State = State.RUNNING, crashes: int = 1) -> Record:
        later = (PastAttempt(NOW - 30 * SECOND, NOW, ended, "vm/2") for ended in after)
        return a_record(state, OURS, crashes=crashes, history=(PAST, *later), retry_at=None)

    @pytest.mark.parametrize(
        ("after", "crashes", "left"),
        [
            ((), 1, 0), ((Ended.CRASHED,), 2, 1), ((Ended.LOST, Ended.ABANDONED), 2, 1),
            ((Ended.FAILED, Ended.CRASHED), 1, 1), ((Ended.RETURNED,), 0, 0),
            ((Ended.RELEASED, Ended.CRASHED), 2, 1),
        ],
    )  # fmt: skip
    def test_only_a_crash_that_still_counts_is_taken_back(self, after, crashes, left) -> None:
        found = attempt_history.with_end(self.row(*after, crashes=crashes), "theirs", Ended.LOST)
        assert found is not None
        assert (found.crashes, found.history[0].ended) == (left, Ended.LOST)

    @pytest.mark.parametrize(("cause", "left"), [
        (ExitCause.REVOKED, 0), (ExitCause.ERROR, 0), (ExitCause.TIME_LIMIT, 1)
    ])  # fmt: skip
    def test_an_attempt_that_celery_has_revoked_is_no_crash(self, cause, left) -> None:
        """The history keeps why it was terminated."""
        row = replace(self.row(state=State.RUNNING), state=State.PENDING, finished_at=NOW)
        row = replace(row, ended=Ended.TERMINATED, reason=cause.value)
        claimed = replace(
            row, history=attempt_history.with_attempt(row, attempt_history.latest_ended(row))
        )
        stored = attempt_history.load(attempt_history.dump(claimed.history))
        running = replace(claimed, state=State.RUNNING, history=stored)
        found = attempt_history.with_end(running, "theirs", Ended.LOST)
        assert found is not None
        assert found.crashes == left

    @pytest.mark.parametrize(("call", "left"), [(OURS, 0), (THEIRS, 1)])
    def test_a_failure_of_another_call_keeps_the_crashes_of_a_call(self, call, left) -> None:
        """Unless ``lease_runs="once"``."""
        row = replace(self.row(Ended.FAILED), crashed_call=OURS)
        found = attempt_history.with_end(row, "theirs", Ended.LOST, call)
        assert found is not None
        assert (found.crashes, found.history[0].ended) == (left, Ended.LOST)

    def test_another_attempt_or_a_second_time_changes_nothing(self) -> None:
        row = self.row()
        assert attempt_history.with_end(row, "another", Ended.LOST) is None
        known = attempt_history.with_end(row, "theirs", Ended.LOST)
        assert known is not None
        assert attempt_history.with_end(known, "theirs", Ended.LOST) is None
