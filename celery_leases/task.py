"""``LeasedTask``: the base class of leased tasks, its options and methods."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, wraps
from types import GenericAlias
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Concatenate,
    Generic,
    Literal,
    ParamSpec,
    TypeVar,
    Unpack,
    overload,
)

from celery import Celery, Task, shared_task
from celery.exceptions import Ignore, Reject
from celery.result import AsyncResult

from celery_leases.errors import (
    AlreadyDone,
    Cooldown,
    CoolingDown,
    LeaseConfigurationError,
    LeaseHeld,
    PermanentFailure,
    RetryLater,
)
from celery_leases.keys import Parameters, call_group, call_key
from celery_leases.options import LeaseOptions, TaskOptions, gather
from celery_leases.worker import celery_signal_receivers  # noqa: F401 - connects them
from celery_leases.worker.app_settings import settings_of

# Modules that run tasks or open stores are imported on first use: a process that only publishes
# does not need them.
if TYPE_CHECKING:
    from celery.canvas import Signature
    from celery.result import EagerResult
    from typing_extensions import ParamSpec as ParamSpecWithDefault
    from typing_extensions import TypeVar as TypeVarWithDefault

    from celery_leases import options as types
    from celery_leases.lease import Lease
    from celery_leases.status import LeaseStatus
    from celery_leases.text.durations import Duration

_DJANGO_METHODS = ("delay_on_commit", "apply_async_on_commit")


class _SetWhenBound:
    """An attribute that is set when a task is bound.

    Celery registers a task before it binds it, so another thread can use it in between, for example
    the second request of a web process. Then this descriptor sets the options. A ``__getattr__``
    would make every attribute of every task slower.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, task: Any, cls: Any) -> Any:
        if task is None or not cls.name:
            raise AttributeError(f"{cls.__name__!r} object has no attribute {self._name!r}")
        _set_options(cls, cls.app)  # the other thread sets the same
        return getattr(cls, self._name)


_HOOKS = ("before_start", "on_success", "on_retry", "on_failure", "after_return")
_UNSTORED = "celery_leases_unstored"
_LOSSES = {
    "acks_late": "acknowledges a message before its work is done, so a kill loses it",
    "reject_on_worker_lost": "drops the message of a killed process",
}
_LAZY = (
    (inspect.iscoroutinefunction, "a coroutine"),
    (inspect.isgeneratorfunction, "a generator"),
    (inspect.isasyncgenfunction, "an asynchronous generator"),
)
_NOT_OPTIONS = frozenset({"lease", "lease_options", "lease_status", "lease_signature"})


def _check_order(cls: Any) -> None:
    """Refuse a class whose method resolution order would run the body without its lease."""
    name = f"task {cls.name}" if getattr(cls, "name", None) else f"class {cls.__qualname__}"
    bases = cls.__mro__
    if Task in bases and bases.index(Task) < bases.index(LeasedMixin):
        other = next(
            base for base in bases if issubclass(base, Task) and not issubclass(base, LeasedMixin)
        )
        raise LeaseConfigurationError(
            f"{name}: {other.__qualname__} comes before LeasedMixin and hides it, so the body would run without a "
            "lease; put LeasedMixin first, as in class MyTask(LeasedMixin, OtherTask)"
        )
    if cls.__call__ is not LeasedMixin.__call__:
        other = next(base for base in bases if "__call__" in vars(base))
        raise LeaseConfigurationError(
            f"{name}: {other.__qualname__}.__call__ comes before the lease, so the body may run without one; "
            "put LeasedMixin first, as in class MyTask(LeasedMixin, OtherTask), or move the code into run()"
        )


