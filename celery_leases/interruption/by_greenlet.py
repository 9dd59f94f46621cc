"""Reaching into a body in a greenlet through its hub, and keeping Celery's kills away from everything around it.

A cold shutdown kills the greenlets of the pool, and Celery acknowledges the messages of those it has killed. Here a
kill only ends the body: before and after it, and in each step of the protocol, it is remembered. So the delivery comes
to its own end, and so does what Celery does around it.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from types import FrameType
from typing import Any
from weakref import WeakValueDictionary

from celery_leases.core.errors import LeaseLost
from celery_leases.core.options import OnLost
from celery_leases.interruption.shields import RaisingShield
from celery_leases.process import greenlets
from celery_leases.tenure import Tenure

Handler = Callable[[int, FrameType | None], Any]


class Kill:
    """Whether the body of one delivery is to be killed. It counts for as long as somebody keeps it."""

    def __init__(self) -> None:
        self.asked = False
        self.pending = False
        self.greenlet: Any = None

    def ask(self) -> None:
        """Kill the body, if it runs when the hub comes to that, or is yet to begin."""
        self.asked = self.pending = True
        if self.greenlet is not None:
            greenlets.hub_caller()(partial(_throw_into, self.greenlet))


class GreenShield(RaisingShield):
    """For one delivery in a greenlet of gevent or eventlet, which is thrown into while it waits."""

    def __init__(self, kill: Kill) -> None:
        super().__init__()
        self._greenlet = greenlets.current()
        self._outer: GreenShield | None = None
        self._step = ExitStack()
        self.kill = kill

    @property
    def hurried(self) -> bool:  # type: ignore[override]
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

    def open(self, tenure: Tenure, on_lost: OnLost) -> None:
        """The body begins; raises when the lease is lost already, or the body to be killed."""
        if on_lost != "flag":
            self._tenure = tenure
            tenure.interrupt = partial(greenlets.hub_caller(), self.throw)
        tenure.check()
        self._open = True
        self._raise_pending()

    def throw(self) -> None:
        """Throw what is pending into the body; called by the hub."""
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


def green_shield(token: str | None) -> GreenShield:
    """The shield for a delivery with that owner *token*, or for an eager call, in this greenlet."""
    outer = _around.get(greenlets.current())
    if outer is not None:
        return GreenShield(outer.kill)
    return GreenShield(_kills.get(token or "") or Kill())


def kill_of(token: str) -> Kill:
    """What kills the body of the delivery with that owner *token*, in this process."""
    return _kills.setdefault(token, Kill())


def _throw_into(greenlet: Any) -> None:
    shield = _around.get(greenlet)
    if shield is not None:
        shield.throw()


def keep_signals_out() -> None:
    """Have Celery's signal handlers run in no greenlet of the pool.

    That of a cold shutdown waits for all of them, and so would never come back to the one it has interrupted.
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
    """Call Celery's handler, which may wait and puts others in its place first."""
    try:
        handler(signum, frame)
    finally:
        keep_signals_out()


_around: dict[Any, GreenShield] = {}
_kills: WeakValueDictionary[str, Kill] = WeakValueDictionary()
