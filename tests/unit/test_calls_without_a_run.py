"""Calls whose bodies do not run: the key is cooling, or its group is closed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from celery_leases.decide.verdicts import Raise, Reschedule, Return
from celery_leases.errors import CoolingDown
from celery_leases.record import State
from tests.distributions.toy_leases import Lease
from tests.unit.decision_inputs import KEY, THEIRS, reschedule
from tests.unit.memory_worker import KINDS, OF_THE_KEY, Bench


@pytest.fixture
def bench() -> Bench:
    """A worker with leases apart from the records."""
    return Bench()


class TestAKeyThatCools:
    """The lease store's value only saves the way to the record, which is the truth."""

    def test_another_call_gets_its_answer_from_the_record(self, bench: Bench) -> None:
        bench.run(bench.call(), OF_THE_KEY)
        bench.journal.clear()
        reply = bench.run(bench.call(call_id=THEIRS))
        assert isinstance(reply, Raise)
        assert isinstance(reply.error, CoolingDown)
        assert bench.steps() == ["acquire", "read"]
        assert bench.cools

    def test_the_copy_that_comes_too_early_asks_the_record_alone(self, bench: Bench) -> None:
        call = bench.call()
        bench.run(call, OF_THE_KEY)
        before = bench.row
        bench.journal.clear()
        assert isinstance(bench.run(bench.again(call)), Reschedule)
        assert bench.steps() == ["read"]
        assert bench.row == before

    def test_events_have_the_whole_wait_and_not_one_reschedule(self, bench: Bench) -> None:
        call = bench.call(longest_countdown=10.0)
        bench.run(call, OF_THE_KEY)
        reply = reschedule(bench.run(bench.again(call)))
        assert reply.task_event is not None
        assert (reply.delay, reply.task_event.type, reply.task_event.retry_after) == (
            10.0,
            "cooldown",
            60.0,
        )

    def test_the_copy_runs_when_its_time_has_come(self, bench: Bench) -> None:
        call = bench.call()
        bench.run(call, OF_THE_KEY)
        bench.clock.sleep(60.0)
        assert bench.run(bench.again(call)) == Return(1)
        assert (bench.row.attempt, bench.row.failures, bench.row.crashes) == (2, 0, 0)

    @pytest.mark.parametrize("record", ["reset by an operator", "gone", "done", "failed"])
    def test_a_value_that_the_record_knows_nothing_of_is_removed_or_answered(self, bench, record):
        """If the record allows a run, the value is removed and the key acquired; otherwise the
        record decides.
        """
        bench.run(bench.call(), OF_THE_KEY)
        row = bench.row
        rows = bench.records.rows
        match record:
            case "gone":
                del rows[KEY.stored]
            case "reset by an operator":
                bench.records.retry(KEY.stored)
            case "done":
                rows[KEY.stored] = replace(row, state=State.DONE, result="7")
            case _:
                rows[KEY.stored] = replace(row, state=State.FAILED)
        bench.journal.clear()
        reply = bench.run(bench.call(call_id=THEIRS))
        if record in ("gone", "reset by an operator"):
            assert reply == Return(1)
            assert bench.steps()[:5] == ["acquire", "read", "end_cooldown", "acquire", "claim"]
            assert not bench.cools
            return
        assert isinstance(reply, Return if record == "done" else Raise)
        assert bench.steps() == ["acquire", "read"]

    def test_a_store_that_forgot_the_cooldown_changes_nothing(self, bench: Bench) -> None:
        bench.run(bench.call(), OF_THE_KEY)
        bench.memory.leases.clear()
        bench.journal.clear()
        reply = bench.run(bench.call(call_id=THEIRS))
        assert isinstance(reply, Raise)
        assert isinstance(reply.error, CoolingDown)
        assert bench.steps() == ["acquire", "claim", "release"]
        assert (len(bench.ran), bench.held) == (1, False)

    def test_after_contradictory_answers_of_the_lease_store_the_call_is_rescheduled(self, bench):
        """The key cools again when it is acquired, because another call was faster."""
        bench.run(bench.call(), OF_THE_KEY)
        bench.records.retry(KEY.stored)
        lasting = Lease("other", None, bench.clock.now() + 60)
        bench.journal.before(
            "end_cooldown", lambda: bench.memory.leases.update({KEY.stored: lasting})
        )
        bench.journal.away("end_cooldown")
        reschedule(bench.run(bench.call(call_id=THEIRS)))
        assert len(bench.ran) == 1


class TestAClosedGroup:
    @KINDS
    def test_no_body_starts_and_nothing_is_taken(self, in_records: bool) -> None:
        bench = Bench(in_records)
        bench.close_group()
        reply = bench.run(bench.call(on_busy="raise"))
        assert isinstance(reply, Raise)
        assert isinstance(reply.error, CoolingDown)
        assert (reply.error.retry_after, reply.error.reason) == (60.0, "rate_limited")
        waits = reschedule(bench.run(bench.call()))
        assert (waits.delay, waits.started) == (60.1, False)
        assert (bench.ran, len(bench.records.rows), bench.held) == ([], 0, False)

    @KINDS
    def test_a_call_without_a_group_does_not_see_it(self, in_records: bool) -> None:
        bench = Bench(in_records)
        bench.close_group()
        assert bench.run(bench.call(group=None)) == Return(1)
