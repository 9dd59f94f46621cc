"""``self.lease`` and ``current_lease``: the lease of the running attempt, for the task body."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from celery_leases import progress as saved
from celery_leases.attempt.held_lease import BodyState, HeldLease
from celery_leases.attempt.process import Process
from celery_leases.body.effects import RECORD_CHANGED, EffectReply, Effects, checked_arguments
from celery_leases.body.null_lease import Unleased
from celery_leases.call import Call
from celery_leases.decide import attempt_history
from celery_leases.decide.after_run import after_run, crashes_of_another_call
from celery_leases.decide.endings import Returned
from celery_leases.effect import NAME_MAX, VERIFY_AFTER, OnUncertain, is_valid_name
from celery_leases.errors import (
    AlreadyCompleted,
    EffectMisused,
    ForkedLease,
    GuardOpen,
    LeaseLost,
    LeaseMisuse,
)
from celery_leases.record import Attempt, Record
from celery_leases.results import decode, encode
from celery_leases.text import durations

if TYPE_CHECKING:
    from celery_leases.stores.sql.transactions import JoinedTransaction

T = TypeVar("T")
FORKED: Final = (
    "this process was forked by the body, but only the process of the body holds the lease"
)
SAVE_EVERY: Final = 1.0
"""Seconds between two saves of a loop's position."""


