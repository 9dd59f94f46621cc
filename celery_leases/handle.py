"""What a task body sees as ``self.lease`` and ``current_lease``: its hold on the key."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from typing import Any, Final, TypeVar

from celery_leases.body.effect_calls import EffectReply, calls_of
from celery_leases.body.effects import MOVED_ON
from celery_leases.body.steps import Steps, UserTransaction
from celery_leases.body.unleased import Unleased
from celery_leases.core import durations
from celery_leases.core import progress as saved
from celery_leases.core.effects import VERIFY_AFTER, OnUncertain
from celery_leases.core.errors import AlreadyCompleted, EffectMisused, ForkedLease, GuardOpen, LeaseLost
from celery_leases.core.records import Attempt, Record
from celery_leases.core.results import decode
from celery_leases.tenure import Tenure

T = TypeVar("T")
FORKED: Final = "this process was forked by the body, and the lease belongs to the process of the body"
SAVE_EVERY: Final = 1.0
"""Seconds between two saves of how far a loop has come."""


class Lease:
    """The lease of the running attempt. All times are seconds by the local clock.

    ``key``: the stable key of the business action. ``token``: random, made for this attempt alone.
    ``fence``: an integer per key that only ever grows; pass it to any store that can compare it.
    ``attempt``: 1 for the first run of the key. ``previous``: how the last attempt ended, with error and host.

    In a process that the body has forked (``os.fork``, ``multiprocessing``) it is not held, and what would write
    raises :class:`~celery_leases.errors.ForkedLease`: the renewals go on in the process of the body alone.
    """

    def __init__(self, tenure: Tenure, record: Record, steps: Callable[[], Steps], process: int) -> None:
        self._tenure = tenure
        self._record = record
        self._make_steps = steps
        self._progress = saved.load(record.progress, record.generation) if record.progress is not None else saved.NONE
        self._saved_at = -math.inf
        self._loops: set[str] = set()
        self._process = process
        self.key = record.key
        self.token = record.owner
        self.fence = record.fence
        self.attempt = record.attempt
        self.previous: Attempt | None = record.previous
        tenure.confirm = self._confirm

    @property
    def _steps(self) -> Steps:
        """Made by the first step that the body takes; threads of a body share one."""
        made: Steps | None = self.__dict__.get("_made_steps")
        return made if made is not None else self.__dict__.setdefault("_made_steps", self._make_steps())

    @property
    def held(self) -> bool:
        """Whether the lease still counts, computed from the clock: no round trip."""
        return not self._forked and self._tenure.held

    @property
    def lost(self) -> bool:
        """Whether the lease is lost; it stays lost."""
        return not self.held

    def remaining(self) -> float:
        """Seconds until the body must stop, unless a renewal comes first; 0 when the lease is lost."""
        return 0.0 if self._forked else self._tenure.remaining()

    def check(self) -> None:
        """Raise :class:`~celery_leases.LeaseLost` unless the lease counts: call it before what cannot be undone.

        No round trip, except after the end of a lease in the database that a transaction has outlasted, which
        :meth:`guard` or :meth:`complete` has locked the row in: then the database is asked, and
        :class:`~celery_leases.errors.StoreUnavailable` is raised when there was no answer.
        """
        if self._forked:
            raise LeaseLost(f"{self.key}: the lease is not held here: {FORKED}", self.key, FORKED)
        self._tenure.check()

    @property
    def _forked(self) -> bool:
        return os.getpid() != self._process

    def extend(self, seconds: durations.Duration) -> None:
        """Make the lease last at least *seconds* (or ``"5m"``) from now, in one round trip; it is never cut.

        Raises :class:`~celery_leases.errors.LeaseConfigurationError` for what is no such time,
        :class:`~celery_leases.LeaseLost`, and :class:`~celery_leases.errors.StoreUnavailable` when there was no answer.
        """
        self._refuse_forked("extend()")
        span = durations.seconds(seconds, "extend(): seconds")
        self._refuse_guarded("extend()")
        with self._steps.closed():
            self._steps.renewer.extend(self._tenure, span)

    # -- effects -------------------------------------------------------------------------------------------

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
        """Make one external action happen once for this key, however many attempts it takes.

        *call* is given an idempotency key, the same on every attempt: pass it on to the other side, in one request, as
        what a client library repeats by itself is not seen (``max_retries=0``). Its reply must be
        JSON; ``reference(reply)`` is the other side's own name for it. The intent is committed before the call, the
        reply after it; where an earlier attempt has done it, its reply is returned and no call is made.

        An effect whose attempt died in between is in doubt. ``verify(idempotency_key)`` is asked then, not before
        *verify_after* seconds after the intent (until then the call is put back): it returns the reply it found,
        ``None`` (not ``False``) if it has not happened, or raises :class:`~celery_leases.Uncertain`. Without *verify*,
        ``uncertain="rerun"`` calls again under the same key, for a side that dedupes by it; ``"stop"`` raises
        :class:`~celery_leases.Uncertain`, and the key is left to an operator.

        Raises :class:`~celery_leases.LeaseLost`, :class:`~celery_leases.errors.GuardOpen`,
        :class:`~celery_leases.errors.EffectMisused`, :class:`~celery_leases.errors.StoreUnavailable`, and whatever
        *call* raises.
        """
        self._refuse_forked("effect()")
        self._refuse_guarded("effect()")
        return self._steps.effects.perform(name, calls_of(call, reference, verify, verify_after, uncertain))

    # -- progress ------------------------------------------------------------------------------------------

    @property
    def progress(self) -> Any:
        """What :meth:`save_progress` saved last, in this attempt or in one before it; ``None`` if there is nothing."""
        return decode(self._progress.value)

    def save_progress(self, value: Any) -> None:
        """Save a JSON value for the next attempt, and renew the lease; it is durable when this returns.

        Raises :class:`~celery_leases.LeaseLost`, :class:`~celery_leases.errors.GuardOpen`,
        :class:`~celery_leases.errors.EffectMisused` for a value that is no JSON,
        :class:`~celery_leases.errors.StoreUnavailable`.
        """
        self._refuse_forked("save_progress()")
        self._refuse_guarded("save_progress()")
        self._save(replace(self._progress, value=saved.checked(value, self.key)))
        self._steps.renewer.extend(self._tenure, self._tenure.bid.ttl)

    def each(self, items: Iterable[T], *, name: str = "items", every: int | None = None) -> Iterator[T]:
        """Iterate over *items*, without those that an earlier attempt has finished; the order must be the same.

        An item is finished once the loop asks for the next one. What is finished is saved once a second, with
        ``every=n`` after every *n* items, at the end of the loop, and with the outcome of an attempt that fails or is
        interrupted. So only a killed process loses any of it: up to a second's items, or *every* - 1, run again, and
        the item it died in. Only the position is saved: what the body has collected in a local variable is gone with
        its attempt. *name* tells loops of one task apart: each may be entered once in an attempt, and by one
        thread: what loops in several threads at once have finished may be run again.
        Raises :class:`~celery_leases.LeaseLost` between items, and what :meth:`save_progress` raises.
        """
        count: object = every
        if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
            raise ValueError(f"each(every={every!r}): give a whole number of at least 1, or leave it out")
        given: object = name
        if not isinstance(given, str):
            raise EffectMisused(f"{self.key}: each(name={name!r}): name a loop by a text", self.key)
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
            due = number + 1 - last >= every if every else self._tenure.now() - self._saved_at >= SAVE_EVERY
            if due:
                self._save_loop()
                last = number + 1
        if self._tenure.work.has_unsaved:
            self._save_loop()

    def _save_loop(self) -> None:
        self._refuse_guarded("each()")
        self._save(self._progress)
        if not self._tenure.renewable(self._tenure.now()):  # then saved progress alone pushes the lease out
            self._steps.renewer.extend(self._tenure, self._tenure.bid.ttl)

    def _advance(self, name: str, finished: int) -> None:
        self._progress = replace(self._progress, positions={**self._progress.positions, name: finished})
        self._tenure.work.leave_unsaved(partial(saved.dump, self._progress, self._record.generation))

    def _save(self, now: saved.Progress) -> None:
        self.check()
        text = saved.dump(now, self._record.generation)
        with self._steps.closed():
            if not self._steps.store.save_progress(self._record, text):
                raise LeaseLost(f"{self.key}: the lease is lost: {MOVED_ON}", self.key, MOVED_ON)
            self._progress, self._saved_at = now, self._tenure.now()
            self._tenure.work.leave_unsaved(None)
            self._tenure.work.progressed = True

    # -- the user's own transaction ------------------------------------------------------------------------

    def complete(self, result: Any, session_or_connection: Any) -> Any:
        """Write the done record in the caller's own transaction, and return the result as JSON gives it back.

        It commits with the caller's rows, or neither does. *session_or_connection*: a SQLAlchemy ``Session`` or
        ``Connection``, or a DB-API connection, in a transaction on the records' database. Once committed the call
        has succeeded with this result, whatever the body does afterwards; return it, and commit before the body ends.
        Legal again after a rollback. While the transaction is open, nothing else of this handle writes.

        Raises :class:`~celery_leases.LeaseLost` when a later attempt owns the key (let it roll your work back),
        :class:`~celery_leases.errors.AlreadyCompleted`, :class:`~celery_leases.errors.WrongDatabase`,
        :class:`~celery_leases.errors.GuardOpen` while another transaction is guarded, and
        :class:`~celery_leases.errors.EffectMisused` for a result that is no JSON.
        """
        self._refuse_forked("complete()")
        text = saved.checked(result, self.key, "complete()")
        if self._steps.transaction is None:  # an eager call, whose records are in memory: the wrapper completes it
            self.check()
            return decode(text)
        transaction = self._joined("complete()", self._steps.transaction(session_or_connection), session_or_connection)
        with self._steps.closed():
            if self._tenure.work.completing and transaction.has_completed(self._record):
                raise AlreadyCompleted(f"{self.key}: complete() was called before in this attempt", self.key)
            self.check()
            outcome = self._steps.outcome(result)
            self._lock(transaction, lambda: transaction.complete(self._record, outcome))
            self._tenure.work.completing = True
        return decode(text)

    def guard(self, session_or_connection: Any) -> None:
        """Lock the record's row in the caller's own transaction: what it writes commits only while the fence is ours.

        Above READ COMMITTED call it first. While the transaction is open, nothing else of this handle writes.
        Raises :class:`~celery_leases.LeaseLost`, :class:`~celery_leases.errors.WrongDatabase`,
        :class:`~celery_leases.errors.GuardOpen` while another transaction is guarded, and what :meth:`check` raises.
        """
        self._refuse_forked("guard()")
        self.check()
        if self._steps.transaction is None:
            return
        transaction = self._joined("guard()", self._steps.transaction(session_or_connection), session_or_connection)
        with self._steps.closed():
            if self._tenure.work.completing and transaction.has_completed(self._record):
                return  # a done record is locked by its own transaction, and nobody runs it after that
            self._lock(transaction, lambda: transaction.guard(self._record))

    def _lock(self, transaction: UserTransaction, lock: Callable[[], None]) -> None:
        with self._tenure.work.locking(transaction):
            self._steps.renewer.make_way(self._tenure)
            sent = self._tenure.now()
            lock()
        if self._record.lease_until is not None:  # the row is the lease
            self._steps.renewer.locked(self._tenure, sent)

    def _confirm(self) -> None:
        with self._steps.closed():
            self._steps.renewer.confirm(self._tenure)

    def _joined(self, what: str, transaction: UserTransaction, given: Any) -> UserTransaction:
        if self._tenure.work.guarded_elsewhere(given):
            other = "another transaction of complete() or guard()"
            raise GuardOpen(f"{self.key}: {what} while {other} is open; end that one first", self.key)
        transaction.join(self.key)
        self._tenure.work.join(transaction)
        return transaction

    def _refuse_forked(self, what: str) -> None:
        if self._forked:
            raise ForkedLease(f"{self.key}: {what} in process {os.getpid()}: {FORKED}; call it there", self.key)

    def _refuse_guarded(self, what: str) -> None:
        if self._tenure.work.is_locked():
            message = f"{self.key}: {what} while the transaction of complete() or guard() is open; end that one first"
            raise GuardOpen(message, self.key)
        if self._tenure.work.completing and self._steps.renewer.has_completed(self._tenure):
            raise AlreadyCompleted(f"{self.key}: {what} after complete() was committed; it comes before it", self.key)

    def __repr__(self) -> str:
        return f"<Lease {self.key} attempt {self.attempt} fence {self.fence}{'' if self.held else ' lost'}>"


UNLEASED = Unleased()
_current: ContextVar[Lease | Unleased] = ContextVar("celery_leases_current", default=UNLEASED)


def lease_here() -> Lease | Unleased:
    """The lease of the body that is running here."""
    return _current.get()


enter_body: Final = _current.set
"""Make a lease that of the body which begins here; :data:`leave_body` takes what it returns."""
leave_body: Final = _current.reset


@contextmanager
def leased(lease: Lease | Unleased) -> Iterator[None]:
    """Enclose a body that runs under *lease*."""
    before = enter_body(lease)
    try:
        yield
    finally:
        leave_body(before)


class CurrentLease:
    """Stands for the lease of the body that is running here; each thread and greenlet sees its own."""

    def __getattr__(self, name: str) -> Any:
        return getattr(lease_here(), name)

    def __repr__(self) -> str:
        return repr(lease_here())


current_lease = CurrentLease()
