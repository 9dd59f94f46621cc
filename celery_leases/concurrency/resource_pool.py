"""A few things that the threads or greenlets of a process use in turn, such as connections."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar
from typing import Any, Final, Generic, TypeVar
from weakref import WeakSet

T = TypeVar("T")

patience: Final[ContextVar[Callable[[], float] | None]] = ContextVar(
    "celery_leases_patience", default=None
)
"""For how many seconds this thread or greenlet waits at most for a thing; ``None``: for as long as
the pool says.
"""


class Turn:
    """The right to do what only so many may do at once."""


class PoolExhausted(Exception):
    """All things were in use for as long as the caller could wait."""


class _Waiter(Generic[T]):
    """A caller that waits for a thing; *wakeup* is released when the thing is there."""

    def __init__(self) -> None:
        self.wakeup = threading.Lock()
        self.wakeup.acquire()
        self.thing: T | None = None


class ResourcePool(Generic[T]):
    """At most *size* things, made by *make* when they are needed, each lent to one caller at a
    time.

    *make* is to be quick and must not raise. Where all are lent, a caller waits, at most *longest*
    seconds, and who has waited longest is the first to get one. The locks are those of
    ``threading``: for greenlets, where it is patched.

    A thing that is lost with the frame that had it, as an exception came at the wrong moment, is
    replaced.
    """

    def __init__(self, size: int, make: Callable[[], T], longest: float) -> None:
        self.size = size
        self.longest = longest
        self._make = make
        self._begin()
        _pools.add(self)

    def _begin(self) -> None:
        # Reentrant, as the garbage collector may give a thing back wherever the collector
        # happens to run.
        self._lock = threading.RLock()
        self._made: WeakSet[Any] = WeakSet()
        self._idle: deque[T] = deque()
        self._waiting: deque[_Waiter[T]] = deque()

    def lend(self) -> T:
        """A thing of one's own until :meth:`take_back`; raises :class:`PoolExhausted`."""
        try:
            return self._idle.pop()
        except IndexError:
            with self._lock:
                thing = self._at_hand()
            return thing if thing is not None else self._awaited()

    def take_back(self, thing: T) -> None:
        """*thing* may be lent to others."""
        if self._waiting and self._handed(thing):
            return
        self._idle.append(thing)
        if self._waiting:  # since then
            self._serve()

    def all(self) -> list[T]:
        """What has been made, lent or not."""
        with self._lock:
            return list(self._made)

    def drain(self) -> list[T]:
        """Take all idle things out of the pool; they are not lent again."""
        drained: list[T] = []
        with suppress(IndexError):
            while True:
                drained.append(self._idle.pop())
        return drained

    def _at_hand(self) -> T | None:
        """A thing that is idle, or a new one if there may be one more; under the lock."""
        with suppress(IndexError):
            return self._idle.pop()
        if len(self._made) >= self.size:
            return None
        made = self._make()
        self._made.add(made)
        return made

    def _serve(self) -> None:
        with self._lock:
            while self._waiting and (thing := self._at_hand()) is not None:
                self._handed(thing)

    def _handed(self, thing: T) -> bool:
        """Give *thing* to the caller that has waited longest, ahead of any newcomer; ``False``
        if no caller waits.
        """
        with self._lock:
            if not self._waiting:
                return False
            waiter = self._waiting.popleft()
            waiter.thing = thing
            waiter.wakeup.release()
            return True

    def _awaited(self) -> T:
        own = patience.get()
        seconds = self.longest if own is None else own()
        waiter: _Waiter[T] = _Waiter()
        # Before the look at what is idle: what is given back after that look finds the waiter.
        self._waiting.append(waiter)
        try:
            self._serve()
            waiter.wakeup.acquire(timeout=max(0.0, seconds))
        except BaseException:
            if (thing := self._withdrawn(waiter)) is not None:
                self.take_back(thing)
            raise
        thing = self._withdrawn(waiter)
        if thing is None:
            raise PoolExhausted(f"all {self.size} were in use for {seconds:.3g} s")
        return thing

    def _withdrawn(self, waiter: _Waiter[T]) -> T | None:
        """What *waiter* has got, who waits no more."""
        with self._lock, suppress(ValueError):
            self._waiting.remove(waiter)
        return waiter.thing


_pools: WeakSet[ResourcePool[Any]] = WeakSet()


def _forget() -> None:
    """In a forked process: what was lent is with threads that are not here, and locks may be held
    for ever.
    """
    for resource_pool in list(_pools):
        resource_pool._begin()  # noqa: SLF001 - of this module


os.register_at_fork(after_in_child=_forget)
