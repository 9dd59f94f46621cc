"""Keep the leases of this process alive while its tasks run, and notice when one is lost.

Two real threads, started with the first lease: the *keeper* talks to the lease store, the *watcher* only looks at the
clock. So a store that freezes a call cannot keep a body from learning that its deadline has passed.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass

from celery_leases.core import validity
from celery_leases.core.errors import StoreUnavailable
from celery_leases.core.events import LeaseGone, LeaseRenewed, RenewalFailed, Subject
from celery_leases.core.ports import Clock, Kept, LeaseStore, Observer, RecordStore, Renewal
from celery_leases.core.records import State
from celery_leases.process import native
from celery_leases.tenure import DEADLINE, Tenure

TAKEN = "taken by another owner"
FORGOTTEN = "forgotten by the store, and the record has moved on"
RELEASED = "released from outside"

DROP_PATIENCE = 5.0
PURGE_EVERY = 60.0
PURGE_BATCH = 500
PURGE_BATCHES = 10


@dataclass(frozen=True, slots=True)
class Stores:
    """Connections of somebody's own to where leases and records are."""

    leases: LeaseStore
    records: RecordStore


class Renewer:
    """All leases of one process. *keeping* is what its keeper uses, and nobody else: stores of its own, whose calls end
    within the tightest ttl / 10. Bodies that ask use *asking*; those in greenlets must not share with a real thread.
    """

    def __init__(self, keeping: Stores, asking: Stores, observer: Observer, clock: Clock) -> None:
        self._keeping = keeping
        self._asking = asking
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
        self._let_answer(tenure, DROP_PATIENCE)

    def make_way(self, tenure: Tenure) -> None:
        """Wait for the renewal in flight, if there is one, before the body locks the row it may be waiting for."""
        if tenure.row_is_lease:
            self._let_answer(tenure, validity.call_timeout(tenure.bid.ttl))

    def _let_answer(self, tenure: Tenure, patience: float) -> None:
        until = self._clock.now() + patience
        while tenure.in_flight and self._clock.now() < until:
            self._clock.sleep(0.002)

    def locked(self, tenure: Tenure, sent: float) -> None:
        """The body's own transaction has locked the row, by a statement sent at *sent*."""
        now = self._clock.now()
        tenure.seen_locked(sent)
        if tenure.row_is_lease and not tenure.renewable(now):
            tenure.due = now + validity.lock_looked_at(tenure.bid.ttl)
            self._keeper_bell.ring()

    def confirm(self, tenure: Tenure) -> None:
        """Ask the store now whether a lease in doubt still counts; where it does not answer, that stays open."""
        sent = self._clock.now()
        ttl = tenure.asks_for(sent)
        with suppress(StoreUnavailable):
            self._take_note(tenure, self._asking.leases.renew([_renewal(tenure, ttl)])[0], sent, ttl, self._asking)

    def extend(self, tenure: Tenure, seconds: float) -> None:
        """Make the lease last at least *seconds* from now; raises :class:`LeaseLost` or :class:`StoreUnavailable`."""
        tenure.check()
        sent = self._clock.now()
        (kept,) = self._asking.leases.renew([_renewal(tenure, seconds)])
        self._take_note(tenure, kept, sent, seconds, self._asking)
        tenure.check()

    def has_completed(self, tenure: Tenure) -> bool:
        """Whether the record is done by this attempt; raises :class:`StoreUnavailable`."""
        return _is_still(tenure, State.DONE, self._asking)

    # -- the keeper ----------------------------------------------------------------------------------------

    def _keep(self) -> None:
        while True:
            now = self._clock.now()
            with self._lock:
                tenures = [tenure for tenure in self._tenures.values() if tenure.looked_after(now)]
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
            renewals = [_renewal(tenure, tenure.asks_for(sent)) for tenure in due]
            answers = list(zip(due, renewals, self._keeping.leases.renew(renewals), strict=True))
        except Exception as error:  # noqa: BLE001 - whatever happens, the keeper goes on and the deadlines decide
            for tenure in due:
                self._failed(tenure, error)
            return
        for tenure, renewal, kept in answers:
            try:
                self._take_note(tenure, kept, sent, renewal.ttl, self._keeping)
            except Exception as error:  # noqa: BLE001 - as above, and one lease's trouble is not that of the others
                self._failed(tenure, error)

    def _take_note(
        self, tenure: Tenure, kept: Kept | StoreUnavailable, sent: float, ttl: float, stores: Stores
    ) -> None:
        if isinstance(kept, StoreUnavailable):
            raise kept
        if kept is Kept.OTHER:
            self._lose(tenure, TAKEN)
        elif kept is Kept.LOCKED:
            tenure.seen_locked(sent)
            tenure.due = self._clock.now() + validity.lock_looked_at(tenure.bid.ttl)
        elif kept is Kept.MISSING:
            self._reassert(tenure, sent, stores)
        elif tenure.unverified and not _is_still(tenure, State.RUNNING, stores):
            self._take_away(tenure, stores)
        else:
            tenure.unverified = False
            tenure.extended(sent, ttl)
            self._observer.observe(LeaseRenewed(**_of(tenure), remaining=tenure.remaining()))

    def _reassert(self, tenure: Tenure, sent: float, stores: Stores) -> None:
        if tenure.row_is_lease:
            if tenure.work.completing and _is_still(tenure, State.DONE, stores):
                tenure.complete()
            else:
                self._lose(tenure, RELEASED if tenure.held else DEADLINE)
            return
        if not tenure.held or tenure.bid.token not in self._tenures:
            tenure.due = validity.renewal_retry(self._clock.now(), tenure.bid.ttl)
            return
        if not stores.leases.reassert(tenure.bid):
            self._lose(tenure, TAKEN if not stores.leases.in_records else RELEASED)
            return
        tenure.unverified = True
        if not _is_still(tenure, State.RUNNING, stores):
            self._take_away(tenure, stores)
            return
        tenure.unverified = False
        tenure.extended(sent, tenure.bid.ttl)
        self._observer.observe(LeaseRenewed(**_of(tenure), remaining=tenure.remaining(), reasserted=True))

    def _take_away(self, tenure: Tenure, stores: Stores) -> None:
        self._lose(tenure, FORGOTTEN)
        stores.leases.release(tenure.bid.stored_key, tenure.bid.token)

    def _failed(self, tenure: Tenure, error: Exception) -> None:
        now = self._clock.now()
        tenure.due = validity.renewal_retry(now, tenure.bid.ttl)
        self._observer.observe(RenewalFailed(**_of(tenure), error=str(error), remaining=tenure.remaining()))

    def _purge(self) -> None:
        with suppress(Exception):  # the next round deletes them; the keeper must go on whatever it meets
            for _ in range(PURGE_BATCHES):
                if self._keeping.records.purge(PURGE_BATCH) < PURGE_BATCH:
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
                elif tenure.answer_by is None and tenure.in_doubt(now):
                    tenure.answer_by = now + validity.answer_awaited(tenure.bid.ttl)
                    tenure.due = now
                    self._keeper_bell.ring()
                elif tenure.lost is not None and tenure.nudge_at <= now:
                    self._nudge(tenure, now)
            with self._lock:
                wakes = [_looked_at(tenure, now) for tenure in self._tenures.values()]
                self._watcher_wakes = min(wakes, default=math.inf)
            self._watcher_bell.wait(self._watcher_wakes - now if wakes else None)

    def _lose(self, tenure: Tenure, reason: str) -> None:
        with self._lock:
            if tenure.lost is not None or tenure.bid.token not in self._tenures:
                return
            tenure.lost = reason
        self._nudge(tenure, self._clock.now())
        self._observer.observe(LeaseGone(**_of(tenure), reason=reason))
        tenure.cut_short()
        self._watcher_bell.ring()

    def _nudge(self, tenure: Tenure, now: float) -> None:
        """Interrupt the body, more and more rarely: one that lands in a finalizer vanishes without a trace."""
        tenure.nudge_at = now + min(10.0, 0.5 * 2.0**tenure.nudges)
        tenure.nudges += 1
        if tenure.interrupt is not None:
            tenure.interrupt()


def _looked_at(tenure: Tenure, now: float) -> float:
    """When the watcher must look at *tenure* again."""
    if tenure.lost is not None:
        return tenure.nudge_at
    stop = tenure.stop if tenure.answer_by is None else max(tenure.stop, tenure.answer_by)
    # Nobody rings when its transaction ends, and the deadline falls back.
    return min(stop, now + validity.lock_looked_at(tenure.bid.ttl)) if tenure.guarded else stop


def _is_still(tenure: Tenure, state: State, stores: Stores) -> bool:
    """Whether the record is in *state* by this very attempt."""
    record = stores.records.read(tenure.bid.stored_key)
    return record is not None and (record.state, record.fence, record.owner) == (state, tenure.fence, tenure.bid.token)


def _renewal(tenure: Tenure, ttl: float) -> Renewal:
    return Renewal(tenure.bid.stored_key, tenure.bid.token, ttl, tenure.probe, waits=not tenure.guarded)


def _of(tenure: Tenure) -> Subject:
    return {"task": tenure.bid.task, "key": tenure.bid.key, "call_id": tenure.bid.call_id}
