"""Keep the leases of this process alive while its tasks run, and notice when one is lost.

Two real threads, started with the first lease: the *keeper* talks to the lease store, the *watcher* only looks at the
clock. So a store that freezes a call cannot keep a body from learning that its deadline has passed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress

from celery_leases import native
from celery_leases.core import validity
from celery_leases.core.errors import LeaseLost
from celery_leases.core.events import LeaseGone, LeaseRenewed, RenewalFailed, Subject
from celery_leases.core.ports import Clock, Kept, LeaseStore, Observer, RecordStore, Renewal
from celery_leases.core.records import Bid, State
from celery_leases.work import Work

TAKEN = "taken by another owner"
DEADLINE = "not renewed in time"
FORGOTTEN = "forgotten by the store, and the record has moved on"
HELD_TOO_LONG = "held for lease_max_hold"
RELEASED = "released from outside"

LEFT_ALONE = 0.4
GUARDED_PAUSE = 0.2
DROP_PATIENCE = 5.0
PURGE_EVERY = 60.0
PURGE_BATCH = 500
PURGE_BATCHES = 10


class Tenure:
    """One lease as its holder sees it. Whether it still counts is arithmetic on the local clock, so a renewer that
    died does no harm; once lost it stays lost, whatever a late reply says.
    """

    def __init__(self, bid: Bid, sent: float, clock: Clock, *, renew: bool = True, max_hold: float = 86_400.0) -> None:
        self.bid = bid
        self.fence = 0
        #: What the body does beside returning.
        self.work = Work()
        #: The cooldown group for which this attempt is the probe; its slot is renewed along with the lease.
        self.probe: str | None = None
        self.hard = validity.hard_deadline(sent, bid.ttl)
        self.lost: str | None = None
        #: Called from another thread when the lease is lost, and again until the body has ended; must not block.
        self.interrupt: Callable[[], None] | None = None
        self._clock = clock
        self._told = -math.inf
        self._hold_until = sent + max_hold
        self._renew_until = self._hold_until if renew else sent
        #: Whether the lease is the claimed row itself.
        self.row_is_lease = False
        self.due = validity.renewal_due(sent, bid.ttl)
        self.in_flight = False
        self.unverified = False
        self.nudges = 0
        self.nudge_at = 0.0

    @property
    def stop(self) -> float:
        """When the body must stop; see :func:`celery_leases.core.validity.stop_deadline`.

        Where the claimed row is the lease, an open transaction of the body's own that has locked it keeps every claim
        out, and every renewal too: the deadline is suspended for as long as it may be held.
        """
        if self.row_is_lease and self.work.guarded:
            return max(self._hold_until, validity.stop_deadline(self.hard, self.bid.ttl))
        return validity.stop_deadline(self.hard, self.bid.ttl)

    @property
    def held(self) -> bool:
        """Whether the lease still counts."""
        return self.lost is None and self._clock.now() < self.stop

    def remaining(self) -> float:
        """Seconds until the body must stop; 0 when the lease is lost."""
        return max(0.0, self.stop - self._clock.now()) if self.lost is None else 0.0

    def check(self) -> None:
        """Raise :class:`LeaseLost` unless the lease still counts."""
        if not self.held:
            reason = self.lost or DEADLINE
            self._told = self._clock.now()
            raise LeaseLost(f"{self.bid.key}: the lease is lost: {reason}", self.bid.key, reason)

    def now(self) -> float:
        """The local clock the lease is counted on."""
        return self._clock.now()

    def just_told(self) -> bool:
        """Whether the body was told of the loss a moment ago: it may be cleaning up, and is left alone for it."""
        return self._clock.now() - self._told < LEFT_ALONE

    def extended(self, sent: float, ttl: float) -> None:
        """The store confirmed, for a request sent at *sent*, that the lease lasts another *ttl* seconds."""
        if self.lost is None:
            self.hard = max(self.hard, validity.hard_deadline(sent, ttl))
            self.due = validity.renewal_due(sent, self.bid.ttl)

    def renewable(self, now: float) -> bool:
        """Whether to go on renewing."""
        return self.lost is None and now < self._renew_until

    def complete(self) -> None:
        """The body has committed the done record: nobody else runs the key, and there is nothing to renew any more."""
        self.hard = max(self.hard, self._hold_until)
        self._renew_until = -math.inf

    def overdue(self, now: float) -> str | None:
        """Why the lease is over by the clock, if it is."""
        if now < self.stop:
            return None
        if self.row_is_lease and self.work.completing and now < self._renew_until:
            return None  # the keeper is about to see what became of the completion
        return DEADLINE if now < self._renew_until else HELD_TOO_LONG


class Renewer:
    """All leases of one process. *leases* must be a store of its own, whose calls end within the tightest ttl / 10."""

    def __init__(self, leases: LeaseStore, records: RecordStore, observer: Observer, clock: Clock) -> None:
        self._leases = leases
        self._records = records
        self._observer = observer
        self._clock = clock
        self._tenures: dict[str, Tenure] = {}
        self._lock = native.allocate_lock()
        self._started = False
        self._purge_at = clock.now() + PURGE_EVERY
        self._keeper_bell = native.Bell()
        self._watcher_bell = native.Bell()
        self._keeper_wakes = math.inf
        self._watcher_wakes = math.inf

    def add(self, tenure: Tenure) -> None:
        """Begin to renew and to watch *tenure*."""
        with self._lock:
            self._tenures[tenure.bid.token] = tenure
            started, self._started = self._started, True
        if not started:
            native.start_thread(self._keep)
            native.start_thread(self._watch)
            return
        if tenure.due < self._keeper_wakes:
            self._keeper_bell.ring()
        if tenure.stop < self._watcher_wakes:
            self._watcher_bell.ring()

    def drop(self, tenure: Tenure) -> None:
        """Stop renewing *tenure* and wait for the call in flight: a late one must not revive a released lease."""
        with self._lock:
            self._tenures.pop(tenure.bid.token, None)
        until = self._clock.now() + DROP_PATIENCE
        while tenure.in_flight and self._clock.now() < until:
            self._clock.sleep(0.002)

    def extend(self, tenure: Tenure, seconds: float) -> None:
        """Make the lease last at least *seconds* from now; raises :class:`LeaseLost` or :class:`StoreUnavailable`."""
        tenure.check()
        sent = self._clock.now()
        self._take_note(tenure, self._leases.renew([_renewal(tenure, seconds)])[0], sent, seconds)
        tenure.check()

    # -- the keeper ----------------------------------------------------------------------------------------

    def _keep(self) -> None:
        while True:
            now = self._clock.now()
            with self._lock:
                tenures = [tenure for tenure in self._tenures.values() if tenure.renewable(now)]
                for tenure in tenures:
                    if self._leases.in_records and tenure.work.guarded:  # its row is locked: look again soon
                        tenure.due = max(tenure.due, now + GUARDED_PAUSE)
                due = [tenure for tenure in tenures if tenure.due <= now]
                self._keeper_wakes = min([tenure.due for tenure in tenures] + [self._purge_at])
                for tenure in due:
                    tenure.in_flight = True
            if due:
                try:
                    self._renew(due)
                finally:
                    for tenure in due:
                        tenure.in_flight = False
                continue
            if now >= self._purge_at:
                self._purge_at = now + PURGE_EVERY
                self._purge()
                continue
            self._keeper_bell.wait(self._keeper_wakes - now)

    def _renew(self, due: list[Tenure]) -> None:
        sent = self._clock.now()
        try:
            answers = self._leases.renew([_renewal(tenure, tenure.bid.ttl) for tenure in due])
            for tenure, kept in zip(due, answers, strict=True):
                self._take_note(tenure, kept, sent, tenure.bid.ttl)
        except Exception as error:  # noqa: BLE001 - whatever happens, the keeper goes on and the deadlines decide
            for tenure in due:
                self._failed(tenure, error)

    def _take_note(self, tenure: Tenure, kept: Kept, sent: float, ttl: float) -> None:
        if kept is Kept.OTHER:
            self._lose(tenure, TAKEN)
        elif kept is Kept.MISSING:
            self._reassert(tenure, sent)
        elif tenure.unverified and not self._still_ours(tenure):
            self._take_away(tenure)
        else:
            tenure.unverified = False
            tenure.extended(sent, ttl)
            self._observer.observe(LeaseRenewed(**_of(tenure), remaining=tenure.remaining()))

    def _reassert(self, tenure: Tenure, sent: float) -> None:
        if tenure.row_is_lease and tenure.work.completing:
            if self._is_still(tenure, State.DONE):
                tenure.complete()
            else:
                self._lose(tenure, RELEASED if tenure.held else DEADLINE)
            return
        if not tenure.held or tenure.bid.token not in self._tenures:
            tenure.due = validity.renewal_retry(self._clock.now(), tenure.bid.ttl)
            return
        if not self._leases.reassert(tenure.bid):
            self._lose(tenure, TAKEN if not self._leases.in_records else RELEASED)
            return
        tenure.unverified = True
        if not self._still_ours(tenure):
            self._take_away(tenure)
            return
        tenure.unverified = False
        tenure.extended(sent, tenure.bid.ttl)
        self._observer.observe(LeaseRenewed(**_of(tenure), remaining=tenure.remaining(), reasserted=True))

    def _still_ours(self, tenure: Tenure) -> bool:
        return self._is_still(tenure, State.RUNNING)

    def _is_still(self, tenure: Tenure, state: State) -> bool:
        record = self._records.read(tenure.bid.stored_key)
        ours = (state, tenure.fence, tenure.bid.token)
        return record is not None and (record.state, record.fence, record.owner) == ours

    def _take_away(self, tenure: Tenure) -> None:
        self._lose(tenure, FORGOTTEN)
        self._leases.release(tenure.bid.stored_key, tenure.bid.token)

    def _failed(self, tenure: Tenure, error: Exception) -> None:
        now = self._clock.now()
        tenure.due = validity.renewal_retry(now, tenure.bid.ttl)
        self._observer.observe(RenewalFailed(**_of(tenure), error=str(error), remaining=tenure.remaining()))

    def _purge(self) -> None:
        with suppress(Exception):  # the next round deletes them; the keeper must go on whatever it meets
            for _ in range(PURGE_BATCHES):
                if self._records.purge(PURGE_BATCH) < PURGE_BATCH:
                    break

    # -- the watcher ---------------------------------------------------------------------------------------

    def _watch(self) -> None:
        while True:
            now = self._clock.now()
            with self._lock:
                tenures = list(self._tenures.values())
            for tenure in tenures:
                if tenure.lost is None and (reason := tenure.overdue(now)):
                    self._lose(tenure, reason)
                elif tenure.lost is not None and tenure.nudge_at <= now:
                    self._nudge(tenure, now)
            with self._lock:
                wakes = [t.nudge_at if t.lost is not None else t.stop for t in self._tenures.values()]
                self._watcher_wakes = min(wakes, default=math.inf)
            self._watcher_bell.wait(self._watcher_wakes - now if wakes else None)

    def _lose(self, tenure: Tenure, reason: str) -> None:
        with self._lock:
            if tenure.lost is not None or tenure.bid.token not in self._tenures:
                return
            tenure.lost = reason
        self._nudge(tenure, self._clock.now())
        self._observer.observe(LeaseGone(**_of(tenure), reason=reason))
        self._watcher_bell.ring()

    def _nudge(self, tenure: Tenure, now: float) -> None:
        """Interrupt the body, more and more rarely: one that lands in a finalizer vanishes without a trace."""
        tenure.nudge_at = now + min(10.0, 0.5 * 2.0**tenure.nudges)
        tenure.nudges += 1
        if tenure.interrupt is not None:
            tenure.interrupt()


def _renewal(tenure: Tenure, ttl: float) -> Renewal:
    return Renewal(tenure.bid.stored_key, tenure.bid.token, ttl, tenure.probe)


def _of(tenure: Tenure) -> Subject:
    return {"task": tenure.bid.task, "key": tenure.bid.key, "call_id": tenure.bid.call_id}
