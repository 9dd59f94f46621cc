"""Counters and histograms of what the calls of each process do, in files for Prometheus.

A process counts if ``PROMETHEUS_MULTIPROC_DIR`` names a directory. It writes each count at once
into its own files there, in the format of prometheus_client's multiprocess mode, so a process that
is killed loses nothing that it has counted. ``celery -A proj leases exporter`` serves the sums of
all files. Needs the extra ``[metrics]``.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from math import inf
from pathlib import Path
from typing import Any, Final

from celery.signals import worker_process_init
from celery.utils.log import current_process_index
from prometheus_client.core import Metric as Family
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString
from prometheus_client.values import MultiProcessValue

from celery_leases import events, signals
from celery_leases.concurrency import os_threads
from celery_leases.events import Event
from celery_leases.worker.processes import METRICS_DIRECTORY

PREFIX: Final = "celery_leases_"
FRACTION: Final = 2**20
"""Times are sums of this part of a second. So floats add up to the same sum in any order, and a sum
never becomes smaller, which Prometheus would take for a restart.
"""


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric: a counter, or with ``buckets`` (upper bounds in seconds) a histogram."""

    name: str
    help: str
    labels: tuple[str, ...] = ("task",)
    buckets: tuple[float, ...] = ()

    @property
    def full_name(self) -> str:
        """The name in Prometheus; the series of a histogram add ``_bucket``, ``_count`` and
        ``_sum``.
        """
        return f"{PREFIX}{self.name}{'_seconds' if self.buckets else '_total'}"


_SHORT: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_RUN: Final = (*_SHORT, 30.0, 60.0, 300.0, 900.0, 3600.0, 14_400.0)
_WAIT: Final = (1.0, 5.0, 15.0, 30.0, 60.0, 300.0, 900.0, 3600.0, 14_400.0, 86_400.0)

METRICS: Final[Mapping[str, Metric]] = {
    metric.name: metric
    for metric in (
        Metric(
            "attempts",
            "Attempts that were closed, by how they ended and the rule that decided.",
            ("task", "outcome", "rule"),
        ),
        Metric(
            "crashes", "Processes that died without reporting an outcome, as their workers saw."
        ),
        Metric("abandonments", "Attempts whose lease ended and of which nothing was heard."),
        Metric("refused_outcomes", "Outcomes refused because a later attempt owns the key."),
        Metric(
            "duplicate_terminal_states",
            "Keys that were done and became done once more in the same generation. Must stay 0.",
        ),
        Metric(
            "saved_runs",
            "Deliveries and calls that did not run because the work was done or running.",
            ("task", "how"),
        ),
        Metric("refused_calls", "Calls that got an error instead of a run."),
        Metric("rescheduled_calls", "Calls that could not run yet and were published again."),
        Metric(
            "unavailable_stores", "Calls that a store did not answer, and that were rescheduled."
        ),
        Metric("lost_leases", "Leases that were lost while a body ran."),
        Metric("failed_renewals", "Renewals that failed and were tried again."),
        Metric("group_closings", "Failures that closed a cooldown group."),
        Metric("run", "Run time of bodies.", buckets=_RUN),
        Metric("hold", "Time from the request of a lease until its key was let go.", buckets=_RUN),
        Metric("cooldown", "Cooldowns that failures have set.", buckets=_WAIT),
        Metric("renewal_lateness", "How late renewals were sent.", buckets=_SHORT),
    )
}
_ONE_EACH: Final[Mapping[type[Event], str]] = {
    events.CrashSeen: "crashes",
    events.AttemptAbandoned: "abandonments",
    events.OutcomeRefused: "refused_outcomes",
    events.CallRefused: "refused_calls",
    events.LeaseLost: "lost_leases",
    events.RenewalFailed: "failed_renewals",
    events.GroupClosed: "group_closings",
}
"""The counters of events that are only counted."""
_BOUNDS: Final = {
    metric.name: [floatToGoString(bound) for bound in (*metric.buckets, inf)]
    for metric in METRICS.values()
}
_BEGIN_AT_0: Final = tuple(
    metric.name for metric in METRICS.values() if metric.labels == ("task",) and not metric.buckets
)
"""The counters with a value before their first event, which an alert on an increase needs."""
COUNTED: Final = tuple(
    signals.SIGNALS[kind]
    for kind in (
        *(*_ONE_EACH, events.AttemptSettled, events.CallDropped),
        *(events.CallRescheduled, events.LeaseRenewed, events.ResultReplayed),
    )
)


# -- in the processes that count -------------------------------------------------------------------


