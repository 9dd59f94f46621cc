"""Renews the leases of this process while its tasks run, and detects lost leases.

Two system threads start with the first lease. The *renewal thread* calls the lease store. The
*deadline thread* only looks at the clock, so a call that hangs in the store does not delay the
interrupt of a body whose deadline has passed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from celery_leases import deadlines, events
from celery_leases.attempt.held_lease import HeldLease
from celery_leases.concurrency import os_threads
from celery_leases.decide.answers import Renewal, RenewalResult
from celery_leases.errors import StoreUnavailable
from celery_leases.events import LeaseRenewed, RenewalFailed, Subject
from celery_leases.keys import bounded
from celery_leases.record import Record, State
from celery_leases.stores.interfaces import Clock, LeaseStore, Observer

if TYPE_CHECKING:  # SQLAlchemy is imported when the first store is opened
    from celery_leases.stores.sql.records import SqlRecordStore

HELD_BY_OTHER = "held by another owner"
SUPERSEDED = "missing in the lease store, and a later attempt owns the record"
RELEASED = "released from outside"

_due_time = attrgetter("due")

DROP_TIMEOUT = 5.0
PURGE_EVERY = 60.0
PURGE_BATCH = 500
PURGE_PAUSE = 0.05


class Stores(NamedTuple):
    """A lease store and a record store over connections that nobody else uses."""

    leases: LeaseStore
    records: SqlRecordStore


class Renewer:
    """Renews all leases of one process.

    Only the renewal thread uses *stores*: they have connections of their own, and their calls end
    within a tenth of the shortest ttl. What a body asks for uses the stores *for_bodies*, because a
    greenlet must not share connections with a system thread. A third thread deletes expired records
    from *purged*, if given.
    """

    def __init__(
        self,
        stores: Stores,
        for_bodies: Stores,
        observer: Observer,
        clock: Clock,
        purged: SqlRecordStore | None,
    ) -> None:
        self._stores = stores
        self._for_bodies = for_bodies
        self._purged = purged
        self._observer = observer
        self._clock = clock
        self._held_leases: dict[str, HeldLease] = {}
        self._lock = os_threads.allocate_lock()
        self._unstarted = [self._renew_leases, self._watch_deadlines]
        # The first purge is due at once, because a process may live for one task only.
        self._purge_at = self._clock.now() if purged is not None else math.inf
        self._purging = False
        self._closed = False
        self._renewal_wakeup = os_threads.Wakeup()
        self._deadline_wakeup = os_threads.Wakeup()
        self._renewal_wakes_at = math.inf
        self._deadline_wakes_at = math.inf

    def add(self, held_lease: HeldLease) -> None:
        """Begin to renew *held_lease* and to watch its deadline."""
        with self._lock:
            while self._unstarted:  # raises RuntimeError if no thread can be started
                os_threads.start_thread(self._unstarted[0])
                self._unstarted.pop(0)
            self._held_leases[held_lease.call.token] = held_lease
        if held_lease.due < self._renewal_wakes_at:
            self._renewal_wakeup.notify()
        if held_lease.own_stop < self._deadline_wakes_at:  # the body has not begun
            self._deadline_wakeup.notify()

    def drop(self, held_lease: HeldLease) -> None:
        """Stop renewing *held_lease*, and wait for a renewal in progress: a late one must not
        write a released lease again.
        """
        if held_lease.call.token in self._held_leases:
            with self._lock:
                self._held_leases.pop(held_lease.call.token, None)
        if held_lease.in_flight:
            self._wait_for_renewal(held_lease, DROP_TIMEOUT)

    def close(self) -> None:
        """Stop deleting expired records, and end the threads once no lease is held.

        Waits at most 5 seconds for a deletion in progress, so that the caller can then close the
        connections.
        """
        with self._lock:
            self._closed = True
            self._purge_at = math.inf
        self._renewal_wakeup.notify()
        self._deadline_wakeup.notify()
        until = self._clock.now() + DROP_TIMEOUT
        while self._purging and self._clock.now() < until:
            self._clock.sleep(0.002)

    @property
    def held_leases(self) -> list[HeldLease]:
        """The leases that are renewed and watched now."""
        with self._lock:
            return list(self._held_leases.values())

    def number_held(self) -> int:
        """How many leases are renewed and watched now."""
        return len(self._held_leases)

    def lose(self, held_lease: HeldLease, reason: str) -> None:
        """Mark *held_lease* as lost and interrupt its body, whatever the store says."""
        with self._lock:
            if held_lease.lost is not None or held_lease.call.token not in self._held_leases:
                return
            held_lease.lost = reason
        self._interrupt_body(held_lease, self._clock.now())
        self._observer.observe(events.LeaseLost(**_of(held_lease), reason=reason))
        held_lease.kill_if_key_is_free()
        self._deadline_wakeup.notify()

    def wait_for_renewal(self, held_lease: HeldLease) -> None:
        """Wait for a renewal in progress; called before the body locks the row, for which that
        renewal would have to wait.
        """
        self._wait_for_renewal(held_lease, deadlines.call_timeout(held_lease.call.options.ttl))

    def _wait_for_renewal(self, held_lease: HeldLease, timeout: float) -> None:
        until = self._clock.now() + timeout
        while held_lease.in_flight and self._clock.now() < until:
            self._clock.sleep(0.002)

    def row_locked(self, held_lease: HeldLease, sent: float) -> None:
        """Note that a statement sent at *sent*, in a transaction of the body's own, has locked the
        row that is the lease.
        """
        now = self._clock.now()
        held_lease.seen_locked(sent)
        if not held_lease.renewable(now):
            with self._lock:
                held_lease.due = deadlines.renewal_retry(now, held_lease.call.options.ttl)
            self._renewal_wakeup.notify()

    def confirm(self, held_lease: HeldLease) -> None:
        """Ask the store now whether the attempt still owns the row.

        Raises :class:`StoreUnavailable` if the store does not answer.
        """
        self._renew_now(held_lease, held_lease.requested_ttl(self._clock.now()))

    def extend(self, held_lease: HeldLease, seconds: float) -> None:
        """Make the lease last at least *seconds* from now; raises :class:`LeaseLost` or
        :class:`StoreUnavailable`.
        """
        held_lease.check()
        self._renew_now(held_lease, seconds)
        held_lease.check()

    def _renew_now(self, held_lease: HeldLease, ttl: float) -> None:
        sent = self._clock.now()
        (result,) = self._for_bodies.leases.renew([_renewal(held_lease, ttl)])
        self._apply_result(held_lease, result, sent, ttl, self._for_bodies)

    def has_completed(self, held_lease: HeldLease) -> bool:
        """Whether this attempt has completed the record; raises :class:`StoreUnavailable`."""
        return _is_still(held_lease, State.DONE, self._for_bodies)

    def _may_end(self, thread: Callable[[], None]) -> bool:
        """Whether *thread* can end now; :meth:`add` starts it again. Called under the lock."""
        if not self._closed or self._held_leases:
            return False
        self._unstarted.append(thread)
        return True

    # -- the renewal thread ------------------------------------------------------------------------

    def _renew_leases(self) -> None:
        while True:
            now = self._clock.now()
            with self._lock:
                if self._may_end(self._renew_leases):
                    return
                due = self._take_due(now)
                next_due = min(map(_due_time, self._held_leases.values()), default=math.inf)
                self._renewal_wakes_at = min(next_due, self._purge_at)
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
                    # If no thread can be started, the next round tries again.
                    with suppress(RuntimeError):
                        os_threads.start_thread(self._purge)
                        continue
                    self._purging = False
                continue
            self._renewal_wakeup.wait(self._renewal_wakes_at - now)

    def _take_due(self, now: float) -> list[HeldLease]:
        """The leases to renew now: none until one of them is due, and then also those that are
        almost due. Called under the lock.
        """
        held_leases = self._held_leases.values()
        if min(map(_due_time, held_leases), default=math.inf) > now:
            return []
        due = []
        for held_lease in held_leases:
            if held_lease.due <= now + deadlines.renewal_batch_window(held_lease.call.options.ttl):
                if held_lease.needs_renewer(now):
                    held_lease.in_flight = True
                    due.append(held_lease)
                else:
                    held_lease.due = math.inf  # until its row is locked, or the body extends it
        return due

    def _renew(self, due: list[HeldLease]) -> None:
        sent = self._clock.now()
        try:
            renewals = [_renewal(held_lease, held_lease.requested_ttl(sent)) for held_lease in due]
            answers = list(zip(due, renewals, self._stores.leases.renew(renewals), strict=True))
        except Exception as error:  # noqa: BLE001 - whatever happens, the thread goes on and the deadlines decide
            for held_lease in due:
                self._renewal_failed(held_lease, error)
            return
        for held_lease, renewal, result in answers:
            try:
                self._apply_result(held_lease, result, sent, renewal.ttl, self._stores, late=True)
            except Exception as error:  # noqa: BLE001 - as above; the other leases are not affected
                self._renewal_failed(held_lease, error)

    def _apply_result(
        self,
        held_lease: HeldLease,
        result: RenewalResult | StoreUnavailable,
        sent: float,
        ttl: float,
        stores: Stores,
        *,
        late: bool = False,
    ) -> None:
        """Apply the answer to a renewal sent at *sent*. *late*: report how late it was sent."""
        if isinstance(result, StoreUnavailable):
            raise result
        if held_lease.is_completed:
            held_lease.due = deadlines.renewal_due(sent, held_lease.call.options.ttl)
        elif result is RenewalResult.OTHER:
            self._held_by_other(held_lease, stores)
        elif result is RenewalResult.LOCKED:
            held_lease.seen_locked(sent)
            with self._lock:
                held_lease.due = deadlines.renewal_retry(
                    self._clock.now(), held_lease.call.options.ttl
                )
        elif result is RenewalResult.MISSING:
            self._reassert(held_lease, sent, stores)
        elif held_lease.unverified and not _is_still(held_lease, State.RUNNING, stores):
            self._lose_and_release(held_lease, stores)
        else:
            delay = max(0.0, sent - held_lease.due) if late else None
            held_lease.unverified = False
            held_lease.extended(sent, ttl)
            if self._observer.wants(LeaseRenewed):
                self._observer.observe(
                    LeaseRenewed(**_of(held_lease), remaining=held_lease.remaining(), late=delay)
                )

    def _reassert(self, held_lease: HeldLease, sent: float, stores: Stores) -> None:
        if held_lease.body_state.completing and _is_still(held_lease, State.DONE, stores):
            held_lease.completed()  # the body's own commit has released the lease
            return
        if not held_lease.held or held_lease.call.token not in self._held_leases:
            held_lease.due = deadlines.renewal_retry(self._clock.now(), held_lease.call.options.ttl)
            return
        if not stores.leases.reassert(held_lease.call, held_lease.lasts(self._clock.now())):
            self._held_by_other(held_lease, stores)
            return
        held_lease.unverified = True
        if not _is_still(held_lease, State.RUNNING, stores):
            self._lose_and_release(held_lease, stores)
            return
        held_lease.unverified = False
        held_lease.extended(sent, held_lease.call.options.ttl)
        self._observer.observe(
            LeaseRenewed(**_of(held_lease), remaining=held_lease.remaining(), reasserted=True)
        )

    def _held_by_other(self, held_lease: HeldLease, stores: Stores) -> None:
        """Another token holds the lease: the lease is lost, unless this attempt still owns the
        record.

        A store that was emptied gives the lease to the first call that requests it. That call finds
        the record ``running`` and releases the lease. Until then the renewal counts as failed, and
        the deadline does not move.
        """
        record = stores.records.read(held_lease.call.key.stored)
        if (
            record is not None
            and (record.owner, record.fence) == (held_lease.call.token, held_lease.fence)
            and record.state is not State.RUNNING
        ):
            # This attempt has written its outcome, and does not have the reply yet.
            held_lease.due = deadlines.renewal_due(self._clock.now(), held_lease.call.options.ttl)
            return
        if not held_lease.held or not _is_by(held_lease, record, State.RUNNING):
            self.lose(
                held_lease,
                HELD_BY_OTHER if record is not None and record.state is State.RUNNING else RELEASED,
            )
        else:
            raise StoreUnavailable(
                f"{stores.leases.name}: another call holds the lease while it reads the record",
                False,
            )

    def _lose_and_release(self, held_lease: HeldLease, stores: Stores) -> None:
        self.lose(held_lease, SUPERSEDED)
        stores.leases.release(held_lease.call.key.stored, held_lease.call.token)

    def _renewal_failed(self, held_lease: HeldLease, error: Exception) -> None:
        now = self._clock.now()
        held_lease.due = deadlines.renewal_retry(now, held_lease.call.options.ttl)
        # A transaction may have ended, so that its lock counts for a shorter time.
        if held_lease.stop_deadline < self._deadline_wakes_at:
            self._deadline_wakeup.notify()
        self._observer.observe(
            RenewalFailed(**_of(held_lease), error=str(error), remaining=held_lease.remaining())
        )

    def _purge(self) -> None:
        """Delete expired records, in a thread of its own because renewals must not wait for it. The
        store decides whether a purge is due.
        """
        try:
            with suppress(Exception):  # the next purge, of this process or another, deletes them
                while (
                    self._purged is not None
                    and not self._closed
                    and self._purged.purge_in_turn(PURGE_BATCH, PURGE_EVERY)
                ):
                    os_threads.Wakeup().wait(PURGE_PAUSE)
        finally:
            self._purging = False

    # -- the deadline thread -----------------------------------------------------------------------

    def _watch_deadlines(self) -> None:
        while True:
            now = self._clock.now()
            with self._lock:
                if self._may_end(self._watch_deadlines):
                    return
                held_leases = list(self._held_leases.values())
            for held_lease in held_leases:
                if held_lease.lost is None and (reason := held_lease.overdue(now)):
                    self.lose(held_lease, reason)
                elif held_lease.lost is not None and held_lease.next_interrupt <= now:
                    self._interrupt_body(held_lease, now)
            with self._lock:
                wakes = [_next_check(held_lease) for held_lease in self._held_leases.values()]
                self._deadline_wakes_at = min(wakes, default=math.inf)
            self._deadline_wakeup.wait(self._deadline_wakes_at - now if wakes else None)

    def _interrupt_body(self, held_lease: HeldLease, now: float) -> None:
        """Interrupt the body, and set the time of the next interrupt, at growing intervals: an
        exception that is raised in a finalizer vanishes.
        """
        held_lease.next_interrupt = now + min(10.0, 0.5 * 2.0**held_lease.interrupts)
        held_lease.interrupts += 1
        if held_lease.interrupt is not None:
            held_lease.interrupt()


def _next_check(held_lease: HeldLease) -> float:
    """When the deadline thread must check *held_lease* again."""
    return held_lease.stop_deadline if held_lease.lost is None else held_lease.next_interrupt


def _is_still(held_lease: HeldLease, state: State, stores: Stores) -> bool:
    """Whether the record is in *state*, and this attempt owns it."""
    return _is_by(held_lease, stores.records.read(held_lease.call.key.stored), state)


def _is_by(held_lease: HeldLease, record: Record | None, state: State) -> bool:
    return record is not None and record.is_attempt(state, held_lease.call.token, held_lease.fence)


def _renewal(held_lease: HeldLease, ttl: float) -> Renewal:
    return Renewal(
        held_lease.call.key.stored,
        held_lease.call.token,
        ttl,
        guarded=held_lease.body_state.guarded,
        slot=held_lease.slot,
    )


def _of(held_lease: HeldLease) -> Subject:
    return {
        "task": held_lease.call.task,
        "key": bounded(held_lease.call.key.key),
        "call_id": held_lease.call.call_id,
    }
