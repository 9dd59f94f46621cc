"""Interrupts a body, and never the steps of the protocol around it and in it.

An interrupt guard lets interrupts through only while its body runs, and defers them during each
step of the protocol in the body: an interrupt during a step is raised at the end of the step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from celery_leases.attempt.held_lease import HeldLease
from celery_leases.options import OnLost


class EarlySoftTimeLimit(BaseException):
    """The soft time limit fired before the body began."""


class InterruptGuard:
    """For pools that cannot interrupt a body, such as threads: the body learns of a lost lease only
    from ``lost`` and ``check()``.

    As a context manager it encloses one delivery.
    """

    #: The process, or at least this body, must end.
    stopping = False
    #: The soft time limit has fired outside the body.
    limited = False

    def __enter__(self) -> None:
        """The delivery begins."""

    def __exit__(self, *_: object) -> None:
        """The delivery has ended."""

    def body_begins(self, held_lease: HeldLease, on_lost: OnLost) -> None:
        """Allow interrupts from now on, and raise one that came before.

        :meth:`body_ended` must follow, also if this raises.
        """

    def interrupts_deferred(self) -> AbstractContextManager[None]:
        """Enclose a step of the protocol inside the body: an interrupt during the step is raised at
        the end of the step.
        """
        return nullcontext()

    def body_ended(self) -> None:
        """Defer interrupts from now on. Call this twice: a signal may interrupt the first call."""


class RaisingGuard(InterruptGuard):
    """Raises :class:`LeaseLost` in a body."""

    def __init__(self) -> None:
        #: Interrupts are raised now, and not deferred.
        self._raises = False
        self._held_lease: HeldLease | None = None

    @contextmanager
    def interrupts_deferred(self) -> Iterator[None]:
        """See :meth:`InterruptGuard.interrupts_deferred`."""
        before, self._raises = self._raises, False
        try:
            yield
        finally:
            self._raises = before
            if before:
                self._raise_pending()

    def body_ended(self) -> None:
        """See :meth:`InterruptGuard.body_ended`."""
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
