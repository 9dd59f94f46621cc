"""The metrics of an app for Prometheus, as a collector of ``prometheus_client``.

To export them beside your own::

    from prometheus_client import REGISTRY

    REGISTRY.register(LeaseCollector(app))

``celery -A proj leases exporter`` serves these metrics alone. The counters include all processes,
so only one process per app exports them. Needs the extra ``[metrics]``.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from itertools import accumulate
from typing import Any, Final

from celery import Celery
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from celery_leases.attempt.process import open_metrics
from celery_leases.errors import LeasesError
from celery_leases.metrics_totals import METRICS, MICROSECONDS, PREFIX, Tally
from celery_leases.ops.client import OperatorClient
from celery_leases.ops.reports import Stats
from celery_leases.worker import processes

logger = logging.getLogger("celery_leases")

COUNT_EVERY: Final = 60.0
"""Seconds between two counts of the records, at least."""
SHARE: Final = 20
"""Counting the records may take at most a twentieth of the time."""
FOLD_EVERY: Final = 30.0
"""Seconds between two searches for processes that have ended."""
GAUGES: Final = {
    "up": "Whether the records database answered: 1 or 0.",
    "lease_store_up": "Whether the lease store answered when the records were counted: 1 or 0.",
    "counting_processes": "Processes that count at this time. 0: leases_metrics is not set.",
    "records": "Records by task and state, as of the last count.",
    "oldest_cooling_seconds": "For how long the oldest key that cools down has done so.",
    "oldest_abandoned_seconds": "Age of the oldest key that is running without a live lease.",
    "groups": "Cooldown groups that are not open, by state.",
    "group_trips": "The most trips in a row of a cooldown group that is not open.",
    "records_counted_timestamp_seconds": "When the records were counted.",
    "records_count_duration_seconds": "How long that took.",
}
"""The gauges and their help texts."""
GROUP_STATES: Final = ("closed", "half_open", "probing")


class LeaseCollector(Collector):
    """Reads the counters at each scrape, and counts the records at most every *count_every*
    seconds.

    A count that took long is repeated less often, so that counting takes at most a twentieth of the
    time.
    """

    def __init__(
        self,
        app: Celery,
        *,
        count_every: float = COUNT_EVERY,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        components = processes.process_of(app, eager=False)
        self._client = OperatorClient.from_app(app, eager=False)
        self._metrics = open_metrics(components.records)
        self._count_every = count_every
        self._clock = clock
        self._lock = threading.Lock()
        self._stats: Stats | None = None
        self._counted_at = 0.0
        self._took = 0.0
        self._count_at = self._fold_at = clock()

    def describe(self) -> list[Metric]:
        """No metrics, so that registering the collector does not read the stores."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All metrics; only ``up``, with the value 0, if the database does not answer.

        Prometheus takes absent counters for a gap, but counters of 0 for a restart.
        """
        with self._lock:  # two scrapes must not count the records at the same time
            try:
                families = self._families()
            except LeasesError as error:
                logger.warning("the metrics could not be read: %s", error)
                families = [_gauge("up", 0.0)]
        yield from families

    def _families(self) -> list[Metric]:
        if self._clock() >= self._fold_at:
            self._fold_at = self._clock() + FOLD_EVERY
            self._metrics.fold()
        counts = self._metrics.read()
        if self._stats is None or self._clock() >= self._count_at:
            self._count()
        return [
            _gauge("up", 1.0),
            _gauge("counting_processes", counts.processes),
            *_counted(counts.tally),
            *self._states(),
        ]

    def _count(self) -> None:
        began, self._counted_at = self._clock(), time.time()
        self._stats = self._client.stats(rules=False)
        self._took = self._clock() - began
        self._count_at = self._clock() + max(self._count_every, SHARE * self._took)

    def _states(self) -> Iterator[Metric]:
        stats = self._stats
        assert stats is not None
        yield _gauge("lease_store_up", 0.0 if stats.trouble else 1.0)
        records = _gauge("records", labels=("task", "state"))
        for each in stats.states:
            records.add_metric([each.task, each.state], each.count)
        yield records
        for state in ("cooling", "abandoned"):
            yield _gauge(f"oldest_{state}_seconds", _age(stats, state))
        groups = _gauge("groups", labels=("state",))
        for state in GROUP_STATES:
            groups.add_metric([state], sum(group.state == state for group in stats.groups))
        yield groups
        yield _gauge("group_trips", max((group.trips for group in stats.groups), default=0))
        yield _gauge("records_counted_timestamp_seconds", self._counted_at)
        yield _gauge("records_count_duration_seconds", self._took)


def _counted(tally: Tally) -> Iterator[Metric]:
    tasks = {series[1] for series in tally.counts if series[0] == "attempts"}
    for metric in METRICS.values():
        if metric.buckets:
            yield _histogram(metric.name, tally)
            continue
        family = CounterMetricFamily(metric.full_name, metric.help, labels=metric.labels)
        found = {
            series[1:]: count for series, count in tally.counts.items() if series[0] == metric.name
        }
        if metric.labels == ("task",):  # an alert on an increase needs a value before the first one
            found = {(task,): 0 for task in tasks} | found
        for labels, count in sorted(found.items()):
            family.add_metric(list(labels), count)
        yield family


def _histogram(name: str, tally: Tally) -> Metric:
    metric = METRICS[name]
    family = HistogramMetricFamily(metric.full_name, metric.help, labels=metric.labels)
    bounds = [*(str(float(bound)) for bound in metric.buckets), "+Inf"]
    for series, span in sorted(tally.spans.items()):
        if series[0] == name:
            counts = accumulate(span[:-1])
            buckets = list(zip(bounds, map(float, counts), strict=True))
            family.add_metric(list(series[1:]), buckets, span[-1] / MICROSECONDS)
    return family


def _gauge(name: str, value: float | None = None, labels: tuple[str, ...] = ()) -> Any:
    return GaugeMetricFamily(f"{PREFIX}{name}", GAUGES[name], value=value, labels=labels or None)


def _age(stats: Stats, state: str) -> float:
    """Seconds since the oldest record in *state* entered it; 0 without such records."""
    oldest = min((each.oldest for each in stats.states if each.state == state), default=None)
    return max(0.0, (datetime.now(UTC) - oldest).total_seconds()) if oldest is not None else 0.0
