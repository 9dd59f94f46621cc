"""``LeasedTask``: the task base class, its options, and what it adds to a user's task."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, ClassVar

from celery import Celery, Task, signals
from celery.result import AsyncResult

from celery_leases.body.unleased import Unleased
from celery_leases.core.errors import (
    AlreadyDone,
    Cooldown,
    CoolingDown,
    LeaseConfigurationError,
    LeaseHeld,
    PermanentFailure,
    RetryLater,
    StoreUnavailable,
)
from celery_leases.core.keys import call_group, call_key
from celery_leases.core.options import LeaseOptions, gather
from celery_leases.core.replies import callbacks_mark
from celery_leases.core.status import LeaseStatus
from celery_leases.handle import UNLEASED, Lease, lease_here, leased
from celery_leases.process import deadman
from celery_leases.seam import apps, green_pool, outgoing, undertaker
from celery_leases.seam.body_end import REPLACED
from celery_leases.seam.delivery import STORED_KEY, Delivery

_RUNNING = "celery_leases_running"
_NOT_OPTIONS = frozenset({"lease_options", "lease_status", "lease_signature"})
_CALLBACKS_REMEMBERED = 86_400.0


class LeasedMixin:
    """What makes a Celery task class leased; put it before any task class: ``class MyTask(LeasedMixin, OtherTask)``.

    Options are the attributes ``lease_*``, see :class:`~celery_leases.core.options.LeaseOptions`; app-wide defaults
    are the settings ``leases_*``. Wrong ones raise :class:`~celery_leases.LeaseConfigurationError` at registration.
    """

    abstract = True
    acks_late = True
    reject_on_worker_lost = True
    # Celery 5.7 would send a new message instead, and count the crash as one of the user's retries.
    retry_on_worker_lost = False
    # What a body asks for is for the rules; an ``autoretry_for`` of everything would eat it.
    dont_autoretry_for = (PermanentFailure, Cooldown, RetryLater)
    Request = "celery_leases.seam.request:LeaseRequest"

    lease_options: ClassVar[LeaseOptions]
    lease_signature: ClassVar[inspect.Signature]

    @classmethod
    def on_bound(cls, app: Celery) -> None:
        """Gather and check the options once the task is registered."""
        super().on_bound(app)  # type: ignore[misc]
        if cls.name:  # type: ignore[attr-defined]
            _check_class(cls)
            cls.lease_signature = _signature(cls)
            cls.lease_options = _options(cls, app)
            # What an option asks for is logged in one line, without a traceback.
            cls.throws = (*cls.throws, AlreadyDone, CoolingDown, LeaseHeld)  # type: ignore[attr-defined]

    def start_strategy(self, app: Celery, consumer: Any, **options: Any) -> Any:
        """Called by the worker each time it has a connection to the broker."""
        undertaker.watch_again()
        green_pool.prepare(consumer)
        return super().start_strategy(app, consumer, **options)  # type: ignore[misc]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the body under a lease if this is a delivery; called directly, it runs alone."""
        request = self.request  # type: ignore[attr-defined]
        if request.called_directly or request.__dict__.get(_RUNNING):
            with leased(UNLEASED):
                return super().__call__(*args, **kwargs)  # type: ignore[misc]
        request.__dict__[_RUNNING] = True
        return Delivery(self, request, args, kwargs, self._run_body).take()

    def _run_body(self, *args: Any, **kwargs: Any) -> Any:
        """Run the body as Celery would: through the ``__call__`` of the class behind this one, if it has its own."""
        behind = super().__call__  # type: ignore[misc]
        if behind.__func__ is not Task.__call__:
            return behind(*args, **kwargs)
        # What Celery's stack protection sets when Task.__call__ is entered first.
        self.request._protected = 1  # type: ignore[attr-defined]  # noqa: SLF001
        return self.run(*args, **kwargs)  # type: ignore[attr-defined]

    @property
    def lease(self) -> Lease | Unleased:
        """The lease of the body that is running here."""
        return lease_here()

    def replace(self, sig: Any) -> Any:
        """Replace this task as Celery does; its key is over, or goes on with a replacement that has the same."""
        self.request.__dict__[REPLACED] = sig  # type: ignore[attr-defined]
        return super().replace(sig)  # type: ignore[misc]

    def enqueue(self, session_or_connection: Any, /, *args: Any, **kwargs: Any) -> AsyncResult:
        """Enqueue a call of this task in the caller's own transaction: published once that has committed, or never.

        *session_or_connection* is one on the records' database: a SQLAlchemy ``Session`` or ``Connection``, or a DB-API
        connection, in a transaction. A ``Session`` publishes after its commit by itself; for the others, and after a
        crash, the relay does (``leases relay``). Where the key has a record that counts already, nothing is
        enqueued and the handle is that of the call it belongs to, unless that has expired. The arguments must be JSON,
        and come back from it as the task's serializer would deliver them.

        Raises :class:`~celery_leases.KeyUnusable`, :class:`~celery_leases.KeyReused`,
        :class:`~celery_leases.PermanentFailure`, :class:`~celery_leases.WrongDatabase`,
        :class:`~celery_leases.LeaseConfigurationError` and what the database raises.
        """
        if check := getattr(self, "__header__", None):
            check(*args, **kwargs)  # as apply_async does
        return outgoing.enqueue(self, session_or_connection, args, kwargs)

    def lease_status(self, *args: Any, **kwargs: Any) -> LeaseStatus:
        """Where the key stands that a call with these arguments would have.

        Raises :class:`~celery_leases.KeyUnusable` when the arguments make no key, and
        :class:`~celery_leases.LeaseConfigurationError` for a task without ``lease_key``: its keys are Celery's ids.
        """
        name: str = self.name  # type: ignore[attr-defined]
        if self.lease_options.key is None:
            raise LeaseConfigurationError(
                f"task {name} has no lease_key, so its keys are Celery's ids; "
                f'ask LeaseClient.status(<task id>, task="{name}"), or give the task a lease_key'
            )
        key = call_key(name, self.lease_options, self.lease_signature, "", args, kwargs)
        group = call_group(name, self.lease_options, self.lease_signature, args, kwargs)
        app: Celery = self.app  # type: ignore[attr-defined]
        return apps.parts_of(app).client.status(key.key, task=name, scope=self.lease_options.scope, group=group)


