"""Advice on ``lease_ttl``, compared with numbers computed by hand."""

from __future__ import annotations

import pytest

from celery_leases.ops.tuning import (
    Delivery,
    Lateness,
    Measured,
    ProcessPause,
    RunTimes,
    advised,
    shortest_ttl,
    unrenewed_ttl,
)
from tests.unit.doc_pages import page


def test_percentiles_are_run_times_that_were_seen() -> None:
    times = RunTimes.of([float(number) for number in range(100, 0, -1)])
    assert times == RunTimes(100, 50.0, 95.0, 99.0, 100.0)
    assert RunTimes.of([3.0]) == RunTimes(1, 3.0, 3.0, 3.0, 3.0)
    assert RunTimes.of([]) is None


def test_a_lock_without_renewal_needs_p99_and_jitter_and_guard() -> None:
    times = RunTimes(1000, 6.0, 15.0, 18.0, 22.0)
    assert unrenewed_ttl(times, guard=2.0) == 24.0
    assert unrenewed_ttl(times, guard=2.0, jitter=4.0) == 24.0
    assert unrenewed_ttl(times, guard=1.0, jitter=0.5) == 19.5


@pytest.mark.parametrize(
    ("latency", "lateness", "ttl"),
    [
        (0.001, 0.0, 10.0),  # never below the advised shortest
        (1.0, 0.0, 20.0),  # a renewal may take a tenth, so ten times twice 1 s
        (0.005, 5.0, 5.01 / (1 - 0.01 - 1 / 6 - 1 / 3 - 0.1 - 1 / 12)),
    ],
)
def test_the_shortest_ttl_outlasts_a_failed_renewal(latency, lateness, ttl) -> None:
    assert shortest_ttl(latency, lateness) == pytest.approx(ttl)


@pytest.mark.parametrize(
    ("counts", "lateness"),
    [
        ([99, 1, 0, 0], Lateness(100, 0.1, 0.5)),  # the 99th of a hundred is in the first bucket
        ([98, 2, 0, 0], Lateness(100, 0.5, 0.5)),
        ([980, 9, 10, 1], Lateness(1000, 5.0, 5.0)),  # the 990th of a thousand
        ([0, 0, 0, 3], Lateness(3, 5.0, 5.0, beyond=True)),
        ([0, 0, 0, 0], None),
        ([], None),
    ],
)
def test_lateness_is_the_upper_bound_of_the_bucket_with_the_99th_of_a_hundred(counts, lateness):
    assert Lateness.of((0.1, 0.5, 5.0), counts) == lateness


def test_the_standstill_is_given_or_measured_or_assumed() -> None:
    measured = Lateness(100, 2.5, 5.0)
    assert ProcessPause.of(measured, 4.0) == ProcessPause(4.0, "given", 100)
    assert ProcessPause.of(measured) == ProcessPause(2.5, "measured", 100)
    assert ProcessPause.of(Lateness(99, 2.5, 5.0)) == ProcessPause(1.0, "assumed", 99)
    assert ProcessPause.of(None) == ProcessPause(1.0, "assumed", 0)


def test_the_guard_has_lateness_and_twice_the_latency() -> None:
    for latency, pause, guard in ((0.1, 2.5, 2.7), (0.001, 1.0, 2.0)):
        measured = Measured(latency, latency, ProcessPause(pause, "given"))
        assert measured.guard == pytest.approx(guard)


def test_the_advice_is_a_whole_number_of_seconds() -> None:
    assert advised(5.0) == 5.0
    assert advised(5.01) == 6.0
    assert advised(4.999999999999) == 5.0


def test_takeovers_are_those_of_the_guarantees() -> None:
    on_redis = Delivery(20.0, visibility_timeout=3600.0)
    assert (on_redis.key_free(15.0), on_redis.work_resumed(15.0)) == (31.0, 36.0)
    assert Delivery(0.0).work_resumed(15.0) == 31.0
    assert Delivery(0.0, database_leases=True).key_free(15.0) == 34.0


@pytest.mark.parametrize("slo", [12.0, 30.0, 60.0, 200.0])
@pytest.mark.parametrize(
    "delivery", [Delivery(0.0), Delivery(20.0, False, 90.0), Delivery(0.0, True)]
)
def test_the_longest_ttl_for_an_slo_just_meets_it(slo: float, delivery: Delivery) -> None:
    ttl = delivery.longest_ttl(slo)
    if ttl is None:
        assert delivery.key_free(10.0) > slo
    else:
        assert delivery.key_free(ttl) <= slo + 1e-9
        assert delivery.key_free(ttl + 0.01) > slo


def test_the_page_names_the_numbers_of_the_formula() -> None:
    text = page("choosing-a-ttl")
    assert f"{1.0 / shortest_ttl(0.0, 1.0 * 100) * 100:.3f}" in text
    longest = Delivery(20.0, False, 90.0).longest_ttl(40.0)
    assert longest is not None
    assert f"write at most lease_ttl={int(longest)}." in text
    assert Delivery(20.0, False, 90.0).key_free(60.0) == 105.0
