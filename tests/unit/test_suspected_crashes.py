"""A takeover of a running row is a suspected crash, until somebody knows how its attempt ended."""

from __future__ import annotations

from dataclasses import replace

import pytest

from celery_leases.attempt.acquire import ClaimedAttempt
from celery_leases.call import Call
from celery_leases.decide import attempt_history
from celery_leases.decide.endings import Ending, Interrupted, Terminated
from celery_leases.decide.verdicts import Answer, Raise, Reschedule, Return
from celery_leases.errors import PermanentFailure, StoreUnavailable
from celery_leases.events import AttemptAbandoned, CrashSeen, OutcomeRefused
from celery_leases.record import Attempt, Ended, PastAttempt, Record, State
from tests.unit.decision_inputs import NOW, OURS, SECOND, a_record
from tests.unit.memory_worker import DONE, Bench, error

HOUR = 3600.0


@pytest.fixture(params=[False, True], ids=["redis", "database"])
def bench(request: pytest.FixtureRequest) -> Bench:
    """With leases beside the records, and in them."""
    return Bench(in_records=request.param)


def begun(bench: Bench, **changes: object) -> tuple[Call, ClaimedAttempt]:
    """A call of its own whose body runs in another process."""
    call = bench.call(**changes)
    claimed_attempt = bench.execution.acquirer.acquire(call)
    assert isinstance(claimed_attempt, ClaimedAttempt)
    return call, claimed_attempt


def unheard(bench: Bench, **changes: object) -> tuple[Call, ClaimedAttempt]:
    """The same, and its lease has ended."""
    found = begun(bench, **changes)
    bench.clock.sleep(HOUR)
    return found


def ends(bench: Bench, call: Call, claimed: ClaimedAttempt, ending: Ending = DONE) -> Answer:
    """The body of that process ends."""
    return bench.execution._run(call, claimed, lambda *_: ending, 0)


def histories(bench: Bench) -> list[Ended]:
    """How the earlier attempts of the row ended."""
    return [past.ended for past in bench.row.history]


class TestTheOldHolder:
    def test_it_takes_the_count_back_while_the_next_attempt_runs(self, bench: Bench) -> None:
        zombie = unheard(bench, call_id="zombie")
        stopped = Interrupted(SystemExit())

        def zombie_ends(_: object) -> None:
            assert bench.row.crashes == 1
            assert histories(bench) == [Ended.ABANDONED]
            assert isinstance(ends(bench, *zombie), Reschedule)
            assert (bench.row.crashes, histories(bench)) == (0, [Ended.LOST])
            assert bench.row.previous == Attempt(Ended.LOST, None, bench.row.holder)

        bench.run(bench.call(), stopped, during=zombie_ends)
        assert (bench.state, bench.row.crashes) == (State.PENDING, 0)
        assert histories(bench) == [Ended.LOST]
        assert [event.was_suspected for event in bench.seen.of(OutcomeRefused)] == [True]
        assert not bench.seen.of(CrashSeen)
        assert len(bench.seen.of(AttemptAbandoned)) == 1

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
        again = ends(bench, *zombie)
        assert isinstance(again, Reschedule)
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
        for _ in range(2):
            unheard(bench, call_id="first", max_crashes=2)
        reply = bench.run(bench.call(max_crashes=2))
        assert isinstance(reply, Reschedule)
        assert (reply.delay, bench.state) == (5.0, State.PENDING)
        assert (
            "its lease ended 2 times in a row and nothing was heard of its process" in reply.reason
        )
        assert asked == [pytest.approx(2 * HOUR)]
        bench.clock.sleep(5.0)
        assert bench.run(bench.call(max_crashes=2)) == Return(1)

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
        ],
    )  # fmt: skip
    def test_only_a_crash_that_still_counts_is_taken_back(self, after, crashes, left) -> None:
        found = attempt_history.with_end(self.row(*after, crashes=crashes), "theirs", Ended.LOST)
        assert found is not None
        assert (found.crashes, found.history[0].ended) == (left, Ended.LOST)

    def test_another_attempt_or_a_second_time_changes_nothing(self) -> None:
        row = self.row()
        assert attempt_history.with_end(row, "another", Ended.LOST) is None
        known = attempt_history.with_end(row, "theirs", Ended.LOST)
        assert known is not None
        assert attempt_history.with_end(known, "theirs", Ended.LOST) is None
