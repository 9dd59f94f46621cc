"""The points at which an attempt can crash in a test, and the external calls that it made before.

The stores, the commits and the watched functions of an attempt report each point to a
:class:`CrashPlan`. From the chosen point on the process counts as dead: what the body still does,
for example in a ``finally``, reaches neither a store nor a watched function. The points:

=======================================  ===========================================================
point                                    the process dies
=======================================  ===========================================================
``before:NAME``                          in an effect, after the intent is committed and before the
                                         call; or just before a call of a watched function
``after:NAME``                           in an effect, after the call and before its reply is saved;
                                         or just after a call of a watched function
``saved:NAME``                           in an effect, after the reply is saved
``before:progress``, ``after:progress``  around a save of ``save_progress()`` or ``each()``
``before:commit``, ``after:commit``      around the commit of a SQLAlchemy ``Session``, or of
                                         Django's connection (a ``TestCase`` commits nothing)
``before:return``, ``after:return``      around the write of the outcome
=======================================  ===========================================================
"""

from __future__ import annotations

import inspect
import linecache
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from types import FrameType
from typing import Any, Final
from weakref import WeakSet

from sqlalchemy import event
from sqlalchemy.orm import Session, SessionTransaction

from celery_leases.effect import Begun
from celery_leases.lease import active_lease

PACKAGE: Final = str(Path(__file__).parents[1])
EFFECTS: Final = "effect"
"""The common name of all effects in a :class:`CrashPlan`, because a body may choose their names."""


class ProcessDied(BaseException):
    """Ends a body in place of the death of its process, at ``point``. Only the test kit catches
    it.
    """

    def __init__(self, point: str) -> None:
        super().__init__(f"the process died {point}")
        self.point = point


@dataclass(frozen=True, slots=True)
class ExternalCall:
    """One external call: *what* was called, by which *attempt*, on which *line* of the body's file.

    *identity* is the value by which the external service recognises a repeated call; ``None`` if it
    does not. *arguments* is their text, without memory addresses.
    """

    what: str
    identity: str | None
    arguments: str
    attempt: int
    line: str


@dataclass
class CrashPlan:
    """The point at which an attempt of a call crashes, and what the call's attempts have done.

    *at* is the name of a point such as ``after:charge``, the first of which counts, the number of a
    point, or ``None``. *file* is the file of the body.
    """

    at: str | int | None
    file: str
    points: list[str] = field(default_factory=list)
    calls: list[ExternalCall] = field(default_factory=list)
    died: str | None = None
    #: The point at which an attempt died; :meth:`stop_crashing` does not reset it.
    crashed: str | None = None
    #: The idempotency key of the effect whose call is being made.
    effect: str | None = None
    #: The number of the attempt that began last.
    attempt: int = 0
    #: The thread of the body; others, which it starts, know no lease.
    thread: int = field(default_factory=threading.get_ident)

    def check(self) -> None:
        """Raise :class:`ProcessDied` if the process is dead."""
        if self.died is not None:
            raise ProcessDied(self.died)

    def reach(self, point: str) -> None:
        """Record that *point* is reached; raise :class:`ProcessDied` if it is the chosen one."""
        self.check()
        self.points.append(point)
        if self.at in (point, len(self.points) - 1):
            self.died = self.crashed = point
            raise ProcessDied(point)

    def stop_crashing(self) -> None:
        """Let the next attempts run to their end, in another process."""
        self.at = self.died = None

    def called(self, what: str, identity: str | None, arguments: str) -> None:
        """Record an external call that is being made."""
        attempt: int = getattr(active_lease(), "attempt", 0) or self.attempt
        line = _line(self.file, self.thread)
        self.calls.append(ExternalCall(what, identity, arguments, attempt, line))


class CrashPoints:
    """Holds the plan of the call that is running; ``now`` is ``None`` without one."""

    def __init__(self) -> None:
        self.now: CrashPlan | None = None
        self._committed: WeakSet[Session] = WeakSet()

    @contextmanager
    def following(self, plan: CrashPlan) -> Iterator[CrashPlan]:
        """Use *plan* meanwhile, also for the commits of SQLAlchemy's sessions and of Django."""
        receivers: tuple[tuple[str, Callable[..., None]], ...] = (
            ("before_commit", self._before_commit),
            ("after_commit", self._after_commit),
            ("after_transaction_end", self._after_end),
        )
        self.now = plan
        for name, receiver in receivers:
            event.listen(Session, name, receiver)
        try:
            with self._commits_of_django():
                yield plan
        finally:
            self.now = None
            for name, receiver in receivers:
                event.remove(Session, name, receiver)

    @contextmanager
    def _commits_of_django(self) -> Iterator[None]:
        """Make points of them in a process that uses Django's databases."""
        module: Any = sys.modules.get("django.db.backends.base.base")
        if module is None:
            yield
            return
        wrapper = module.BaseDatabaseWrapper
        commit = wrapper.commit

        @wraps(commit)
        def committed(connection: Any) -> None:
            try:
                if self.now is not None:
                    self.now.reach("before:commit")
                commit(connection)
                if self.now is not None:
                    self.now.reach("after:commit")
            except ProcessDied:
                # The server ends the transaction of a dead process, which calls no hook.
                connection.rollback()
                raise

        wrapper.commit = committed
        try:
            yield
        finally:
            wrapper.commit = commit

    def _before_commit(self, session: Session) -> None:
        if self.now is not None and session.get_nested_transaction() is None:
            self.now.reach("before:commit")

    def _after_commit(self, session: Session) -> None:
        if session.get_nested_transaction() is None:
            self._committed.add(session)

    def _after_end(self, session: Session, transaction: SessionTransaction) -> None:
        if transaction.parent is None and session in self._committed:
            self._committed.discard(session)
            if self.now is not None and self.now.died is None:
                self.now.reach("after:commit")


