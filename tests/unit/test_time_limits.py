"""A delivery whose body cannot begin within half of its time limit is rescheduled."""

from __future__ import annotations

from dataclasses import replace

import pytest

from celery_leases.call import Call
from celery_leases.deadlines import begin_by
from celery_leases.decide.verdicts import Reschedule
from celery_leases.record import State
from celery_leases.stores.availability import Availability
from tests.unit.decision_inputs import THEIRS
from tests.unit.memory_worker import KINDS, Bench

LIMIT = 4.0


def limited(bench: Bench, **changes: object) -> Call:
    """A call whose delivery begins now."""
    call = bench.call(**changes)
    now = bench.clock.now()
    return replace(call, received_at=now, time_limit=LIMIT, begin_by=begin_by(now, LIMIT, None))


def rescheduled_in_time(bench: Bench, call: Call) -> Reschedule:
    """Run *call*, which is rescheduled at half of its limit."""
    reply = bench.run(call)
    assert isinstance(reply, Reschedule)
    assert bench.clock.now() - call.received_at <= LIMIT / 2
    assert bench.ran == []
    return reply


@pytest.mark.parametrize(
    ("hard", "soft", "half"),
    [(10.0, None, 5.0), (None, 6.0, 3.0), (10.0, 6.0, 3.0), (6.0, 10.0, 3.0)],
)
def test_the_lower_limit_counts(hard: float | None, soft: float | None, half: float) -> None:
    assert begin_by(100.0, hard, soft) == 100.0 + half


def test_a_call_without_a_limit_may_begin_at_any_time() -> None:
    assert begin_by(100.0, None, None) == float("inf")


def test_a_wait_for_the_holder_of_an_expired_lease_ends() -> None:
    bench = Bench(in_records=True)
    bench.execution.acquirer.acquire(bench.call(call_id=THEIRS, ttl=3.0))
    bench.records.availability = Availability(10_000.0)
    bench.clock.sleep(10.0)
    rescheduled_in_time(bench, limited(bench))


@KINDS
def test_repeats_of_a_claim_without_an_answer_end(in_records: bool) -> None:
    """The lease would last longer."""
    bench = Bench(in_records)
    bench.journal.away("acquire" if in_records else "claim", done=True)
    assert rescheduled_in_time(bench, limited(bench, ttl=60.0)).unavailable


@KINDS
def test_a_claim_that_took_too_long_is_given_back(in_records: bool) -> None:
    """The body would have less than half of its time."""
    bench = Bench(in_records)
    bench.journal.before("acquire" if in_records else "claim", lambda: bench.clock.sleep(3.0))
    reply = bench.run(limited(bench, ttl=60.0))
    assert isinstance(reply, Reschedule)
    assert (bench.ran, bench.state, bench.row.attempt, bench.held) == ([], State.PENDING, 0, False)
    assert bench.run(bench.again(bench.call())) is not None
    assert len(bench.ran) == 1
