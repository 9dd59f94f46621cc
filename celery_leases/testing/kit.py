"""Leases in tests: stores in memory, a clock that the test moves, held keys, lost leases, and
crashes.

:class:`LeaseKit` makes a Celery app use such stores until the kit is stopped. The functions of
:mod:`celery_leases.testing` call its methods, on the kit that was started last.
"""

from __future__ import annotations

import importlib
import inspect
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, Self
from uuid import uuid4

from celery import Celery, Task, current_app
from celery.result import AsyncResult, EagerResult

from celery_leases.attempt.held_lease import HeldLease
from celery_leases.attempt.process import Process
from celery_leases.attempt.renewal import HELD_BY_OTHER, Renewer
from celery_leases.call import Call
from celery_leases.client import LeaseClient
from celery_leases.concurrency.os_threads import boot_clock
from celery_leases.decide.after_failure import resumes_after_cooldown
from celery_leases.decide.answers import Acquired
from celery_leases.errors import CoolingDown, KeyUnusable, LeaseConfigurationError
from celery_leases.events import Event, LeaseAcquired, ResultReplayed
from celery_leases.failures.actions import RuleMatch
from celery_leases.failures.classifier import Rules
from celery_leases.keys import CallKey, call_group, call_key, stored_key
from celery_leases.options import DATABASE
from celery_leases.record import (
    Record,
    State,
)
from celery_leases.settings import IN_MEMORY
from celery_leases.signals import Announcer
from celery_leases.status import LeaseStatus
from celery_leases.stores import memory
from celery_leases.stores.sql.rows import column_values
from celery_leases.testing.crash_points import (
    CrashableStore,
    CrashPlan,
    CrashPoints,
    ProcessDied,
    crashable_effects,
    crashable_records,
    watched,
)
from celery_leases.testing.crashes import check_survival
from celery_leases.text.durations import Duration, seconds
from celery_leases.worker import processes
from celery_leases.worker.app_settings import leased_tasks, settings_of
from celery_leases.worker.stored_messages import HeaderRecorder

HOLD_SECONDS: Final = 10 * 365 * 86_400.0
"""The ttl of :meth:`LeaseKit.hold` in memory: longer than any test moves the clock."""
HOLD_SECONDS_REAL_CLOCK: Final = 3600.0
"""The same with the real clock."""
MAX_DELIVERIES: Final = 50
"""How often a call is delivered before the kit concludes that it never ends."""

_started: list[LeaseKit] = []


class KitClock:
    """A clock that stands still until a caller sleeps or the test moves it. Sleeping takes no real
    time.
    """

    def __init__(self) -> None:
        self._began, self._wall, self._moved = boot_clock(), time.time(), 0.0

    def now(self) -> float:
        """Seconds since some fixed point."""
        return self._began + self._moved

    def wall_time(self) -> float:
        """Seconds since the epoch."""
        return self._wall + self._moved

    def microseconds(self) -> int:
        """The same in microseconds, as databases count."""
        return round(self.wall_time() * 1e6)

    def sleep(self, seconds: float) -> None:
        """Move the clock."""
        self._moved += max(0.0, seconds)


class KitRenewer(Renewer):
    """Renews the leases in memory when the clock is moved. It has no thread."""

    def add(self, held_lease: HeldLease) -> None:
        """See :class:`~celery_leases.attempt.renewal.Renewer`."""
        self._held_leases[held_lease.call.token] = held_lease

    def renew_all(self) -> float | None:
        """Renew all leases that may be renewed; returns the seconds until the next renewal, or
        ``None`` if there is no lease.
        """
        now = self._clock.now()
        due = [held_lease for held_lease in self._held_leases.values() if held_lease.renewable(now)]
        if due:
            self._renew(due)
        return min((held_lease.call.options.ttl / 3 for held_lease in due), default=None)

    def end_overdue(self) -> None:
        """Lose each lease whose time is over, as the renewer's deadline thread does."""
        for held_lease in list(self._held_leases.values()):
            if held_lease.lost is None and (reason := held_lease.overdue(self._clock.now())):
                self.lose(held_lease, reason)


