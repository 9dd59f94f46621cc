"""Real operating-system threads and locks, also where gevent or eventlet have replaced the ones in
``threading``.

A greenlet stalls with its hub: a body that blocks would lose its lease although its process is
alive.
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
    """Whether this process runs its tasks in greenlets (gevent or eventlet have patched
    ``threading``).
    """
    return by_gevent() or _eventlet()


def by_gevent() -> bool:
    """Whether it is gevent that has patched ``threading``."""
    monkey = sys.modules.get("gevent.monkey")
    return monkey is not None and bool(monkey.is_module_patched("threading"))


def allocate_lock() -> Lock:
    """A lock of the operating system."""
    lock: Lock = _original("allocate_lock")()
    return lock


def look_at(descriptor: int) -> Callable[[int], Sequence[object]]:
    """A function that says whether *descriptor* can be read, and waits for that so many
    milliseconds at most.

    It switches to no other greenlet. A connection that the other side has closed can be read.
    """
    poll = _original("poll", "select")()
    poll.register(descriptor, select.POLLIN)
    look: Callable[[int], Sequence[object]] = poll.poll
    return look


def start_thread(work: Callable[[], None]) -> None:
    """Run *work* in a daemon thread of the operating system."""
    _original("start_new_thread")(work, ())


class Wakeup:
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


BOOT_CLOCK: Final[int | None] = getattr(time, "CLOCK_BOOTTIME", None)
"""The clock of :func:`boot_clock`, as the system numbers it; ``None`` where it has none."""

boot_clock: Final[Callable[[], float]] = (
    time.monotonic if BOOT_CLOCK is None else partial(time.clock_gettime, BOOT_CLOCK)
)
"""Seconds on a clock that never steps and, where the system has one, runs on while the machine
sleeps.
"""


def _eventlet() -> bool:
    patcher = sys.modules.get("eventlet.patcher")
    return patcher is not None and bool(patcher.is_monkey_patched("thread"))


def _original(name: str, module: str = "_thread") -> Any:
    if by_gevent():
        return sys.modules["gevent.monkey"].get_original(module, name)
    if _eventlet():
        original = sys.modules["eventlet.patcher"].original
        return (
            getattr(original("threading"), f"_{name}")
            if module == "_thread"
            else getattr(original(module), name)
        )
    return getattr(importlib.import_module(module), name)
