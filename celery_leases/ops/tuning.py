"""Advice on ``lease_ttl`` from measured run times and latencies.

Times are seconds. The parts of a ttl are those of :mod:`celery_leases.deadlines`; the
bounds of a takeover are those of docs/explanation/guarantees.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Self

from celery import Celery

from celery_leases.deadlines import RATE_MARGIN, RENEWALS_PER_TTL
from celery_leases.options import ADVISED_TTL, DATABASE, DEFAULT_TTL, LONGEST_COUNTDOWN
from celery_leases.worker.app_settings import leased_tasks, settings_of
from celery_leases.worker.checks.settings import redis_options

CALL_PART = 10
"""A renewal may take a tenth of the ttl: ``deadlines.call_timeout``."""
LATENCY_MARGIN = 2.0
"""A renewal must be in time even if it takes twice the p99 latency."""
STOP_PART = 1 / 6
"""The part of the ttl that a body has to stop: ``deadlines.stop_deadline``."""
DATABASE_PROOF = 3.0
"""Seconds for which the database must have answered before an expired lease in a row may be taken
over.
"""
ASSUMED_PAUSE = 1.0
"""Seconds of a process pause if none was measured."""
SHORTEST_GUARD = 2.0
ENOUGH_MEASUREMENTS = 100
"""With fewer measured runs or renewals their p99 is not known."""


@dataclass(frozen=True, slots=True)
class RunTimes:
    """The run times of the finished runs of a task."""

    count: int
    p50: float
    p95: float
    p99: float
    longest: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> RunTimes | None:
        """From the time of each run, with nearest-rank percentiles; ``None`` without runs."""
        if not seconds:
            return None
        ordered = sorted(seconds)
        p50, p95, p99 = (ordered[math.ceil(part * len(ordered) / 100) - 1] for part in (50, 95, 99))
        return cls(len(ordered), p50, p95, p99, ordered[-1])


@dataclass(frozen=True, slots=True)
class Lateness:
    """How late renewals were sent, from the buckets of a histogram.

    ``p99`` and ``latest`` are upper bounds of buckets. ``beyond``: p99 is above the last bound, and
    ``p99`` is that bound.
    """

    count: int
    p99: float
    latest: float
    beyond: bool = False

    @classmethod
    def of(cls, bounds: Sequence[float], counts: Sequence[int]) -> Lateness | None:
        """From the *counts* in the buckets below each of the *bounds*, and in the bucket above the
        last; ``None`` without renewals.
        """
        total = sum(counts)
        if not total:
            return None
        rank = math.ceil(99 * total / 100)
        place = next(at for at, upto in enumerate(accumulate(counts)) if upto >= rank)
        latest = max(at for at, count in enumerate(counts) if count)
        upper = (*bounds, bounds[-1])
        return cls(total, upper[place], upper[latest], place == len(bounds))


@dataclass(frozen=True, slots=True)
class ProcessPause:
    """How long a process may pause (no code runs, for example in a long garbage collection).

    ``source``: ``given``, ``measured`` or ``assumed``. ``renewals``: how many were measured.
    """

    seconds: float
    source: str
    renewals: int = 0

    @classmethod
    def of(cls, measured: Lateness | None, given: float | None = None) -> ProcessPause:
        """*given*, or the p99 of *measured* renewals if they are :data:`ENOUGH_MEASUREMENTS`, or
        :data:`ASSUMED_PAUSE`.
        """
        count = measured.count if measured is not None else 0
        if given is not None:
            return cls(given, "given", count)
        if measured is not None and count >= ENOUGH_MEASUREMENTS:
            return cls(measured.p99, "measured", count)
        return cls(ASSUMED_PAUSE, "assumed", count)


@dataclass(frozen=True, slots=True)
class Delivery:
    """When the broker delivers the messages of a dead worker again.

    ``redelivery`` counts from the death of the worker: on Redis the ttl of the worker's own lease
    and a third of it, 0 for a broker that notices the lost connection.
    """

    redelivery: float
    database_leases: bool = False
    visibility_timeout: float | None = None

    @classmethod
    def of(cls, app: Celery) -> Self:
        """By the settings of the broker and the stores of *app*."""
        database_leases = settings_of(app).leases_url == DATABASE
        options = redis_options(app)
        if options is None:
            return cls(0.0, database_leases)
        from kombu.transport.redis import Channel

        timeout = float(options.get("visibility_timeout", Channel.visibility_timeout))
        ttl = min(
            (task.lease_options.ttl for task in leased_tasks(app).values()), default=DEFAULT_TTL
        )
        return cls(ttl + ttl / RENEWALS_PER_TTL, database_leases, timeout)

    def delay(self, ttl: float) -> float:
        """The longest countdown of a call that finds the lease of the dead worker."""
        countdown = LONGEST_COUNTDOWN
        if self.visibility_timeout is not None:
            countdown = min(countdown, self.visibility_timeout / 2)
        return min(ttl + 1.0, countdown)

    def key_free(self, ttl: float) -> float:
        """How long after a kill another call of the key runs, at most."""
        return ttl + self.delay(ttl) + self._proof()

    def work_resumed(self, ttl: float) -> float:
        """How long after a kill the killed call itself runs again, at most."""
        return max(ttl, self.redelivery) + self.delay(ttl) + self._proof()

    def longest_ttl(self, slo: float) -> float | None:
        """The longest ttl with which the key is free within *slo*; ``None`` if no ttl is short
        enough.
        """
        left = slo - self._proof()
        found = max((left - 1.0) / 2, left - self.delay(math.inf))
        return found if found >= ADVISED_TTL else None

    def _proof(self) -> float:
        return DATABASE_PROOF if self.database_leases else 0.0


def shortest_ttl(latency: float, lateness: float) -> float:
    """The shortest ttl with which a lease survives one failed renewal.

    *latency* is the p99 of round trips to the lease store, *lateness* the longest process pause. A
    renewal must fit into its call timeout, a tenth of the ttl. A renewal that is due after a third
    of the ttl, starts late, times out and is repeated must end before the body has to stop.
    """
    slow = LATENCY_MARGIN * latency
    left = 1 - RATE_MARGIN - STOP_PART - 1 / RENEWALS_PER_TTL - 1 / CALL_PART - 1 / 12
    return max(ADVISED_TTL, CALL_PART * slow, (lateness + slow) / left)


def unrenewed_ttl(times: RunTimes, guard: float, jitter: float | None = None) -> float:
    """The ttl that a lock without renewal would need: p99 + *jitter* + *guard*.

    *jitter* is how much longer than p99 a run may take; the default is the longest measured run
    less p99.
    """
    return times.p99 + (times.longest - times.p99 if jitter is None else jitter) + guard


@dataclass(frozen=True, slots=True)
class Measured:
    """The p99 of round trips to the stores, and how long a process may pause; in seconds."""

    store_p99: float
    database_p99: float
    pause: ProcessPause

    @classmethod
    def of(
        cls, latencies: Sequence[Sequence[float]], late: Lateness | None, pause: float | None = None
    ) -> Self:
        """From the *latencies* of the lease store and the database, how *late* renewals were, and a
        *pause* that was given instead.
        """
        store, database = (times.p99 for times in map(RunTimes.of, latencies) if times is not None)
        return cls(store, database, ProcessPause.of(late, pause))

    @property
    def ttl(self) -> float:
        """The shortest safe ``lease_ttl``, in whole seconds."""
        return advised(shortest_ttl(self.store_p99, self.pause.seconds))

    @property
    def guard(self) -> float:
        """What a ttl without renewal must have in addition to the run time, at least 2 s: the
        process may pause after the body has ended, and the store may be slow to write the outcome.
        """
        return max(SHORTEST_GUARD, self.pause.seconds + LATENCY_MARGIN * self.store_p99)


def advised(shortest: float) -> float:
    """*shortest* rounded up to a whole second, as a value for ``lease_ttl``."""
    return float(math.ceil(round(shortest, 6)))


def advice_of(
    name: str,
    took: Sequence[float],
    known: Mapping[str, Any],
    delivery: Delivery,
    guard: float,
    jitter: float | None = None,
) -> dict[str, Any]:
    """The advice for a task from its run times, as plain values; times are seconds.

    *took* are the run times of the task, *known* the leased tasks of the app. *guard* and *jitter*
    are those of :func:`unrenewed_ttl`.
    """
    found, task = RunTimes.of(took), known.get(name)
    ttl = task.lease_options.ttl if task is not None else None
    limit = (task.time_limit or task.app.conf.task_time_limit) if task is not None else None
    spans = ("p50", "p95", "p99", "longest")
    return {
        "task": name,
        "runs": found.count if found else 0,
        **{span: getattr(found, span, None) for span in spans},
        "ttl": ttl,
        "key_free_within": delivery.key_free(ttl) if ttl is not None else None,
        "work_resumed_within": delivery.work_resumed(ttl) if ttl is not None else None,
        "unrenewed_ttl": unrenewed_ttl(found, guard, jitter) if found else None,
        "time_limit": limit,
    }
