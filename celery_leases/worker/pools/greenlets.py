"""Interrupts a body in a greenlet through its hub, and keeps Celery's kills away from the steps
around it.

A cold shutdown kills the greenlets of the pool, and Celery acknowledges the messages of killed
greenlets. Here a kill only ends the body: a kill before or after it, or in a step of the protocol,
is stored. So the delivery, and Celery's work around it, finish normally.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from types import FrameType
from typing import Any
from weakref import WeakValueDictionary

from celery_leases.attempt.held_lease import HeldLease
from celery_leases.concurrency import greenlets
from celery_leases.errors import LeaseLost
from celery_leases.protocol.options import OnLost
from celery_leases.worker.pools.interrupt_guard import RaisingGuard

Handler = Callable[[int, FrameType | None], Any]


class Kill:
    """Whether the body of one delivery must be killed. It applies as long as the object exists."""

    def __init__(self) -> None:
        self.asked = False
        self.pending = False
        self.greenlet: Any = None

    def ask(self) -> None:
        """Kill the body, if it runs when the hub gets to it, or has not begun."""
        self.asked = self.pending = True
        if self.greenlet is not None:
            greenlets.hub_caller()(partial(_throw_into, self.greenlet))


class GreenletGuard(RaisingGuard):
    """For one delivery in a greenlet of gevent or eventlet; exceptions are thrown into it while it
    waits.
    """

    def __init__(self, kill: Kill) -> None:
        super().__init__()
        self._greenlet = greenlets.current()
        self._outer: GreenletGuard | None = None
        self._step = ExitStack()
        self.kill = kill

    @property
    def stopping(self) -> bool:  # type: ignore[override]
        """Whether the body is to be killed."""
        return self.kill.asked

    def __enter__(self) -> None:
        """A delivery begins; inside the body of another one it is a step of that."""
        self._outer = _around.get(self._greenlet)
        _around[self._greenlet] = self
        self.kill.greenlet = self._greenlet
        if self._outer is not None:
            self._step.enter_context(self._outer.closed())

    def __exit__(self, *_: object) -> None:
        """It has ended."""
        try:
            self._step.close()
        finally:
            if self._outer is None:
                del _around[self._greenlet]
                self.kill.greenlet = None
            else:
                _around[self._greenlet] = self._outer

    def open(self, held_lease: HeldLease, on_lost: OnLost) -> None:
        """The body begins; raises when the lease is lost already, or the body must be killed."""
        if on_lost != "flag":
            self._held_lease = held_lease
            held_lease.interrupt = partial(greenlets.hub_caller(), self.throw)
        held_lease.check()
        self._open = True
        self._raise_pending()

    def throw(self) -> None:
        """Throw the pending exception into the body; called by the hub."""
        error = self._pending()
        if error is not None:
            self._greenlet.throw(error)

    def _pending(self) -> BaseException | None:
        try:
            self._raise_pending()
        except (LeaseLost, greenlets.exit_type()) as error:
            return error
        return None

    def _raise_pending(self) -> None:
        if self._open and self.kill.pending:
            self.kill.pending = False
            raise greenlets.exit_type()
        super()._raise_pending()


def greenlet_guard(token: str | None) -> GreenletGuard:
    """The interrupt guard for a delivery with that owner *token*, or for an eager call, in this
    greenlet.
    """
    outer = _around.get(greenlets.current())
    if outer is not None:
        return GreenletGuard(outer.kill)
    return GreenletGuard(_kills.get(token or "") or Kill())


def kill_of(token: str) -> Kill:
    """The object that kills the body of the delivery with that owner *token*, in this process."""
    return _kills.setdefault(token, Kill())


def _throw_into(greenlet: Any) -> None:
    interrupt_guard = _around.get(greenlet)
    if interrupt_guard is not None:
        interrupt_guard.throw()


def keep_signals_out() -> None:
    """Let Celery's signal handlers run in no greenlet of the pool.

    The handler of a cold shutdown waits for all of them, and so would never return to the one it
    has interrupted.
    """
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT):
        handler = signal.getsignal(signum)
        if callable(handler) and getattr(handler, "__module__", "") == "celery.apps.worker":
            signal.signal(signum, partial(_on_signal, handler))


def _on_signal(handler: Handler, signum: int, frame: FrameType | None) -> None:
    if greenlets.of_a_pool():
        greenlets.spawn(partial(_handle, handler, signum, frame))
    else:
        _handle(handler, signum, frame)


def _handle(handler: Handler, signum: int, frame: FrameType | None) -> None:
    """Call Celery's handler, which may wait, and first installs other handlers."""
    try:
        handler(signum, frame)
    finally:
        keep_signals_out()


_around: dict[Any, GreenletGuard] = {}
_kills: WeakValueDictionary[str, Kill] = WeakValueDictionary()
