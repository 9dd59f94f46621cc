"""Renews the leases of this process while its tasks run, and detects a lost one.

There are two real threads, started with the first lease: the *keeper* calls the lease store, the
*watcher* only looks at the clock. So a store that freezes a call does not delay the interrupt of a
body whose deadline has passed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress

from celery_leases.attempt.context import Context
from celery_leases.attempt.held_lease import HeldLease
from celery_leases.concurrency import os_threads
from celery_leases.errors import StoreUnavailable
from celery_leases.protocol import deadlines
from celery_leases.protocol.events import LeaseGone, LeaseRenewed, RenewalFailed, Subject
from celery_leases.protocol.keys import bounded
from celery_leases.protocol.ports import RecordStore, Renewal, RenewalResult
from celery_leases.protocol.records import Record, State

TAKEN = "taken by another owner"
FORGOTTEN = "missing in the lease store, and a later attempt owns the record"
RELEASED = "released from outside"

DROP_PATIENCE = 5.0
PURGE_EVERY = 60.0
PURGE_BATCH = 500
PURGE_PAUSE = 0.05


class Renewer:
    """All leases of one process. Only the keeper uses the stores of *keeping*, which have
    connections of their own, and whose calls end within the tightest ttl / 10. Bodies use those of
    *asking*; bodies in greenlets must not share connections with a real thread. If *purged* is
    given, a thread of its own deletes expired records there.
    """

    def __init__(self, keeping: Context, asking: Context, purged: RecordStore | None) -> None:
        self._keeping = keeping
        self._purged = purged
        self._asking = asking
        self._observer = asking.observer
        self._clock = asking.clock
        self._held_leases: dict[str, HeldLease] = {}
        self._lock = os_threads.allocate_lock()
        self._unstarted = [self._keep, self._watch]
        # At once, because a process may live for one task only.
        self._purge_at = self._clock.now() if purged is not None else math.inf
        self._purging = False
        self._closed = False
        self._keeper_bell = os_threads.Wakeup()
        self._watcher_bell = os_threads.Wakeup()
        self._keeper_wakes = math.inf
        self._watcher_wakes = math.inf

    def add(self, held_lease: HeldLease) -> None:
        """Begin to renew and watch *held_lease*."""
        with self._lock:
            while self._unstarted:  # raises RuntimeError if no thread can be started
                os_threads.start_thread(self._unstarted[0])
                self._unstarted.pop(0)
            self._held_leases[held_lease.claim_request.token] = held_lease
        if held_lease.due < self._keeper_wakes:
            self._keeper_bell.ring()
        if held_lease.stop < self._watcher_wakes:
            self._watcher_bell.ring()

    def drop(self, held_lease: HeldLease) -> None:
        """Stop renewing *held_lease* and wait for the renewal in progress: a late one must not
        revive a released lease.
        """
        if held_lease.claim_request.token in self._held_leases:
            with self._lock:
                self._held_leases.pop(held_lease.claim_request.token, None)
        if held_lease.in_flight:
            self._let_answer(held_lease, DROP_PATIENCE)

    def close(self) -> None:
        """Delete no more expired records, and end the threads once no lease is held.

        Waits for a deletion in progress, at most 5 seconds, so that the caller may close the
        connections.
        """
        with self._lock:
            self._closed = True
            self._purge_at = math.inf
        self._keeper_bell.ring()
        self._watcher_bell.ring()
        until = self._clock.now() + DROP_PATIENCE
        while self._purging and self._clock.now() < until:
            self._clock.sleep(0.002)

    @property
    def held_leases(self) -> list[HeldLease]:
        """The leases that are renewed and watched now."""
        with self._lock:
            return list(self._held_leases.values())

    def lose(self, held_lease: HeldLease, reason: str) -> None:
        """Make *held_lease* lost and interrupt its body, whatever the store says."""
        self._lose(held_lease, reason)

    def make_way(self, held_lease: HeldLease) -> None:
        """Wait for the renewal in progress, if any, before the body locks the row that the renewal
        may be waiting for.
        """
        self._let_answer(held_lease, deadlines.call_timeout(held_lease.claim_request.ttl))

    def _let_answer(self, held_lease: HeldLease, patience: float) -> None:
        until = self._clock.now() + patience
        while held_lease.in_flight and self._clock.now() < until:
            self._clock.sleep(0.002)

    def locked(self, held_lease: HeldLease, sent: float) -> None:
        """The body's own transaction has locked the row, which is the lease, by a statement sent at
        *sent*.
        """
        now = self._clock.now()
        held_lease.seen_locked(sent)
        if not held_lease.renewable(now):
            held_lease.due = deadlines.renewal_retry(now, held_lease.claim_request.ttl)
            self._keeper_bell.ring()

    def confirm(self, held_lease: HeldLease) -> None:
        """Ask the store now whether the attempt still owns the row; raises
        :class:`StoreUnavailable` if the store does not answer.
        """
        sent = self._clock.now()
        ttl = held_lease.asks_for(sent)
        self._take_note(
            held_lease,
            self._asking.leases.renew([_renewal(held_lease, ttl)])[0],
            sent,
            ttl,
            self._asking,
        )

    def extend(self, held_lease: HeldLease, seconds: float) -> None:
        """Make the lease last at least *seconds* from now; raises :class:`LeaseLost` or
        :class:`StoreUnavailable`.
        """
        held_lease.check()
        sent = self._clock.now()
        (kept,) = self._asking.leases.renew([_renewal(held_lease, seconds)])
        self._take_note(held_lease, kept, sent, seconds, self._asking)
        held_lease.check()

    def has_completed(self, held_lease: HeldLease) -> bool:
        """Whether this attempt has completed the record; raises :class:`StoreUnavailable`."""
        return _is_still(held_lease, State.DONE, self._asking)

    def _ends(self, thread: Callable[[], None]) -> bool:
        """Whether *thread* ends now; :meth:`add` starts it again. Under the lock."""
        if not self._closed or self._held_leases:
            return False
        self._unstarted.append(thread)
        return True

    # -- the keeper --------------------------------------------------------------------------------

    def _keep(self) -> None:
        while True:
            now = self._clock.now()
            with self._lock:
                if self._ends(self._keep):
                    return
                held_leases = [
                    held_lease
                    for held_lease in self._held_leases.values()
                    if held_lease.looked_after(now)
                ]
                due = _due(held_leases, now)
                self._keeper_wakes = min(
                    [held_lease.due for held_lease in held_leases] + [self._purge_at]
                )
                for held_lease in due:
                    held_lease.in_flight = True
            if due:
                try:
                    self._renew(due)
                finally:
                    for held_lease in due:
                        held_lease.in_flight = False
                continue
            if now >= self._purge_at:
                with self._lock:
                    self._purge_at = math.inf if self._closed else now + PURGE_EVERY
                if not self._purging:
                    self._purging = True
                    with suppress(
                        RuntimeError
                    ):  # no thread can be started: the next round tries again
                        os_threads.start_thread(self._purge)
                        continue
                    self._purging = False
                continue
            self._keeper_bell.wait(self._keeper_wakes - now)

    def _renew(self, due: list[HeldLease]) -> None:
        sent = self._clock.now()
        try:
            renewals = [_renewal(held_lease, held_lease.asks_for(sent)) for held_lease in due]
            answers = list(zip(due, renewals, self._keeping.leases.renew(renewals), strict=True))
        except Exception as error:  # noqa: BLE001 - whatever happens, the keeper goes on and the deadlines decide
            for held_lease in due:
                self._failed(held_lease, error)
            return
        for held_lease, renewal, kept in answers:
            try:
                self._take_note(held_lease, kept, sent, renewal.ttl, self._keeping)
            except Exception as error:  # noqa: BLE001 - as above, and one lease's trouble is not that of the others
                self._failed(held_lease, error)

    def _take_note(
        self,
        held_lease: HeldLease,
        kept: RenewalResult | StoreUnavailable,
        sent: float,
        ttl: float,
        stores: Context,
    ) -> None:
        if isinstance(kept, StoreUnavailable):
            raise kept
        if kept is RenewalResult.OTHER:
            self._taken(held_lease, stores)
        elif kept is RenewalResult.LOCKED:
            held_lease.seen_locked(sent)
            held_lease.due = deadlines.renewal_retry(
                self._clock.now(), held_lease.claim_request.ttl
            )
        elif kept is RenewalResult.MISSING:
            self._reassert(held_lease, sent, stores)
        elif held_lease.unverified and not _is_still(held_lease, State.RUNNING, stores):
            self._take_away(held_lease, stores)
        else:
            late = max(0.0, sent - held_lease.due) if stores is self._keeping else None
            held_lease.unverified = False
            held_lease.extended(sent, ttl)
            if self._observer.wants(LeaseRenewed):
                self._observer.observe(
                    LeaseRenewed(**_of(held_lease), remaining=held_lease.remaining(), late=late)
                )

    def _reassert(self, held_lease: HeldLease, sent: float, stores: Context) -> None:
        if held_lease.work.completing and _is_still(held_lease, State.DONE, stores):
            held_lease.complete()
            return
        if not held_lease.held or held_lease.claim_request.token not in self._held_leases:
            held_lease.due = deadlines.renewal_retry(
                self._clock.now(), held_lease.claim_request.ttl
            )
            return
        if not stores.leases.reassert(held_lease.claim_request):
            self._taken(held_lease, stores)
            return
        held_lease.unverified = True
        if not _is_still(held_lease, State.RUNNING, stores):
            self._take_away(held_lease, stores)
            return
        held_lease.unverified = False
        held_lease.extended(sent, held_lease.claim_request.ttl)
        self._observer.observe(
            LeaseRenewed(**_of(held_lease), remaining=held_lease.remaining(), reasserted=True)
        )

    def _taken(self, held_lease: HeldLease, stores: Context) -> None:
        """The lease has another token: it is lost, unless the attempt still owns the record, so
        that another call only reads it.

        An emptied store gives the lease to the first call that requests it. That call finds the row
        running and gives the lease back. Until then the renewal counts as failed, and the deadline
        does not move.
        """
        record = stores.records.read(held_lease.claim_request.stored_key)
        if not held_lease.held or not _is_by(held_lease, record, State.RUNNING):
            self._lose(
                held_lease,
                TAKEN if record is not None and record.state is State.RUNNING else RELEASED,
            )
        else:
            raise StoreUnavailable(
                f"{stores.leases.name}: another call holds the lease while it reads the record",
                False,
            )

    def _take_away(self, held_lease: HeldLease, stores: Context) -> None:
        self._lose(held_lease, FORGOTTEN)
        stores.leases.release(held_lease.claim_request.stored_key, held_lease.claim_request.token)

    def _failed(self, held_lease: HeldLease, error: Exception) -> None:
        now = self._clock.now()
        held_lease.due = deadlines.renewal_retry(now, held_lease.claim_request.ttl)
        if (
            held_lease.stop < self._watcher_wakes
        ):  # a transaction has ended, so its lock counts for less long
            self._watcher_bell.ring()
        self._observer.observe(
            RenewalFailed(**_of(held_lease), error=str(error), remaining=held_lease.remaining())
        )

    def _purge(self) -> None:
        """Delete expired records in a thread of its own, because renewals must not wait for that;
        the store decides whether it is due.
        """
        try:
            with suppress(Exception):  # the next round, of this process or another, deletes them
                while (
                    self._purged is not None
                    and not self._closed
                    and self._purged.purge_in_turn(PURGE_BATCH, PURGE_EVERY)
                ):
                    os_threads.Wakeup().wait(PURGE_PAUSE)
        finally:
            self._purging = False

    # -- the watcher -------------------------------------------------------------------------------

    def _watch(self) -> None:
        while True:
            now = self._clock.now()
            with self._lock:
                if self._ends(self._watch):
                    return
                held_leases = list(self._held_leases.values())
            for held_lease in held_leases:
                if held_lease.lost is None and (reason := held_lease.overdue(now)):
                    self._lose(held_lease, reason)
                elif held_lease.lost is not None and held_lease.nudge_at <= now:
                    self._nudge(held_lease, now)
            with self._lock:
                wakes = [_looked_at(held_lease) for held_lease in self._held_leases.values()]
                self._watcher_wakes = min(wakes, default=math.inf)
            self._watcher_bell.wait(self._watcher_wakes - now if wakes else None)

    def _lose(self, held_lease: HeldLease, reason: str) -> None:
        with self._lock:
            if (
                held_lease.lost is not None
                or held_lease.claim_request.token not in self._held_leases
            ):
                return
            held_lease.lost = reason
        self._nudge(held_lease, self._clock.now())
        self._observer.observe(LeaseGone(**_of(held_lease), reason=reason))
        held_lease.cut_short()
        self._watcher_bell.ring()

    def _nudge(self, held_lease: HeldLease, now: float) -> None:
        """Interrupt the body, at growing intervals: an exception in a finalizer vanishes without a
        trace.
        """
        held_lease.nudge_at = now + min(10.0, 0.5 * 2.0**held_lease.nudges)
        held_lease.nudges += 1
        if held_lease.interrupt is not None:
            held_lease.interrupt()


def _due(held_leases: Sequence[HeldLease], now: float) -> list[HeldLease]:
    """The leases to renew now: none before one of them is due, and with that one all that are
    nearly due.
    """
    if all(held_lease.due > now for held_lease in held_leases):
        return []
    return [
        held_lease
        for held_lease in held_leases
        if held_lease.due <= now + deadlines.renewal_batch_window(held_lease.claim_request.ttl)
    ]


def _looked_at(held_lease: HeldLease) -> float:
    """When the watcher must check *held_lease* again."""
    return held_lease.stop if held_lease.lost is None else held_lease.nudge_at


def _is_still(held_lease: HeldLease, state: State, stores: Context) -> bool:
    """Whether the record is in *state* by this attempt."""
    return _is_by(held_lease, stores.records.read(held_lease.claim_request.stored_key), state)


def _is_by(held_lease: HeldLease, record: Record | None, state: State) -> bool:
    return record is not None and record.is_attempt(
        state, held_lease.claim_request.token, held_lease.fence
    )


def _renewal(held_lease: HeldLease, ttl: float) -> Renewal:
    return Renewal(
        held_lease.claim_request.stored_key,
        held_lease.claim_request.token,
        ttl,
        held_lease.probe,
        guarded=held_lease.work.guarded,
    )


def _of(held_lease: HeldLease) -> Subject:
    return {
        "task": held_lease.claim_request.task,
        "key": bounded(held_lease.claim_request.key),
        "call_id": held_lease.claim_request.call_id,
    }
