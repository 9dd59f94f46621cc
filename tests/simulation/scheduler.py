"""Runs simulated threads as greenlets, one at a time, in virtual time.

One random generator chooses who runs next and how long each step takes, so a seed repeats a run.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from random import Random
from typing import TYPE_CHECKING, Any, Protocol

import greenlet

if TYPE_CHECKING:
    from tests.simulation.processes import SimulatedClock


class Owner(Protocol):
    """The process of a thread."""

    name: str
    clock: SimulatedClock
    alive: bool
    #: It does not run before this time.
    paused_until: float
    #: It runs bodies in threads, which nothing interrupts.
    has_threads: bool


class Ended(BaseException):
    """Thrown into the threads that are left when the simulation ends. No server answers then."""


class Strand:
    """A simulated thread. ``value`` is what ends its wait: true if it was woken."""

    __slots__ = ("greenlet", "name", "process", "signals", "value", "wakes")

    def __init__(self, process: Owner, name: str) -> None:
        self.process = process
        self.name = name
        self.greenlet: Any = None
        #: The number of its latest wait; an entry of the queue with another number is outdated.
        self.wakes = 0
        self.value = False
        #: Signal handlers to run in it when it runs next.
        self.signals: list[Callable[[], None]] = []


class Scheduler:
    """The queue of what happens next. ``now`` is the true time, in seconds."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.now = 0.0
        self.steps = 0
        self.current: Strand | None = None
        #: The last error that ended a thread.
        self.failure: BaseException | None = None
        self._draw = random.random
        self._queue: list[tuple[float, float, int, int, Strand]] = []
        self._numbers = count()
        self._until: Callable[[], bool] = lambda: True
        self._earliest = 0.0
        self._hub = greenlet.getcurrent()
        self._strands: dict[Strand, None] = {}
        self._ended = False

    def spawn(
        self, process: Owner, work: Callable[[], object], name: str, after: float = 0.0
    ) -> Strand:
        """Begin a thread of *process* in *after* seconds."""
        strand = Strand(process, name)

        def run() -> None:
            try:
                work()
            except Ended:
                pass
            except BaseException as error:  # noqa: BLE001 - the run ends with it
                if self.failure is None:
                    self.failure = error
            finally:
                self._strands.pop(strand, None)

        strand.greenlet = greenlet.greenlet(run, self._hub)
        self._strands[strand] = None
        self._put(self.now + after, strand)
        return strand

    def sleep(self, seconds: float) -> None:
        """Let others run for so many seconds."""
        if self._ended:
            raise Ended
        strand = self.current
        assert strand is not None, "nothing waits outside of a simulated thread"
        until = self.now + max(0.0, seconds)
        while not self._passes(until, strand):
            self._put(until, strand)
            self._switch(strand)
            if self.now >= until:  # otherwise a signal came, whose handler did not raise
                return

    def park(self, timeout: float = math.inf) -> bool:
        """Wait to be woken, at most *timeout* seconds; return whether that happened."""
        if self._ended:
            raise Ended
        strand, queue = self.current, self._queue
        assert strand is not None, "nothing waits outside of a simulated thread"
        strand.wakes += 1
        strand.value = False
        if queue and queue[0][0] > self.now + timeout and self._passes(self.now + timeout, strand):
            return False
        if timeout < math.inf:
            self._put(self.now + timeout, strand)
        self._switch(strand)
        return strand.value

    def wake(self, strand: Strand) -> None:
        """End the wait of a parked thread."""
        strand.value = True
        self._put(self.now, strand)

    def signal(self, strand: Strand, handler: Callable[[], None]) -> None:
        """Run *handler* in *strand* when it runs next, which is now, as a signal would."""
        strand.signals.append(handler)
        self._put(self.now, strand)

    def run(self, until: Callable[[], bool], earliest: float = 0.0) -> None:
        """Run until *until* returns true, which is asked only after *earliest*, or nothing is left
        to do.
        """
        self._until, self._earliest = until, earliest
        while (strand := self._next()) is not None:
            strand.greenlet.switch()

    def _next(self) -> Strand | None:
        """The thread that runs now; ``None`` if the run is over."""
        self.current, queue = None, self._queue
        while queue and self.failure is None and not (self.now > self._earliest and self._until()):
            at, _, number, _, strand = heappop(queue)
            process = strand.process
            if number != strand.wakes or not process.alive or strand.greenlet.dead:
                continue
            self.now = max(self.now, at)
            if process.paused_until > self.now:
                self._put(process.paused_until, strand)
                continue
            self.steps += 1
            self.current = strand
            return strand
        return None

    def end(self) -> None:
        """End all threads that are left."""
        self._ended = True
        for strand in list(self._strands):
            self.current = strand
            if strand.greenlet:
                strand.greenlet.throw(Ended())
        self._strands.clear()
        self.current = None

    def _passes(self, until: float, strand: Strand) -> bool:
        """Let the time until then pass without the queue, if nothing else happens meanwhile."""
        queue, process = self._queue, strand.process
        if not queue or queue[0][0] <= until or process.paused_until > until:
            return False
        if not process.alive or self.failure is not None:
            return False
        if self.now > self._earliest and self._until():
            return False
        strand.wakes += 1
        self._draw()
        self.now = max(self.now, until)
        self.steps += 1
        return True

    def _put(self, at: float, strand: Strand) -> None:
        strand.wakes += 1
        heappush(self._queue, (at, self._draw(), strand.wakes, next(self._numbers), strand))

    def _switch(self, strand: Strand) -> None:
        # Without a detour through the hub, which costs as much again.
        if (following := self._next()) is not strand:
            (self._hub if following is None else following.greenlet).switch()
        while strand.signals:
            strand.signals.pop(0)()
