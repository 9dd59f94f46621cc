"""A lease as its holder sees it: until when it counts, by the clock and the store's replies; and
the state of its body, which the renewer and the run read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from celery_leases import deadlines
from celery_leases.call import Call
from celery_leases.errors import LeaseLost, StoreUnavailable
from celery_leases.stores.interfaces import Clock
from celery_leases.text.cleaning import printable

if TYPE_CHECKING:  # SQLAlchemy is imported when the first store is opened
    from celery_leases.stores.sql.transactions import JoinedTransaction

DEADLINE: Final = "not renewed in time"
HELD_TOO_LONG: Final = "held for its time_limit, or 24 h without one"
NOT_EXTENDED: Final = (
    "not extended in time, and lease_renew=False: call self.lease.extend(seconds) before it ends, "
    "make lease_ttl longer, or write lease_renew=True"
)
CLEANUP_TIME: Final = 0.4
"""Seconds for which an interrupted body is not interrupted again, so that it can clean up."""


class BodyState:
    """The state of one attempt's body. The lease object writes it, as do Celery's methods of the
    task; the run, the delivery and the renewer's threads read it.
    """

    def __init__(self) -> None:
        #: The exception by which Celery learns that the call goes on in another message: ``Retry``
        #: after ``retry()`` and if the body publishes its call again, ``Ignore`` after
        #: ``replace()``.
        self.goes_on: Any = None
        #: The signature with which the task has replaced itself.
        self.replacement: Any = None
        #: The number of retries in the message with which the body has published its call again.
        self.published_retries: int | None = None
        #: The state that the body has set last for its call.
        self.reported: str | None = None
        #: The stored key and the id of the call whose callbacks are to be marked as sent.
        self.callbacks_of: tuple[str, str] | None = None
        #: What the body sees as ``self.lease``, once it has asked for it.
        self.lease: Any = None
        #: The attempt has finished an effect or saved its progress.
        self.progressed = False
        #: The JSON text of the unsaved progress, as a function because the progress changes often;
        #: ``None``: all is saved.
        self.unsaved_progress: Callable[[], str] | None = None
        #: ``complete()`` was called.
        self.completing = False
        self._transaction: JoinedTransaction | None = None
        self._locking = False
        #: The transactions that the body uses, so that they end with the body at the latest.
        self.joined: list[JoinedTransaction] = []

    @property
    def guarded(self) -> bool:
        """Whether a transaction of the body's own has locked the record's row, or is locking it;
        asks no server.
        """
        transaction = self._transaction
        return transaction is not None and (self._locking or transaction.is_open())

    def holds_row_lock(self) -> bool:
        """Whether a transaction of the body's own has locked the record's row; asks the server if
        the connection does not show it.
        """
        transaction = self._transaction
        if transaction is None or not transaction.is_over():
            return transaction is not None
        self._transaction = None
        return False

    def locked_by_another(self, given: Any) -> bool:
        """Whether *given* would wait for the record's row, because another transaction of this body
        has locked it.
        """
        transaction = self._transaction
        if transaction is None or not transaction.is_open():
            return False
        return not transaction.is_of(given) and self.holds_row_lock()

    def join(self, transaction: JoinedTransaction) -> None:
        """Note that the body uses *transaction*."""
        self.joined = [joined for joined in self.joined if joined.is_open()] + [transaction]

    @contextmanager
    def locking(self, transaction: JoinedTransaction) -> Iterator[None]:
        """Enclose the statement by which *transaction* locks the record's row. If the statement
        raises, the state is as before.
        """
        before, self._transaction, self._locking = self._transaction, transaction, True
        try:
            yield
        except BaseException:
            self._transaction = before
            raise
        finally:
            self._locking = False

    def roll_back_open(self) -> bool:
        """Roll back the transactions that the body left open, because no code can commit them any
        more and they would keep the row locked; return whether there was one.
        """
        self._transaction = None
        joined, self.joined = self.joined, []
        return sum(transaction.roll_back() for transaction in joined) > 0


class HeldLease:
    """A lease as its holder sees it.

    The lease counts until :attr:`stop_deadline`, which :meth:`extended`, :meth:`seen_locked` and
    :meth:`completed` move. The local clock alone decides whether it still counts, so a renewer
    that died does no harm. A lost lease stays lost, whatever a late reply says.
    """

    def __init__(
        self,
        call: Call,
        sent: float,
        clock: Clock,
        *,
        renew: bool = True,
        max_hold: float = 86_400.0,
    ) -> None:
        self.call = call
        #: When it was requested, by the local clock.
        self.since = sent
        self.fence = 0
        self.body_state = BodyState()
        #: The group of which this attempt holds a slot, and its limit; renewed with the lease.
        self.slot: tuple[str, int] | None = None
        #: The slot is the only one, so that the success of this attempt opens the group.
        self.probes = False
        if call.ask is not None and call.ask.limit:
            self.slot = (call.group or "", call.ask.limit)
        self.hard_deadline = deadlines.hard_deadline(sent, call.options.ttl)
        #: When the body must stop if no transaction of its own has locked the row.
        self.own_stop = deadlines.stop_deadline(self.hard_deadline, call.options.ttl)
        #: Why the lease is lost.
        self.lost: str | None = None
        #: Called from another thread when the lease is lost, and again until the body has ended;
        #: must not block.
        self.interrupt: Callable[[], None] | None = None
        #: Called with :attr:`kill_deadline` whenever it changes, if there is a kill timer.
        self.move_kill_timer: Callable[[float], None] | None = None
        #: Called by :meth:`check` while only a row lock proves the lease: asks the store, and
        #: applies the answer to this lease before it returns.
        self.confirm: Callable[[], None] | None = None
        #: When to renew next.
        self.due = deadlines.renewal_due(sent, call.options.ttl)
        #: A call of the renewer for this lease has not returned yet.
        self.in_flight = False
        #: The body has committed the done record, and only its slot is renewed.
        self.is_completed = False
        #: The lease was missing in the store and was written again; the record was not read yet.
        self.unverified = False
        #: How often the body was interrupted, and when to interrupt it next.
        self.interrupts = 0
        self.next_interrupt = 0.0
        self._clock = clock
        self._interrupted_at = -math.inf
        self._renewed = sent
        self._seen_locked = -math.inf
        self._hold_until = sent + max_hold
        self._renews = renew
        self._renew_until = self._hold_until if renew else sent

    def probe(self) -> None:
        """Note that the attempt got the only slot of its group."""
        limit = self.call.ask.limit if self.call.ask is not None else 0
        self.slot, self.probes = (self.call.group or "", limit), True

    # -- by the clock ------------------------------------------------------------------------------

    @property
    def stop_deadline(self) -> float:
        """When the body must stop; see :func:`celery_leases.deadlines.stop_deadline`.

        With database leases, a transaction of the body's own that has locked the row blocks every
        claim, and every renewal too. Then that lock is the lease: it counts for
        :func:`~celery_leases.deadlines.lock_counts_for` after it was last seen, and at
        most until the task's ``time_limit``.
        """
        if self._seen_locked <= self._renewed:  # not seen locked since the last renewal
            return self.own_stop
        believed = deadlines.lock_counts_for(self.call.options.ttl, still=self.body_state.guarded)
        return max(self.own_stop, min(self._hold_until, self._seen_locked + believed))

    @property
    def kill_deadline(self) -> float:
        """Deadline for the kill timer: as long after :attr:`stop_deadline` as the lease expires
        after its own stop deadline.
        """
        return self.stop_deadline + self.hard_deadline - self.own_stop

    @property
    def held(self) -> bool:
        """Whether the lease still counts."""
        if self.lost is not None:
            return False
        now = self._clock.now()
        return now < self.own_stop or now < self.stop_deadline

    def needs_row_lock(self, now: float) -> bool:
        """Whether the lease has reached its own stop deadline, so that it counts only while a
        transaction of the body's own has locked the row.
        """
        return now >= self.own_stop

    def remaining(self) -> float:
        """Seconds until the body must stop; 0 when the lease is lost."""
        return max(0.0, self.stop_deadline - self._clock.now()) if self.lost is None else 0.0

    def connection_wait(self) -> float:
        """For how many seconds this attempt may wait for a connection of the pool."""
        return deadlines.connection_timeout(self.call.options.ttl, self.remaining())

    def check(self) -> None:
        """Raise :class:`LeaseLost` unless the lease still counts.

        While only a row lock proves the lease, ask the store first: the lock may have ended since
        it was last seen. Raises :class:`StoreUnavailable` if the store does not answer then.
        """
        if self.lost is None and self._clock.now() < self.own_stop:
            return
        if self.confirm is not None and self.held:
            try:
                self.confirm()
            except StoreUnavailable:
                if self.held:
                    raise
        if not self.held:
            reason = self.lost or (DEADLINE if self._renews else NOT_EXTENDED)
            self._interrupted_at = self._clock.now()
            raise LeaseLost(
                f"{printable(self.call.key.key)}: the lease is lost: {reason}",
                self.call.key.key,
                reason,
            )

    def now(self) -> float:
        """The local clock of the lease."""
        return self._clock.now()

    def interrupted_recently(self) -> bool:
        """Whether the body got :class:`LeaseLost` a moment ago, may be cleaning up, and must not be
        interrupted again yet.
        """
        return self._clock.now() - self._interrupted_at < CLEANUP_TIME

    # -- by the replies of the store ---------------------------------------------------------------

    def extended(self, sent: float, ttl: float) -> None:
        """The store confirmed, for a request sent at *sent*, that the lease lasts another *ttl*
        seconds.
        """
        if self.lost is None:
            self._extend_to(deadlines.hard_deadline(sent, ttl))
            self.due = deadlines.renewal_due(sent, self.call.options.ttl)
            self._renewed = max(self._renewed, sent)
            self._update_kill_timer()

    def seen_locked(self, sent: float) -> None:
        """The store confirmed, for a request sent at *sent*, that a transaction of this attempt has
        locked the row.
        """
        self._seen_locked = max(self._seen_locked, sent)
        self._update_kill_timer()

    def kill_if_key_is_free(self) -> None:
        """If there is a kill timer and another attempt may already hold the key of this lost lease,
        kill the process now.

        After a missed deadline the key is not free yet: the body has until the kill deadline to
        end.
        """
        if self.move_kill_timer is not None and self.lost not in (
            DEADLINE,
            HELD_TOO_LONG,
            NOT_EXTENDED,
        ):
            self.move_kill_timer(self._clock.now())

    def completed(self) -> None:
        """The body has committed the done record: no other attempt can run, so the lease needs no
        renewal. The slot of its group does, until the body ends.
        """
        self.is_completed = True
        self._extend_to(self._hold_until)
        self._seen_locked = -math.inf
        if self.slot is None:
            self._renew_until = -math.inf
        self._update_kill_timer()

    def _extend_to(self, hard_deadline: float) -> None:
        self.hard_deadline = max(self.hard_deadline, hard_deadline)
        self.own_stop = deadlines.stop_deadline(self.hard_deadline, self.call.options.ttl)

    def _update_kill_timer(self) -> None:
        if self.move_kill_timer is not None:
            self.move_kill_timer(self.kill_deadline)

    # -- for the renewer ---------------------------------------------------------------------------

    def renewable(self, now: float) -> bool:
        """Whether the lease is to be renewed, now or later."""
        return self.lost is None and now < self._renew_until

    def needs_renewer(self, now: float) -> bool:
        """Whether the renewer must call the store: to renew the lease, or to check the lock on the
        row.
        """
        return self.renewable(now) or (
            self.lost is None and now < self._hold_until and self._seen_locked > self._renewed
        )

    def requested_ttl(self, now: float) -> float:
        """The ttl to request, in seconds; 0: check the lease without renewing it."""
        return self.call.options.ttl if self.renewable(now) or self.needs_row_lock(now) else 0.0

    def lasts(self, now: float) -> float:
        """The seconds for which the store must keep the lease from *now*: its ttl, or what is left
        of an extension.
        """
        left = deadlines.ttl_until(self.hard_deadline, now)
        return max(self.call.options.ttl, left)

    def overdue(self, now: float) -> str | None:
        """The reason why the lease counts no longer by the clock; ``None`` if it counts."""
        if now < self.stop_deadline:
            return None
        if not self._renews and now < self._hold_until:
            return NOT_EXTENDED
        return DEADLINE if now < self._renew_until else HELD_TOO_LONG