class LeasedTask(LeasedMixin, Task):
    """A Celery task that is safe to run twice: ``@app.task(base=LeasedTask, lease_key="invoice:{customer_id}")``."""


def _signature(cls: Any) -> inspect.Signature:
    signature = inspect.signature(cls.run)
    if isinstance(inspect.getattr_static(cls, "run"), staticmethod):
        return signature
    return signature.replace(parameters=list(signature.parameters.values())[1:])


def _check_class(cls: Any) -> None:
    """Refuse a class that would run without its lease, or that hides what it needs."""
    if cls.__call__ is not LeasedMixin.__call__:
        other = next(base for base in cls.__mro__ if "__call__" in vars(base))
        raise LeaseConfigurationError(
            f"task {cls.name}: {other.__qualname__}.__call__ stands before the lease, so the body may run without; "
            "put LeasedMixin first, as in class MyTask(LeasedMixin, OtherTask), or move the code into run()"
        )
    reserved = {"lease_options": LeaseOptions, "lease_signature": inspect.Signature}
    wrong = [name for name, kind in reserved.items() if not isinstance(getattr(cls, name, None), kind | None)]
    if cls.lease_status is not LeasedMixin.lease_status:
        wrong.append("lease_status")
    if wrong:
        raise LeaseConfigurationError(f"task {cls.name}: {wrong[0]} is no option; write each as lease_<option>")


def _options(cls: Any, app: Celery) -> LeaseOptions:
    given = {
        name.removeprefix("lease_"): getattr(cls, name)
        for name in dir(cls)
        if name.startswith("lease_") and name not in _NOT_OPTIONS
    }
    defaults: Mapping[str, Any] = apps.settings_of(app, lenient=True).defaults
    parameters = cls.lease_signature.parameters.values()
    open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    options = gather(cls.name, given, defaults, None if open_ended else [parameter.name for parameter in parameters])
    if not cls.reject_on_worker_lost and not options.allow_loss:
        raise LeaseConfigurationError(
            f"task {cls.name}: reject_on_worker_lost=False gives up a message whose process was killed; "
            "leave it out, or write lease_allow_loss=True beside it"
        )
    if not cls.acks_late and not options.allow_loss:
        raise LeaseConfigurationError(
            f"task {cls.name}: acks_late=False acknowledges a message before its work is done, so a kill loses "
            "it; leave acks_late out, or write lease_allow_loss=True beside it"
        )
    if options.on_lost == "kill" and not deadman.available():
        raise LeaseConfigurationError(
            f"task {cls.name}: lease_on_lost='kill' needs a timer of the Linux kernel, which this system has not; "
            "write lease_on_lost='interrupt'"
        )
    if cls.time_limit and "max_hold" not in given and "max_hold" not in defaults:
        options = replace(options, max_hold=max(options.ttl, float(cls.time_limit)))
    return options


@signals.task_success.connect(weak=False)
def _callbacks_are_out(sender: Any, **_: Any) -> None:
    """Celery has sent the callbacks of this call: a copy of it that comes now is superfluous."""
    if isinstance(sender, LeasedMixin):
        request = sender.request  # type: ignore[attr-defined]
        stored_key, call_id = request.__dict__.get(STORED_KEY, (None, None))
        if stored_key is not None and not request.is_eager:
            ttl = min(sender.lease_options.retention, _CALLBACKS_REMEMBERED)
            marks = apps.parts_of(sender.app).marks  # type: ignore[attr-defined]
            with suppress(StoreUnavailable):  # a copy would send the callbacks again, as the guarantees say
                marks.swap_mark(stored_key, callbacks_mark(call_id), None, "out", ttl)
