"""Keep the leases of this process alive while its tasks run, and notice when one is lost.

Two real threads, started with the first lease: the *keeper* talks to the lease store, the *watcher* only looks at the
clock. So a store that freezes a call cannot keep a body from learning that its deadline has passed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from celery_leases.core import validity
from celery_leases.core.errors import StoreUnavailable
from celery_leases.core.events import LeaseGone, LeaseRenewed, RenewalFailed, Subject
from celery_leases.core.keys import bounded
from celery_leases.core.ports import Clock, Kept, LeaseStore, Observer, RecordStore, Renewal
from celery_leases.core.records import Record, State
from celery_leases.process import native
from celery_leases.tenure import Tenure

TAKEN = "taken by another owner"
FORGOTTEN = "forgotten by the store, and the record has moved on"
RELEASED = "released from outside"

DROP_PATIENCE = 5.0
PURGE_EVERY = 60.0
PURGE_BATCH = 500
PURGE_PAUSE = 0.05


@dataclass(frozen=True, slots=True)
class Stores:
    """Connections of somebody's own to where leases and records are."""

    leases: LeaseStore
    records: RecordStore


class Renewer:
    """All leases of one process. *keeping* is what its keeper uses, and nobody else: stores of its own, whose calls end
    within the tightest ttl / 10. Bodies that ask use *asking*; those in greenlets must not share with a real thread.
    From *purged*, if there is one, a thread of its own deletes what is over.
    """

    def __init__(
        self,
        keeping: Stores,
        asking: Stores,
        observer: Observer,
        clock: Clock,
        purged: RecordStore | None,
    ) -> None:
        self._keeping = keeping
        self._purged = purged
        self._asking = asking
        self._observer = observer
        self._clock = clock
        self._tenures: dict[str, Tenure] = {}
        self._lock = native.allocate_lock()
        self._unstarted = [self._keep, self._watch]
        # At once, as a process may live for one task only.
        self._purge_at = clock.now() if purged is not None else math.inf
        self._purging = False
        self._keeper_bell = native.Bell()
        self._watcher_bell = native.Bell()
        self._keeper_wakes = math.inf
        self._watcher_wakes = math.inf

    def add(self, tenure: Tenure) -> None:
        """Begin to renew and to watch *tenure*."""
        with self._lock:
            while self._unstarted:  # raises RuntimeError where no thread can be had
                native.start_thread(self._unstarted[0])
                self._unstarted.pop(0)
            self._tenures[tenure.bid.token] = tenure
        if tenure.due < self._keeper_wakes:
            self._keeper_bell.ring()
        if tenure.stop < self._watcher_wakes:
            self._watcher_bell.ring()

    def drop(self, tenure: Tenure) -> None:
        """Stop renewing *tenure* and wait for the call in flight: a late one must not revive a released lease."""
        if tenure.bid.token in self._tenures:
            with self._lock:
                self._tenures.pop(tenure.bid.token, None)
        if tenure.in_flight:
            self._let_answer(tenure, DROP_PATIENCE)

    def make_way(self, tenure: Tenure) -> None:
        """Wait for the renewal in flight, if there is one, before the body locks the row it may be waiting for."""
        self._let_answer(tenure, validity.call_timeout(tenure.bid.ttl))

    def _let_answer(self, tenure: Tenure, patience: float) -> None:
        until = self._clock.now() + patience
        while tenure.in_flight and self._clock.now() < until:
            self._clock.sleep(0.002)

    def locked(self, tenure: Tenure, sent: float) -> None:
        """The body's own transaction has locked the row, which is the lease, by a statement sent at *sent*."""
        now = self._clock.now()
        tenure.seen_locked(sent)
        if not tenure.renewable(now):
            tenure.due = validity.renewal_retry(now, tenure.bid.ttl)
            self._keeper_bell.ring()

    def confirm(self, tenure: Tenure) -> None:
        """Ask the store now whether the row is still ours; raises :class:`StoreUnavailable` where it does not say."""
        sent = self._clock.now()
        ttl = tenure.asks_for(sent)
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
                due = _due(tenures, now)
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
                if not self._purging:
                    self._purging = True
                    with suppress(RuntimeError):  # no thread can be had: the next round
                        native.start_thread(self._purge)
                        continue
                    self._purging = False
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
            self._taken(tenure, stores)
        elif kept is Kept.LOCKED:
            tenure.seen_locked(sent)
            tenure.due = validity.renewal_retry(self._clock.now(), tenure.bid.ttl)
        elif kept is Kept.MISSING:
            self._reassert(tenure, sent, stores)
        elif tenure.unverified and not _is_still(tenure, State.RUNNING, stores):
            self._take_away(tenure, stores)
        else:
            tenure.unverified = False
            tenure.extended(sent, ttl)
            if self._observer.hears(LeaseRenewed):
                self._observer.observe(LeaseRenewed(**_of(tenure), remaining=tenure.remaining()))

    def _reassert(self, tenure: Tenure, sent: float, stores: Stores) -> None:
        if tenure.work.completing and _is_still(tenure, State.DONE, stores):
            tenure.complete()
            return
        if not tenure.held or tenure.bid.token not in self._tenures:
            tenure.due = validity.renewal_retry(self._clock.now(), tenure.bid.ttl)
            return
        if not stores.leases.reassert(tenure.bid):
            self._taken(tenure, stores)
            return
        tenure.unverified = True
        if not _is_still(tenure, State.RUNNING, stores):
            self._take_away(tenure, stores)
            return
        tenure.unverified = False
        tenure.extended(sent, tenure.bid.ttl)
        self._observer.observe(LeaseRenewed(**_of(tenure), remaining=tenure.remaining(), reasserted=True))

    def _taken(self, tenure: Tenure, stores: Stores) -> None:
        """The lease is not ours: it is lost, unless the record is still ours, so that another call only looks at it.

        A store that came up empty gives the lease to the first call that asks. That call finds the row running and
        gives the lease back. Until then the renewal counts as failed, and the deadline stays where it is.
        """
        record = stores.records.read(tenure.bid.stored_key)
        if not tenure.held or not _is_by(tenure, record, State.RUNNING):
            self._lose(tenure, TAKEN if record is not None and record.state is State.RUNNING else RELEASED)
        else:
            raise StoreUnavailable(f"{stores.leases.name}: another call looks at the record under the lease", False)

    def _take_away(self, tenure: Tenure, stores: Stores) -> None:
        self._lose(tenure, FORGOTTEN)
        stores.leases.release(tenure.bid.stored_key, tenure.bid.token)

    def _failed(self, tenure: Tenure, error: Exception) -> None:
        now = self._clock.now()
        tenure.due = validity.renewal_retry(now, tenure.bid.ttl)
        if tenure.stop < self._watcher_wakes:  # a transaction has ended, so that its lock counts for less long
            self._watcher_bell.ring()
        self._observer.observe(RenewalFailed(**_of(tenure), error=str(error), remaining=tenure.remaining()))

    def _purge(self) -> None:
        """Delete what is over, in a thread of its own, as no renewal waits for it; the store says whether it is due."""
        try:
            with suppress(Exception):  # the next round, of this process or another, deletes them
                while self._purged is not None and self._purged.purge_in_turn(PURGE_BATCH, PURGE_EVERY):
                    native.Bell().wait(PURGE_PAUSE)
        finally:
            self._purging = False

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
                wakes = [_looked_at(tenure) for tenure in self._tenures.values()]
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


