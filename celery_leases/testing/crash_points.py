"""The points at which an attempt may crash in a test, and the external calls it had made by then.

The stores of an attempt, its commits and the watched external calls tell a :class:`CrashPlan` which
point they have reached. At the chosen point the process of the attempt counts as dead: nothing that
its body still does, such as in a ``finally``, reaches a store or a watched call.
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

from celery_leases.lease import lease_here
from celery_leases.protocol.effects import Begun

PACKAGE: Final = str(Path(__file__).parents[1])
EFFECTS: Final = "effect"
"""What the calls of ``lease.effect()`` are called together, as their names are the body's own."""


class ProcessDied(BaseException):
    """Ends a body as the death of its process would; ``point`` is where. Only its test may catch
    it.
    """

    def __init__(self, point: str) -> None:
        super().__init__(f"the process died {point}")
        self.point = point


@dataclass(frozen=True, slots=True)
class ExternalCall:
    """One call to the outside: *what* was called, by which *attempt*, from which *line* of the
    body's file.

    *identity* is that by which the other side recognises a repetition; ``None`` where it does not.
    *arguments* are as they are shown, without addresses in memory.
    """

    what: str
    identity: str | None
    arguments: str
    attempt: int
    line: str


@dataclass
class CrashPlan:
    """At which point an attempt of one call crashes, if at any, and what its attempts have done.

    *at* is a name such as ``after:charge``, of which the first counts, or the number of a point.
    *file* is the one of the body.
    """

    at: str | int | None
    file: str
    points: list[str] = field(default_factory=list)
    calls: list[ExternalCall] = field(default_factory=list)
    died: str | None = None
    #: The point at which an attempt has died, also after :meth:`stop_crashing`.
    crashed: str | None = None
    #: The idempotency key of the effect that is being made.
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
        """Be at *point*, and die there if that is the chosen one."""
        self.check()
        self.points.append(point)
        if self.at in (point, len(self.points) - 1):
            self.died = self.crashed = point
            raise ProcessDied(point)

    def stop_crashing(self) -> None:
        """Another process goes on, and lives to the end."""
        self.at = self.died = None

    def called(self, what: str, identity: str | None, arguments: str) -> None:
        """Take note of a call to the outside that is being made."""
        attempt: int = getattr(lease_here(), "attempt", 0) or self.attempt
        line = _line(self.file, self.thread)
        self.calls.append(ExternalCall(what, identity, arguments, attempt, line))


class CrashPoints:
    """The plan of the call that is run now, if it has one."""

    def __init__(self) -> None:
        self.now: CrashPlan | None = None
        self._committed: WeakSet[Session] = WeakSet()

    @contextmanager
    def following(self, plan: CrashPlan) -> Iterator[CrashPlan]:
        """Have *plan* count, also for the commits of SQLAlchemy's sessions and of Django."""
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
"""Called for a step of a store with its plan, its arguments, and what it has returned."""


class CrashableStore:
    """A store as the process of an attempt has it: once that is dead, no step of it is taken any
    more.

    *before* and *after* are called for the steps of these names.
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
            if told := self._before.get(name):
                told(plan, args, None)
            result = value(*args, **kwargs)
            if told := self._after.get(name):
                told(plan, args, result)
            return result

        return step


def crashable_effects(target: Any, crash_points: CrashPoints) -> Any:
    """An effect store whose effects and saved progress are points."""

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
    """A record store that is left by the outcome of an attempt."""
    return CrashableStore(
        target,
        crash_points,
        {"settle": lambda plan, *_: plan.reach("before:return")},
        {"settle": lambda plan, *_: plan.reach("after:return")},
    )


def watched(
    function: Callable[..., Any], name: str, by: str | None, crash_points: CrashPoints
) -> Callable[..., Any]:
    """*function*, a call to the outside of that *name*, which the other side recognises *by* one of
    its parameters. One that is ``async def`` is called when it is awaited.
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
    """The line of the body's file that is being executed, here or by the *thread* of the body,
    which waits for this one; else the innermost one outside of this package.
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
