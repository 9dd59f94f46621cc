"""Counts what the calls of this process do, and writes the counts to the records database.

A call only appends its event to a queue. A thread of the operating system counts the events and
writes the sums of this process, at most every 5 seconds and at least every 30. So no call makes a
trip of its own, and under gevent and eventlet no greenlet waits.
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

from celery_leases.concurrency import os_threads
from celery_leases.protocol import events
from celery_leases.protocol.events import Event
from celery_leases.protocol.metrics import Tally, Written
from celery_leases.protocol.ports import Observer
from celery_leases.protocol.records import Record

logger = logging.getLogger("celery_leases")

EVERY: Final = 5.0
"""Seconds between two writes while there is something new."""
SIGN_OF_LIFE: Final = 30.0
"""Seconds between two writes while there is nothing new."""
FOLDED_EVERY: Final = 60.0
"""Seconds between two looks for processes that have ended."""
PATIENCE: Final = 5.0
"""Seconds for which the end of a process waits for the last write."""
PROMPT: Final = 2_000
"""So many events are counted before their time, so that the queue stays short."""
MISSING_KEPT: Final = 500
"""The most outcomes that are remembered as begun and not counted."""
_COUNTED: Final = (events.AttemptSettled, events.LeaseRenewed)
_ASKED: Final = (*_COUNTED, events.LeaseAcquired)
"""Events that are made only if an observer wants them, and those of them that are counted."""


class MetricsStore(Protocol):
    """Where the counts of all processes are kept."""

    def write(self, process: str, written: Written, *, first: bool, closed: bool) -> bool:
        """Write the sums of *process*; whether its row is still its own."""
        ...

    def fold(self) -> int:
        """Add the counts of processes that have ended to the total; how many."""
        ...


class Counting:
    """An observer that counts the events that it passes on to *inner*.

    *tag* makes a word from this process and a number. The records keep that word beside an outcome.
    If this process is killed, what it has not written yet is computed from there.
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
        self._word = tag
        self._clock = clock
        self._events: deque[Event] = deque()
        self._bell = os_threads.Wakeup()
        self._ended = os_threads.Wakeup()
        self._numbering = os_threads.allocate_lock()
        self._starting = os_threads.allocate_lock()
        self._started = False
        self._over = False
        # Processes that start together look at different times.
        self._fold_at = clock() + FOLDED_EVERY * (0.5 + secrets.randbelow(1000) / 1000)
        self._last = 0
        self._numbers: dict[tuple[str, int], int] = {}
        self._written: Written | None = None
        self._changed = False
        self._alive_by = 0.0
        self._begin(Tally())
        _counting.add(self)

    # -- on the way of a call ----------------------------------------------------------------------

    def observe(self, event: Event) -> None:
        """Count *event* later, and pass it on."""
        self._events.append(event)
        if not self._started:
            self._start()
        elif len(self._events) > PROMPT:
            self._bell.ring()
        kind = type(event)
        failed = getattr(event, "failure", None) is not None
        if failed or kind not in _ASKED or self._inner.wants(kind):
            self._inner.observe(event)

    def wants(self, kind: type[Event]) -> bool:
        """Whether such an event is counted, or *inner* wants it. It is asked when a body begins:
        then the row of this process is made, so that its outcomes can be computed if it is killed.
        """
        if not self._started:
            self._start()
        return kind in _COUNTED or self._inner.wants(kind)

    def tag(self, record: Record) -> str:
        """The word for the outcome that is about to be written for the attempt on *record*."""
        attempt = (record.call_id, record.fence)
        with self._numbering:
            number = self._numbers.get(attempt)
            if number is None:
                self._last += 1
                number = self._numbers[attempt] = self._last
            return self._word(self._process, number)

    # -- in the thread -----------------------------------------------------------------------------

    def flush(self, *, closing: bool = False) -> None:
        """Write what is new, if anything is, or a sign of life is due.

        *closing*: what comes later is counted as that of another process. One thread at a time may
        call this. Raises :class:`~celery_leases.errors.StoreUnavailable`; then the next call writes
        what this one did not.
        """
        self._drain()
        if not (self._changed or closing or self._clock() >= self._alive_by):
            return
        written = self._snapshot()
        first = self._written is None
        ours = self._store.write(self._process, written, first=first, closed=closing)
        before = self._written.tally if self._written is not None else Tally()
        self._changed = False
        if not ours:
            # The process was silent for long, and its row was folded. The outcomes that followed
            # were computed from the records.
            self._begin(self._tally.since(before))
        elif closing:
            self._begin(Tally())
        else:
            self._written, self._alive_by = written, self._clock() + SIGN_OF_LIFE

    def end(self) -> None:
        """Write the last counts and end the thread; waits for that at most 5 seconds.

        What is observed later is counted all the same, by a new thread.
        """
        with self._starting:
            if not self._started:
                return
            self._over = True
        self._bell.ring()
        self._ended.wait(PATIENCE)

    def _begin(self, tally: Tally) -> None:
        """Count as a process of its own from now on, beginning with *tally*."""
        with self._numbering:
            self._process = secrets.token_hex(6)
            self._numbers = {}
        self._tally = tally
        self._written = None
        self._changed = bool(tally.counts or tally.spans)
        self._alive_by = self._clock() + SIGN_OF_LIFE

    def _drain(self) -> None:
        while self._events:
            event = self._events.popleft()
            self._tally.add(event)
            self._changed = True
            if isinstance(event, events.AttemptSettled | events.OutcomeRefused):
                self._numbers.pop((event.call_id, event.fence), None)

    def _snapshot(self) -> Written:
        """What was counted. An outcome that has its number by now is among it, or is missing."""
        with self._numbering:
            for attempt in list(self._numbers)[:-MISSING_KEPT]:
                del self._numbers[attempt]  # it was never written
            return Written(self._tally.copy(), self._last, tuple(self._numbers.values()))

    def _start(self) -> None:
        with self._starting, suppress(RuntimeError):  # no thread: the next event tries again
            if not self._started:
                os_threads.start_thread(self._keep)
                self._started = True

    def _keep(self) -> None:
        self._alive_by = 0.0  # writes a row at once
        while True:
            closing = self._over
            try:
                self.flush(closing=closing)
                if not closing and self._clock() >= self._fold_at:
                    self._fold_at = self._clock() + FOLDED_EVERY
                    self._store.fold()
            except Exception as error:  # noqa: BLE001 - the next round writes what this one did not
                logger.debug("the counts of this process could not be written: %s", error)
            if closing:
                with self._starting:
                    self._over = self._started = False
                self._ended.ring()
                return
            self._bell.wait(EVERY)


_counting: WeakSet[Counting] = WeakSet()


def end_all() -> None:
    """Write the last counts of this process."""
    for counting in list(_counting):
        counting.end()


atexit.register(end_all)
# The counts of the parent are the parent's, and its thread is not in the child.
os.register_at_fork(after_in_child=_counting.clear)