class Lease:
    """The lease of the running attempt. All times are seconds by the local clock.

    ``key`` is the stable key of the business action. ``token`` is random, and identifies this
    attempt. ``fence`` is an integer that grows with each attempt of the key; pass it to stores that
    can compare it. ``attempt`` is 1 for the first run of the key. ``previous`` says how the
    previous attempt ended, with error and host.

    A process that the body has forked (``os.fork``, ``multiprocessing``) does not hold the lease,
    because only the process of the body renews it. Methods that write raise
    :class:`~celery_leases.errors.ForkedLease` there.
    """

    def __init__(
        self,
        process: Process,
        call: Call,
        held_lease: HeldLease,
        record: Record,
        interrupts_deferred: Callable[[], AbstractContextManager[None]],
        pid: int,
    ) -> None:
        self._process = process
        self._call = call
        self._held_lease = held_lease
        self._record = record
        #: Defers signals during a step.
        self._interrupts_deferred = interrupts_deferred
        self._progress = (
            saved.load(record.progress, record.generation)
            if record.progress is not None
            else saved.NONE
        )
        self._saved_at = -math.inf
        self._loops: set[str] = set()
        self._effects: set[str] = set()
        self._pid = pid
        self.key = record.key
        self.token = record.owner
        self.fence = record.fence
        self.attempt = record.attempt
        self.previous: Attempt | None = record.previous
        held_lease.confirm = self._confirm

    @property
    def held(self) -> bool:
        """Whether the lease is held, computed from the clock without a round trip."""
        return not self._forked and self._held_lease.held

    @property
    def lost(self) -> bool:
        """Whether the lease is lost. A lost lease stays lost."""
        return not self.held

    def remaining(self) -> float:
        """Seconds until the body must stop if no renewal succeeds before; 0 if the lease is
        lost.
        """
        return 0.0 if self._forked else self._held_lease.remaining()

    def check(self) -> None:
        """Raise :class:`~celery_leases.LeaseLost` if the lease is not held. Call it right before an
        action that cannot be undone.

        It needs no round trip, with one exception: if a database lease has expired while a
        transaction of :meth:`guard` or :meth:`complete` locks the row, it reads the row. Then it
        raises :class:`~celery_leases.errors.StoreUnavailable` if the database does not answer.
        """
        if self._forked:
            raise LeaseLost(
                f"{self.key}: the lease is not held in this process: {FORKED}", self.key, FORKED
            )
        self._held_lease.check()

    @property
    def _forked(self) -> bool:
        return os.getpid() != self._pid

    def extend(self, seconds: durations.Duration) -> None:
        """Renew the lease for at least *seconds* (or ``"5m"``) from now, in one round trip. It is
        never shortened.

        Raises :class:`~celery_leases.errors.LeaseConfigurationError` for a wrong duration,
        :class:`~celery_leases.LeaseLost`, and :class:`~celery_leases.errors.StoreUnavailable` if
        the store does not answer.
        """
        self._refuse_forked("extend()")
        span = durations.seconds(seconds, "extend(): seconds")
        self._refuse_guarded("extend()")
        with self._interrupts_deferred():
            self._process.renewer.extend(self._held_lease, span)

    # -- effects -----------------------------------------------------------------------------------

    def effect(
        self,
        name: str,
        call: Callable[[str], Any],
        *,
        reference: Callable[[Any], Any] | None = None,
        verify: Callable[[str], Any] | None = None,
        verify_after: float = VERIFY_AFTER,
        uncertain: OnUncertain = "stop",
    ) -> EffectReply:
        """Perform one external action once for this key, even if it takes several attempts.

        *call* gets an idempotency key, which is the same on every attempt. Pass it to the other
        system in one request, and switch off the retries of the client library (``max_retries=0``),
        because celery_leases does not see them. The reply must be JSON. ``reference(reply)``
        returns the other system's own name for the action. The intent is committed before the call,
        the reply after it. If an earlier attempt has committed the reply, that reply is returned
        without a call.

        If an attempt died between intent and reply, the outcome of the effect is unknown. Then
        ``verify(idempotency_key)`` is called, at least *verify_after* seconds after the intent;
        until then the task is rescheduled. It returns the reply it found, returns ``None`` (not
        ``False``) if the effect has not happened, or raises :class:`~celery_leases.Uncertain`.
        Without *verify*, ``uncertain="rerun"`` makes the call again with the same key, for a system
        that deduplicates by it; ``"stop"`` raises :class:`~celery_leases.Uncertain`, and an
        operator decides about the key.

        Raises :class:`~celery_leases.LeaseLost`, :class:`~celery_leases.errors.LeaseMisuse` for a
        wrong argument, :class:`~celery_leases.errors.GuardOpen`,
        :class:`~celery_leases.errors.EffectMisused`,
        :class:`~celery_leases.errors.StoreUnavailable`, and every exception of *call*.
        """
        self._refuse_forked("effect()")
        self._refuse_guarded("effect()")
        arguments = checked_arguments(call, reference, verify, verify_after, uncertain)
        if not is_valid_name(name):
            raise EffectMisused(
                f"effect({name!r}): give a name of 1 to {NAME_MAX} characters", self.key
            )
        if name in self._effects:
            message = f"{self.key}: effect {name!r} was used twice in one attempt; give each effect a name of its own"
            raise EffectMisused(message, self.key, name)
        self._effects.add(name)
        return Effects(
            self._process, self._call, self._held_lease, self._record, self._interrupts_deferred
        ).perform(name, arguments)

    # -- progress ----------------------------------------------------------------------------------

    @property
    def progress(self) -> Any:
        """The last value of :meth:`save_progress`, from this attempt or an earlier one; ``None`` if
        there is none.
        """
        return decode(self._progress.value)

    def save_progress(self, value: Any) -> None:
        """Save a JSON value for the next attempt, and renew the lease. The value is durable when
        this returns.

        Raises :class:`~celery_leases.LeaseLost`, :class:`~celery_leases.errors.GuardOpen`,
        :class:`~celery_leases.errors.EffectMisused` for a value that is not JSON,
        :class:`~celery_leases.errors.StoreUnavailable`.
        """
        self._refuse_forked("save_progress()")
        self._refuse_guarded("save_progress()")
        self._save(replace(self._progress, value=saved.checked(value, self.key)))
        self._process.renewer.extend(self._held_lease, self._held_lease.call.options.ttl)

    def each(
        self, items: Iterable[T], *, name: str = "items", every: int | None = None
    ) -> Iterator[T]:
        """Iterate over *items* without those that an earlier attempt has finished. The order of the
        items must be the same on every attempt.

        An item is finished once the loop requests the next one. The position is saved once a
        second, or after every *n* items with ``every=n``. It is also saved at the end of the loop,
        and with the outcome of an attempt that fails or is interrupted. So items are only repeated
        after a process was killed: the item in progress, and those of up to a second, or *every* -
        1. Only the position is saved: the next attempt does not have the local variables of the
        body.

        *name* identifies the loop if a task has several. Each loop may be entered once in an
        attempt, and by one thread: items of one loop in several threads may run again.

        Raises :class:`~celery_leases.errors.LeaseMisuse` for a wrong *every*,
        :class:`~celery_leases.LeaseLost` between items, and the errors of :meth:`save_progress`.
        """
        count: object = every
        if count is not None and (
            isinstance(count, bool) or not isinstance(count, int) or count < 1
        ):
            raise LeaseMisuse(
                f"each(every={every!r}): give a whole number of at least 1, or leave it out"
            )
        given: object = name
        if not isinstance(given, str):
            raise EffectMisused(
                f"{self.key}: each(name={name!r}): write a str as the name of the loop", self.key
            )
        if name in self._loops:
            message = f"{self.key}: each() named {name!r} twice in one attempt; give each loop its own name="
            raise EffectMisused(message, self.key)
        self._refuse_forked("each()")
        self._refuse_guarded("each()")
        self._loops.add(name)
        return self._each(items, name, every)

    def _each(self, items: Iterable[T], name: str, every: int | None) -> Iterator[T]:
        finished = self._progress.positions.get(name, 0)
        last = finished
        for number, item in enumerate(items):
            if number < finished:
                continue
            self.check()
            yield item
            self._refuse_forked("each()")
            self._advance(name, number + 1)
            due = (
                number + 1 - last >= every
                if every
                else self._held_lease.now() - self._saved_at >= SAVE_EVERY
            )
            if due:
                self._save_loop()
                last = number + 1
        if self._held_lease.body_state.unsaved_progress is not None:
            self._save_loop()

    def _save_loop(self) -> None:
        self._refuse_guarded("each()")
        self._save(self._progress)
        # With lease_renew=False, or after the time_limit, only saved progress extends the lease.
        if not self._held_lease.renewable(self._held_lease.now()):
            self._process.renewer.extend(self._held_lease, self._held_lease.call.options.ttl)

    def _advance(self, name: str, finished: int) -> None:
        self._progress = replace(
            self._progress, positions={**self._progress.positions, name: finished}
        )
        self._held_lease.body_state.unsaved_progress = partial(
            saved.dump, self._progress, self._record.generation
        )

    def _save(self, now: saved.Progress) -> None:
        self.check()
        text = saved.dump(now, self._record.generation)
        with self._interrupts_deferred():
            keeps = crashes_of_another_call(self._call, self._record)
            if not self._process.effects.save_progress(self._record, text, keeps_crashes=keeps):
                raise LeaseLost(
                    f"{self.key}: the lease is lost: {RECORD_CHANGED}", self.key, RECORD_CHANGED
                )
            self._progress, self._saved_at = now, self._held_lease.now()
            self._held_lease.body_state.unsaved_progress = None
            self._held_lease.body_state.progressed = True

    # -- the caller's own transaction --------------------------------------------------------------

    def complete(self, result: Any, session_or_connection: Any) -> Any:
        """Write the done record in the caller's own transaction, and return the result as it is
        after a round trip through JSON.

        The record commits together with the caller's rows, or neither does. *session_or_connection*
        is a SQLAlchemy ``Session`` or ``Connection``, or a DB-API connection, in a transaction on
        the records' database. Commit before the body ends, and return the result. After the commit
        the call has succeeded with this result, even if the body then raises. After a rollback
        ``complete()`` may be called again. While the transaction is open, no other method of the
        lease writes.

        Raises :class:`~celery_leases.LeaseLost` if a later attempt owns the key (let the exception
        roll your work back), :class:`~celery_leases.errors.AlreadyCompleted`,
        :class:`~celery_leases.errors.WrongDatabase`, :class:`~celery_leases.errors.GuardOpen` while
        another transaction is guarded, and :class:`~celery_leases.errors.EffectMisused` for a
        result that is not JSON.
        """
        self._refuse_forked("complete()")
        text = saved.checked(result, self.key, "complete()")
        made = self._process.transaction(session_or_connection)
        if made is None:  # an eager call with records in memory is completed when the body returns
            self.check()
            return decode(text)
        transaction = self._joined("complete()", made, session_or_connection)
        with self._interrupts_deferred():
            if self._held_lease.body_state.completing and transaction.has_completed(self._record):
                raise AlreadyCompleted(
                    f"{self.key}: complete() was called before in this attempt", self.key
                )
            self.check()
            ending = Returned(result, *encode(result))
            record = self._record
            if record.history and attempt_history.has_suspicions(record):
                now = transaction.read(record.stored_key, record.key, newest=True)
                record = attempt_history.with_known_ends(record, now)
            outcome = after_run(self._call, record, ending)
            self._lock(transaction, lambda: transaction.complete(record, outcome))
            self._held_lease.body_state.completing = True
        return decode(text)

    def guard(self, session_or_connection: Any) -> None:
        """Lock the record's row in the caller's own transaction, so that this transaction commits
        only if no later attempt owns the key.

        Above READ COMMITTED call it first in the transaction. While the transaction is open, no
        other method of the lease writes. Raises :class:`~celery_leases.LeaseLost`,
        :class:`~celery_leases.errors.WrongDatabase`, :class:`~celery_leases.errors.GuardOpen` while
        another transaction is guarded, and the errors of :meth:`check`.
        """
        self._refuse_forked("guard()")
        self.check()
        made = self._process.transaction(session_or_connection)
        if made is None:
            return
        transaction = self._joined("guard()", made, session_or_connection)
        with self._interrupts_deferred():
            if self._held_lease.body_state.completing and transaction.has_completed(self._record):
                return  # this transaction has written the done record, so it has locked the row
            self._lock(transaction, lambda: transaction.guard(self._record))

    def _lock(self, transaction: JoinedTransaction, lock: Callable[[], None]) -> None:
        with self._held_lease.body_state.locking(transaction):
            self._process.renewer.wait_for_renewal(self._held_lease)
            sent = self._held_lease.now()
            lock()
        if self._record.lease_until is not None:  # the row is the lease
            self._process.renewer.row_locked(self._held_lease, sent)

    def _confirm(self) -> None:
        with self._interrupts_deferred():
            self._process.renewer.confirm(self._held_lease)

    def _joined(self, what: str, transaction: JoinedTransaction, given: Any) -> JoinedTransaction:
        if self._held_lease.body_state.locked_by_another(given):
            other = "another transaction of complete() or guard()"
            raise GuardOpen(
                f"{self.key}: {what} while {other} is open; end that transaction first", self.key
            )
        transaction.join(self.key)
        self._held_lease.body_state.join(transaction)
        return transaction

    def _refuse_forked(self, what: str) -> None:
        if self._forked:
            raise ForkedLease(
                f"{self.key}: {what} in process {os.getpid()}: {FORKED}; call it there", self.key
            )

    def _refuse_guarded(self, what: str) -> None:
        if self._held_lease.body_state.holds_row_lock():
            message = (
                f"{self.key}: {what} while the transaction of complete() or guard() is open; "
                "end that transaction first"
            )
            raise GuardOpen(message, self.key)
        if self._held_lease.body_state.completing and self._process.renewer.has_completed(
            self._held_lease
        ):
            raise AlreadyCompleted(
                f"{self.key}: {what} after complete() was committed; call {what} before complete()",
                self.key,
            )

    def __repr__(self) -> str:
        return f"<Lease {self.key} attempt {self.attempt} fence {self.fence}{'' if self.held else ' lost'}>"