@dataclass(frozen=True, slots=True)
class QueuedCall:
    """A published call: the task's name, the arguments, Celery's id, and the options of
    ``apply_async()``.
    """

    task: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    id: str
    options: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class CrashedCall:
    """A call whose process died at *point*; *points* are all that it reached."""

    kit: LeaseKit
    task: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    call_id: str
    point: str
    points: tuple[str, ...]

    def resume(self) -> EagerResult:
        """Deliver the message again, as the broker would, until the call has ended. The clock is
        moved by the time that the call waits.
        """
        return self.kit.run_to_its_end(self.task, self.args, self.kwargs, self.call_id)


class LeaseKit:
    """Makes a Celery *app*, by default the current app, use stores in memory with a clock that the
    test moves.

    *eager*: a call runs at once when it is published. Otherwise calls are queued, and
    :meth:`run_queued` runs them. Nothing is sent to a broker in either case. *stores* is
    ``"memory"``, or ``"configured"`` for tests with a real worker: then the app uses the stores of
    its settings and the real clock, and published calls go to the broker.

    A kit is a context manager. Meanwhile ``lease_status()``, ``LeaseClient.from_app()`` and
    ``delay_in()`` use the same stores. Only one kit of an app is in use at a time.
    """

    def __init__(
        self,
        app: Celery | None = None,
        *,
        eager: bool = True,
        stores: Literal["memory", "configured"] = "memory",
    ) -> None:
        if stores not in ("memory", "configured"):
            raise LeaseConfigurationError(
                f'leases(stores={stores!r}): write "memory" or "configured"'
            )
        given: Any = app if app is not None else current_app
        real = getattr(
            given, "_get_current_object", None
        )  # only a proxy such as current_app has it
        self.app: Celery = real() if real else given
        self.in_memory = stores == "memory"
        self.eager = eager
        #: The calls published since the start or the last :meth:`reset`, the oldest first.
        self.published: list[QueuedCall] = []
        #: The events of leased calls since then; see :mod:`celery_leases.events`.
        self.events: list[Event] = []
        self._crash_points = CrashPoints()
        self._reset_functions: list[Callable[[], None]] = []
        self._queued: list[QueuedCall] = []
        self._stack = ExitStack()
        self._clock: KitClock | None = None
        self._open_process: Process | None = None

    # -- start and stop ----------------------------------------------------------------------------

    def __enter__(self) -> Self:
        """Start."""
        return self.start()

    def __exit__(self, *_: object) -> None:
        """Stop."""
        self.stop()

    def start(self) -> Self:
        """Make the app use the stores of this kit."""
        self.app.finalize()
        with ExitStack() as stack:
            self._open()
            stack.callback(self._close)
            if self.in_memory:
                self._intercept_publishing(stack)
            _started.append(self)
            stack.callback(_started.remove, self)
            self._stack = stack.pop_all()
        return self

    def stop(self) -> None:
        """Make the app use its own stores again, and undo :meth:`watch`."""
        self._stack.close()

    def reset(self) -> None:
        """Forget all keys, calls and events, as between two tests, and call the functions given to
        :meth:`on_reset`.
        """
        self._require_memory("reset()")
        self._close()
        self._open()
        self.published.clear()
        self.events.clear()
        self._queued.clear()
        for function in self._reset_functions:
            function()

    def on_reset(self, function: Callable[[], None]) -> Callable[[], None]:
        """Call *function* at each :meth:`reset`, so that it resets your own state, such as rows."""
        self._reset_functions.append(function)
        return function

    def _open(self) -> None:
        self._clock = KitClock() if self.in_memory else None
        settings = settings_of(self.app, lenient=self.in_memory)
        if self.in_memory:
            settings = replace(settings, leases_url=DATABASE, database_url=IN_MEMORY)
        observer = _RecordingObserver(self.events, self._crash_points, Announcer(self.app.tasks))
        process = processes.open_for(
            self.app,
            settings,
            observer,
            clock=self._clock,
            renewed_by=KitRenewer if self.in_memory else Renewer,
        )
        if self._clock is not None:
            process.wall_time, process.rand = self._clock.wall_time, lambda: 1.0
            memory.prepare(process.records, self._clock.microseconds)
        else:
            process.records.check()
        # complete() writes with the user's commit, which has no crash points.
        setattr(process, "transaction", copy(process).transaction)  # noqa: B010 - a method
        process.records = crashable_records(process.records, self._crash_points)
        leases: Any = CrashableStore(process.leases, self._crash_points, {}, {})
        process.leases = leases
        process.effects = crashable_effects(process.effects, self._crash_points)
        self._open_process = process
        self._before = processes.use(self.app, self._open_process)

    def _close(self) -> None:
        if self._open_process is not None:
            processes.use(self.app, self._before)
            self._open_process.close()
            self._open_process = None

    def _intercept_publishing(self, stack: ExitStack) -> None:
        """Let this kit receive all published calls of the app, and the broker none."""
        conf = self.app.conf
        before = conf.task_always_eager
        conf.task_always_eager = self.eager
        stack.callback(setattr, conf, "task_always_eager", before)
        publish = Task.apply_async

        def apply_async(
            task: Any, args: Any = None, kwargs: Any = None, task_id: Any = None, **options: Any
        ) -> Any:
            if task._get_app() is not self.app:  # noqa: SLF001 - task.app calls it too
                return publish(task, args, kwargs, task_id, **options)
            given, named, call_id = tuple(args or ()), dict(kwargs or {}), task_id or str(uuid4())
            recorder = options.get("producer") or options.get("router")
            if isinstance(recorder, HeaderRecorder):
                recorder.publish(headers=options.get("headers"))
                return AsyncResult(call_id, app=self.app)
            if task.typing and (check := getattr(task, "__header__", None)):
                check(*given, **named)
            call = self._record_published(task.name, given, named, call_id, options)
            if self.eager:
                return publish(task, given, named, call_id, **options)
            self._queued.append(call)
            return AsyncResult(call_id, app=self.app)

        def send_task(name: str, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
            if name in self.app.tasks:
                return self.app.tasks[name].apply_async(args, kwargs, **options)
            call_id = options.pop("task_id", None) or str(uuid4())
            self._record_published(name, tuple(args or ()), dict(kwargs or {}), call_id, options)
            return AsyncResult(call_id, app=self.app)

        _replace(stack, Task, "apply_async", apply_async)
        _replace(stack, self.app, "send_task", send_task)

    def _record_published(
        self,
        name: str,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        call_id: str,
        options: Mapping[str, Any],
    ) -> QueuedCall:
        call = QueuedCall(
            name, args, kwargs, call_id, {key: value for key, value in options.items() if value}
        )
        self.published.append(call)
        return call

    # -- time --------------------------------------------------------------------------------------

    def tick(self, span: Duration) -> None:
        """Let *span* (seconds, ``"5m"``, a timedelta) pass. Leases of running bodies are
        renewed.
        """
        left = seconds(span, "tick(): span")
        clock, renewer = self._require_memory("tick()"), self._process.renewer
        assert isinstance(renewer, KitRenewer)
        while left > 0:
            step = min(left, renewer.renew_all() or left)
            clock.sleep(step)
            renewer.end_overdue()
            left -= step
        renewer.renew_all()

    @property
    def now(self) -> float:
        """The time of the stores, in seconds since the epoch."""
        return self._clock.wall_time() if self._clock is not None else time.time()

    # -- keys --------------------------------------------------------------------------------------

    def status(self, what: Any, *args: Any, task: str | None = None, **kwargs: Any) -> LeaseStatus:
        """The status of a key. *what* is a task, with the arguments of the call; or the key, with
        the name of its *task*.
        """
        if isinstance(what, str):
            return LeaseClient.from_app(self.app).status(what, task=task)
        key = self._key(what, args, kwargs)
        options = what.lease_options
        group = call_group(what.name, options, what.lease_signature, args, kwargs)
        client = LeaseClient.from_app(self.app)
        return client.status(key.key, task=what.name, group=group)

    @contextmanager
    def hold(self, what: Any, *args: Any, task: str | None = None, **kwargs: Any) -> Iterator[None]:
        """A context manager during which another call runs the key; *what* is as for
        :meth:`status`.

        Afterwards the key is as it was before. Raises AssertionError if the key cannot be run,
        because it is done or cools down.
        """
        name, key = self._task_and_key(what, args, kwargs, task)
        process = self._process
        before = process.records.read(key.stored)
        span = HOLD_SECONDS if self.in_memory else HOLD_SECONDS_REAL_CLOCK
        token = uuid4().hex
        call = Call(
            name,
            f"held-{token}",
            key,
            replace(self.app.tasks[name].lease_options, ttl=span),
            token=token,
            host="another-host/1",
            database=process.database,
        )
        held = self._claim(process, call)
        try:
            yield
        finally:
            self._restore(process, call, held, before)

    def _claim(self, process: Process, call: Call) -> Record:
        answer = process.leases.acquire(call)
        if isinstance(answer, Acquired) and answer.record is None:
            answer = process.records.claim(call, process.leases.name)
            if not isinstance(answer, Acquired):
                process.leases.release(call.key.stored, call.token)
        if answer.record is None or not isinstance(answer, Acquired):
            raise AssertionError(f"{call.key.key} cannot be held: {answer}")
        return answer.record

    def _restore(
        self,
        process: Process,
        call: Call,
        held: Record,
        before: Record | None,
    ) -> None:
        table = process.records.tables.records
        ours = (
            table.c.stored_key == call.key.stored,
            table.c.owner == held.owner,
            table.c.state == State.RUNNING,
        )
        if before is None:
            process.records.database.count(table.delete().where(*ours), {})
        else:
            values = column_values(replace(before, fence=held.fence))
            process.records.database.count(table.update().where(*ours).values(values), {})
        process.leases.end(call.key.stored, call.token)

    def lose(self, what: Any, *args: Any, task: str | None = None, **kwargs: Any) -> None:
        """Let another attempt take the lease of the body that runs the key in this process; *what*
        is as for :meth:`status`.

        ``lease_on_lost`` says what happens to the body. Raises AssertionError if no body in this
        process runs the key.
        """
        _, key = self._task_and_key(what, args, kwargs, task)
        client = LeaseClient.from_app(self.app)
        renewer = self._process.renewer
        running = [
            held_lease
            for held_lease in renewer.held_leases
            if held_lease.call.key.stored == key.stored
        ]
        if not running:
            raise AssertionError(
                f"no body in this process runs {key.key}: call lose() inside the body"
            )
        client.release(key.stored)
        for held_lease in running:
            renewer.lose(held_lease, HELD_BY_OTHER)

    def _key(self, task: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> CallKey:
        if getattr(task, "lease_options", None) is None:
            raise LeaseConfigurationError(
                f"{task!r} is not a leased task; give a leased task, or a key and task="
            )
        if task.lease_options.key is None:
            raise LeaseConfigurationError(
                f"task {task.name} has no lease_key, so its keys are Celery's task ids; give it a lease_key"
            )
        return call_key(task.name, task.lease_options, task.lease_signature, "", args, kwargs)

    def _task_and_key(
        self, what: Any, args: Sequence[Any], kwargs: Mapping[str, Any], task: str | None
    ) -> tuple[str, CallKey]:
        """The task's name and the key for the arguments of :meth:`status`."""
        if not isinstance(what, str):
            return what.name, self._key(what, args, kwargs)
        tasks = leased_tasks(self.app)
        if (
            task is None
            and len(keyed := [name for name, one in tasks.items() if one.lease_options.key]) == 1
        ):
            (task,) = keyed
        if task not in tasks:
            known = ", ".join(sorted(tasks)) or "none"
            raise KeyUnusable(
                f"{what}: say whose key it is: task= one of the leased tasks ({known})"
            )
        return task, CallKey(what, stored_key(task, what))

    # -- calls that die ----------------------------------------------------------------------------

    def watch(self, target: str, *, by: str | None = None) -> None:
        """Treat calls of the function *target*, such as ``"shop.gateway.charge"``, as external
        calls until the kit stops.

        The function is named as for ``mock.patch()``: by the module that looks it up. *by* is the
        name of the parameter, such as an idempotency key, by which the external service recognises
        a repeated call. The last part of the name is used for the points: ``after:charge``.
        """
        module, *path = _import_prefix(target)
        owner = module
        for name in path[:-1]:
            owner = getattr(owner, name)
        self._watch(owner, path[-1], by)

    def external(
        self, function: Callable[..., Any], *, by: str | None = None
    ) -> Callable[..., Any]:
        """*function*, whose calls count as external calls. A decorator for functions that
        :meth:`watch` cannot name.
        """
        return watched(
            function, getattr(function, "__name__", type(function).__name__), by, self._crash_points
        )

    def _watch(self, owner: Any, name: str, by: str | None) -> None:
        here = inspect.getattr_static(owner, name) if isinstance(owner, type) else None
        call: Any
        if isinstance(here, staticmethod | classmethod):
            call = type(here)(watched(here.__func__, name, by, self._crash_points))
        else:
            call = watched(getattr(owner, name), name, by, self._crash_points)
        _replace(self._stack, owner, name, call)

    def crash(self, task: Any, *args: Any, at: str, **kwargs: Any) -> CrashedCall:
        """Call *task*, and let its process die at the point *at*.

        :meth:`CrashedCall.resume` of the returned object delivers the call again.

        An effect has the points ``before:NAME`` (its intent is committed), ``after:NAME`` (the call
        was made, its reply is not saved) and ``saved:NAME``. There are points ``before:`` and
        ``after:`` each watched function, ``progress``, the ``commit`` of a SQLAlchemy session or of
        Django, and ``return``, the write of the outcome. The first point of that name counts.
        Raises AssertionError if the call ends without reaching the point.
        """
        call_id = str(uuid4())
        died, plan = self._crash_at(task, args, kwargs, call_id, at)
        if not died:
            passed = ", ".join(dict.fromkeys(plan.points)) or "none"
            raise AssertionError(
                f"{task.name} ended without reaching {at!r}; its points are {passed}"
            )
        return CrashedCall(self, task, args, kwargs, call_id, plan.points[-1], tuple(plan.points))

    def _crash_at(
        self,
        task: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        call_id: str,
        at: str | int,
    ) -> tuple[bool, CrashPlan]:
        with self._crash_points.following(CrashPlan(at, file_of(task))) as plan:
            try:
                task.apply(args, dict(kwargs), task_id=call_id)
            except ProcessDied:
                return True, plan
        return False, plan

    def _run_with_crash(
        self,
        task: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        call_id: str,
        at: int | None,
    ) -> tuple[CrashPlan, EagerResult, LeaseStatus]:
        """Run a call that dies at point number *at*, and deliver it again until it has ended."""
        with self._crash_points.following(CrashPlan(at, file_of(task))) as plan:
            result = self.run_to_its_end(task, args, kwargs, call_id)
        return plan, result, self._status_of_call(task, args, kwargs, call_id)

    def run_to_its_end(
        self, task: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], call_id: str
    ) -> EagerResult:
        """Deliver a call until it has ended, and move the clock by the time that it waits; returns
        its result.
        """
        clock = self._require_memory("delivering a call again")
        for _ in range(MAX_DELIVERIES):
            try:
                result = task.apply(args, dict(kwargs), task_id=call_id)
            except ProcessDied:
                if self._crash_points.now is not None:
                    self._crash_points.now.stop_crashing()
                result = None
            status = self._status_of_call(task, args, kwargs, call_id)
            if result is not None and (
                result.successful() or status.state in (State.FAILED, State.UNCERTAIN)
            ):
                return result
            if (
                result is not None
                and status.state == State.COOLING
                and not self._is_redelivered(task, result.result)
            ):
                return result
            wait = (
                status.lease_remaining
                or status.retry_after
                or getattr(getattr(result, "result", None), "delay", 0)
            )
            if result is not None and not wait:
                return result
            clock.sleep((wait or 0.0) + 1.0)
        raise AssertionError(
            f"{task.name} has not ended after {MAX_DELIVERIES} deliveries; it is {status.state}: {result}"
        )

    def _is_redelivered(self, task: Any, error: BaseException) -> bool:
        """Whether a worker would run a call again after it failed with *error*."""
        cause = (
            error.__cause__
            if isinstance(error, CoolingDown) and error.__cause__ is not None
            else error
        )
        matched = self.classify(cause, task)
        return resumes_after_cooldown(task.lease_options, matched, matched.action)

    def _status_of_call(
        self, task: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], call_id: str
    ) -> LeaseStatus:
        key = call_key(task.name, task.lease_options, task.lease_signature, call_id, args, kwargs)
        return LeaseClient.from_app(self.app).status(key.stored, task=None)

    # -- calls that were published -----------------------------------------------------------------

    def run_queued(self) -> list[EagerResult]:
        """Run the queued calls in order, and the calls that they publish; returns their results."""
        self._require_memory("run_queued()")
        results = []
        while self._queued:
            call = self._queued.pop(0)
            canvas = sorted(call.options.keys() & {"chain", "chord"})
            if canvas:
                raise AssertionError(
                    f"{call.task} was published with {canvas[0]}=, which run_queued() does not support; write "
                    "leases(eager=True)"
                )
            given = {
                name: call.options[name]
                for name in ("link", "link_error", "headers")
                if name in call.options
            }
            task = self.app.tasks.get(call.task)
            if task is None:
                raise AssertionError(
                    f"{call.task} is not a task of this app, so it cannot be run here"
                )
            results.append(task.apply(call.args, dict(call.kwargs), task_id=call.id, **given))
        return results

    def assert_queued(self, task: Any, *args: Any, **kwargs: Any) -> QueuedCall:
        """The last published call of *task* with these arguments; raises AssertionError if there is
        none.
        """
        name = task if isinstance(task, str) else task.name
        wanted = _bound_arguments(task, args, kwargs)
        for call in reversed(self.published):
            if call.task == name and _bound_arguments(task, call.args, call.kwargs) == wanted:
                return call
        seen = (
            "; ".join(_call_text(call.task, call.args, call.kwargs) for call in self.published)
            or "nothing"
        )
        raise AssertionError(
            f"{_call_text(name, args, kwargs)} was not published; published was {seen}"
        )

    def assert_ran_once(self, task: Any, *args: Any, **kwargs: Any) -> None:
        """Raise AssertionError unless the body of that key has begun exactly once."""
        begun = self._events_of_key(LeaseAcquired, task, args, kwargs)
        if len(begun) != 1:
            calls = ", ".join(event.call_id for event in begun) or "no call"
            raise AssertionError(
                f"{_call_text(task.name, args, kwargs)} has run {len(begun)} times, by {calls}"
            )

    def assert_replayed(self, task: Any, *args: Any, **kwargs: Any) -> None:
        """Raise AssertionError unless a call of that key got the saved result of an earlier
        call.
        """
        if not self._events_of_key(ResultReplayed, task, args, kwargs):
            state = self.status(task, *args, **kwargs).state
            raise AssertionError(
                f"no call of {_call_text(task.name, args, kwargs)} was replayed; the key is {state}"
            )

    def _events_of_key(
        self, kind: type[Event], task: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> list[Event]:
        shown = self._key(task, args, kwargs).shown
        return [
            one
            for one in self.events
            if isinstance(one, kind) and (one.task, one.key) == (task.name, shown)
        ]

    def assert_survives_crashes(self, task: Any, *args: Any, **kwargs: Any) -> list[str]:
        """See :func:`celery_leases.testing.assert_survives_crashes`."""
        call_id = str(uuid4())  # the same for all runs, so that idempotency keys are equal
        return check_survival(
            task,
            self.reset,
            lambda number: self._run_with_crash(task, args, kwargs, call_id, number),
        )

    def classify(self, error: BaseException, task: Any = None) -> RuleMatch:
        """How the rules of *task*, by default the default rules, classify *error*."""
        rules = task.lease_options.failures.classifier if task is not None else Rules.default()
        found: RuleMatch = rules.classify(error, self.now)
        return found

    # -- process ------------------------------------------------------------------------------

    @property
    def _process(self) -> Process:
        if self._open_process is None:
            raise AssertionError(
                "the kit is not started: use it as a context manager, or call start()"
            )
        return self._open_process

    def _require_memory(self, what: str) -> KitClock:
        _ = self._process
        if self._clock is None:
            raise AssertionError(
                f"{what} needs stores in memory; with a real worker the clock is the real one"
            )
        return self._clock


class _RecordingObserver:
    """Records events, and passes them on."""

    def __init__(self, seen: list[Event], crash_points: CrashPoints, then: Announcer) -> None:
        self._seen, self._crash_points, self._then = seen, crash_points, then

    def observe(self, event: Event) -> None:
        self._seen.append(event)
        if isinstance(event, LeaseAcquired) and (plan := self._crash_points.now) is not None:
            plan.attempt = event.attempt
        self._then.observe(event)

    def wants(self, kind: type[Event]) -> bool:
        return True


def current_kit() -> LeaseKit:
    """The kit that was started last; raises AssertionError if no kit runs."""
    if not _started:
        raise AssertionError(
            "no leases in memory here: write `with leases(app):`, or use the fixture `leases`"
        )
    return _started[-1]


def file_of(task: Any) -> str:
    """The file of a task's body."""
    function = getattr(task.run, "__wrapped__", task.run)
    return str(getattr(function, "__code__", None) and function.__code__.co_filename)


def _replace(stack: ExitStack, owner: Any, name: str, value: Any) -> None:
    """Set an attribute of *owner* until the end of *stack*."""
    own = name in vars(owner)
    before = vars(owner).get(name)
    setattr(owner, name, value)
    if own:
        stack.callback(setattr, owner, name, before)
    else:
        stack.callback(delattr, owner, name)


def _import_prefix(target: str) -> list[Any]:
    """The module in a dotted name, and the names after it."""
    parts = target.split(".")
    for length in range(len(parts) - 1, 0, -1):
        try:
            module = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError as error:
            if not ".".join(parts[:length]).startswith(str(error.name)):
                raise
            continue
        return [module, *parts[length:]]
    raise LeaseConfigurationError(
        f'watch({target!r}): write the name of a function, such as "shop.gateway.charge"'
    )


def _bound_arguments(task: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The arguments bound to the parameters of the body, so that equal calls compare as equal."""
    signature = getattr(task, "lease_signature", None)
    if signature is None:
        return tuple(args), dict(kwargs)
    try:
        given = signature.bind(*args, **kwargs)
    except TypeError:
        return tuple(args), dict(kwargs)
    given.apply_defaults()
    return given.arguments


def _call_text(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    given = [*map(repr, args), *(f"{key}={value!r}" for key, value in kwargs.items())]
    return f"{name}({', '.join(given)})"