class EventCounter:
    """Counts events in the files of this process.

    Its receiver never waits, so a signal handler, a system thread and a greenlet may all call it:
    an event that comes while another one is counted is counted after it.
    """

    def __init__(self) -> None:
        self._sample_class: Any = MultiProcessValue(_process)
        self._samples: dict[tuple[str, ...], Any] = {}
        self._events: deque[Event] = deque()
        self._lock = os_threads.allocate_lock()
        # A child that is forked while another thread counts would find the locks taken for ever.
        os.register_at_fork(
            before=self._lock.acquire,
            after_in_parent=self._after_fork,
            after_in_child=partial(self._after_fork, child=True),
        )

    def receive(self, event: Event, **_: Any) -> None:
        """Count *event*: a receiver of signals."""
        self._events.append(event)
        self._count_all()

    def _count_all(self) -> None:
        while self._events and self._lock.acquire(blocking=False):
            try:
                while self._events:
                    self._count(self._events.popleft())
            finally:
                self._lock.release()

    def _after_fork(self, *, child: bool = False) -> None:
        if child:
            self._events.clear()  # the parent counts them
        self._lock.release()
        self._count_all()

    def _count(self, event: Event) -> None:
        task = event.task
        if ("crashes_total", task) not in self._samples:
            for name in _BEGIN_AT_0:
                self._add(name, task, by=0)
        match event:
            case events.AttemptSettled():
                rule = event.failure.rule if event.failure is not None else None
                self._add("attempts", task, event.ended, rule or "")
                self._observe("run", task, event.runtime)
                self._observe("hold", task, event.held)
                if event.state == "cooling" and event.retry_after:
                    self._observe("cooldown", task, event.retry_after)
                if event.repeated:
                    self._add("duplicate_terminal_states", task)
            case events.ResultReplayed():
                self._add("saved_runs", task, "replayed")
            case events.CallDropped():
                if event.reason.saved_a_run:
                    self._add("saved_runs", task, "dropped")
            case events.CallRescheduled():
                self._add("unavailable_stores" if event.unavailable else "rescheduled_calls", task)
            case events.LeaseRenewed():
                if event.late is not None:
                    self._observe("renewal_lateness", task, event.late)
            case _:
                self._add(_ONE_EACH[type(event)], task)

    def _add(self, name: str, *labels: str, by: int = 1) -> None:
        self._sample(METRICS[name], "_total", *labels).inc(by)

    def _observe(self, name: str, task: str, seconds: float) -> None:
        metric = METRICS[name]
        if (f"{name}_sum", task) not in self._samples:
            for bound in _BOUNDS[name]:
                self._sample(metric, "_bucket", task, bound)
        bucket = _BOUNDS[name][bisect_left(metric.buckets, seconds)]
        self._sample(metric, "_bucket", task, bucket).inc(1)
        self._sample(metric, "_sum", task).inc(round(max(0.0, seconds) * FRACTION) / FRACTION)

    def _sample(self, metric: Metric, end: str, *labels: str) -> Any:
        """The sample with these labels in the file of this process."""
        key = (f"{metric.name}{end}", *labels)
        sample = self._samples.get(key)
        if sample is None:
            family = metric.full_name.removesuffix("_total")
            kind = "histogram" if metric.buckets else "counter"
            names = (*metric.labels, "le")[: len(labels)]
            sample = self._samples[key] = self._sample_class(
                kind, family, f"{family}{end}", names, labels, metric.help
            )
        return sample


_counter: EventCounter | None = None
_place: tuple[int, str] = (0, "")


def count_events() -> None:
    """Count the events of this process and of its later forks from now on."""
    global _counter  # noqa: PLW0603 - one for each process
    if _counter is None:
        Path(os.environ[METRICS_DIRECTORY]).mkdir(parents=True, exist_ok=True)
        _counter = EventCounter()
        for signal in COUNTED:
            signal.connect(_counter.receive, weak=False)
        worker_process_init.connect(_enter_pool, weak=False)


def _enter_pool(**_: Any) -> None:
    """Continue the files of the child whose place in the pool this child takes: otherwise there
    would be more files with each child.
    """
    global _place  # noqa: PLW0603
    _place = os.getpid(), f"{os.getppid()}-{current_process_index()}"


def _process() -> str:
    """A name for the files of this process, which no other running process has."""
    pid = os.getpid()
    return f"celery-leases-{_place[1] if _place[0] == pid else pid}"


# -- in the process that exports -------------------------------------------------------------------


class CountedEvents(Collector):
    """The sums of the files in *directory* that processes with leased tasks have written."""

    def __init__(self, directory: str) -> None:
        self._directory = directory

    def describe(self) -> list[Family]:
        """No metrics, so that registering the collector reads nothing."""
        return []

    def collect(self) -> Iterable[Family]:
        """All counters and histograms."""
        return read_counts(self._directory)


def read_counts(directory: str, *, accumulate: bool = True) -> Iterable[Family]:
    """The sums of the files in *directory*; without *accumulate* each bucket is counted alone."""
    files = sorted(Path(directory).glob("*_celery-leases-*.db"))
    made = [str(file) for file in files if file.stat().st_size]  # a new file is empty at first
    found: Iterable[Family] = MultiProcessCollector.merge(made, accumulate)
    return found
