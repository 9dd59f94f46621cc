"""System threads and locks, also where gevent or eventlet have patched ``threading``.

A lease must not be renewed by a greenlet: a body that blocks stops all greenlets of its thread, and
would lose its lease although its process is alive.
"""

from __future__ import annotations

import importlib
import select
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final, Protocol


class Lock(Protocol):
    """The type of ``_thread.allocate_lock()``."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Acquire the lock; a negative *timeout* waits for ever."""
        ...

    def release(self) -> None:
        """Release the lock."""
        ...

    def __enter__(self) -> bool: ...
    def __exit__(self, *exc_info: object) -> None: ...


def uses_greenlets() -> bool:
    """Whether this process runs its tasks in greenlets: gevent or eventlet have patched
    ``threading``.
    """
    return is_gevent() or _eventlet()


def is_gevent() -> bool:
    """Whether gevent has patched ``threading``."""
    monkey = sys.modules.get("gevent.monkey")
    return monkey is not None and bool(monkey.is_module_patched("threading"))


def allocate_lock() -> Lock:
    """A lock of the operating system."""
    lock: Lock = _original("allocate_lock")()
    return lock


def readable_poll(descriptor: int) -> Callable[[int], Sequence[object]]:
    """Return a function that waits at most the given number of milliseconds until *descriptor* can
    be read, and returns a true value if it can.

    It does not switch to another greenlet. A connection that the other side has closed can be read.
    """
    poll = _original("poll", "select")()
    poll.register(descriptor, select.POLLIN)
    look: Callable[[int], Sequence[object]] = poll.poll
    return look


def start_thread(work: Callable[[], None]) -> None:
    """Run *work* in a daemon thread of the system."""
    _original("start_new_thread")(work, ())


class Wakeup:
    """Wakes one waiting thread. A notification before the wait ends that wait at once; several
    count as one.
    """

    def __init__(self) -> None:
        self._lock = allocate_lock()
        self._lock.acquire()

    def notify(self) -> None:
        """Wake the thread that waits, or the next one that waits."""
        with suppress(RuntimeError):  # notified already
            self._lock.release()

    def wait(self, timeout: float | None) -> None:
        """Wait for a notification, at most *timeout* seconds and at most an hour; ``None``: for
        ever.
        """
        self._lock.acquire(timeout=-1 if timeout is None else max(0.0, min(timeout, 3600.0)))


BOOT_CLOCK: Final[int | None] = getattr(time, "CLOCK_BOOTTIME", None)
"""The system's number for the clock of :func:`boot_clock`; ``None`` if the system has no such
clock.
"""

boot_clock: Final[Callable[[], float]] = (
    time.monotonic if BOOT_CLOCK is None else partial(time.clock_gettime, BOOT_CLOCK)
)
"""Seconds on a clock that never steps and that includes the time in which the machine is suspended.
On systems without such a clock, that time is missing.
"""


def _eventlet() -> bool:
    patcher = sys.modules.get("eventlet.patcher")
    return patcher is not None and bool(patcher.is_monkey_patched("thread"))


def _original(name: str, module: str = "_thread") -> Any:
    if is_gevent():
        return sys.modules["gevent.monkey"].get_original(module, name)
    if _eventlet():
        return getattr(sys.modules["eventlet.patcher"].original(module), name)
    return getattr(importlib.import_module(module), name)
