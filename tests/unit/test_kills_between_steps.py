"""A process that dies between two steps of a failing call, and the copy of the message the broker
delivers then.
"""

from __future__ import annotations

from typing import Any

import pytest

from celery_leases.call import Call
from celery_leases.decide.endings import Raised
from celery_leases.decide.verdicts import Raise, Return
from celery_leases.errors import PermanentFailure
from tests.unit.decision_inputs import THEIRS, reschedule
from tests.unit.memory_worker import FOR_GOOD, OF_THE_GROUP, OF_THE_KEY, Bench, error


class Killed(BaseException):
    """The process is gone: nothing after this step happens."""


@pytest.fixture(params=[False, True], ids=["leases apart", "rows are leases"])
def bench(request: pytest.FixtureRequest) -> Bench:
    return Bench(request.param)


def killed(bench: Bench, call: Call, before: str, ending: Raised) -> None:
    """The process that runs *call* dies just before a step; its lease ends by itself."""

    def kill() -> None:
        raise Killed

    bench.journal.before(before, kill)
    with pytest.raises(Killed):
        bench.run(call, ending)
    bench.clock.sleep(call.options.ttl)


def test_a_claim_whose_reply_was_lost_is_no_crash_of_ours(bench: Bench) -> None:
    step = "acquire" if bench.in_records else "claim"
    bench.journal.away(step, times=1, done=True)
    bench.journal.before(
        step, lambda: bench.journal.before(step, lambda: bench.journal.away(step, times=1))
    )
    assert bench.run(bench.call()) == Return(1)
    assert bench.steps(step) == [step] * 3
    assert (bench.row.crashes, bench.row.attempt) == (0, 1)


class TestAKill:
    """At each step of a failing call; the broker delivers its message once more, as it was."""

    def test_after_the_group_was_closed(self, bench: Bench) -> None:
        call = bench.call(on_busy="raise")
        killed(bench, call, "settle", OF_THE_GROUP)
        reply = reschedule(bench.run(bench.redelivered(call)))
        assert reply.started
        assert 45.0 <= reply.delay <= 48.0
        bench.clock.sleep(reply.delay)
        assert bench.run(bench.again(call)) == Return(1)
        assert bench.row.attempt == 2

    def test_after_the_failure_was_settled(self, bench: Bench) -> None:
        call = bench.call(on_busy="raise")
        killed(bench, call, "cool", OF_THE_KEY)
        reply = reschedule(bench.run(bench.redelivered(call)))
        assert reply.started
        bench.clock.sleep(60.0)
        assert bench.run(bench.redelivered(call)) == Return(1)
        assert (bench.row.attempt, bench.row.crashes) == (2, 0)

    def test_after_a_cooldown_that_was_over_when_the_group_closed_its_group(self, bench) -> None:
        call = bench.call(on_busy="raise")
        killed(bench, call, "cool", OF_THE_KEY)
        bench.clock.sleep(60.0)
        bench.close_group()
        reply = reschedule(bench.run(bench.redelivered(call)))
        assert reply.started

    @pytest.mark.parametrize("runs", ["once", "each"])
    def test_before_the_caller_got_a_permanent_failure(self, bench: Bench, runs: Any) -> None:
        """The redelivered call raises it; if it were dropped, a chord would wait for ever."""
        call = bench.call(runs=runs, canvas=True)
        bench.run(call, FOR_GOOD)  # and Celery never got to store it
        reply = bench.run(bench.redelivered(call))
        assert isinstance(error(reply), PermanentFailure)
        assert len(bench.ran) == 1

    @pytest.mark.parametrize("ending", [OF_THE_KEY, OF_THE_GROUP])
    def test_before_the_caller_got_the_error_of_a_call_that_does_not_resume(self, bench, ending):
        call = bench.call(resume="never")
        bench.run(call, ending)
        for _ in range(2):
            reply = bench.run(bench.redelivered(call))
            assert isinstance(reply, Raise)
            assert (str(reply.error), reply.own) == ("ValueError: boom", True)
            bench.clock.sleep(120.0)
        assert len(bench.ran) == 1

    def test_a_message_that_was_lost_does_not_block_its_key(self, bench: Bench) -> None:
        bench.run(bench.call(), OF_THE_KEY)
        bench.clock.sleep(60.0)
        assert bench.run(bench.call(call_id=THEIRS)) == Return(1)
