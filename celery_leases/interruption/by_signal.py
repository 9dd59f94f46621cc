"""Reaching into a running body, and keeping signals away from everything around it.

Celery's pool children raise exceptions out of signal handlers: the soft time limit, and the ``SystemExit`` of SIGTERM.
Raised between two steps of the protocol they would leave a lease or a record half-written. Here the handlers run only
while a body is open; before and after it the signal is remembered. A lost lease reaches the body the same way, by a
real-time signal to the main thread whose handler raises only while *that* body is open.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from types import FrameType
from typing import Any

from celery_leases.core.errors import LeaseLost
from celery_leases.core.options import OnLost
from celery_leases.core.texts import printable
from celery_leases.interruption.by_greenlet import green_shield
from celery_leases.interruption.shields import LimitedTooEarly, RaisingShield, Shield
from celery_leases.process import native
from celery_leases.process.deadman import DeadMan
from celery_leases.tenure import Tenure

Handler = Callable[[int, FrameType | None], Any]


class SignalShield(RaisingShield):
    """For tasks that run in the main thread: prefork's children, and solo."""

    def __init__(self) -> None:
        super().__init__()
        self.main = threading.main_thread().ident or 0
        #: Whether a delivery is being taken.
        self.busy = False
        self._dead_man: DeadMan | None = None
        self._pending: list[int] = []
        self._handlers: dict[int, Handler] = {}
        self._loss_signal = _free_signal()
        if self._loss_signal:
            signal.signal(self._loss_signal, self._on_loss)
        for name in ("SIGTERM", "SIGUSR1"):
            self._wrap(getattr(signal, name))

    @property
    def hurried(self) -> bool:  # type: ignore[override]
        """Whether SIGTERM has come."""
        return signal.SIGTERM in self._pending

    @property
    def limited(self) -> bool:  # type: ignore[override]
        """Whether the soft time limit has fired outside the body."""
        return signal.SIGUSR1 in self._pending

    def __enter__(self) -> None:
        """A delivery begins."""
        self.busy = True

    def __exit__(self, *_: object) -> None:
        """It has ended: a SIGTERM that came in between is acted on, a late soft limit dropped."""
        self.busy = False
        pending, self._pending = self._pending, []
        if signal.SIGTERM in pending:
            self._handlers[signal.SIGTERM](signal.SIGTERM, None)

    def open(self, tenure: Tenure, on_lost: OnLost) -> None:
        """The body begins; raises what was remembered before it, so that it does not begin."""
        if on_lost != "flag":
            self._tenure = tenure
            tenure.interrupt = self._interrupt if self._loss_signal else None
        tenure.check()
        if on_lost == "kill":
            self._dead_man = _dead_man(tenure)
            tenure.put_off = self._dead_man.put_off
        self._open = True  # from here on a signal raises by itself
        if self._pending:
            if self.hurried:
                raise SystemExit(_exit_code(signal.SIGTERM))
            self._pending.remove(signal.SIGUSR1)
            raise LimitedTooEarly

    def reopen(self) -> None:
        """The body of an eager call within a step begins."""
        self._open = True
        self._raise_pending()

    def close(self) -> None:
        """It has ended."""
        self._open = False

    def shut(self) -> None:
        """The body is over."""
        self._open = False
        if self._tenure is not None or self._dead_man is not None:
            super().shut()
            dead_man, self._dead_man = self._dead_man, None
            if dead_man is not None:
                dead_man.call_off()

    def _raise_pending(self) -> None:
        if self.hurried:
            raise SystemExit(_exit_code(signal.SIGTERM))
        if self.limited:
            self._pending.remove(signal.SIGUSR1)
            self._handlers[signal.SIGUSR1](signal.SIGUSR1, None)
        super()._raise_pending()

    def _wrap(self, signum: int) -> None:
        """Stand before a handler of billiard; a handler of anybody else does not raise into the task."""
        handler = signal.getsignal(signum)
        if callable(handler) and getattr(handler, "__module__", "").startswith("billiard"):
            self._handlers[signum] = handler
            signal.signal(signum, self._on_signal)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if not self.busy:
            self._handlers[signum](signum, frame)
        elif signum == signal.SIGTERM:
            # Billiard's own handler runs at the end of the delivery: it would let a second SIGTERM kill at once.
            first = signum not in self._pending
            self._pending.append(signum)
            if self._open and first:
                raise SystemExit(_exit_code(signum))
        elif self._open:
            self._handlers[signum](signum, frame)
        else:
            self._pending.append(signum)

    def _on_loss(self, signum: int, frame: FrameType | None) -> None:
        super()._raise_pending()

    def _interrupt(self) -> None:
        signal.pthread_kill(self.main, self._loss_signal)


def _dead_man(tenure: Tenure) -> DeadMan:
    """The switch of a body that is to be killed; without one it must not begin."""
    try:
        return DeadMan(tenure.dead_by)
    except OSError as error:
        why = f"the timer that was to kill it could not be set: {error}"
        raise LeaseLost(f"{printable(tenure.bid.key)}: {why}", tenure.bid.key, why) from error


class NestedShield(Shield):
    """For an eager call inside the body of another delivery, which its own is a part of."""

    def __init__(self, outer: SignalShield) -> None:
        self._outer = outer
        self._step = ExitStack()

    @property
    def hurried(self) -> bool:  # type: ignore[override]
        """Whether SIGTERM has come."""
        return self._outer.hurried

    def __enter__(self) -> None:
        """A step of the outer body begins."""
        self._step.enter_context(self._outer.closed())

    def __exit__(self, *_: object) -> None:
        """It has ended."""
        self._step.close()

    def open(self, tenure: Tenure, on_lost: OnLost) -> None:
        """The body begins."""
        tenure.check()
        self._outer.reopen()

    def closed(self) -> AbstractContextManager[None]:
        """Enclose a step of the protocol inside the body."""
        return self._outer.closed()

    def shut(self) -> None:
        """The body is over."""
        self._outer.close()


_shield: SignalShield | None = None
_pid = 0


def shield_here(pid: int, token: str | None = None) -> Shield:
    """The shield for a task that runs in this thread, or greenlet, of process *pid*, with that owner *token*."""
    global _shield, _pid
    if _shield is None or _pid != pid or threading.get_ident() != _shield.main:
        if native.green():
            return green_shield(token)
        if threading.current_thread() is not threading.main_thread():
            return Shield()
        _shield, _pid = SignalShield(), pid
    return NestedShield(_shield) if _shield.busy else _shield


def _exit_code(signum: int) -> int:
    """The exit code billiard gives a child that ends by *signum*."""
    return -(256 - signum)


def _free_signal() -> int:
    """A real-time signal nobody handles; 0 where the system has none."""
    lowest, highest = getattr(signal, "SIGRTMIN", 0), getattr(signal, "SIGRTMAX", -1)
    for signum in range(lowest + 9, highest):
        if signal.getsignal(signum) in (signal.SIG_DFL, None):
            return signum
    return 0
