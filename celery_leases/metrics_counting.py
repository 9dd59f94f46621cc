"""Counts the events of the calls of this process, and writes the counts to the records database.

A call only appends its event to a queue. A system thread counts the events and writes the sums of
this process, at most every 5 seconds and at least every 30. So no call makes a round trip for the
counts, and under gevent and eventlet no greenlet waits.
"""

from __future__ import annotations

import atexit
import logging
import os
import secrets
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Final, Protocol
from weakref import WeakSet

from celery_leases import events
from celery_leases.concurrency import os_threads
from celery_leases.events import Event
from celery_leases.metrics_totals import Tally, Written
from celery_leases.record import Record
from celery_leases.stores.interfaces import Observer

logger = logging.getLogger("celery_leases")

WRITE_EVERY: Final = 5.0
"""Seconds between two writes while counts change."""
HEARTBEAT_EVERY: Final = 30.0
"""Seconds between two writes while no count changes."""
FOLD_EVERY: Final = 60.0
"""Seconds between two searches for processes that have ended."""
EXIT_TIMEOUT: Final = 5.0
"""Seconds for which an ending process waits for the last write."""
QUEUE_MAX: Final = 2_000
"""Events in the queue above which they are counted at once."""
MISSING_MAX: Final = 500
"""How many outcomes are remembered, at most, that have a number and are not counted yet."""
_COUNTED: Final = (events.AttemptSettled, events.LeaseRenewed)
"""Events that are counted, of those that are created only if an observer wants them."""
_ON_DEMAND: Final = (*_COUNTED, events.LeaseAcquired)
"""Events that are created only if an observer wants them."""


class MetricsStore(Protocol):
    """Stores the counts of all processes."""

    def write(self, process: str, written: Written, *, first: bool, closed: bool) -> bool:
        """Write the sums of *process*; returns whether its row still exists."""
        ...

    def fold(self) -> int:
        """Add the counts of ended processes to the total; returns how many processes ended."""
        ...


class Counting:
    """An observer that counts events, and passes them on to *inner*.

    *tag* makes a text of the id of this process and a number. Records store it with each outcome,
    so the counts that a killed process has not written can be computed from the records.
    """

    def __init__(
        self,
        inner: Observer,
        store: MetricsStore,
        tag: Callable[[str, int], str],
        clock: Callable[[], float] = os_threads.boot_clock,
    ) -> None:
        self._inner = inner
        self._store = store
        self._tag = tag
        self._clock = clock
        self._events: deque[Event] = deque()
        self._wakeup = os_threads.Wakeup()
        self._ended = os_threads.Wakeup()
        self._numbers_lock = os_threads.allocate_lock()
        self._thread_lock = os_threads.allocate_lock()
        self._started = False
        self._closing = False
        # Processes that start together fold at different times.
        self._fold_at = clock() + FOLD_EVERY * (0.5 + secrets.randbelow(1000) / 1000)
        self._last = 0
        self._numbers: dict[tuple[str, int], int] = {}
        self._written: Written | None = None
        self._changed = False
        self._heartbeat_at = 0.0
        self._begin(Tally())
        _counting.add(self)

    # -- in the thread of a call -------------------------------------------------------------------

    def observe(self, event: Event) -> None:
        """Count *event* later, and pass it on."""
        self._events.append(event)
        if not self._started:
            self._start()
        elif len(self._events) > QUEUE_MAX:
            self._wakeup.notify()
        kind = type(event)
        failed = getattr(event, "failure", None) is not None
        if failed or kind not in _ON_DEMAND or self._inner.wants(kind):
            self._inner.observe(event)

    def wants(self, kind: type[Event]) -> bool:
        """Whether such an event is counted, or *inner* wants it. It is asked when a body begins:
        then the row of this process is made, so that its outcomes can be computed if it is killed.
        """
        if not self._started:
            self._start()
        return kind in _COUNTED or self._inner.wants(kind)

    def tag(self, record: Record) -> str:
        """The text to store with the outcome of the attempt on *record*."""
        attempt = (record.call_id, record.fence)
        with self._numbers_lock:
            number = self._numbers.get(attempt)
            if number is None:
                self._last += 1
                number = self._numbers[attempt] = self._last
            return self._tag(self._process, number)

    # -- in the system thread ----------------------------------------------------------------------

    def flush(self, *, closing: bool = False) -> None:
        """Write the counts, if they have changed or a heartbeat is due.

        *closing*: later events are counted as those of another process. Only one thread at a time
        may call this. Raises :class:`~celery_leases.errors.StoreUnavailable`; the next call then
        writes the counts.
        """
        self._drain()
        if not (self._changed or closing or self._clock() >= self._heartbeat_at):
            return
        written = self._snapshot()
        first = self._written is None
        ours = self._store.write(self._process, written, first=first, closed=closing)
        before = self._written.tally if self._written is not None else Tally()
        self._changed = False
        if not ours:
            # The process did not write for long, and its row was added to the total. Later outcomes
            # were computed from the records.
            self._begin(self._tally.since(before))
        elif closing:
            self._begin(Tally())
        else:
            self._written, self._heartbeat_at = written, self._clock() + HEARTBEAT_EVERY

    def end(self) -> None:
        """Write the last counts and end the thread; waits for that at most 5 seconds.

        Later events start a new thread, which counts them.
        """
        with self._thread_lock:
            if not self._started:
                return
            self._closing = True
        self._wakeup.notify()
        self._ended.wait(EXIT_TIMEOUT)

    def _begin(self, tally: Tally) -> None:
        """Count under a new process id from now on, beginning with *tally*."""
        with self._numbers_lock:
            self._process = secrets.token_hex(6)
            self._numbers = {}
        self._tally = tally
        self._written = None
        self._changed = bool(tally.counts or tally.spans)
        self._heartbeat_at = self._clock() + HEARTBEAT_EVERY

    def _drain(self) -> None:
        while self._events:
            event = self._events.popleft()
            self._tally.add(event)
            self._changed = True
            if isinstance(event, events.AttemptSettled | events.OutcomeRefused):
                self._numbers.pop((event.call_id, event.fence), None)

    def _snapshot(self) -> Written:
        """The counts now. Each outcome that has a number is included, or listed as missing."""
        with self._numbers_lock:
            for attempt in list(self._numbers)[:-MISSING_MAX]:
                del self._numbers[attempt]  # its outcome was not written
            return Written(self._tally.copy(), self._last, tuple(self._numbers.values()))

    def _start(self) -> None:
        # Without memory for a thread, the next event starts it.
        with self._thread_lock, suppress(RuntimeError):
            if not self._started:
                os_threads.start_thread(self._run)
                self._started = True

    def _run(self) -> None:
        self._heartbeat_at = 0.0  # write a row at once
        while True:
            closing = self._closing
            try:
                self.flush(closing=closing)
                if not closing and self._clock() >= self._fold_at:
                    self._fold_at = self._clock() + FOLD_EVERY
                    self._store.fold()
            except Exception as error:  # noqa: BLE001 - the next round writes the counts
                logger.debug("the counts of this process could not be written: %s", error)
            if closing:
                with self._thread_lock:
                    self._closing = self._started = False
                self._ended.notify()
                return
            self._wakeup.wait(WRITE_EVERY)


_counting: WeakSet[Counting] = WeakSet()


def end_all() -> None:
    """Write the last counts of this process."""
    for counting in list(_counting):
        counting.end()


atexit.register(end_all)
# A child process does not have the thread of its parent, and must not write its counts.
os.register_at_fork(after_in_child=_counting.clear)
