"""A pool of resources, such as connections, for the threads or greenlets of a process."""

from __future__ import annotations

import mmap
import os
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar
from typing import Any, Final, Generic, TypeVar
from weakref import WeakSet

from celery_leases.concurrency import wait_limit
from celery_leases.errors import StoreUnavailable

T = TypeVar("T")
R = TypeVar("R")

max_wait: Final[ContextVar[Callable[[], float] | None]] = ContextVar(
    "celery_leases_max_wait", default=None
)
"""Returns for how many seconds this thread or greenlet may wait for a resource; ``None``: as long
as the pool allows.
"""


class Permit:
    """A resource without content: the right to do what a limited number of callers may do at
    once.
    """


class _Waiter(Generic[T]):
    """A caller that waits for a resource; the lock *wakeup* is released once it has one."""

    def __init__(self) -> None:
        self.wakeup = threading.Lock()
        self.wakeup.acquire()
        self.resource: T | None = None


class ResourcePool(Generic[T]):
    """A pool of at most *size* resources, each used by one caller at a time.

    *make* makes a resource when one is needed; it must be quick and must not raise. If all
    resources are in use, a caller waits, at most *longest* seconds. Callers get resources in the
    order in which they began to wait. *name* is that of the server, for errors. The locks are those
    of ``threading``, so they work for greenlets where ``threading`` is patched.

    A resource that no reference holds any more, for example because an interrupt came between its
    acquisition and its release, is replaced.
    """

    def __init__(self, size: int, make: Callable[[], T], longest: float, name: str = "") -> None:
        self.size = size
        self.name = name
        self.longest = longest
        self._make = make
        self._discard: Callable[[T], object] | None = None
        self._begin()
        _pools.add(self)

    def _begin(self) -> None:
        # Reentrant, because the garbage collector may release a resource at any point.
        self._lock = threading.RLock()
        self._made: WeakSet[Any] = WeakSet()
        self._idle: deque[T] = deque()
        # In order of arrival.
        self._waiting: deque[_Waiter[T]] = deque()

    def use(self, work: Callable[..., R], *args: Any) -> R:
        """What *work* returns, called with *args* after a resource that no other caller uses
        meanwhile; raises :class:`StoreUnavailable` if all were in use for as long as the caller may
        wait.
        """
        if not _not_forked[0]:
            _reset_after_fork()
        try:
            resource = self._idle.pop()
        except IndexError:
            resource = self._new_or_next()
        try:
            return work(resource, *args)
        finally:
            if self._waiting or self._discard is not None:
                self.release(resource)
            else:
                self._idle.append(resource)
                if self._waiting:  # a caller has begun to wait meanwhile
                    self._serve()

    def acquire(self) -> T:
        """Return a resource until :meth:`release`, as :meth:`use` does for one call."""
        if not _not_forked[0]:
            _reset_after_fork()
        return self._new_or_next()

    def release(self, resource: T) -> None:
        """Return *resource* to the pool."""
        if self._discard is not None:
            self._discard(resource)
        if self._waiting and self._hand_over(resource):
            return
        self._idle.append(resource)
        if self._waiting:  # a caller has begun to wait meanwhile
            self._serve()

    def all(self) -> list[T]:
        """All resources, in use or idle."""
        with self._lock:
            return list(self._made)

    def discard(self, close: Callable[[T], object]) -> None:
        """Close all resources by *close*: those in use when they are released."""
        self._discard = close
        with suppress(IndexError):
            while True:
                close(self._idle.pop())

    def _new_or_next(self) -> T:
        """An idle resource, a new one, or the next that is released."""
        with self._lock:
            resource = self._idle_or_new()
        return resource if resource is not None else self._wait()

    def _idle_or_new(self) -> T | None:
        """An idle resource, or a new one if the pool is not full; called under the lock."""
        with suppress(IndexError):
            return self._idle.pop()
        if len(self._made) >= self.size:
            return None
        made = self._make()
        self._made.add(made)
        return made

    def _serve(self) -> None:
        with self._lock:
            while self._waiting and (resource := self._idle_or_new()) is not None:
                self._hand_over(resource)

    def _hand_over(self, resource: T) -> bool:
        """Give *resource* to the caller that has waited longest; ``False`` if no caller waits."""
        with self._lock:
            if not self._waiting:
                return False
            waiter = self._waiting.popleft()
            waiter.resource = resource
            waiter.wakeup.release()
            return True

    def _wait(self) -> T:
        limit = max_wait.get()
        seconds = wait_limit.bounded(self.longest if limit is None else limit())
        waiter: _Waiter[T] = _Waiter()
        # Appended before looking for idle resources, so that one that is released after the look
        # is given to this waiter.
        self._waiting.append(waiter)
        try:
            self._serve()
            waiter.wakeup.acquire(timeout=max(0.0, seconds))
        except BaseException:
            if (resource := self._stop_waiting(waiter)) is not None:
                self.release(resource)
            raise
        resource = self._stop_waiting(waiter)
        if resource is None:
            raise StoreUnavailable(
                f"{self.name}: connections of this process: all {self.size} were in use for "
                f"{seconds:.3g} s; see leases_pool_size",
                False,
            )
        return resource

    def _stop_waiting(self, waiter: _Waiter[T]) -> T | None:
        """Remove *waiter* from those that wait; return the resource it has got."""
        with self._lock, suppress(ValueError):
            self._waiting.remove(waiter)
        return waiter.resource


_pools: WeakSet[ResourcePool[Any]] = WeakSet()
_not_forked: Any = bytearray(1)
"""One byte, which is 0 in a forked process until the pools are reset. On Linux the kernel sets it,
because a fork in C, as of a web server, runs no hooks of Python; reading it needs no call.
"""
with suppress(OSError, AttributeError, ValueError):
    _page = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    _page.madvise(18)  # MADV_WIPEONFORK, since Linux 4.14
    _not_forked = _page
_not_forked[0] = 1


def _reset_after_fork() -> None:
    """Empty all pools in a forked process: the threads that use the resources do not exist there,
    and would never release the locks.
    """
    for resource_pool in list(_pools):
        resource_pool._begin()  # noqa: SLF001 - of this module
    _not_forked[0] = 1


os.register_at_fork(after_in_child=_reset_after_fork)
