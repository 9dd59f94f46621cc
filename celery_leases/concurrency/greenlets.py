"""Reaching the greenlets of one thread from another, under gevent and eventlet."""

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
    """What is raised in a greenlet to kill it: ``GreenletExit``."""
    raised: type[BaseException] = sys.modules["greenlet"].GreenletExit
    return raised


def of_a_pool() -> bool:
    """Whether the greenlet that is running was spawned: it is neither the hub nor the thread's
    own.
    """
    here = current()
    return here.parent is not None and here.parent.parent is not None


def hub_caller() -> Callable[[Call], None]:
    """What has the hub of this thread make a call as soon as it comes to that.

    It may be used in any thread, also while the hub sleeps, and does not block. While the hub makes
    the call, every greenlet of its thread stands still, so one that waits may be thrown into, as
    the timeouts of both libraries do.
    """
    if os_threads.by_gevent():
        caller: Callable[[Call], None] = (
            sys.modules["gevent"].get_hub().loop.run_callback_threadsafe
        )
        return caller
    hub = sys.modules["eventlet.hubs"].get_hub()
    box = _letterboxes.get(hub)
    if box is None:
        box = _letterboxes[hub] = _Letterbox(hub)
    return box.post


def spawn(call: Call) -> None:
    """Make *call* in a greenlet of its own; not before the one that runs now waits."""
    if os_threads.by_gevent():
        sys.modules["gevent"].spawn(call)
    else:
        sys.modules["eventlet"].spawn_n(call)


class _Letterbox:
    """Calls for a hub of eventlet, which is woken by nothing but a file descriptor.

    ``os`` has green functions there, which would wait in the thread that calls; ``posix`` has the
    system's.
    """

    def __init__(self, hub: Any) -> None:
        self._schedule = hub.schedule_call_global
        self._calls: deque[Call] = deque()
        self._reader, self._writer = posix.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(self._writer, False)
        hub.add(hub.READ, self._reader, self._read, lambda *_: None, lambda: None)

    def post(self, call: Call) -> None:
        self._calls.append(call)
        with suppress(BlockingIOError):  # then it is full, and wakes the hub all the same
            posix.write(self._writer, b".")

    def _read(self, _: int) -> None:
        """Leave the calls to the hub's timers.

        A greenlet thrown into from here might be woken a second time, by what the hub has seen in
        the same look.
        """
        with suppress(BlockingIOError):
            posix.read(self._reader, 4096)
        while self._calls:
            self._schedule(0, self._calls.popleft())


_letterboxes: WeakKeyDictionary[Any, _Letterbox] = WeakKeyDictionary()
