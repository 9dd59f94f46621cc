"""Interrupts a body in a greenlet through its hub, and defers Celery's kills in the steps around
the body.

A cold shutdown kills the greenlets of the pool, and Celery acknowledges the messages of killed
greenlets. Here a kill ends only the body: a kill before or after the body, or in a step of the
protocol, is stored. So the delivery, and Celery's work around it, finish normally.
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
from celery_leases.options import OnLost
from celery_leases.worker.pools.interrupt_guard import RaisingGuard

Handler = Callable[[int, FrameType | None], Any]


class BodyKill:
    """A request to kill the body of one delivery. It can be made before the body begins."""

    def __init__(self) -> None:
        self.requested = False
        self.pending = False
        self.greenlet: Any = None

    def request(self) -> None:
        """Kill the body as soon as the hub runs; if the body has not begun, when it begins."""
        self.requested = self.pending = True
        if self.greenlet is not None:
            greenlets.hub_scheduler()(partial(_throw_into, self.greenlet))


class GreenletGuard(RaisingGuard):
    """For one delivery in a greenlet of gevent or eventlet. Exceptions are thrown into the greenlet
    while it waits.
    """

    def __init__(self, kill: BodyKill) -> None:
        super().__init__()
        self._greenlet = greenlets.current()
        self._outer: GreenletGuard | None = None
        self._step = ExitStack()
        self.kill = kill

    @property
    def stopping(self) -> bool:  # type: ignore[override]
        """Whether the body must be killed."""
        return self.kill.requested

    def __enter__(self) -> None:
        """The delivery begins. An eager call inside the body of another delivery is one step of
        that body.
        """
        self._outer = _guards.get(self._greenlet)
        _guards[self._greenlet] = self
        self.kill.greenlet = self._greenlet
        if self._outer is not None:
            self._step.enter_context(self._outer.interrupts_deferred())

    def __exit__(self, *_: object) -> None:
        """The delivery has ended."""
        try:
            self._step.close()
        finally:
            if self._outer is None:
                del _guards[self._greenlet]
                self.kill.greenlet = None
            else:
                _guards[self._greenlet] = self._outer

    def body_begins(self, held_lease: HeldLease, on_lost: OnLost) -> None:
        """Allow interrupts from now on. Raises if the lease is already lost, or the body must be
        killed.
        """
        if on_lost != "flag":
            self._held_lease = held_lease
            held_lease.interrupt = partial(greenlets.hub_scheduler(), self.throw)
        held_lease.check()
        self._raises = True
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
        if self._raises and self.kill.pending:
            self.kill.pending = False
            raise greenlets.exit_type()
        super()._raise_pending()


def greenlet_guard(token: str | None) -> GreenletGuard:
    """The interrupt guard for a delivery with that owner *token*, or for an eager call, in this
    greenlet.
    """
    outer = _guards.get(greenlets.current())
    if outer is not None:
        return GreenletGuard(outer.kill)
    return GreenletGuard(_kills.get(token or "") or BodyKill())


def body_kill_of(token: str) -> BodyKill:
    """The request to kill the body of the delivery with that owner *token*, in this process."""
    return _kills.setdefault(token, BodyKill())


def _throw_into(greenlet: Any) -> None:
    interrupt_guard = _guards.get(greenlet)
    if interrupt_guard is not None:
        interrupt_guard.throw()


def run_signal_handlers_outside_pool() -> None:
    """Replace Celery's signal handlers, so that they do not run in a greenlet of the pool.

    The handler of a cold shutdown waits for all greenlets of the pool. In one of them it would wait
    for itself.
    """
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT):
        handler = signal.getsignal(signum)
        if callable(handler) and getattr(handler, "__module__", "") == "celery.apps.worker":
            signal.signal(signum, partial(_on_signal, handler))


def _on_signal(handler: Handler, signum: int, frame: FrameType | None) -> None:
    if greenlets.in_spawned_greenlet():
        greenlets.spawn(partial(_handle, handler, signum, frame))
    else:
        _handle(handler, signum, frame)


def _handle(handler: Handler, signum: int, frame: FrameType | None) -> None:
    """Call Celery's handler, which may wait. It installs other handlers, which are replaced too."""
    try:
        handler(signum, frame)
    finally:
        run_signal_handlers_outside_pool()


_guards: dict[Any, GreenletGuard] = {}
_kills: WeakValueDictionary[str, BodyKill] = WeakValueDictionary()
