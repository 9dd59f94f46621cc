"""Steps of different threads or greenlets that go to a server together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final, Generic, TypeVar

from celery_leases.concurrency import wait_limit

G = TypeVar("G")
A = TypeVar("A")

PATIENCE: Final = 2.0
"""Seconds for which a step waits at most for a trip that others have begun. Then it goes alone."""


class _Step(Generic[G, A]):
    """What a caller has *given*, and its answer. The lock *wakeup*, if the caller waits, is
    released once it has the answer, or is to begin the *trip* of all that wait.
    """

    __slots__ = ("answer", "given", "trip", "wakeup")

    def __init__(self, given: G) -> None:
        self.given = given
        self.answer: A | None = None
        self.wakeup: Any = None
        self.trip: list[_Step[G, A]] | None = None


class SharedTrips(Generic[G, A]):
    """Steps that go to a server together.

    A caller goes at once if no trip is under way. Those that come during a trip go together in the
    next one. *together* gets what the callers have given, and returns an answer for each; ``None``:
    that step must go alone. If it raises an error, all steps of the trip, and all that wait, must
    go alone, so that what is wrong with one of them fails only that one. So a step may be executed
    together and then again alone: it must be repeatable.
    """

    def __init__(self, together: Callable[[Sequence[G]], Sequence[A | None]]) -> None:
        self._together = together
        self._lock = threading.Lock()
        self._waiting: list[_Step[G, A]] = []
        self._under_way = False

    def run(self, given: G) -> A | None:
        """The answer to *given*; ``None``: the caller must go alone."""
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
        if step.trip is not None:
            self._go(step.trip)
        return step.answer

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
            if step.trip is not None:  # its turn has come meanwhile
                self._end(step.trip[1:], alone=True)
            raise

    def _go(self, trip: list[_Step[G, A]]) -> None:
        """Make a trip, whose first step is that of this caller; then let the next one begin."""
        alone = True
        try:
            with suppress(Exception):  # each step meets its own error when it goes alone
                answers = self._together([step.given for step in trip])
                for step, answer in zip(trip, answers, strict=True):
                    step.answer = answer
                alone = False
        finally:
            self._end(trip[1:], alone=alone)

    def _end(self, others: list[_Step[G, A]], *, alone: bool) -> None:
        """Wake the *others* of a trip that has ended, and let those that wait begin the next one,
        or go *alone*.
        """
        with self._lock:
            waiting, self._waiting = self._waiting, []
            self._under_way = bool(waiting) and not alone
            if self._under_way:
                waiting[0].trip = waiting
                waiting = waiting[:1]
        for step in (*others, *waiting):
            step.wakeup.release()
