"""Interrupts a body in each pool, and defers interrupts in the steps of the protocol around it and
in it.

Celery's pool children raise exceptions from signal handlers: the soft time limit, and the
``SystemExit`` of SIGTERM. Raised between two steps of the protocol, they would leave a lease held
or a record ``running``. Here the handlers raise only while a body runs; a signal before or after it
is stored. A lost lease interrupts its body in the same way: by a real-time signal to the main
thread, whose handler raises only while *that* body runs.

In a pool of greenlets exceptions are thrown into the greenlet through its hub. A cold shutdown
kills the greenlets of the pool, and Celery acknowledges the messages of killed greenlets. Here a
kill ends only the body: a kill before or after the body, or in a step of the protocol, is stored.
So the delivery, and Celery's work around it, finish normally.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import FrameType
from typing import Any
from weakref import WeakValueDictionary

from celery_leases.attempt.held_lease import HeldLease
from celery_leases.concurrency import greenlets, os_threads
from celery_leases.concurrency.kill_timer import KillTimer
from celery_leases.errors import LeaseLost
from celery_leases.options import OnLost
from celery_leases.text.cleaning import printable

Handler = Callable[[int, FrameType | None], Any]


class EarlySoftTimeLimit(BaseException):
    """The soft time limit fired before the body began."""


class InterruptGuard:
    """Lets interrupts through only while its body runs, and defers them during each step of the
    protocol in the body. As a context manager it encloses one delivery.

    This one is for pools that cannot interrupt a body, such as threads: the body learns of a lost
    lease only from ``lost`` and ``check()``.
    """

    #: The process, or at least this body, must end.
    stopping = False
    #: The soft time limit has fired outside the body.
    limited = False
    #: Interrupts are raised now, and not deferred.
    _raises = False
    _held_lease: HeldLease | None = None

    def __enter__(self) -> None:
        """The delivery begins."""

    def __exit__(self, *_: object) -> None:
        """The delivery has ended."""

    def body_begins(self, held_lease: HeldLease, on_lost: OnLost) -> None:
        """Allow interrupts from now on, and raise one that came before, so that the body does not
        begin.

        :meth:`body_ended` must follow, also if this raises.
        """

    @contextmanager
    def interrupts_deferred(self) -> Iterator[None]:
        """Enclose a step of the protocol inside the body: an interrupt during the step is raised at
        the end of the step.
        """
        before, self._raises = self._raises, False
        try:
            yield
        finally:
            self._raises = before
            if before:
                self._raise_pending()

    def body_ended(self) -> None:
        """Defer interrupts from now on. Call this twice: a signal may interrupt the first call."""
        self._raises = False
        held_lease = self._held_lease
        if held_lease is not None:
            held_lease.interrupt = held_lease.move_kill_timer = None
            self._held_lease = None

    def _raise_pending(self) -> None:
        held_lease = self._held_lease
        if (
            self._raises
            and held_lease is not None
            and held_lease.lost is not None
            and not held_lease.interrupted_recently()
        ):
            held_lease.check()


def interrupt_guard_here(pid: int, token: str | None = None) -> InterruptGuard:
    """The interrupt guard for a delivery with that owner *token*, in this thread or greenlet of
    process *pid*.
    """
    global _interrupt_guard, _pid
    if _interrupt_guard is None or _pid != pid or threading.get_ident() != _interrupt_guard.main:
        if os_threads.uses_greenlets():
            outer = _guards.get(greenlets.current())
            if outer is not None:
                return GreenletGuard(outer.kill)
            return GreenletGuard(_kills.get(token or "") or BodyKill())
        if threading.current_thread() is not threading.main_thread():
            return InterruptGuard()
        _interrupt_guard, _pid = SignalGuard(), pid
    return NestedGuard(_interrupt_guard) if _interrupt_guard.busy else _interrupt_guard


# -- signals ---------------------------------------------------------------------------------------


class SignalGuard(InterruptGuard):
    """For tasks that run in the main thread: prefork's children, and solo."""

    def __init__(self) -> None:
        self.main = threading.main_thread().ident or 0
        #: A delivery is being handled.
        self.busy = False
        self._kill_timer: KillTimer | None = None
        self._handlers: dict[int, Handler] = {}
        self._loss_signal = _free_signal()
        if self._loss_signal:
            signal.signal(self._loss_signal, self._on_loss)
        for name in ("SIGTERM", "SIGUSR1"):
            self._wrap(getattr(signal, name))

    def __enter__(self) -> None:
        """The delivery begins."""
        self.busy = True

    def __exit__(self, *_: object) -> None:
        """The delivery has ended: a stored SIGTERM takes effect; a soft time limit is dropped."""
        self.busy = self.limited = False
        if self.stopping:
            self.stopping = False
            self._handlers[signal.SIGTERM](signal.SIGTERM, None)

    def body_begins(self, held_lease: HeldLease, on_lost: OnLost) -> None:
        """Allow interrupts from now on. Raises an interrupt that is stored, so that the body does
        not begin.
        """
        if on_lost != "flag":
            self._held_lease = held_lease
            held_lease.interrupt = self._interrupt if self._loss_signal else None
        held_lease.check()
        if on_lost == "kill":
            self._kill_timer = _kill_timer(held_lease)
            held_lease.move_kill_timer = self._kill_timer.set
        self._raises = True  # from here on the signal handlers raise
        if self.stopping:
            raise SystemExit(_exit_code(signal.SIGTERM))
        if self.limited:
            self.limited = False
            raise EarlySoftTimeLimit

    def nested_body_begins(self) -> None:
        """The body of an eager call, made inside this guard's body, begins."""
        self._raises = True
        self._raise_pending()

    def nested_body_ended(self) -> None:
        """The body of an eager call has ended."""
        self._raises = False

    def body_ended(self) -> None:
        """Defer interrupts from now on, and cancel the kill timer."""
        self._raises = False
        held_lease, kill_timer = self._held_lease, self._kill_timer
        if held_lease is not None:
            held_lease.interrupt = held_lease.move_kill_timer = None
            self._held_lease = None
        if kill_timer is not None:
            self._kill_timer = None
            kill_timer.cancel()

    def _raise_pending(self) -> None:
        if self.stopping:
            raise SystemExit(_exit_code(signal.SIGTERM))
        if self.limited:
            self.limited = False
            self._handlers[signal.SIGUSR1](signal.SIGUSR1, None)
        super()._raise_pending()

    def _wrap(self, signum: int) -> None:
        """Wrap the handler if it is billiard's. Other handlers do not raise inside the task."""
        handler = signal.getsignal(signum)
        if callable(handler) and getattr(handler, "__module__", "").startswith("billiard"):
            self._handlers[signum] = handler
            signal.signal(signum, self._on_signal)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if not self.busy:
            self._handlers[signum](signum, frame)
        elif signum == signal.SIGTERM:
            # Billiard's own handler runs at the end of the delivery, because it lets a second
            # SIGTERM kill the process at once.
            first, self.stopping = not self.stopping, True
            if self._raises and first:
                raise SystemExit(_exit_code(signum))
        elif self._raises:
            self._handlers[signum](signum, frame)
        else:
            self.limited = True

    def _on_loss(self, signum: int, frame: FrameType | None) -> None:
        super()._raise_pending()

    def _interrupt(self) -> None:
        signal.pthread_kill(self.main, self._loss_signal)