def _due(tenures: Sequence[Tenure], now: float) -> list[Tenure]:
    """The leases to renew now: none before one of them is due, and with that one all that are nearly due."""
    if all(tenure.due > now for tenure in tenures):
        return []
    return [tenure for tenure in tenures if tenure.due <= now + validity.renewed_along(tenure.bid.ttl)]


def _looked_at(tenure: Tenure) -> float:
    """When the watcher must look at *tenure* again."""
    return tenure.stop if tenure.lost is None else tenure.nudge_at


def _is_still(tenure: Tenure, state: State, stores: Stores) -> bool:
    """Whether the record is in *state* by this very attempt."""
    return _is_by(tenure, stores.records.read(tenure.bid.stored_key), state)


def _is_by(tenure: Tenure, record: Record | None, state: State) -> bool:
    return record is not None and (record.state, record.fence, record.owner) == (state, tenure.fence, tenure.bid.token)


def _renewal(tenure: Tenure, ttl: float) -> Renewal:
    return Renewal(tenure.bid.stored_key, tenure.bid.token, ttl, tenure.probe, guarded=tenure.work.guarded)


def _of(tenure: Tenure) -> Subject:
    return {"task": tenure.bid.task, "key": bounded(tenure.bid.key), "call_id": tenure.bid.call_id}
