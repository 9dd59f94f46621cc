"""Rows that are running without a lease: whether their holder may be alive, and who waits for
it.
"""

from __future__ import annotations

import pytest

from celery_leases.call import Call
from celery_leases.decide.after_run import after_run
from celery_leases.decide.claim import ALWAYS
from celery_leases.decide.verdicts import Reschedule, Return
from celery_leases.decide.waiting import LAPSED_LEASE_WAIT
from celery_leases.events import AttemptAbandoned
from celery_leases.record import State
from celery_leases.stores.availability import GRACE, NEVER, SILENCE, Availability
from tests.unit.decision_inputs import THEIRS
from tests.unit.memory_worker import DONE, Bench


def runs_elsewhere(bench: Bench, ttl: float = 15.0, **changes: object) -> Call:
    """Another call whose body runs in another process: the row is running, the lease is held."""
    other = bench.call(call_id=THEIRS, ttl=ttl, **changes)
    entered = bench.execution.acquirer.acquire(other)
    assert not isinstance(entered, Reschedule)
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
        reply = bench.run(bench.call(ttl=2.0))
        assert isinstance(reply, Reschedule)
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
        reply = bench.run(bench.call())
        assert isinstance(reply, Reschedule)
        assert (reply.unavailable, reply.prior, bench.clock.now() - began) == (True, None, 0.0)
        assert bench.steps() == ["acquire", "claim", "age", "release"]
        assert (bench.ran, bench.row.call_id, bench.held) == ([], THEIRS, False)

    def test_the_age_counts_up_to_when_the_lease_was_asked_for(self, bench: Bench) -> None:
        runs_elsewhere(bench, ttl=15.0)
        emptied(bench)
        bench.clock.sleep(5.0)
        bench.journal.before("age", lambda: bench.clock.sleep(12.0))
        reply = bench.run(bench.call(ttl=600.0))
        assert isinstance(reply, Reschedule)
        assert reply.delay == pytest.approx(10.0)
        assert (bench.ran, bench.state) == ([], State.RUNNING)

    def test_a_claim_that_lands_after_the_lease_was_given_is_not_taken_over(self, bench) -> None:
        emptied(bench)

        def claims() -> None:
            bench.records.others.claim(bench.call(call_id=THEIRS), "fake")

        bench.journal.before("claim", claims)
        reply = bench.run(bench.call())
        assert isinstance(reply, Reschedule)
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
        reply = bench.run(bench.call(on_busy=on_busy))
        assert isinstance(reply, Reschedule)
        assert "may still write" in reply.reason
        assert LAPSED_LEASE_WAIT <= bench.clock.now() - began < LAPSED_LEASE_WAIT + 1
        assert bench.state is State.RUNNING

    def test_a_worker_that_stops_does_not_wait(self, bench: Bench) -> None:
        runs_elsewhere(bench)
        bench.clock.sleep(20.0)
        bench.stopping = True
        reply = bench.run(bench.call())
        assert isinstance(reply, Reschedule)
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

    def test_without_grace_there_is_nothing_to_know(self) -> None:
        assert Availability(0.0).takeover_until(1.0) == ALWAYS
