"""What an attempt works with: stores, clocks, randomness, and an observer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from celery_leases.stores.interfaces import (
    Clock,
    GateStore,
    LeaseStore,
    MarkStore,
    Observer,
    RecordStore,
)


def never() -> bool:
    """Whether a process that does not end is shutting down."""
    return False


@dataclass(frozen=True, slots=True)
class Context:
    """One pair of stores with all that decides beside them.

    ``rand`` gives random numbers in [0, 1). ``host`` is ``hostname/pid``. ``wall_time`` gives
    seconds since the epoch, for times that people see. ``stopping``: whether the process is
    shutting down, so that nothing is repeated for long.
    """

    leases: LeaseStore
    records: RecordStore
    marks: MarkStore
    gates: GateStore
    observer: Observer
    clock: Clock
    rand: Callable[[], float]
    host: str
    wall_time: Callable[[], float]
    stopping: Callable[[], bool] = never
