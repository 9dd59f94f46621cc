"""Attributes of OpenTelemetry's current span for the events of leased calls, and nothing else."""

import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip(
    "opentelemetry.sdk", reason="the SDK of OpenTelemetry is not installed: it is in the group test"
)

from celery import Celery
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from celery_leases import LeasedTask, events, tracing
from celery_leases.record import Failure
from celery_leases.signals import Announcer
from celery_leases.text.notices import logger
from tests.unit.celery_apps import apps
from tests.unit.doc_pages import markdown_rows, page, section

__all__ = ["apps"]

SECRET = "secret of the exception"
WHOM: Any = {"task": "t", "key": "invoice:7", "call_id": "c"}
EVENTS: tuple[events.Event, ...] = (
    events.LeaseAcquired(**WHOM, fence=9, attempt=2),
    events.CrashSeen(**WHOM, crashes=1, host=SECRET),
    events.ResultReplayed(**WHOM, first_call_id="first"),
    events.CallRescheduled(**WHOM, delay=3.0, reason=SECRET),
    events.CallDropped(**WHOM, reason=events.Dropped.COOLING, why=SECRET),
    events.CallRefused(**WHOM, error=SECRET),
    events.OutcomeRefused(**WHOM, fence=9, state="done"),
    events.AttemptSettled(
        **WHOM,
        state="cooling",
        ended="failed",
        attempt=2,
        runtime=0.1,
        retry_after=300.0,
        reason=SECRET,
        failure=Failure(
            SECRET, SECRET, "status:429", "rate_limited", group="openai", ambiguous=True
        ),
    ),
)


@pytest.fixture
def spans() -> Iterator[tuple[Any, InMemorySpanExporter]]:
    """A tracer, and where its spans go."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    yield provider.get_tracer("tests"), exporter
    provider.shutdown()


@pytest.fixture
def task(apps: None) -> Iterator[Any]:
    """An eager leased task that fails for a name."""
    app = Celery("traced", broker="memory://", set_as_current=False)
    app.conf.task_always_eager = True

    @app.task(base=LeasedTask, bind=True, name="traced.body", lease_key="traced:{name}")
    def body(self, name):
        if name == "bad":
            raise KeyError(SECRET)
        return self.lease.fence

    yield body
    app.close()


def attributes(spans: Any) -> list[dict[str, Any]]:
    return [dict(span.attributes) for span in spans[1].get_finished_spans()]


@pytest.mark.parametrize("level", ["WARNING", "DEBUG"])
def test_a_call_sets_attributes_of_its_current_span(spans, task, level, monkeypatch) -> None:
    name, before = f"good-{level}", logger.logger.level
    logger.setLevel(level)
    try:
        for _ in range(2):
            with spans[0].start_as_current_span("run"):
                fence = task.delay(name).get()
    finally:
        logger.setLevel(before)
    first, again = attributes(spans)
    assert first == {
        "celery_leases.key": f"traced:{name}",
        "celery_leases.attempt": 1,
        "celery_leases.fence": fence,
        "celery_leases.outcome": "done",
        "celery_leases.ended": "returned",
    }
    assert again.keys() == {
        "celery_leases.key",
        "celery_leases.outcome",
        "celery_leases.replayed_call",
    }
    assert again["celery_leases.outcome"] == "replayed"


def test_a_failure_sets_its_codes_and_not_its_text(spans: Any, task: Any) -> None:
    with spans[0].start_as_current_span("run"):
        task.delay("bad")
    (told,) = attributes(spans)
    assert (told["celery_leases.outcome"], told["celery_leases.reason"]) == ("cooling", "error")
    assert told["celery_leases.retry_after"] > 1
    assert SECRET not in str(told)


def test_no_span_is_created_and_spans_that_do_not_record_are_not_changed(spans, task) -> None:
    task.delay("alone")
    assert attributes(spans) == []
    assert tracing.recording_span() is None


def test_the_attributes_are_those_of_the_page() -> None:
    rows = markdown_rows(section(page("opentelemetry"), "The attributes"))[1:]
    told = [tracing.attributes_of(event) for event in EVENTS]
    assert {row[0].strip("`") for row in rows} == set().union(*told)
    outcomes = {one["celery_leases.outcome"] for one in told if "celery_leases.outcome" in one}
    (row,) = (row for row in rows if "outcome" in row[0])
    assert outcomes <= set(re.findall(r"`(\w+)`", row[2]))
    assert SECRET not in str(told)


def test_events_of_other_threads_set_nothing() -> None:
    for event in (
        events.LeaseRenewed(**WHOM, remaining=1.0),
        events.RenewalFailed(**WHOM, error=SECRET, remaining=1.0),
        events.LeaseLost(**WHOM, reason=SECRET),
        events.LeaseHeld(**WHOM, holder="h", holder_call_id="c", remaining=1.0, same_call=False),
    ):
        assert tracing.attributes_of(event) == {}


def test_a_key_that_cannot_be_sent_is_shown() -> None:
    told = tracing.attributes_of(
        events.LeaseAcquired(**WHOM | {"key": "a\ud800\n"}, fence=1, attempt=1)
    )
    assert told["celery_leases.key"].encode().decode().isprintable()


def test_a_span_that_raises_does_not_affect_the_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """A task ends as it would have."""

    class Broken:
        def is_recording(self) -> bool:
            return True

        def set_attributes(self, _: Any) -> None:
            raise RuntimeError

    monkeypatch.setattr("opentelemetry.trace.get_current_span", Broken)
    assert Announcer().wants(events.LeaseAcquired)
    for event in EVENTS:
        Announcer().observe(event)


def test_nothing_is_imported_for_it() -> None:
    code = "import sys; import celery_leases.signals; print('opentelemetry' in sys.modules)"
    said = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout
    assert said == "False\n"
