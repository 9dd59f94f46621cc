"""Values that take long to read: read by one thread, shared by all who look, and kept for a
while.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, Generic, TypeVar

T = TypeVar("T")
REST: Final = 10
"""A value is kept for so many times as long as it took to read: the board asks for a tenth of the
time at most, however many look.
"""

AFTER_ERROR: Final = 2.0
"""Seconds after which a reading that has failed is tried again, however long it took."""


@dataclass(frozen=True, slots=True)
class Read(Generic[T]):
    """What was read: the *value*, or the *error* of the try; when it was *at*, and what it *took*
    in seconds.
    """

    value: T | None
    error: Exception | None
    at: datetime
    took: float


class Shared(Generic[T]):
    """One value. A request reads it again if it is older than *fresh_for* seconds.

    A value that takes long to read is kept longer. Each request says how long it waits.
    """

    def __init__(self, read: Callable[[], T], fresh_for: float) -> None:
        self._read, self._fresh_for = read, fresh_for
        self._lock = threading.Lock()
        self._reading: threading.Event | None = None
        self._last: Read[T] | None = None
        self._ended = 0.0

    def look(self, wait: float) -> Read[T] | None:
        """The last value; waits at most *wait* seconds for the first one, and for a newer one than
        an old one. ``None``: it is still being read.
        """
        with self._lock:
            last, reading = self._last, self._reading
            if last is not None and time.monotonic() - self._ended < self._kept_for(last):
                return last
            if reading is None:
                reading = self._reading = threading.Event()
                threading.Thread(
                    target=self._refresh, args=(reading,), name="celery_leases_board", daemon=True
                ).start()
        reading.wait(wait)
        return self._last

    def forget(self) -> None:
        """Read it anew at the next look: something was changed."""
        with self._lock:
            self._ended = 0.0 if self._last is None else self._ended - REST * 3600.0

    def _kept_for(self, last: Read[T]) -> float:
        if last.error is not None:
            return AFTER_ERROR
        return max(self._fresh_for, REST * last.took)

    def _refresh(self, reading: threading.Event) -> None:
        began = time.monotonic()
        value: T | None = None
        error: Exception | None = None
        try:
            value = self._read()
        except Exception as raised:  # noqa: BLE001 - raised for the request that asks
            error = raised
        took = time.monotonic() - began
        with self._lock:
            self._last = Read(value, error, datetime.now(UTC), took)
            self._ended, self._reading = time.monotonic(), None
        reading.set()


def value_of(read: Read[Any]) -> Any:
    """The value that was read; raises the error of the try."""
    if read.error is not None:
        raise read.error
    return read.value
