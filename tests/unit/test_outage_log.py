"""The log level of a reschedule: a store that does not answer is a warning, once a minute for each
cause.
"""

import logging

import pytest

from celery_leases import signals
from celery_leases.events import CallRescheduled


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time by which warnings are counted."""
    time = [100.0]
    monkeypatch.setattr(signals, "_outages", signals._Outages(clock=lambda: time[0]))
    return time


def reschedule(reason: str, *, unavailable: bool = True) -> None:
    event = CallRescheduled(
        task="t", key="k", call_id="c", delay=5.0, reason=reason, unavailable=unavailable
    )
    signals.Announcer().observe(event)


def levels(caplog: pytest.LogCaptureFixture) -> list[int]:
    return [record.levelno for record in caplog.records]


def test_the_first_is_a_warning_and_the_next_within_a_minute_are_not(caplog, now) -> None:
    caplog.set_level(logging.INFO, "celery_leases")
    for number in range(4):
        reschedule(f"lease store redis: refused from port {number}")
    reschedule("postgresql: refused")
    now[0] += 60
    reschedule("lease store redis: refused from port 9")
    assert levels(caplog) == [30, 20, 20, 20, 30, 30]
    assert caplog.records[-1].getMessage().endswith("port 9 (3 more since the last such warning)")
    assert (
        caplog.records[0]
        .getMessage()
        .endswith("rescheduled in 5.0 s: lease store redis: refused from port 0")
    )


def test_a_reschedule_for_another_reason_stays_an_info(caplog, now) -> None:
    caplog.set_level(logging.INFO, "celery_leases")
    reschedule("another call holds the key", unavailable=False)
    assert levels(caplog) == [20]


def test_any_number_of_causes_needs_little_memory(caplog, now) -> None:
    for number in range(500):
        reschedule("refused by " + "x" * number)
    assert len(signals._outages._seen) <= 100