UNLEASED: Final = cast(Lease, Unleased())
"""It has all that a body may use of a :class:`Lease`, so a body sees one type."""
_current: ContextVar[Lease | partial[Lease]] = ContextVar("celery_leases_current", default=UNLEASED)
_making = threading.RLock()
"""Reentrant, because a signal handler of the user may ask for the lease at any point."""


def active_lease() -> Lease:
    """The lease of the body that runs in this thread or greenlet; :data:`UNLEASED` outside one.
    Most bodies do not ask for it, so it is made when the body or one of its threads first does.
    """
    current = _current.get()
    if not isinstance(current, partial):
        return current
    state: BodyState = current.keywords["held_lease"].body_state
    with _making:
        if state.lease is None:
            state.lease = current()
    lease: Lease = state.lease
    return lease


enter_body: Final = _current.set
"""Set how the lease of the body that begins is made, or :data:`UNLEASED`; returns a token for
:data:`leave_body`.
"""
leave_body: Final = _current.reset
"""Restore the lease before the body that ends."""


@contextmanager
def unleased() -> Iterator[None]:
    """A context in which :data:`UNLEASED` is the active lease."""
    before = enter_body(UNLEASED)
    try:
        yield
    finally:
        leave_body(before)


class CurrentLease:
    """A proxy for the lease of the running body, in each thread and greenlet."""

    def __getattr__(self, name: str) -> Any:
        return getattr(active_lease(), name)

    def __repr__(self) -> str:
        return repr(active_lease())


current_lease = CurrentLease()
