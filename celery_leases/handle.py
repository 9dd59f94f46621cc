"""What a task body sees as ``self.lease`` and ``current_lease``: its hold on the key."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

from celery_leases.core.records import Attempt, Record
from celery_leases.renewal import Renewer, Tenure


class Lease:
    """The lease of the running attempt. All times are seconds by the local clock.

    ``key``: the stable key of the business action. ``token``: random, made for this attempt alone.
    ``fence``: an integer per key that only ever grows; pass it to any store that can compare it.
    ``attempt``: 1 for the first run of the key. ``previous``: how the last attempt ended, with error and host.
    """

    def __init__(
        self,
        tenure: Tenure,
        record: Record,
        renewer: Renewer,
        shielded: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._tenure = tenure
        self._renewer = renewer
        self._shielded = shielded
        self.key = record.key
        self.token = record.owner
        self.fence = record.fence
        self.attempt = record.attempt
        self.previous: Attempt | None = record.previous

    @property
    def held(self) -> bool:
        """Whether the lease still counts, computed from the clock: no round trip."""
        return self._tenure.held

    @property
    def lost(self) -> bool:
        """Whether the lease is lost; it stays lost."""
        return not self._tenure.held

    def remaining(self) -> float:
        """Seconds until the body must stop, unless a renewal comes first; 0 when the lease is lost."""
        return self._tenure.remaining()

    def check(self) -> None:
        """Raise :class:`~celery_leases.LeaseLost` unless the lease counts: call it before what cannot be undone."""
        self._tenure.check()

    def extend(self, seconds: float) -> None:
        """Make the lease last at least *seconds* from now, in one round trip; it is never cut.

        Raises :class:`~celery_leases.LeaseLost` when it is no longer ours,
        :class:`~celery_leases.StoreUnavailable` when the lease store did not answer.
        """
        if not seconds > 0:
            raise ValueError(f"extend({seconds!r}): give the seconds the lease shall last from now, above 0")
        with self._shielded():
            self._renewer.extend(self._tenure, seconds)

    def __repr__(self) -> str:
        return f"<Lease {self.key} attempt {self.attempt} fence {self.fence}{'' if self.held else ' lost'}>"


class Unleased:
    """Stands for the lease where a body runs without one: called directly, by ``map``, or outside any task."""

    key = ""
    token = ""
    fence = 0
    attempt = 0
    held = False
    lost = False
    previous: Attempt | None = None

    def remaining(self) -> float:
        """Nothing is held."""
        return 0.0

    def check(self) -> None:
        """Nothing can have been lost."""

    def extend(self, seconds: float) -> None:
        """There is nothing to extend."""

    def __repr__(self) -> str:
        return "<no lease>"


UNLEASED = Unleased()
_current: ContextVar[Lease | Unleased] = ContextVar("celery_leases_current", default=UNLEASED)


def lease_here() -> Lease | Unleased:
    """The lease of the body that is running here."""
    return _current.get()


@contextmanager
def leased(lease: Lease | Unleased) -> Iterator[None]:
    """Enclose a body that runs under *lease*."""
    before = _current.set(lease)
    try:
        yield
    finally:
        _current.reset(before)


class CurrentLease:
    """Stands for the lease of the body that is running here; each thread and greenlet sees its own."""

    def __getattr__(self, name: str) -> Any:
        return getattr(lease_here(), name)

    def __repr__(self) -> str:
        return repr(lease_here())


current_lease = CurrentLease()
