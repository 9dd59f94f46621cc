"""Calls made in a greenlet's thread from another thread, under gevent and eventlet."""

from __future__ import annotations

import os
import posix
import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

from celery_leases.concurrency import os_threads

Call = Callable[[], None]


def current() -> Any:
    """The greenlet that is running."""
    return sys.modules["greenlet"].getcurrent()


def exit_type() -> type[BaseException]:
    """The exception that kills a greenlet: ``GreenletExit``."""
    raised: type[BaseException] = sys.modules["greenlet"].GreenletExit
    return raised


def kills_greenlet(error: BaseException) -> bool:
    """Whether *error* is the exception that kills a greenlet."""
    return "greenlet" in sys.modules and isinstance(error, exit_type())


def in_spawned_greenlet() -> bool:
    """Whether the running greenlet was spawned: it is neither the hub nor the main greenlet of its
    thread.
    """
    here = current()
    return here.parent is not None and here.parent.parent is not None


def hub_scheduler() -> Callable[[Call], None]:
    """Return a function that lets the hub of this thread make a call as soon as possible.

    The function can be called in any thread, also while the hub sleeps, and does not block. While
    the hub makes the call, no greenlet of its thread runs, so the call may throw into a greenlet
    that waits, as the timeouts of both libraries do.
    """
    if os_threads.is_gevent():
        caller: Callable[[Call], None] = (
            sys.modules["gevent"].get_hub().loop.run_callback_threadsafe
        )
        return caller
    hub = sys.modules["eventlet.hubs"].get_hub()
    pipe = _hub_pipes.get(hub)
    if pipe is None:
        pipe = _hub_pipes[hub] = _HubPipe(hub)
    return pipe.send


def spawn(call: Call) -> None:
    """Make *call* in a new greenlet, which begins when the running greenlet waits."""
    if os_threads.is_gevent():
        sys.modules["gevent"].spawn(call)
    else:
        sys.modules["eventlet"].spawn_n(call)


def start(call: Call) -> None:
    """Make *call* beside the caller: in a new greenlet where tasks run in greenlets, otherwise in a
    system thread.
    """
    (spawn if os_threads.uses_greenlets() else os_threads.start_thread)(call)


class _HubPipe:
    """Calls for a hub of eventlet, which only a file descriptor can wake.

    Eventlet replaces the functions of ``os`` by ones that switch greenlets in the calling thread;
    ``posix`` still has those of the system.
    """

    def __init__(self, hub: Any) -> None:
        self._schedule = hub.schedule_call_global
        self._calls: deque[Call] = deque()
        self._reader, self._writer = posix.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(self._writer, False)
        hub.add(hub.READ, self._reader, self._read, lambda *_: None, lambda: None)

    def send(self, call: Call) -> None:
        self._calls.append(call)
        with suppress(BlockingIOError):  # a full pipe wakes the hub too
            posix.write(self._writer, b".")

    def _read(self, _: int) -> None:
        """Let the hub's timers make the calls.

        If a call threw into a greenlet from here, the hub might wake that greenlet a second time,
        because of a descriptor it has polled in the same round.
        """
        with suppress(BlockingIOError):
            posix.read(self._reader, 4096)
        while self._calls:
            self._schedule(0, self._calls.popleft())


_hub_pipes: WeakKeyDictionary[Any, _HubPipe] = WeakKeyDictionary()
