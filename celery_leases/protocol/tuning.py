"""Advice on ``lease_ttl``: from measured run times and latencies to seconds. Pure functions.

Times are seconds. The arithmetic of the lease itself is that of
:mod:`celery_leases.protocol.deadlines`; the bounds of a takeover are those of docs/guarantees.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from celery_leases.protocol.deadlines import RATE_MARGIN, RENEWALS_PER_TTL
from celery_leases.protocol.options import ADVISED_TTL, LONGEST_COUNTDOWN

CALL_PART = 10
"""A renewal may take a tenth of the ttl: ``call_timeout`` of the deadlines."""
LATENCY_MARGIN = 2.0
"""A renewal that takes twice as long as the slowest one of a hundred must still be in time."""
STOP_PART = 1 / 6
"""The part of the ttl that a body is given to stop."""
DATABASE_PROOF = 3.0
"""How long a database is watched before the lease in one of its rows counts as lapsed."""
ASSUMED_LATENESS = 1.0
"""For how long a process stands still, where this was not measured."""
SHORTEST_GUARD = 2.0
FEW = 100
"""With fewer measurements than these the slowest of a hundred is not known."""


@dataclass(frozen=True, slots=True)
class RunTimes:
    """What the finished runs of a task took."""

    count: int
    p50: float
    p95: float
    p99: float
    longest: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> RunTimes | None:
        """From the time of each run, by the nearest rank; ``None`` without a run."""
        if not seconds:
            return None
        ordered = sorted(seconds)
        p50, p95, p99 = (ordered[math.ceil(part * len(ordered) / 100) - 1] for part in (50, 95, 99))
        return cls(len(ordered), p50, p95, p99, ordered[-1])


@dataclass(frozen=True, slots=True)
class Lateness:
    """How late renewals were sent, from the counts in the buckets of a histogram.

    ``p99`` and ``latest`` are upper bounds of buckets. ``beyond``: p99 is later than the last of
    these bounds, which stands for it then.
    """

    count: int
    p99: float
    latest: float
    beyond: bool = False

    @classmethod
    def of(cls, bounds: Sequence[float], counts: Sequence[int]) -> Lateness | None:
        """From the *counts* up to each of the *bounds*, and beyond the last one; by the nearest
        rank, and ``None`` without a renewal.
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
    """For how long a process may stand still, and where that figure is from: ``given``,
    ``measured`` or ``assumed``. ``renewals``: how many were measured.
    """

    seconds: float
    source: str
    renewals: int = 0

    @classmethod
    def of(cls, measured: Lateness | None, given: float | None = None) -> ProcessPause:
        """What is *given*, else the p99 of at least :data:`FEW` *measured* renewals, else
        :data:`ASSUMED_LATENESS`.
        """
        count = measured.count if measured is not None else 0
        if given is not None:
            return cls(given, "given", count)
        if measured is not None and count >= FEW:
            return cls(measured.p99, "measured", count)
        return cls(ASSUMED_LATENESS, "assumed", count)


@dataclass(frozen=True, slots=True)
class Delivery:
    """How messages of a dead worker come back.

    ``redelivery`` is the time until the broker delivers again, counted from the delivery of the
    message: visibility timeout plus sweep on Redis, 0 where it notices the lost connection.
    """

    redelivery: float
    database_leases: bool = False
    visibility_timeout: float | None = None

    def delay(self, ttl: float) -> float:
        """For how long a call that met the key of the dead worker is rescheduled at most."""
        countdown = LONGEST_COUNTDOWN
        if self.visibility_timeout is not None:
            countdown = min(countdown, self.visibility_timeout / 2)
        return min(ttl + 1.0, countdown)

    def key_free(self, ttl: float) -> float:
        """How long after a worker was killed another call of its key runs, at most."""
        return ttl + self.delay(ttl) + self._proof()

    def work_resumed(self, ttl: float) -> float:
        """How long after a worker was killed its own work begins again, at most."""
        return max(ttl, self.redelivery) + self.delay(ttl) + self._proof()

    def longest_ttl(self, slo: float) -> float | None:
        """The longest ttl whose key is free within *slo*; ``None``: there is none."""
        left = slo - self._proof()
        found = max((left - 1.0) / 2, left - self.delay(math.inf))
        return found if found >= ADVISED_TTL else None

    def _proof(self) -> float:
        return DATABASE_PROOF if self.database_leases else 0.0


def shortest_ttl(latency: float, lateness: float) -> float:
    """The shortest ttl that renewals keep alive, when one of them fails.

    *latency*: the slowest of a hundred round trips to the lease store. *lateness*: for how long a
    process may stand still. A renewal must fit into its call timeout, a tenth of the ttl. And a
    renewal that is due after a third of the ttl, starts late, times out and is repeated must end
    before the body has to stop.
    """
    slow = LATENCY_MARGIN * latency
    left = 1 - RATE_MARGIN - STOP_PART - 1 / RENEWALS_PER_TTL - 1 / CALL_PART - 1 / 12
    return max(ADVISED_TTL, CALL_PART * slow, (lateness + slow) / left)


def unrenewed_ttl(times: RunTimes, guard: float, jitter: float | None = None) -> float:
    """The ttl that a lock without renewal would need: ``p99 + jitter + guard``.

    *jitter* is how much longer than that a run may take, by default the longest run seen less p99.
    """
    return times.p99 + (times.longest - times.p99 if jitter is None else jitter) + guard


def safe_guard(latency: float, lateness: float) -> float:
    """What a ttl without renewal needs on top of the run: its process may stand still after the
    body has ended, and the store may be slow to take the outcome. At least 2 s.
    """
    return max(SHORTEST_GUARD, lateness + LATENCY_MARGIN * latency)


def advised(shortest: float) -> float:
    """*shortest* rounded up to a whole second: what to write for ``lease_ttl``."""
    return float(math.ceil(round(shortest, 6)))
