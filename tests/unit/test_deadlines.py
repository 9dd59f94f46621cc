"""The arithmetic of a lease's end, at its boundaries."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_leases.deadlines import (
    call_timeout,
    hard_deadline,
    renewal_due,
    renewal_retry,
    stop_deadline,
)

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
