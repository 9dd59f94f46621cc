"""The arithmetic of a lease's end, at its boundaries."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_leases.attempt.run import Execution
from celery_leases.call import Call
from celery_leases.deadlines import (
    begin_by,
    call_timeout,
    hard_deadline,
    renewal_due,
    renewal_retry,
    stop_deadline,
)
from celery_leases.decide.verdicts import Reschedule
from celery_leases.record import State
from celery_leases.stores.sql.database import Availability
from tests.unit.decision_inputs import THEIRS, reschedule
from tests.unit.memory_worker import KINDS, Bench

TTLS = st.floats(1.0, 86_400.0)
TIMES = st.floats(0.0, 1e7)


@pytest.mark.parametrize(("ttl", "lasts"), [(1.0, 0.988), (15.0, 14.848), (100.0, 98.998)])
def test_a_lease_counts_from_its_sending_less_one_percent_and_two_milliseconds(ttl, lasts) -> None:
    assert hard_deadline(50.0, ttl) == pytest.approx(50.0 + lasts)


@pytest.mark.parametrize(
    ("ttl", "before"), [(1.0, 1 / 6), (15.0, 2.5), (30.0, 5.0), (31.0, 5.0), (86_400.0, 5.0)]
)
def test_the_body_stops_a_sixth_of_the_ttl_earlier_and_at_most_five_seconds(ttl, before) -> None:
    assert stop_deadline(100.0, ttl) == pytest.approx(100.0 - before)


@given(TIMES, TTLS)
def test_a_renewal_is_due_before_the_body_must_stop_and_that_before_the_lease_ends(sent, ttl):
    hard = hard_deadline(sent, ttl)
    assert sent < renewal_due(sent, ttl) < stop_deadline(hard, ttl) < hard < sent + ttl


@given(TIMES, TTLS)
def test_a_failed_renewal_can_be_tried_again_before_the_body_must_stop(sent, ttl) -> None:
    second = renewal_retry(renewal_due(sent, ttl) + call_timeout(ttl), ttl)
    assert second + call_timeout(ttl) < stop_deadline(hard_deadline(sent, ttl), ttl)


@pytest.mark.parametrize(("ttl", "pause"), [(1.2, 0.1), (12.0, 1.0), (15.0, 1.0), (86_400.0, 1.0)])
def test_the_pause_after_a_failed_renewal_is_a_twelfth_of_the_ttl_and_at_most_a_second(ttl, pause):
    assert renewal_retry(7.0, ttl) == pytest.approx(7.0 + pause)


@pytest.mark.parametrize(
    ("ttl", "timeout"), [(1.0, 0.1), (15.0, 1.5), (20.0, 2.0), (86_400.0, 2.0)]
)
def test_one_call_may_take_a_tenth_of_the_ttl_and_at_most_two_seconds(ttl, timeout) -> None:
    assert call_timeout(ttl) == pytest.approx(timeout)


LIMIT = 4.0


def limited(bench: Bench, **changes: object) -> Call:
    """A call whose delivery begins now."""
    call = bench.call(**changes)
    now = bench.clock.now()
    return replace(call, received_at=now, time_limit=LIMIT, begin_by=begin_by(now, LIMIT, None))


def rescheduled_in_time(bench: Bench, call: Call) -> Reschedule:
    """Run *call*, which is rescheduled at half of its limit."""
    reply = reschedule(bench.run(call))
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
    Execution(bench.process, bench.call(call_id=THEIRS, ttl=3.0)).acquire()
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
    reschedule(bench.run(limited(bench, ttl=60.0)))
    assert (bench.ran, bench.state, bench.row.attempt, bench.held) == ([], State.PENDING, 0, False)
    assert bench.run(bench.again(bench.call())) is not None
    assert len(bench.ran) == 1
