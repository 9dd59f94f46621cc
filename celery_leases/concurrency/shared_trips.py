"""Steps of different threads or greenlets that go to a server together."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final, Generic, TypeVar

from celery_leases.concurrency import os_threads, wait_limit
from celery_leases.errors import StoreUnavailable

G = TypeVar("G")
A = TypeVar("A")

SPACING: Final = 100e-6
"""Seconds for each call that runs in the process, by which a trip begins later than the one before,
so that more steps go together.
"""
MOST_SPACING: Final = 0.005
"""Seconds that this takes at most."""
LEAST_PAUSE: Final = 0.0005
"""A pause of at most so many seconds is left out, so a process that runs few calls never waits."""
PATIENCE: Final = 0.1
"""Seconds after which those that wait no longer wait for the trip that is under way."""


class _Step(Generic[G, A]):
    """What a caller has *given*, and its answer, or the *failure* to raise instead. The lock
    *wakeup*, if the caller waits, is released once it has either, or is to begin the *trip* of all
    that wait.
    """

    __slots__ = ("answer", "failure", "given", "trip", "wakeup")

    def __init__(self, given: G) -> None:
        self.given = given
        self.answer: A | None = None
        self.failure: StoreUnavailable | None = None
        self.wakeup: Any = None
        self.trip: list[_Step[G, A]] = []


class SharedTrips(Generic[G, A]):
    """Steps that go to a server together.

    A caller goes at once, and alone, if no trip is under way and the last one has not just begun.
    Otherwise it goes in the next trip, together with all that come until that begins: when the one
    before has ended, or is late, and some time after it began, which grows with the number of
    *running* calls. *together* gets what the callers have given, and returns an answer for each;
    ``None``: that step must go alone. If it raises an error after which nothing was executed, all
    steps of the trip must go alone, so that what is wrong with one of them fails only that one;
    after any other :class:`StoreUnavailable` it is unknown what was executed, and each step fails.
    """

    def __init__(
        self,
        together: Callable[[Sequence[G]], Sequence[A | None]],
        running: Callable[[], int] = lambda: 0,
    ) -> None:
        self._together = together
        self._running = running
        #: When the last trip began.
        self._began = -MOST_SPACING
        self._lock = threading.Lock()
        self._waiting: list[_Step[G, A]] = []
        #: The trip for whose end those that come must wait.
        self._under_way: list[_Step[G, A]] = []

    def run(self, given: G, alone: Callable[[], A]) -> A:
        """The answer to *given*, from a shared trip or from *alone*, whose errors it raises.

        Raises :class:`StoreUnavailable` if a shared trip has failed and may have been executed.
        """
        step: _Step[G, A] = _Step(given)
        with self._lock:
            if self._under_way:
                step.wakeup = threading.Lock()
                step.wakeup.acquire()
                self._waiting.append(step)
            else:
                self._under_way = step.trip = [step]
        if step.wakeup is not None:
            self._wait(step)
        self._gather(step)
        if len(step.trip) == 1:
            try:
                return alone()
            finally:
                self._go_on(step, self._end(step, step.trip))
        self._go_on(step, step.trip)
        if step.failure is not None:
            raise step.failure
        return step.answer if step.answer is not None else alone()

    def send(self, given: G) -> bool:
        """Let *given* go in the next trip, and do not wait for an answer; ``False``: the caller
        must go itself, at once. A step that would have to go alone is forgotten.
        """
        step: _Step[G, A] = _Step(given)
        with self._lock:
            if self._under_way:
                self._waiting.append(step)
                return True
            if self._until_next() <= LEAST_PAUSE:
                self._began = os_threads.boot_clock()
                return False
            self._under_way = step.trip = [step]
        self._gather(step)
        self._go_on(step, step.trip)
        return True

    def _until_next(self) -> float:
        """In how many seconds the next trip may begin."""
        spacing = min(MOST_SPACING, SPACING * self._running())
        return self._began + spacing - os_threads.boot_clock()

    def _gather(self, step: _Step[G, A]) -> None:
        """Before a trip that *step* is to begin, wait until it may begin, and let those that come
        meanwhile join it.
        """
        trip = step.trip
        if not trip:
            return
        if (seconds := self._until_next()) > LEAST_PAUSE:
            try:
                time.sleep(seconds)
            except BaseException:
                self._go_on(step, self._end(step, trip))
                raise
            with self._lock:
                if self._under_way is trip:
                    trip += self._waiting
                    self._waiting = []
        self._began = os_threads.boot_clock()

    def _wait(self, step: _Step[G, A]) -> None:
        """Return when *step* has an answer, must go alone, or is to begin a trip."""
        try:
            if step.wakeup.acquire(timeout=wait_limit.bounded(PATIENCE)):
                return
            with self._lock:
                if step in self._waiting:  # the trip is late
                    self._waiting.remove(step)
                    step.trip = self._under_way = [step, *self._waiting]
                    self._waiting = []
                    return
            step.wakeup.acquire()  # it is in a trip, or is to begin one
        except BaseException:
            with self._lock:
                if step in self._waiting:
                    self._waiting.remove(step)
            if step.trip:  # its turn has come meanwhile
                self._go_on(step, self._end(step, step.trip))
            raise

    def _go_on(self, step: _Step[G, A], trip: list[_Step[G, A]]) -> None:
        """Make a *trip*, if there is any, and then the next one if nobody waits for it."""
        while trip:
            try:
                with suppress(Exception):  # each step meets its own error when it goes alone
                    self._make(trip)
            finally:
                trip = self._end(step, trip)

    def _make(self, trip: list[_Step[G, A]]) -> None:
        try:
            answers = self._together([step.given for step in trip])
        except StoreUnavailable as error:
            if error.executed is not False:
                for step in trip:
                    step.failure = StoreUnavailable(str(error), error.executed)
            raise
        for step, answer in zip(trip, answers, strict=True):
            step.answer = answer

    def _end(self, own: _Step[G, A], trip: list[_Step[G, A]]) -> list[_Step[G, A]]:
        """Wake the others of a *trip* that has ended, and one of those that wait, to begin the next
        one. If nobody waits for it, return it.
        """
        ended: list[_Step[G, A]] = trip
        ours: list[_Step[G, A]] = []
        with self._lock:
            if self._under_way is trip:  # no later one has begun meanwhile
                waiting, self._waiting = self._waiting, []
                self._under_way = waiting
                first = next((step for step in waiting if step.wakeup is not None), None)
                if first is None:
                    ours = waiting
                else:
                    waiting.remove(first)
                    waiting.insert(0, first)
                    first.trip, ended = waiting, [*trip, first]
        for step in ended:
            if step is not own and step.wakeup is not None:
                step.wakeup.release()
        return ours