class LeasedMixin:
    """Makes a Celery task class leased; put it before any other task class: ``class
    MyTask(LeasedMixin, OtherTask)``.

    Options are the attributes ``lease_*``, see
    :class:`~celery_leases.options.LeaseOptions`; defaults for the app are the settings
    ``leases_*``. Wrong options raise :class:`~celery_leases.errors.LeaseConfigurationError` at
    registration.
    """

    abstract = True
    acks_late = True
    reject_on_worker_lost: bool | None = True
    # Celery 5.7 would send a new message instead, and count the crash as one of the user's retries.
    retry_on_worker_lost = False
    # These are for the rules; ``autoretry_for = (Exception,)`` would catch them first.
    dont_autoretry_for = (PermanentFailure, Cooldown, RetryLater)
    Request: Any = "celery_leases.worker.request:LeaseRequest"

    if TYPE_CHECKING:
        lease_options: ClassVar[LeaseOptions]
        lease_signature: ClassVar[Parameters]
        # A class of your own may set them; the types are those of TaskOptions.
        lease_key: ClassVar[types.KeyMaker]
        lease_fingerprint: ClassVar[
            Callable[..., Any] | list[str] | tuple[str, ...] | Literal[False] | None
        ]
        lease_runs: ClassVar[types.Runs]
        lease_debounce: ClassVar[Duration | None]
        lease_debounce_max: ClassVar[Duration | None]
        lease_ttl: ClassVar[Duration]
        lease_renew: ClassVar[bool]
        lease_on_lost: ClassVar[types.OnLost]
        lease_on_busy: ClassVar[types.OnBusy]
        lease_on_done: ClassVar[types.OnDone]
        lease_failures: ClassVar[types.Failures]
        lease_group: ClassVar[types.Group | str | Callable[..., str] | None]
        lease_retention: ClassVar[Duration]
        lease_outbox: ClassVar[types.Outbox]
    else:
        lease_options = _SetWhenBound()
        lease_signature = _SetWhenBound()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _check_order(cls)

    @classmethod
    def on_bound(cls, app: Celery) -> None:
        """Read and validate the options when the task is registered."""
        super().on_bound(app)  # type: ignore[misc]
        if cls.name:  # type: ignore[attr-defined]
            _set_options(cls, app)
            _guard_hooks(cls)
            # Celery logs these errors in one line, without a traceback.
            cls.throws = (*cls.throws, AlreadyDone, CoolingDown, LeaseHeld)  # type: ignore[attr-defined]
            _add_django_methods(app, cls)

    def start_strategy(self, app: Celery, consumer: Any, **options: Any) -> Any:
        """Called by the worker each time it connects to the broker."""
        from celery_leases.worker import child_exit, greenlet_shutdown
        from celery_leases.worker.request import request_class

        child_exit.watch_again()
        greenlet_shutdown.prepare(consumer)
        self.Request = request_class(self)
        return super().start_strategy(app, consumer, **options)  # type: ignore[misc]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the body under a lease if this is a delivery; a direct call runs it without one."""
        request = self.request  # type: ignore[attr-defined]
        if not request.called_directly:
            delivery = _delivery_class()(self, request, args, kwargs, self._run_body)
            if not delivery.is_nested:
                return delivery.handle()
        from celery_leases.lease import unleased

        with unleased():
            return super().__call__(*args, **kwargs)  # type: ignore[misc]

    def _run_body(self, request: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Run the body as Celery does: by the ``__call__`` of the next class, if that is not
        ``Task``.
        """
        next_call = super().__call__  # type: ignore[misc]
        if next_call.__func__ is not Task.__call__:
            return next_call(*args, **kwargs)
        # Task.__call__ sets this for Celery's stack protection.
        request._protected = 1  # noqa: SLF001
        return self.run(*args, **kwargs)  # type: ignore[attr-defined]

    @property
    def lease(self) -> Lease:
        """The lease of the running body."""
        from celery_leases.lease import active_lease

        return active_lease()

    def apply_async(self, *args: Any, **options: Any) -> Any:
        """Publish a call as Celery does. A ``lease_*`` option is refused: it is an option of the
        task, and has no effect in a message.

        With ``lease_outbox="once"`` the call is only published if no other call of the key is
        queued, runs, cools down or has ended. Otherwise this returns the ``AsyncResult`` of the
        key's call, or raises :class:`~celery_leases.errors.AlreadyQueued` if the task has
        ``lease_on_busy="raise"``. With this option it also raises
        :class:`~celery_leases.errors.KeyUnusable`, :class:`~celery_leases.errors.KeyReused`,
        :class:`~celery_leases.errors.LeaseConfigurationError` and
        :class:`~celery_leases.errors.StoreUnavailable`.
        """
        if options:
            _refuse_task_options(self, options)
        if self.lease_options.queues_once:
            from celery_leases.outbox import calls as outbox

            publish: Any = super().apply_async  # type: ignore[misc]
            return outbox.publish_once(self, publish, args, options)
        if self.lease_options.latest_runs:
            from celery_leases.outbox import in_order

            return in_order.publish(self, super().apply_async, args, options)  # type: ignore[misc]
        return super().apply_async(*args, **options)  # type: ignore[misc]

    def apply(self, *args: Any, **options: Any) -> Any:
        """Run a call in this process as Celery does. A ``lease_*`` option is refused, as in
        :meth:`apply_async`.
        """
        if options:
            _refuse_task_options(self, options)
        return super().apply(*args, **options)  # type: ignore[misc]

    def retry(
        self,
        args: Any = None,
        kwargs: Any = None,
        exc: Any = None,
        throw: bool = True,
        eta: Any = None,
        countdown: Any = None,
        max_retries: Any = None,
        **options: Any,
    ) -> Any:
        """Retry the task as Celery does. The worker publishes the message as soon as the body has
        ended, whatever the body returns or raises then. Only the last retry of an attempt counts.
        """
        from celery_leases.worker.body_exceptions import body_state_of

        request: Any = self.request  # type: ignore[attr-defined]
        given = (args, kwargs, exc, throw, eta, countdown, max_retries)
        if request.called_directly or request.is_eager:
            return super().retry(*given, **options)  # type: ignore[misc]
        request.is_eager = True  # then Celery makes the message, and does not publish it
        try:
            retry = super().retry(args, kwargs, exc, False, *given[4:], **options)  # type: ignore[misc]
        finally:
            request.is_eager = False
        retry.is_eager = False
        check = getattr(self, "__header__", None) if self.typing else None  # type: ignore[attr-defined]
        if check is not None:
            try:
                check(*retry.sig.args, **retry.sig.kwargs)  # as apply_async does
            except TypeError as error:
                raise Reject(error, requeue=False) from error
        state = body_state_of(request)
        state.goes_on, state.published_retries = retry, None
        if throw:
            raise retry
        return retry

    def replace(self, sig: Any) -> Any:
        """Replace this task as Celery does. The key is done, unless the replacement has the same
        key.
        """
        from celery_leases.worker.body_exceptions import body_state_of

        try:
            return super().replace(sig)  # type: ignore[misc]
        except Ignore as replaced:
            state = body_state_of(self.request)  # type: ignore[attr-defined]
            if state.goes_on is None:
                state.goes_on, state.replacement = replaced, sig
            raise

    def update_state(
        self, task_id: Any = None, state: Any = None, meta: Any = None, **options: Any
    ) -> None:
        """Set the state of a call as Celery does. A call that sets its own state to ``FAILURE`` and
        then raises ``Ignore`` has failed.
        """
        request: Any = self.request  # type: ignore[attr-defined]
        super().update_state(task_id, state, meta, **options)  # type: ignore[misc]
        if not request.called_directly and task_id in (None, request.id):
            from celery_leases.worker.body_exceptions import body_state_of

            body_state_of(request).reported = state

    def delay_in(self, session_or_connection: Any, /, *args: Any, **kwargs: Any) -> AsyncResult:
        """Call this task in the caller's own transaction, as ``delay()`` does outside one; see
        :meth:`apply_async_in`.
        """
        return self.apply_async_in(session_or_connection, args, kwargs)

    def apply_async_in(
        self,
        session_or_connection: Any,
        /,
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> AsyncResult:
        """Call this task in the caller's own transaction: the call is published after the commit,
        and not at all after a rollback.

        *session_or_connection* is on the records' database and in a transaction: a SQLAlchemy
        ``Session`` or ``Connection``, Django's connection, or another DB-API connection. With a
        ``Session`` or Django's connection, this process publishes the call after the commit. With
        another connection, and after a crash, ``leases relay`` publishes it. If the key already has
        a record that has not expired, nothing is enqueued, and the result is that of the record's
        call, unless that call has expired. The arguments must be JSON, and unchanged after a round
        trip through JSON and the task's serializer.

        *options* are those of ``apply_async`` that a record can store: ``countdown``, ``eta``,
        ``expires``, ``queue``, ``exchange``, ``routing_key``, ``priority``, ``headers``, ``link``,
        ``link_error``, ``serializer``, ``compression``, ``time_limit``, ``soft_time_limit``,
        ``ignore_result`` and ``shadow``. Times count from now.

        Raises :class:`~celery_leases.errors.KeyUnusable`, :class:`~celery_leases.errors.KeyReused`,
        :class:`~celery_leases.PermanentFailure`, :class:`~celery_leases.errors.WrongDatabase`,
        :class:`~celery_leases.errors.LeaseConfigurationError` and the errors of the database.
        """
        from celery_leases.outbox import calls as outbox

        given, named = tuple(args or ()), dict(kwargs or {})
        if options:
            _refuse_task_options(self, options)
        if check := getattr(self, "__header__", None):
            check(*given, **named)  # as apply_async does
        return outbox.enqueue(self, session_or_connection, given, named, options)

    def lease_status(self, *args: Any, **kwargs: Any) -> LeaseStatus:
        """The status of the key that a call with these arguments has.

        Raises :class:`~celery_leases.errors.KeyUnusable` if the arguments make no key, and
        :class:`~celery_leases.errors.LeaseConfigurationError` for a task without ``lease_key``,
        whose keys are the ids of its calls.
        """
        from celery_leases.client import LeaseClient

        name: str = self.name  # type: ignore[attr-defined]
        if self.lease_options.key is None:
            raise LeaseConfigurationError(
                f"task {name} has no lease_key, so its keys are Celery's ids; "
                f'ask LeaseClient.status(<task id>, task="{name}"), or give the task a lease_key'
            )
        headers = None
        if self.lease_options.tenant is not None:
            from celery_leases.outbox import calls as outbox

            headers = outbox.headers_of(self, args, kwargs)
        key = call_key(name, self.lease_options, self.lease_signature, "", args, kwargs, headers)
        group = call_group(name, self.lease_options, self.lease_signature, args, kwargs)
        app: Celery = self.app  # type: ignore[attr-defined]
        client = LeaseClient.from_app(app)
        return client.status(key.key, task=name, group=group)


@cache
def _delivery_class() -> Any:
    """``Delivery``, imported when the first task runs: a process that only publishes does not load
    it.
    """
    from celery_leases.worker.delivery import Delivery

    return Delivery


_P = ParamSpec("_P")
_R = TypeVar("_R")

if TYPE_CHECKING:
    _Given = ParamSpecWithDefault("_Given", default=...)
    _Result = TypeVarWithDefault("_Result", default=Any)
    _Args = Sequence[Any] | None
    _Named = Mapping[str, Any] | None

    class LeasedTask(LeasedMixin, Task, Generic[_Given, _Result]):
        """What editors and type checkers see: the parameters and the result of the body."""

        # fmt: off
        def __call__(self, *args: _Given.args, **kwargs: _Given.kwargs) -> _Result: ...  # noqa: D102
        def delay(self, *args: _Given.args, **kwargs: _Given.kwargs) -> AsyncResult[_Result]: ...  # noqa: D102
        def delay_in(self, session_or_connection: Any, /, *args: _Given.args, **kwargs: _Given.kwargs) -> AsyncResult[_Result]: ...  # noqa: D102, E501
        def delay_on_commit(self, *args: _Given.args, **kwargs: _Given.kwargs) -> None: ...  # noqa: D102
        def lease_status(self, *args: _Given.args, **kwargs: _Given.kwargs) -> LeaseStatus: ...  # noqa: D102
        def s(self, *args: Any, **kwargs: Any) -> Signature[_Result]: ...  # noqa: D102
        def si(self, *args: Any, **kwargs: Any) -> Signature[_Result]: ...  # noqa: D102
        def apply(self, args: _Args = None, kwargs: _Named = None, **options: Any) -> EagerResult[_Result]: ...  # noqa: D102
        def apply_async(self, args: _Args = None, kwargs: _Named = None, *more: Any, **options: Any) -> AsyncResult[_Result]: ...  # noqa: D102, E501
        def apply_async_in(self, session_or_connection: Any, /, args: _Args = None, kwargs: _Named = None, **options: Any) -> AsyncResult[_Result]: ...  # noqa: D102, E501
        def apply_async_on_commit(self, *args: Any, **options: Any) -> None: ...  # noqa: D102
        # fmt: on

else:

    class LeasedTask(LeasedMixin, Task):
        """A Celery task that is safe to run twice: ``@app.task(base=LeasedTask,
        lease_key="invoice:{customer_id}")``.
        """

        __class_getitem__ = classmethod(GenericAlias)


@overload
def leased_task(
    app: Celery | None = None,
    *,
    bind: Literal[True],
    base: type[LeasedMixin] = LeasedTask,
    **options: Unpack[TaskOptions],
) -> Callable[[Callable[Concatenate[Any, _P], _R]], LeasedTask[_P, _R]]: ...
@overload
def leased_task(
    app: Celery | None = None,
    *,
    bind: Literal[False] = False,
    base: type[LeasedMixin] = LeasedTask,
    **options: Unpack[TaskOptions],
) -> Callable[[Callable[_P, _R]], LeasedTask[_P, _R]]: ...
def leased_task(
    app: Celery | None = None, *, base: type[LeasedMixin] = LeasedTask, **options: Any
) -> Any:
    """``@app.task(base=LeasedTask, …)`` for editors and type checkers: they know the options, and
    the task has the parameters and the result of its body. Without *app*, ``@shared_task``.
    """
    return (shared_task if app is None else app.task)(base=base, **options)


def _add_django_methods(app: Celery, cls: Any) -> None:
    """Add the methods that Celery's task class for Django has, if *cls* does not have them."""
    for name in _DJANGO_METHODS:
        if not hasattr(cls, name) and (method := getattr(app.Task, name, None)) is not None:
            setattr(cls, name, method)


def _guard_hooks(cls: Any) -> None:
    """Let the hooks that Celery calls around the body only raise an ``Exception``. Any other
    exception would end the pool process with each delivery of the message.
    """
    for name in _HOOKS:
        hook = inspect.getattr_static(cls, name)
        if hook is not vars(Task)[name] and not hasattr(hook, "guarded_by_lease"):
            setattr(cls, name, _guarded(name, hook))


def _guarded(name: str, hook: Any) -> Any:
    bind = getattr(hook, "__get__", None)

    @wraps(hook)
    def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
        if name == "on_failure" and hasattr(sys.exception(), _UNSTORED):
            return None  # the call has not failed
        try:
            return (bind(self, type(self)) if bind else hook)(*args, **kwargs)
        except Exception:
            raise
        except BaseException as error:
            from celery_leases.worker.body_exceptions import as_exception
            from celery_leases.worker.interrupts import is_sigterm

            if self.request.is_eager or is_sigterm(error):
                raise
            raise as_exception(error, f"{name}()") from error

    guarded.guarded_by_lease = True  # type: ignore[attr-defined]
    return guarded


def _signature(cls: Any) -> Parameters:
    """The signature of what is called. A decorator that accepts any arguments is expected to pass
    them on, so it has the signature of the function that it decorates.
    """
    called, decorated = (
        _parameters(cls, inspect.signature(cls.run, follow_wrapped=follow))
        for follow in (False, True)
    )
    signature = Parameters(decorated if _passes_on(called, decorated) else called)
    if called != decorated:
        signature.called = inspect.Signature(called)
    return signature


def _parameters(cls: Any, signature: inspect.Signature) -> list[inspect.Parameter]:
    parameters = list(signature.parameters.values())
    alone = isinstance(inspect.getattr_static(cls, "run"), staticmethod)
    # A decorator may get the task itself as one of *args.
    return (
        parameters
        if alone or parameters[0].kind is inspect.Parameter.VAR_POSITIONAL
        else parameters[1:]
    )


def _passes_on(called: list[inspect.Parameter], decorated: list[inspect.Parameter]) -> bool:
    """Whether a decorator with the parameters *called* accepts any arguments, and those that it
    names are the first ones of the *decorated* function.
    """
    named = [
        each.name for each in called if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    ]
    return len(called) == len(named) + 2 and named == [
        each.name for each in decorated[: len(named)]
    ]


def _refuse_task_options(task: Any, options: Mapping[str, Any]) -> None:
    for name in options:
        if name.startswith("lease"):
            value = options[name]
            raise LeaseConfigurationError(
                f"task {task.name}: {name}={value!r} was given to one call, where it does nothing; it is an option of "
                f"the task, write @app.task({name}={value!r})"
            )


def _set_options(cls: Any, app: Celery) -> None:
    _check_class(cls)
    _check_body(cls)
    cls.lease_signature = _signature(cls)
    cls.lease_options = _options(cls, app)


def _check_class(cls: Any) -> None:
    """Refuse a class that would run without its lease, or that replaces attributes that the lease
    needs.
    """
    _check_order(cls)
    for attribute in ("Strategy", "start_strategy"):
        others = (
            base
            for base in cls.__mro__
            if attribute in vars(base) and base not in (LeasedMixin, Task)
        )
        if other := next(others, None):
            raise LeaseConfigurationError(
                f"task {cls.name}: {other.__qualname__}.{attribute} bypasses the lease, so bodies would run "
                "without one; use that class without LeasedMixin, and let its body call a leased task for each message"
            )
    reserved = {"lease_options": LeaseOptions, "lease_signature": inspect.Signature}
    wrong = [
        name
        for name, kind in reserved.items()
        if not isinstance(getattr(cls, name, None), kind | None)
    ]
    if cls.lease_status is not LeasedMixin.lease_status:
        wrong.append("lease_status")
    if wrong:
        raise LeaseConfigurationError(
            f"task {cls.name}: {wrong[0]} is no option; write each as lease_<option>"
        )


def _check_body(cls: Any) -> None:
    """Refuse a body of which a call runs nothing: a coroutine or generator function."""
    bases = cls.__mro__[cls.__mro__.index(LeasedMixin) + 1 :]
    if next(base for base in bases if "__call__" in vars(base)) is not Task:
        return  # that class may run the coroutine
    for kind, named in _LAZY:
        if kind(cls.run):
            raise LeaseConfigurationError(
                f"task {cls.name}: its body is {named}, of which Celery would run nothing; write a plain "
                "function that runs it, as with asyncio.run() or list(), and returns the result"
            )


def _options(cls: Any, app: Celery) -> LeaseOptions:
    given = {
        name.removeprefix("lease_"): getattr(cls, name)
        for name in dir(cls)
        if name.startswith("lease") and name not in _NOT_OPTIONS
    }
    defaults: Mapping[str, Any] = settings_of(app, lenient=True).defaults
    parameters = cls.lease_signature.parameters.values()
    open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    options = gather(
        cls.name,
        given,
        defaults,
        None if open_ended else [parameter.name for parameter in parameters],
    )
    for name, why in _LOSSES.items():
        if not getattr(cls, name):
            raise LeaseConfigurationError(f"task {cls.name}: {name}=False {why}; leave it out")
    if options.on_lost == "kill":
        _check_timer(cls)
    if cls.time_limit:
        options = replace(options, max_hold=max(options.ttl, float(cls.time_limit)))
    return options


def _check_timer(cls: Any) -> None:
    from celery_leases.concurrency import kill_timer

    if not kill_timer.available():
        raise LeaseConfigurationError(
            f"task {cls.name}: lease_on_lost='kill' requires a POSIX timer (Linux), which is not available here; "
            "write lease_on_lost='interrupt'"
        )