StepObserver = Callable[[CrashPlan, Any, Any], None]
"""Called before or after a method of a store, with the plan, the arguments, and the result."""


class CrashableStore:
    """A store in the process of an attempt. Once the process counts as dead, no method is called.

    *before* and *after* have functions to call before and after the methods of these names.
    """

    def __init__(
        self,
        target: Any,
        crash_points: CrashPoints,
        before: Mapping[str, StepObserver],
        after: Mapping[str, StepObserver],
    ) -> None:
        self._target, self._crash_points = target, crash_points
        self._before, self._after = before, after

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._target, name)
        if not callable(value):
            return value

        def step(*args: Any, **kwargs: Any) -> Any:
            plan = self._crash_points.now
            if plan is None:
                return value(*args, **kwargs)
            plan.check()
            if observer := self._before.get(name):
                observer(plan, args, None)
            result = value(*args, **kwargs)
            if observer := self._after.get(name):
                observer(plan, args, result)
            return result

        return step


def crashable_effects(target: Any, crash_points: CrashPoints) -> Any:
    """An effect store with points around effects and around saving progress."""

    def begun(plan: CrashPlan, args: Any, result: Any) -> None:
        if isinstance(result, Begun):
            plan.effect = result.effect.idempotency_key
            plan.reach(f"before:{args[1]}")

    def called(plan: CrashPlan, args: Any, _: Any) -> None:
        plan.effect = None
        plan.called(EFFECTS, args[0].idempotency_key, _arguments((args[0].name,), {}))
        plan.reach(f"after:{args[0].name}")

    def noted(plan: CrashPlan, args: Any, _: Any) -> None:
        plan.reach(f"saved:{args[0].name}")

    before = {"finish": called, "save_progress": lambda plan, *_: plan.reach("before:progress")}
    after = {
        "begin": begun,
        "finish": noted,
        "save_progress": lambda plan, *_: plan.reach("after:progress"),
    }
    return CrashableStore(target, crash_points, before, after)


def crashable_records(target: Any, crash_points: CrashPoints) -> Any:
    """A record store with points around the write of an outcome."""
    return CrashableStore(
        target,
        crash_points,
        {"settle": lambda plan, *_: plan.reach("before:return")},
        {"settle": lambda plan, *_: plan.reach("after:return")},
    )


def watched(
    function: Callable[..., Any], name: str, by: str | None, crash_points: CrashPoints
) -> Callable[..., Any]:
    """*function*, whose calls are external calls called *name*. *by* is the parameter by which the
    external service recognises a repeated call. An ``async def`` counts as called when it is
    awaited.
    """

    def calling(plan: CrashPlan, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        plan.reach(f"before:{name}")
        plan.called(name, _identity(function, by, args, kwargs, plan), _arguments(args, kwargs))

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        plan = crash_points.now
        if plan is None:
            return function(*args, **kwargs)
        calling(plan, args, kwargs)
        result = function(*args, **kwargs)
        plan.reach(f"after:{name}")
        return result

    @wraps(function)
    async def awaited_call(*args: Any, **kwargs: Any) -> Any:
        plan = crash_points.now
        if plan is None:
            return await function(*args, **kwargs)
        calling(plan, args, kwargs)
        result = await function(*args, **kwargs)
        plan.reach(f"after:{name}")
        return result

    return awaited_call if inspect.iscoroutinefunction(function) else call


def _identity(
    function: Callable[..., Any],
    by: str | None,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    plan: CrashPlan,
) -> str | None:
    if by is not None:
        if by in kwargs:
            return repr(kwargs[by])
        try:
            given = inspect.signature(function).bind(*args, **kwargs)
        except (TypeError, ValueError):
            return None
        given.apply_defaults()
        value = given.arguments.get(by)
        return repr(value) if value is not None else None
    return plan.effect if plan.effect is not None and plan.effect in repr((args, kwargs)) else None


def _arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    given = [*map(repr, args), *(f"{name}={value!r}" for name, value in kwargs.items())]
    return re.sub(r" at 0x[0-9a-fA-F]+", "", f"({', '.join(given)})")


def _line(file: str, thread: int) -> str:
    """The current line of the body's file, in this thread or in the *thread* of the body, which
    waits for this one; otherwise the innermost current line outside this package.
    """
    here = _frames(sys._getframe(1))  # noqa: SLF001 - a documented function of CPython
    of_body = _frames(sys._current_frames().get(thread))  # noqa: SLF001 - as above
    found = next((one for one in (*here, *of_body) if one.f_code.co_filename == file), None)
    outside = (one for one in here if not one.f_code.co_filename.startswith(PACKAGE))
    if (frame := found or next(outside, None)) is None:
        return "?"
    name, number = frame.f_code.co_filename, frame.f_lineno
    return f"{Path(name).name}:{number}: {linecache.getline(name, number).strip()}"


def _frames(innermost: FrameType | None) -> list[FrameType]:
    """The frames of a thread, the innermost first."""
    found = []
    while innermost is not None:
        found.append(innermost)
        innermost = innermost.f_back
    return found
