"""The metrics that processes count of their calls, and sums that can be added and subtracted. Pure.

Times are summed in whole microseconds. A sum of floats depends on the order of its terms, so it
could fall when the processes are added up in another order, which Prometheus takes for a restart.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Self

from celery_leases import events
from celery_leases.decide.before_run import RUN_SAVED
from celery_leases.events import Event

MICROSECONDS: Final = 1_000_000
PREFIX: Final = "celery_leases_"

Series = tuple[str, ...]
"""The name of a metric without prefix and suffix, and the values of its labels in their order."""


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
        Metric("group_trips", "Failures that closed the gate of a cooldown group."),
        Metric("run", "Run time of bodies.", buckets=_RUN),
        Metric("hold", "Time from the request of a lease until its key was let go.", buckets=_RUN),
        Metric("cooldown", "Cooldowns that failures have set.", buckets=_WAIT),
        Metric("renewal_lateness", "How late renewals were sent.", buckets=_SHORT),
    )
}
RECOVERED: Final = ("attempts", "run", "hold", "cooldown")
"""The metrics that can be computed from the records if a process was killed before it wrote
them.
"""


@dataclass(slots=True)
class Tally:
    """The values of counters and histograms by series. ``spans``: the count in each bucket, and
    last the sum in microseconds.
    """

    counts: dict[Series, int] = field(default_factory=dict)
    spans: dict[Series, list[int]] = field(default_factory=dict)

    def count(self, name: str, *labels: str, by: int = 1) -> None:
        """Add *by* to a counter."""
        series = (name, *labels)
        self.counts[series] = self.counts.get(series, 0) + by

    def span(self, name: str, task: str, seconds: float) -> None:
        """Add *seconds* to a histogram."""
        buckets = METRICS[name].buckets
        found = self.spans.setdefault((name, task), [0] * (len(buckets) + 2))
        found[bisect_left(buckets, seconds)] += 1
        found[-1] += max(0, round(seconds * MICROSECONDS))

    def add(self, event: Event) -> None:  # noqa: C901, PLR0912 - a branch for each kind of event
        """Count *event*."""
        match event:
            case events.AttemptSettled():
                self.attempt(event)
            case events.CrashSeen():
                self.count("crashes", event.task)
            case events.AttemptAbandoned():
                self.count("abandonments", event.task)
            case events.OutcomeRefused():
                self.count("refused_outcomes", event.task)
            case events.ResultReplayed():
                self.count("saved_runs", event.task, "replayed")
            case events.CallDropped() if event.reason in RUN_SAVED:
                self.count("saved_runs", event.task, "dropped")
            case events.CallRefused():
                self.count("refused_calls", event.task)
            case events.CallRescheduled():
                name = "unavailable_stores" if event.unavailable else "rescheduled_calls"
                self.count(name, event.task)
            case events.LeaseGone():
                self.count("lost_leases", event.task)
            case events.RenewalFailed():
                self.count("failed_renewals", event.task)
            case events.GateClosed():
                self.count("group_trips", event.task)
            case events.LeaseRenewed() if event.late is not None:
                self.span("renewal_lateness", event.task, event.late)
            case _:
                pass

    def attempt(self, event: events.AttemptSettled) -> None:
        """Count an attempt that was closed."""
        rule = event.failure.rule if event.failure is not None else None
        self.closed(event.task, event.ended, rule, event.runtime, event.held)
        if event.state == "cooling" and event.retry_after:
            self.span("cooldown", event.task, event.retry_after)
        if event.repeated:
            self.count("duplicate_terminal_states", event.task)

    def closed(self, task: str, ended: str, rule: str | None, runtime: float, held: float) -> None:
        """Count how an attempt *ended*; *runtime* and *held* are seconds."""
        self.count("attempts", task, ended, rule or "")
        self.span("run", task, runtime)
        self.span("hold", task, held)

    def merge(self, other: Self, sign: int = 1) -> None:
        """Add the counts of *other*, or with *sign* -1 subtract them.

        Histograms whose buckets differ between releases are left out.
        """
        for series, count in other.counts.items():
            self.counts[series] = self.counts.get(series, 0) + sign * count
        for series, span in other.spans.items():
            mine = self.spans.setdefault(series, [0] * len(span))
            if len(mine) == len(span):
                self.spans[series] = [a + sign * b for a, b in zip(mine, span, strict=True)]

    def since(self, written: Self) -> Self:
        """The counts after *written*, without the :data:`RECOVERED` metrics."""
        rest = type(self)(dict(self.counts), dict(self.spans))
        rest.merge(written, -1)
        counts = {
            series: count
            for series, count in rest.counts.items()
            if count and series[0] not in RECOVERED
        }
        spans = {
            series: span
            for series, span in rest.spans.items()
            if any(span) and series[0] not in RECOVERED
        }
        return type(self)(counts, spans)

    def copy(self) -> Self:
        """A copy, which does not change when this tally does."""
        return type(self)(
            dict(self.counts), {series: [*span] for series, span in self.spans.items()}
        )

    def as_json(self) -> dict[str, Any]:
        """Plain values, which :meth:`of_json` reads."""
        return {
            "counts": [[*series, count] for series, count in self.counts.items()],
            "spans": [[*series, span] for series, span in self.spans.items()],
        }

    @classmethod
    def of_json(cls, document: Mapping[str, Any]) -> Self:
        """The tally that :meth:`as_json` has written. Metrics of a later release are left out."""
        counts = {
            tuple(series): int(count)
            for *series, count in document.get("counts", ())
            if _is_known(series, spans=False)
        }
        spans = {
            tuple(series): [int(each) for each in span]
            for *series, span in document.get("spans", ())
            if _is_known(series, spans=True) and len(span) == len(METRICS[series[0]].buckets) + 2
        }
        return cls(counts, spans)


@dataclass(frozen=True, slots=True)
class Written:
    """The counts that one process has written.

    Outcomes are numbered. The counts include the outcomes up to the number ``last``, except those
    in ``missing``.
    """

    tally: Tally
    last: int = 0
    missing: tuple[int, ...] = ()

    def dump(self) -> str:
        """The counts as JSON."""
        more = {"last": self.last, "missing": list(self.missing)}
        return json.dumps(self.tally.as_json() | more, separators=(",", ":"))

    @classmethod
    def load(cls, text: str) -> Self:
        """The counts that :meth:`dump` has written."""
        document = json.loads(text)
        last, missing = document.get("last", 0), document.get("missing", ())
        return cls(Tally.of_json(document), last, tuple(missing))

    def has(self, number: int) -> bool:
        """Whether the counts include the outcome with that *number*."""
        return number <= self.last and number not in self.missing


@dataclass(frozen=True, slots=True)
class Total:
    """The counts of processes that have ended. ``folded``: the ids of included processes whose own
    rows still exist.
    """

    tally: Tally = field(default_factory=Tally)
    folded: frozenset[str] = frozenset()

    def dump(self) -> str:
        """The counts as JSON."""
        more = {"folded": sorted(self.folded)}
        return json.dumps(self.tally.as_json() | more, separators=(",", ":"))

    @classmethod
    def load(cls, text: str) -> Self:
        """The total that :meth:`dump` has written."""
        document = json.loads(text)
        return cls(Tally.of_json(document), frozenset(document.get("folded", ())))


def summed(tallies: Iterable[Tally]) -> Tally:
    """The sum of *tallies*."""
    total = Tally()
    for tally in tallies:
        total.merge(tally)
    return total


def _is_known(series: list[str], *, spans: bool) -> bool:
    metric = METRICS.get(series[0]) if series else None
    return (
        metric is not None
        and bool(metric.buckets) is spans
        and len(series) == len(metric.labels) + 1
    )
