"""Keeping what may be raised into a body away from everything around it.

A shield is open only while its body runs, and closed during each step of the protocol in it. What came meanwhile is
raised at the end of the step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from celery_leases.core.options import OnLost
from celery_leases.tenure import Tenure


class LimitedTooEarly(BaseException):
    """The soft time limit fired before the body had begun."""


class Shield:
    """For pools that cannot be interrupted by signals: the body learns of a loss by the flag and ``check()`` alone.

    Entered as a context manager it encloses one delivery.
    """

    #: The process, or at least this body, is to end.
    hurried = False
    #: The soft time limit has fired outside the body.
    limited = False

    def __enter__(self) -> None:
        """A delivery begins."""

    def __exit__(self, *_: object) -> None:
        """It has ended."""

    def open(self, tenure: Tenure, on_lost: OnLost) -> None:
        """The body begins, which alone may be interrupted; raises what was remembered before it.

        Its end is :meth:`shut`, also where this raises.
        """

    def closed(self) -> AbstractContextManager[None]:
        """Enclose a step of the protocol inside the body."""
        return nullcontext()

    def shut(self) -> None:
        """The body is over. Call it twice: a signal may cut the first call short."""


class RaisingShield(Shield):
    """Raises :class:`LeaseLost` in a body, only while it is open."""

    def __init__(self) -> None:
        self._open = False
        self._tenure: Tenure | None = None

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Enclose a step of the protocol inside the body: what came meanwhile is raised at its end."""
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
        tenure = self._tenure
        if tenure is not None:
            tenure.interrupt = tenure.put_off = None
            self._tenure = None

    def _raise_pending(self) -> None:
        tenure = self._tenure
        if self._open and tenure is not None and tenure.lost is not None and not tenure.just_told():
            tenure.check()
