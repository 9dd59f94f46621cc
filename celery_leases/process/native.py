"""Real operating-system threads and locks, also where gevent or eventlet have replaced the ones in ``threading``.

A greenlet stalls with its hub: a body that blocks would lose its lease although its process is alive.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol


class Lock(Protocol):
    """What ``_thread.allocate_lock`` gives."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Take it; a negative *timeout* waits for ever."""
        ...

    def release(self) -> None:
        """Let it go."""
        ...

    def __enter__(self) -> bool: ...
    def __exit__(self, *exc_info: object) -> None: ...


def green() -> bool:
    """Whether this process runs its tasks in greenlets (gevent or eventlet have patched ``threading``)."""
    return by_gevent() or _eventlet()


def by_gevent() -> bool:
    """Whether it is gevent that has patched ``threading``."""
    monkey = sys.modules.get("gevent.monkey")
    return monkey is not None and bool(monkey.is_module_patched("threading"))


def allocate_lock() -> Lock:
    """A lock of the operating system."""
    lock: Lock = _original("allocate_lock")()
    return lock


def start_thread(work: Callable[[], None]) -> None:
    """Run *work* in a daemon thread of the operating system."""
    _original("start_new_thread")(work, ())


def boot_clock() -> float:
    """Seconds on a clock that never steps and, where the system has one, runs on while the machine sleeps."""
    return time.clock_gettime(BOOT_CLOCK) if BOOT_CLOCK is not None else time.monotonic()


class Bell:
    """Wakes one waiting thread; rings are remembered, but not counted."""

    def __init__(self) -> None:
        self._silence = allocate_lock()
        self._silence.acquire()

    def ring(self) -> None:
        """Wake the waiter, now or when it comes to wait."""
        with suppress(RuntimeError):  # it rings already
            self._silence.release()

    def wait(self, timeout: float | None) -> None:
        """Wait for a ring, at most *timeout* seconds."""
        self._silence.acquire(timeout=-1 if timeout is None else max(0.0, min(timeout, 3600.0)))


BOOT_CLOCK: int | None = getattr(time, "CLOCK_BOOTTIME", None)
"""The clock of :func:`boot_clock`, as the system numbers it; ``None`` where it has none."""


def _eventlet() -> bool:
    patcher = sys.modules.get("eventlet.patcher")
    return patcher is not None and bool(patcher.is_monkey_patched("thread"))


def _original(name: str) -> Any:
    if by_gevent():
        return sys.modules["gevent.monkey"].get_original("_thread", name)
    if _eventlet():
        return getattr(sys.modules["eventlet.patcher"].original("threading"), f"_{name}")
    import _thread

    return getattr(_thread, name)
