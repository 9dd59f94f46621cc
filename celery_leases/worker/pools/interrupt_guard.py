"""Keeps interrupts of a body away from the steps around it.

An interrupt guard is open only while its body runs, and closed during each step of the protocol in
it. An interrupt during a step is raised at the end of the step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from celery_leases.attempt.held_lease import HeldLease
from celery_leases.protocol.options import OnLost


class LimitedTooEarly(BaseException):
    """The soft time limit fired before the body began."""


class InterruptGuard:
    """For pools that signals cannot interrupt: the body learns of a loss only by the flag and
    ``check()``.

    Entered as a context manager it encloses one delivery.
    """

    #: The process, or at least this body, must end.
    stopping = False
    #: The soft time limit has fired outside the body.
    limited = False

    def __enter__(self) -> None:
        """A delivery begins."""

    def __exit__(self, *_: object) -> None:
        """It has ended."""

    def open(self, held_lease: HeldLease, on_lost: OnLost) -> None:
        """The body begins, which alone may be interrupted; raises an interrupt from before it.

        Its end is :meth:`shut`, also if this raises.
        """

    def closed(self) -> AbstractContextManager[None]:
        """Enclose a step of the protocol inside the body."""
        return nullcontext()

    def shut(self) -> None:
        """The body is over. Call it twice: a signal may cut the first call short."""


class RaisingGuard(InterruptGuard):
    """Raises :class:`LeaseLost` in a body, only while the guard is open."""

    def __init__(self) -> None:
        self._open = False
        self._held_lease: HeldLease | None = None

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Enclose a step of the protocol inside the body: an interrupt during the step is raised at
        its end.
        """
        was, self._open = self._open, False
        try:
            yield
        finally:
            self._open = was
            if was:
                self._raise_pending()

    def shut(self) -> None:
        """The body is over."""
        self._open = False
        held_lease = self._held_lease
        if held_lease is not None:
            held_lease.interrupt = held_lease.put_off = None
            self._held_lease = None

    def _raise_pending(self) -> None:
        held_lease = self._held_lease
        if (
            self._open
            and held_lease is not None
            and held_lease.lost is not None
            and not held_lease.just_told()
        ):
            held_lease.check()