def _kill_timer(held_lease: HeldLease) -> KillTimer:
    """The kill timer of a body. Raises :class:`LeaseLost` if the system gives no timer, so that the
    body does not begin.
    """
    try:
        return KillTimer(held_lease.kill_deadline)
    except OSError as error:
        why = f"the kill timer could not be set: {error}"
        raise LeaseLost(
            f"{printable(held_lease.call.key.key)}: {why}", held_lease.call.key.key, why
        ) from error


class NestedGuard(InterruptGuard):
    """For an eager call inside the body of another delivery: an interrupt of that body ends the
    eager call too.
    """

    def __init__(self, outer: SignalGuard) -> None:
        self._outer = outer
        self._step = ExitStack()

    @property
    def stopping(self) -> bool:  # type: ignore[override]
        """Whether SIGTERM has come."""
        return self._outer.stopping

    def __enter__(self) -> None:
        """The eager call begins: for the outer body it is one step."""
        self._step.enter_context(self._outer.interrupts_deferred())

    def __exit__(self, *_: object) -> None:
        """The eager call has ended."""
        self._step.close()

    def body_begins(self, held_lease: HeldLease, on_lost: OnLost) -> None:
        """Allow interrupts of the outer body from now on."""
        held_lease.check()
        self._outer.nested_body_begins()

    @contextmanager
    def interrupts_deferred(self) -> Iterator[None]:
        """See :meth:`InterruptGuard.interrupts_deferred`."""
        with self._outer.interrupts_deferred():
            yield

    def body_ended(self) -> None:
        """Defer interrupts of the outer body again."""
        self._outer.nested_body_ended()


_interrupt_guard: SignalGuard | None = None
_pid = 0


def is_sigterm(error: BaseException) -> bool:
    """Whether *error* is the exit of a pool child by SIGTERM."""
    return isinstance(error, SystemExit) and error.code == _exit_code(signal.SIGTERM)


def _exit_code(signum: int) -> int:
    """The exit code billiard gives a child that ends by *signum*."""
    return -(256 - signum)


def _free_signal() -> int:
    """A real-time signal without a handler; 0 if all have handlers."""
    lowest, highest = getattr(signal, "SIGRTMIN", 0), getattr(signal, "SIGRTMAX", -1)
    for signum in range(lowest + 9, highest):
        if signal.getsignal(signum) in (signal.SIG_DFL, None):
            return signum
    return 0


# -- greenlets -------------------------------------------------------------------------------------


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


class GreenletGuard(InterruptGuard):
    """For one delivery in a greenlet of gevent or eventlet. Exceptions are thrown into the greenlet
    while it waits.
    """

    def __init__(self, kill: BodyKill) -> None:
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
