"""Keeping what may be raised into a body away from everything around it.

A shield is open only while its body runs, and closed during each step of the protocol in it. What came meanwhile is
raised at the end of the step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from celery_leases.core.options import OnLost
from celery_leases.tenure import Tenure


class LimitedTooEarly(BaseException):
    """The soft time limit fired before the body had begun."""


class Shield:
    """For pools that cannot be interrupted by signals: the body learns of a loss by the flag and ``check()`` alone."""

    #: The process, or at least this body, is to end.
    hurried = False
    #: The soft time limit has fired outside the body.
    limited = False

    @contextmanager
    def around(self) -> Iterator[None]:
        """Enclose one delivery."""
        yield

    @contextmanager
    def opened(self, tenure: Tenure, on_lost: OnLost) -> Iterator[None]:
        """Enclose the body, which alone may be interrupted."""
        yield

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Enclose a step of the protocol inside the body."""
        yield

    def shut(self) -> None:
        """The body is over: call it where its end is handled, as a signal may have cut :meth:`opened` short."""


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
        self._tenure = None

    def _raise_pending(self) -> None:
        tenure = self._tenure
        if self._open and tenure is not None and tenure.lost is not None and not tenure.just_told():
            tenure.check()
