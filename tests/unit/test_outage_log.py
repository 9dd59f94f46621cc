"""The log level of a reschedule: a store that does not answer is a warning, once a minute for each
cause.
"""

import logging
from collections.abc import Iterator

import pytest
from celery import Celery
from celery.app.trace import TraceInfo
from celery.exceptions import Ignore

from celery_leases import signals
from celery_leases.decide.verdicts import Reschedule
from celery_leases.errors import CoolingDown
from celery_leases.events import CallRescheduled
from celery_leases.worker import waiting_log
from celery_leases.worker.publisher import KeyIsHeld
from celery_leases.worker.waiting_log import AGAIN, LONGEST_CAUSE, RESCHEDULED, STILL, cause_after


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


HELD = Reschedule(1.0, "another call holds the key", held=True)


@pytest.fixture(autouse=True)
def _filters() -> Iterator[None]:
    waiting_log.name_reschedules()
    yield
    for name in ("celery.app.trace", "celery.worker.strategy"):
        logger = logging.getLogger(name)
        logger.filters[:] = [
            each for each in logger.filters if type(each).__module__ != waiting_log.__name__
        ]


def cooling(wait: str, scope: str = "key") -> Reschedule:
    error = CoolingDown(f"Retry available in {wait}", "k", 0.0, 1.0, "rate_limited", "r", scope)
    return Reschedule(45.0, str(error), refusal=error)


def test_a_wait_goes_on_as_long_as_its_cause_is_the_same() -> None:
    seen, causes = "", []
    hops = [
        *(HELD, HELD, cooling("5 minutes"), cooling("45 seconds"), cooling("9 s", "group")),
        *(Reschedule(5.0, "redis: port 1"), Reschedule(9.0, "redis: port 22")),
        *(Reschedule(1.0, "failed", cause=OSError()), Reschedule(1.0, "failed", cause=OSError())),
        *(Reschedule(1.0, "x" * 500), Reschedule(1.0, "x" * 500)),
    ]
    for hop in hops:
        seen = cause_after(seen, hop)
        causes.append(seen)
        assert len(seen) <= LONGEST_CAUSE
    still = [cause.startswith(AGAIN) for cause in causes]
    assert still == [False, True, False, True, False, False, True, False, False, False, True]


def test_a_reschedule_within_a_wait_is_logged_for_debugging(caplog) -> None:
    caplog.set_level(logging.DEBUG, "celery_leases")
    for still in (False, True):
        event = CallRescheduled(
            task="t", key="k", call_id="c", delay=5.0, reason="held", still=still
        )
        signals.Announcer().observe(event)
    assert [record.levelno for record in caplog.records] == [logging.INFO, logging.DEBUG]


def test_celery_does_not_call_a_waiting_call_ignored(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "celery.app.trace")
    app = Celery("logs", broker="memory://", set_as_current=False)

    @app.task(name="logs.task", shared=False)
    def task() -> None:
        """Do nothing."""

    for error in (
        KeyIsHeld(f"{RESCHEDULED}held", "t:t|k", None),
        Ignore(f'{STILL}it\'s "cooling"'),
        KeyIsHeld(f"{STILL}held", "t:t|k", None),
        Ignore("it expired"),
    ):
        try:
            raise error
        except Ignore:
            task.push_request(id="c")
            TraceInfo("IGNORED", error).handle_ignore(task, task.request)
    said = [record.getMessage() for record in caplog.records]
    assert said == ["Task logs.task[c] rescheduled", "Task logs.task[c] ignored"]


def test_only_the_next_arrival_of_that_call_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    logger = logging.getLogger("celery.worker.strategy")

    def arrive(call_id: str) -> None:
        logger.info("Task %(name)s[%(id)s] received", {"name": "t", "id": call_id})

    arrive("a")
    waiting_log.leave_out_arrival("a")
    for call_id in ("b", "a", "a"):
        arrive(call_id)
    logger.info("something else")
    assert [record.getMessage()[:7] for record in caplog.records] == [
        *("Task t[", "Task t[", "Task t[", "somethi")
    ]
    assert [each for each in caplog.messages if "[a]" in each] == ["Task t[a] received"] * 2
