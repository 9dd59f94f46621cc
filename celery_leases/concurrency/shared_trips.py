"""Steps of different threads or greenlets that go to a server together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final, Generic, TypeVar

from celery_leases.concurrency import wait_limit
from celery_leases.errors import StoreUnavailable

G = TypeVar("G")
A = TypeVar("A")

PATIENCE: Final = 2.0
"""Seconds for which a step waits at most for a trip that others have begun. Then it goes alone."""


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

    A caller goes at once if no trip is under way. Those that come during a trip go together in the
    next one. *together* gets what the callers have given, and returns an answer for each; ``None``:
    that step must go alone. If it raises an error after which nothing was executed, all steps of
    the trip must go alone, so that what is wrong with one of them fails only that one; after any
    other :class:`StoreUnavailable` nobody knows, and each step fails. Those that wait go alone.
    """

    def __init__(self, together: Callable[[Sequence[G]], Sequence[A | None]]) -> None:
        self._together = together
        self._lock = threading.Lock()
        self._waiting: list[_Step[G, A]] = []
        self._under_way = False

    def run(self, given: G) -> A | None:
        """The answer to *given*; ``None``: the caller must go alone.

        Raises :class:`StoreUnavailable` if it may have been executed.
        """
        step: _Step[G, A] = _Step(given)
        with self._lock:
            if self._under_way:
                step.wakeup = threading.Lock()
                step.wakeup.acquire()
                self._waiting.append(step)
            else:
                self._under_way = True
                step.trip = [step]
        if step.wakeup is not None:
            self._wait(step)
        if step.trip:
            self._go(step)
        if step.failure is not None:
            raise step.failure
        return step.answer

    def send(self, given: G) -> bool:
        """Let *given* go in the next trip, and do not wait for an answer; ``False``: no trip is
        under way, so the caller must go itself. A step that would have to go alone is forgotten.
        """
        with self._lock:
            if self._under_way:
                self._waiting.append(_Step(given))
            return self._under_way

    def _wait(self, step: _Step[G, A]) -> None:
        try:
            if step.wakeup.acquire(timeout=wait_limit.bounded(PATIENCE)):
                return
            with self._lock:
                if step in self._waiting:
                    self._waiting.remove(step)
        except BaseException:
            with self._lock:
                if step in self._waiting:
                    self._waiting.remove(step)
            if step.trip:  # its turn has come meanwhile
                self._end(step, step.trip, alone=True)
            raise

    def _go(self, step: _Step[G, A]) -> None:
        """Make the trip of *step*, and then the next one if nobody waits for it."""
        trip = step.trip
        while trip:
            alone = True
            try:
                with suppress(Exception):  # each step meets its own error when it goes alone
                    self._make(trip)
                    alone = False
            finally:
                trip = self._end(step, trip, alone=alone)

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

    def _end(self, own: _Step[G, A], trip: list[_Step[G, A]], *, alone: bool) -> list[_Step[G, A]]:
        """Wake the others of a *trip* that has ended, and let those that wait begin the next one,
        or go *alone*. If nobody waits for the next one, return it.
        """
        with self._lock:
            waiting, self._waiting = self._waiting, []
            goes_on = self._under_way = bool(waiting) and not alone
            ended = trip if goes_on else [*trip, *waiting]
            next_one = next((step for step in waiting if step.wakeup is not None), None)
            if goes_on and next_one is not None:
                next_one.trip, ended, waiting = waiting, [*trip, next_one], []
        for step in ended:
            if step is not own and step.wakeup is not None:
                step.wakeup.release()
        return waiting if goes_on else []
