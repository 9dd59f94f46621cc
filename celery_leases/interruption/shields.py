"""Keeping what may be raised into a body away from everything around it; and reaching into a body in a greenlet.

A shield is open only while its body runs, and closed during each step of the protocol in it. What came meanwhile is
raised at the end of the step. A body that runs in a greenlet is reached through its hub.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

from celery_leases.core.errors import LeaseLost
from celery_leases.core.options import OnLost
from celery_leases.process import greenlets
from celery_leases.tenure import Tenure


class LimitedTooEarly(BaseException):
    """The soft time limit fired before the body had begun."""


class Shield:
    """For pools that cannot be interrupted by signals: the body learns of a loss by the flag and ``check()`` alone."""

    #: SIGTERM has come: the process is to end.
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


class GreenShield(RaisingShield):
    """For one delivery in a greenlet of gevent or eventlet, which is thrown into while it waits."""

    def __init__(self) -> None:
        super().__init__()
        self._greenlet = greenlets.current()

    @contextmanager
    def around(self) -> Iterator[None]:
        """Enclose one delivery; inside the body of another one it is a step of that."""
        outer = _around.get(self._greenlet)
        _around[self._greenlet] = self
        try:
            with nullcontext() if outer is None else outer.closed():
                yield
        finally:
            if outer is None:
                del _around[self._greenlet]
            else:
                _around[self._greenlet] = outer

    @contextmanager
    def opened(self, tenure: Tenure, on_lost: OnLost) -> Iterator[None]:
        """Enclose the body; raises when the lease is lost already."""
        if on_lost != "flag":
            self._tenure = tenure
            tenure.interrupt = partial(greenlets.hub_caller(), self._throw)
        try:
            tenure.check()
            self._open = True
            yield
        finally:
            self.shut()
            tenure.interrupt = None

    def _throw(self) -> None:
        """Called by the hub."""
        lost: LeaseLost | None = None
        try:
            self._raise_pending()
        except LeaseLost as error:
            lost = error
        if lost is not None:
            self._greenlet.throw(lost)


_around: dict[Any, GreenShield] = {}
