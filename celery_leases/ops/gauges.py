"""Gauges for Prometheus from the records of an app, as a collector of ``prometheus_client``.

``celery -A proj leases exporter`` serves them. To export them beside your own metrics::

    from prometheus_client import REGISTRY

    REGISTRY.register(RecordGauges(app))

Needs the extra ``[metrics]``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any, Final

from celery import Celery
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from celery_leases.errors import LeasesError
from celery_leases.ops.client import OperatorClient
from celery_leases.ops.metrics import PREFIX
from celery_leases.ops.reports import Stats
from celery_leases.text.notices import logger
from celery_leases.worker import processes

COUNT_EVERY: Final = 60.0
"""Seconds between two counts of the records, at least."""
SHARE: Final = 20
"""Counting the records may take at most a twentieth of the time."""
GAUGES: Final = {
    "up": "Whether the records database answered: 1 or 0.",
    "lease_store_up": "Whether the lease store answered when the records were counted: 1 or 0.",
    "records": "Records by task and state, as of the last count.",
    "oldest_cooling_seconds": "For how long the oldest key that cools down has done so.",
    "oldest_abandoned_seconds": "Age of the oldest key that is running without a live lease.",
    "groups": "Groups that are not open, or full, by state.",
    "group_closings_in_a_row": "The most closings in a row of a cooldown group that is not open.",
    "records_counted_timestamp_seconds": "When the records were counted.",
    "records_count_duration_seconds": "How long that took.",
}
"""The gauges and their help texts."""
GROUP_STATES: Final = ("closed", "probe_due", "probing", "full")


class RecordGauges(Collector):
    """Gauges from the records of *app*, which are counted at most every *count_every* seconds.

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
        self._records = processes.process_of(app, eager=False).records
        self._client = OperatorClient.from_app(app, eager=False)
        self._count_every = count_every
        self._clock = clock
        self._lock = threading.Lock()
        self._stats: Stats | None = None
        self._counted_at = 0.0
        self._took = 0.0
        self._count_at = clock()

    def describe(self) -> list[Family]:
        """No metrics, so that registering the collector does not read the stores."""
        return []

    def collect(self) -> Iterator[Family]:
        """All gauges; only ``up``, with the value 0, if the database does not answer."""
        with self._lock:  # two scrapes must not count the records at the same time
            try:
                if self._stats is None or self._clock() >= self._count_at:
                    self._count()
                else:
                    self._records.now()
                families = [_gauge("up", 1.0), *self._states()]
            except LeasesError as error:
                logger.warning("the gauges could not be read: %s", error, code="gauges-unreadable")
                families = [_gauge("up", 0.0)]
        yield from families

    def _count(self) -> None:
        began, self._counted_at = self._clock(), time.time()
        self._stats = self._client.stats(rules=False)
        self._took = self._clock() - began
        self._count_at = self._clock() + max(self._count_every, SHARE * self._took)

    def _states(self) -> Iterator[Family]:
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
        yield _gauge(
            "group_closings_in_a_row", max((group.in_a_row for group in stats.groups), default=0)
        )
        yield _gauge("records_counted_timestamp_seconds", self._counted_at)
        yield _gauge("records_count_duration_seconds", self._took)


def _gauge(name: str, value: float | None = None, labels: tuple[str, ...] = ()) -> Any:
    return GaugeMetricFamily(f"{PREFIX}{name}", GAUGES[name], value=value, labels=labels or None)


def _age(stats: Stats, state: str) -> float:
    """Seconds since the oldest record in *state* entered it; 0 without such records."""
    oldest = min((each.oldest for each in stats.states if each.state == state), default=None)
    return max(0.0, (datetime.now(UTC) - oldest).total_seconds()) if oldest is not None else 0.0
