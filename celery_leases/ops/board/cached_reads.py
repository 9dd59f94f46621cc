"""A cache for values that take long to read: one thread reads, all requests share the value."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, Generic, TypeVar

T = TypeVar("T")
FRESHNESS_FACTOR: Final = 10
"""A value is fresh for ten times as long as it took to read. So reading takes at most a tenth of
the time, however many users look at the board.
"""

FRESH_AFTER_ERROR: Final = 2.0
"""Seconds until a failed read is repeated, however long it took."""


@dataclass(frozen=True, slots=True)
class ReadResult(Generic[T]):
    """The *value* or the *error* of a read, when it ended (*at*), and the seconds it *took*."""

    value: T | None
    error: Exception | None
    at: datetime
    took: float


class CachedRead(Generic[T]):
    """One cached value, which is read again once it is older than *fresh_for* seconds.

    A value that takes long to read stays fresh for longer.
    """

    def __init__(self, read: Callable[[], T], fresh_for: float) -> None:
        self._read, self._fresh_for = read, fresh_for
        self._lock = threading.Lock()
        self._reading: threading.Event | None = None
        self._last: ReadResult[T] | None = None
        self._ended = 0.0

    def get(self, wait: float) -> ReadResult[T] | None:
        """The last value; if it is not fresh, waits up to *wait* seconds for a newer one.

        ``None``: the first read has not ended yet.
        """
        with self._lock:
            last, reading = self._last, self._reading
            if last is not None and time.monotonic() - self._ended < self._fresh_for_seconds(last):
                return last
            if reading is None:
                reading = self._reading = threading.Event()
                threading.Thread(
                    target=self._refresh, args=(reading,), name="celery_leases_board", daemon=True
                ).start()
        reading.wait(wait)
        return self._last

    def invalidate(self) -> None:
        """Let the next request read the value again."""
        with self._lock:
            self._ended = 0.0 if self._last is None else self._ended - FRESHNESS_FACTOR * 3600.0

    def _fresh_for_seconds(self, last: ReadResult[T]) -> float:
        if last.error is not None:
            return FRESH_AFTER_ERROR
        return max(self._fresh_for, FRESHNESS_FACTOR * last.took)

    def _refresh(self, reading: threading.Event) -> None:
        started = time.monotonic()
        value: T | None = None
        error: Exception | None = None
        try:
            value = self._read()
        except Exception as raised:  # noqa: BLE001 - raised again by value_of
            error = raised
        took = time.monotonic() - started
        with self._lock:
            self._last = ReadResult(value, error, datetime.now(UTC), took)
            self._ended, self._reading = time.monotonic(), None
        reading.set()


def value_of(read: ReadResult[Any]) -> Any:
    """The value that was read; raises the error of a failed read."""
    if read.error is not None:
        raise read.error
    return read.value
