"""Reads what the processes of this host have counted."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress

from celery_leases.worker.processes import METRICS_DIRECTORY


def counted(name: str) -> Iterator[tuple[Mapping[str, str], float]]:
    """The labels and the value of each sample called *name*; each bucket of a histogram is counted
    alone.

    There are none if :data:`METRICS_DIRECTORY` is not set, or the extra ``[metrics]`` is not
    installed.
    """
    if directory := os.environ.get(METRICS_DIRECTORY):
        with suppress(ImportError):
            from celery_leases.ops.metrics import read_counts

            for family in read_counts(directory, accumulate=False):
                for sample in family.samples:
                    if sample.name == name:
                        yield sample.labels, sample.value
