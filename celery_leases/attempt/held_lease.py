"""One lease from its holder's view: until when it counts, by the local clock and the store's
replies.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

from celery_leases.attempt.body_state import Work
from celery_leases.common.texts import printable
from celery_leases.errors import LeaseLost, StoreUnavailable
from celery_leases.protocol import deadlines
from celery_leases.protocol.ports import Clock
from celery_leases.protocol.records import ClaimRequest

DEADLINE: Final = "not renewed in time"
HELD_TOO_LONG: Final = "held for lease_max_hold"
NOT_EXTENDED: Final = (
    "not extended in time, and lease_renew=False: call self.lease.extend(seconds) before it ends, "
    "make lease_ttl longer, or write lease_renew=True"
)
LEFT_ALONE: Final = 0.4


class HeldLease:
    """One lease from its holder's view. The local clock alone decides whether it still counts, so a
    renewer that died does no harm. A lost lease stays lost, whatever a late reply says.

    It is held before :attr:`stop`, which moves in :meth:`extended`, :meth:`seen_locked` and
    :meth:`complete`.
    """

    def __init__(
        self,
        claim_request: ClaimRequest,
        sent: float,
        clock: Clock,
        *,
        renew: bool = True,
        max_hold: float = 86_400.0,
    ) -> None:
        self.claim_request = claim_request
        #: When it was requested, by the local clock.
        self.since = sent
        self.fence = 0
        #: The state of the body.
        self.work = Work()
        #: The cooldown group for which this attempt is the probe; its slot is renewed together with
        #: the lease.
        self.probe: str | None = None
        self.hard = deadlines.hard_deadline(sent, claim_request.ttl)
        self._stop = deadlines.stop_deadline(self.hard, claim_request.ttl)
        self.lost: str | None = None
        #: Called from another thread when the lease is lost, and again until the body has ended;
        #: must not block.
        self.interrupt: Callable[[], None] | None = None
        #: Called with the time at which the process must be dead, whenever that changes.
        self.put_off: Callable[[float], None] | None = None
        #: Called by :meth:`check` while the lease is a row lock: asks the store, and stores the
        #: answer before it returns.
        self.confirm: Callable[[], None] | None = None
        self.due = deadlines.renewal_due(sent, claim_request.ttl)
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

    # -- what the clock says -----------------------------------------------------------------------

    @property
    def stop(self) -> float:
        """When the body must stop; see :func:`celery_leases.protocol.deadlines.stop_deadline`.

        With database leases, a transaction of the body's own that has locked the row blocks every
        claim, and every renewal too. Then that lock is the lease, at most until ``lease_max_hold``.
        It counts for :func:`~celery_leases.protocol.deadlines.lock_counts_for` from when it was
        last seen.
        """
        if not self._locked_since:
            return self._stop
        believed = deadlines.lock_counts_for(self.claim_request.ttl, still=self.work.guarded)
        return max(self._stop, min(self._hold_until, self._seen_locked + believed))

    @property
    def dead_by(self) -> float:
        """Deadline for the kill timer: as long after :attr:`stop` as the lease itself ends."""
        return self.stop + self.hard - self._stop

    @property
    def held(self) -> bool:
        """Whether the lease still counts."""
        return self.lost is None and self._clock.now() < self.stop

    def outlasted(self, now: float) -> bool:
        """Whether the lease of the row has expired, and only a lock on the row blocks other
        attempts.
        """
        return now >= self._stop

    def remaining(self) -> float:
        """Seconds until the body must stop; 0 when the lease is lost."""
        return max(0.0, self.stop - self._clock.now()) if self.lost is None else 0.0

    def patience(self) -> float:
        """For how many seconds a step of this call may wait for a connection that others use."""
        return deadlines.connection_timeout(self.claim_request.ttl, self.remaining())

    def check(self) -> None:
        """Raise :class:`LeaseLost` unless the lease still counts; if it is a row lock, ask the
        store first.

        A lock proves nothing after it was last seen, so :class:`StoreUnavailable` is raised if the
        store does not answer.
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
            raise LeaseLost(
                f"{printable(self.claim_request.key)}: the lease is lost: {reason}",
                self.claim_request.key,
                reason,
            )

    def now(self) -> float:
        """The local clock of the lease."""
        return self._clock.now()

    def just_told(self) -> bool:
        """Whether the body was interrupted a moment ago: it may be cleaning up, and is not
        interrupted again yet.
        """
        return self._clock.now() - self._told < LEFT_ALONE

    # -- what the store says -----------------------------------------------------------------------

    def extended(self, sent: float, ttl: float) -> None:
        """The store confirmed, for a request sent at *sent*, that the lease lasts another *ttl*
        seconds.
        """
        if self.lost is None:
            self._last_until(deadlines.hard_deadline(sent, ttl))
            self.due = deadlines.renewal_due(sent, self.claim_request.ttl)
            self._renewed = max(self._renewed, sent)
            self._moved()

    def seen_locked(self, sent: float) -> None:
        """The store confirmed, for a request sent at *sent*, that the attempt's own transaction
        holds the row.
        """
        self._seen_locked = max(self._seen_locked, sent)
        self._moved()

    def cut_short(self) -> None:
        """The lease is lost. With a kill timer the body has the rest of the lease to end, unless
        its key is free.
        """
        if self.put_off is not None and self.lost not in (DEADLINE, HELD_TOO_LONG, NOT_EXTENDED):
            self.put_off(self._clock.now())

    def complete(self) -> None:
        """The body has committed the done record: no other attempt runs the key, and there is
        nothing to renew.
        """
        self._last_until(self._hold_until)
        self._renew_until = self._seen_locked = -math.inf
        self._moved()

    def _last_until(self, hard: float) -> None:
        self.hard = max(self.hard, hard)
        self._stop = deadlines.stop_deadline(self.hard, self.claim_request.ttl)

    def _moved(self) -> None:
        if self.put_off is not None:
            self.put_off(self.dead_by)

    # -- what is to be done ------------------------------------------------------------------------

    def renewable(self, now: float) -> bool:
        """Whether to continue to renew."""
        return self.lost is None and now < self._renew_until

    def looked_after(self, now: float) -> bool:
        """Whether the keeper calls the store for it: to renew it, or to check its row's lock."""
        return self.renewable(now) or (
            self.lost is None and now < self._hold_until and self._locked_since
        )

    def asks_for(self, now: float) -> float:
        """The seconds the keeper requests; 0 only checks, if the lease must not be renewed."""
        return self.claim_request.ttl if self.renewable(now) or self.outlasted(now) else 0.0

    def overdue(self, now: float) -> str | None:
        """Why the lease has expired by the clock, or ``None``."""
        if now < self.stop:
            return None
        if not self._renews and now < self._hold_until:
            return NOT_EXTENDED
        return DEADLINE if now < self._renew_until else HELD_TOO_LONG

    @property
    def _locked_since(self) -> bool:
        """Whether the row was seen locked since the last renewal."""
        return self._seen_locked > self._renewed
