"""Medians, their spread, and ratios within rounds."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Figure:
    """The median and the quartiles of *size* samples."""

    median: float
    low: float
    high: float
    size: int

    def shown(self, digits: int = 2) -> str:
        """The median with *digits* decimals, and the quartiles if the samples differ."""
        median = f"{self.median:,.{digits}f}"
        if self.low == self.high:
            return median
        return f"{median} ({self.low:,.{digits}f} to {self.high:,.{digits}f})"


def figure(samples: Iterable[float]) -> Figure:
    """The figure of *samples*, which must not be empty."""
    values = sorted(samples)
    if len(values) == 1:
        return Figure(values[0], values[0], values[0], 1)
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Figure(median, low, high, len(values))


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Figure:
    """The ratio of two contenders in each round; both have one sample for each."""
    return figure(mine / other for mine, other in zip(ours, theirs, strict=True))


def quantile(samples: Iterable[float], share: float) -> float:
    """The sample below which *share* of all samples are."""
    values = sorted(samples)
    return values[min(len(values) - 1, int(len(values) * share))]
