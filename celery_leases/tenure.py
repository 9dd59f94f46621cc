"""One lease as its holder sees it: until when it counts, by the local clock and by what the store has said."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

from celery_leases.core import validity
from celery_leases.core.errors import LeaseLost, StoreUnavailable
from celery_leases.core.ports import Clock
from celery_leases.core.records import Bid
from celery_leases.core.texts import printable
from celery_leases.work import Work

DEADLINE: Final = "not renewed in time"
HELD_TOO_LONG: Final = "held for lease_max_hold"
NOT_EXTENDED: Final = (
    "not extended in time, and lease_renew=False: call self.lease.extend(seconds) before it ends, "
    "make lease_ttl longer, or write lease_renew=True"
)
LEFT_ALONE: Final = 0.4


class Tenure:
    """One lease as its holder sees it. Whether it still counts is arithmetic on the local clock, so a renewer that
    died does no harm; once lost it stays lost, whatever a late reply says.

    It is held before :attr:`stop`, which moves in :meth:`extended`, :meth:`seen_locked` and :meth:`complete`.
    """

    def __init__(self, bid: Bid, sent: float, clock: Clock, *, renew: bool = True, max_hold: float = 86_400.0) -> None:
        self.bid = bid
        self.fence = 0
        #: What the body does beside returning.
        self.work = Work()
        #: The cooldown group for which this attempt is the probe; its slot is renewed along with the lease.
        self.probe: str | None = None
        self.hard = validity.hard_deadline(sent, bid.ttl)
        self._stop = validity.stop_deadline(self.hard, bid.ttl)
        self.lost: str | None = None
        #: Called from another thread when the lease is lost, and again until the body has ended; must not block.
        self.interrupt: Callable[[], None] | None = None
        #: Told of the moment at which the process must be dead, whenever that moves.
        self.put_off: Callable[[float], None] | None = None
        #: Called by :meth:`check` while the lease is a lock: asks the store, and has noted the answer when it returns.
        self.confirm: Callable[[], None] | None = None
        self.due = validity.renewal_due(sent, bid.ttl)
        self.in_flight = False
        self.unverified = False
        self.nudges = 0
        self.nudge_at = 0.0
        self._clock = clock
        self._told = -math.inf
        self._renewed = sent
        self._seen_locked = -math.inf
        self._hold_until = sent + max_hold
        self._renews = renew
        self._renew_until = self._hold_until if renew else sent

    # -- what the clock says -------------------------------------------------------------------------------

    @property
    def stop(self) -> float:
        """When the body must stop; see :func:`celery_leases.core.validity.stop_deadline`.

        Where the claimed row is the lease, a transaction of the body's own that has locked the row keeps every claim
        out, and every renewal too. Then that lock is the lease, at most until the lease has been held for as long as
        it may be. It counts for :func:`~celery_leases.core.validity.lock_believed` from when it was last seen.
        """
        if not self._locked_since:
            return self._stop
        believed = validity.lock_believed(self.bid.ttl, still=self.work.guarded)
        return max(self._stop, min(self._hold_until, self._seen_locked + believed))

    @property
    def dead_by(self) -> float:
        """When a body that is to be killed must be dead: as long after :attr:`stop` as the lease itself ends."""
        return self.stop + self.hard - self._stop

    @property
    def held(self) -> bool:
        """Whether the lease still counts."""
        return self.lost is None and self._clock.now() < self.stop

    def outlasted(self, now: float) -> bool:
        """Whether the lease of the row is over, and only a lock on the row can keep others out."""
        return now >= self._stop

    def remaining(self) -> float:
        """Seconds until the body must stop; 0 when the lease is lost."""
        return max(0.0, self.stop - self._clock.now()) if self.lost is None else 0.0

    def patience(self) -> float:
        """For how many seconds a step of this call may wait for a connection that others use."""
        return validity.connection_awaited(self.bid.ttl, self.remaining())

    def check(self) -> None:
        """Raise :class:`LeaseLost` unless the lease still counts; where it is a lock, ask the store first.

        A lock is no evidence beyond the last look, so :class:`StoreUnavailable` is raised where the store does not say.
        """
        if self.lost is None and not self.outlasted(self._clock.now()):
            return
        if self.confirm is not None and self.held:
            try:
                self.confirm()
            except StoreUnavailable:
                if self.held:
                    raise
        if not self.held:
            reason = self.lost or (DEADLINE if self._renews else NOT_EXTENDED)
            self._told = self._clock.now()
            raise LeaseLost(f"{printable(self.bid.key)}: the lease is lost: {reason}", self.bid.key, reason)

    def now(self) -> float:
        """The local clock the lease is counted on."""
        return self._clock.now()

    def just_told(self) -> bool:
        """Whether the body was told of the loss a moment ago: it may be cleaning up, and is left alone for it."""
        return self._clock.now() - self._told < LEFT_ALONE

    # -- what the store says -------------------------------------------------------------------------------

    def extended(self, sent: float, ttl: float) -> None:
        """The store confirmed, for a request sent at *sent*, that the lease lasts another *ttl* seconds."""
        if self.lost is None:
            self._last_until(validity.hard_deadline(sent, ttl))
            self.due = validity.renewal_due(sent, self.bid.ttl)
            self._renewed = max(self._renewed, sent)
            self._moved()

    def seen_locked(self, sent: float) -> None:
        """The store confirmed, for a request sent at *sent*, that the row is ours and locked."""
        self._seen_locked = max(self._seen_locked, sent)
        self._moved()

    def cut_short(self) -> None:
        """It is lost. A body that is to be killed has what is left of the lease to end, unless its key is free."""
        if self.put_off is not None and self.lost not in (DEADLINE, HELD_TOO_LONG, NOT_EXTENDED):
            self.put_off(self._clock.now())

    def complete(self) -> None:
        """The body has committed the done record: nobody else runs the key, and there is nothing to renew any more."""
        self._last_until(self._hold_until)
        self._renew_until = self._seen_locked = -math.inf
        self._moved()

    def _last_until(self, hard: float) -> None:
        self.hard = max(self.hard, hard)
        self._stop = validity.stop_deadline(self.hard, self.bid.ttl)

    def _moved(self) -> None:
        if self.put_off is not None:
            self.put_off(self.dead_by)

    # -- what is to be done --------------------------------------------------------------------------------

    def renewable(self, now: float) -> bool:
        """Whether to go on renewing."""
        return self.lost is None and now < self._renew_until

    def looked_after(self, now: float) -> bool:
        """Whether the keeper asks the store about it: to renew it, or to see what has become of its row's lock."""
        return self.renewable(now) or (self.lost is None and now < self._hold_until and self._locked_since)

    def asks_for(self, now: float) -> float:
        """The seconds the keeper asks for; 0 is a mere look, where the lease is not to be renewed."""
        return self.bid.ttl if self.renewable(now) or self.outlasted(now) else 0.0

    def overdue(self, now: float) -> str | None:
        """Why the lease is over by the clock, if it is."""
        if now < self.stop:
            return None
        if not self._renews and now < self._hold_until:
            return NOT_EXTENDED
        return DEADLINE if now < self._renew_until else HELD_TOO_LONG

    @property
    def _locked_since(self) -> bool:
        """Whether the row was seen locked since the last renewal."""
        return self._seen_locked > self._renewed
