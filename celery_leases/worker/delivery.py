"""One delivery: from Celery's request to a call, and from the reply back to Celery."""

from __future__ import annotations

import logging
import math
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Any, NoReturn
from uuid import uuid4

from celery import signals, states
from celery.backends.base import DisabledBackend
from celery.backends.rpc import RPCBackend
from celery.exceptions import Ignore, Retry
from celery.utils.time import maybe_timedelta

from celery_leases.attempt.held_lease import HeldLease
from celery_leases.common.texts import printable
from celery_leases.errors import (
    Cooldown,
    LeaseHeld,
    LeasesError,
    RescheduleFailed,
    RetryLater,
    StoreUnavailable,
)
from celery_leases.lease import Lease, enter_body, leave_body
from celery_leases.protocol.body_endings import Ending, Returned
from celery_leases.protocol.decisions import OUTCOME_KNOWN
from celery_leases.protocol.events import CallDropped, CallRefused, CallRescheduled
from celery_leases.protocol.message_copies import callbacks_mark
from celery_leases.protocol.records import Failure, Record, State
from celery_leases.protocol.results import encode, failure_of
from celery_leases.protocol.verdicts import (
    Answer,
    Call,
    Drop,
    Follow,
    Raise,
    Reschedule,
    Return,
    TaskEvent,
)
from celery_leases.protocol.waiting import (
    LONGEST_PUBLISH_RETRY_TIME,
    may_be_returned,
    publish_retry_pause,
    publish_retry_time,
)
from celery_leases.signals import logger
from celery_leases.worker import app_components, requeue
from celery_leases.worker.app_components import AppParts
from celery_leases.worker.body_exceptions import BodyEnd
from celery_leases.worker.headers import (
    HEADER,
    PRIOR_KEPT,
    WOKEN,
    Header,
    arrived,
    call_id_of,
    celery_id_of,
    group_of,
    key_of,
    owner_of,
    state_of,
    token_of,
)
from celery_leases.worker.pools.signals import interrupt_guard_here
from celery_leases.worker.reschedule import KeyIsHeld, NotPublishable
from celery_leases.worker.return_routes import Routes
from celery_leases.worker.stored_messages import is_over

LOOK_AGAIN = 0.5
"""Seconds between two looks at a copy that runs."""

_WAITING = (State.PENDING, State.COOLING)

TIME_TO_GIVE_BACK = 12.0
"""Seconds before the hard time limit after which nothing is published: enough for two tries, and
the end.
"""

CALLBACKS_REMEMBERED = 86_400.0
_callbacks_noted = False


class Delivery:
    """One delivery of one call of *task*, with the arguments Celery unpacked."""

    parts: AppParts
    taken: float

    def __init__(
        self,
        task: Any,
        request: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        run_body: Callable[..., Any],
    ) -> None:
        self.task = task
        self.run_body = run_body
        self.request = request
        self.args = args
        self.kwargs = kwargs
        self.options = task.lease_options
        self.process = os.getpid()
        self.token = token_of(request)
        self.interrupt_guard = interrupt_guard_here(self.process, self.token)
        self.call_id = call_id_of(request.id, request.replaced_task_nesting)
        headers = request.headers
        if not (type(headers) is dict or headers is None or isinstance(headers, Mapping)):
            request.headers = headers = (
                None  # a message may have a header of that name, of any type
            )
        self.arrived = arrived(headers, task.name, self.call_id)
        #: It has a header that cannot be read, so it is unknown which copy this is.
        self.unread = (
            self.arrived is None and headers is not None and headers.get(HEADER) is not None
        )
        self.pin = self.arrived or Header(task.name, self.call_id)
        delivered = request.delivery_info
        self.redelivered = bool(delivered and delivered.get("redelivered"))
        #: Its body has run here, so a copy that was published earlier cannot replace it.
        self.ran = False

    def take(self) -> Any:
        """Handle the delivery to its end; returns what Celery stores, or raises an exception that
        Celery handles.
        """
        with self.interrupt_guard:
            self.parts = self._parts_of()
            self.taken = self.parts.clock.now()
            call = self._call()
            if call.repeat:
                self._refuse_expired(call)
            answer = self.parts.execution.run(
                call, partial(self._body, call), self.pin.store_failures
            )
            if self.interrupt_guard.limited:
                logger.info(
                    "%s[%s] dropped a soft time limit that fired outside the body",
                    call.task,
                    call.call_id,
                )
            return self._give(call, answer)

    # -- what Celery delivered ---------------------------------------------------------------------

    def _parts_of(self) -> AppParts:
        """The components of the app; a process that cannot make them, for example without memory or
        file descriptors, is given time.
        """
        spent: tuple[int, int | None] = (0, None)
        tries, until = 0, 0.0
        while True:
            try:
                return app_components.parts_of(self.task.app, eager=self.request.is_eager)
            except LeasesError:
                raise
            except Exception as error:
                if self.request.is_eager:
                    raise
                why = f"{type(error).__name__}: {error}"
            if not tries:
                spent = requeue.spent(self.request, self.call_id, Routes(self.task.app))
                until = time.monotonic() + publish_retry_time(*spent, LONGEST_PUBLISH_RETRY_TIME)
                logger.error(
                    "%s[%s] did not begin, retrying: %s", self.task.name, self.call_id, why
                )
            pause = publish_retry_pause(tries)
            tries += 1
            if self.interrupt_guard.stopping or time.monotonic() + pause > until:
                self._not_taken(why, *spent)
            time.sleep(pause)

    def _not_taken(self, why: str, before: int, limit: int | None) -> NoReturn:
        """End a delivery that this process cannot handle."""
        if may_be_returned(before, limit):
            requeue.give_back(self.task.name, self.call_id, "did not begin", why)
        key = key_of(
            self.task, self.arrived, self.call_id, self.args, self.kwargs, self.request.retries
        ).key
        message = (
            f"{printable(key)}: the call did not begin, and cannot be rescheduled "
            f"after {before + 1} deliveries: {why}"
        )
        raise RescheduleFailed(message, key, why)

    def _call(self) -> Call:
        request, pin = self.request, self.pin
        limits = request.timelimit or (None, None)
        group = message = None
        if self.options.cooldown_group is not None:
            group = group_of(self.task, self.arrived, self.args, self.kwargs, request.retries)
        if self.options.store_arguments and not request.is_eager:
            message = self.parts.copies.message_of(self.task, self.arrived)
        return Call(
            task=self.task.name,
            call_id=self.call_id,
            key=key_of(
                self.task, self.arrived, self.call_id, self.args, self.kwargs, request.retries
            ),
            options=self.options,
            repeat=self.arrived is not None or self.redelivered or request.retries > 0,
            failure_fence=None
            if pin.failure_fence == 0 and self.redelivered
            else pin.failure_fence,
            canvas=bool(request.chain or request.chord or request.group or request.callbacks),
            reschedules=pin.reschedules,
            started=pin.started or request.retries > 0,
            retries=request.retries,
            prior=pin.prior,
            token=owner_of(self.token or uuid4().hex, self.process),
            longest_countdown=self.parts.settings.longest_countdown,
            time_limit=limits[0] or self.task.time_limit,
            group=group,
            reschedulable=not request.is_eager,
            message=message,
            starts_when_free=WOKEN in request.__dict__,
        )

    def _pin(self, call: Call, **changes: Any) -> None:
        self._write(replace(self.pin.of_key(call.key, call.group), **changes))

    def _write(self, pin: Header) -> None:
        """Write the header into this request's own copy of the headers, which retries and copies
        carry.
        """
        self.pin = pin
        self.request.headers = {**(self.request.headers or {}), HEADER: pin.written()}

    def _refuse_expired(self, call: Call) -> None:
        """End a redelivered message that has expired, unless its call has begun: then the message
        is only a copy.
        """
        now = datetime.fromtimestamp(self.parts.context.wall_time(), UTC)
        if self.pin.started or not is_over(self.request.expires, now):
            return
        try:
            record = self.parts.records.read(call.key.stored)
        except StoreUnavailable:
            return
        if record is not None and (
            record.call_id == call.call_id or call.call_id in record.finished_calls
        ):
            self._pin(call, started=True)
            return
        self.task.backend.mark_as_revoked(self.request.id, "expired", request=self.request)
        signals.task_revoked.send(
            sender=self.task, request=self.request, terminated=False, signum=None, expired=True
        )
        self._drop(call, "it expired before it began")

    # -- the body ----------------------------------------------------------------------------------

    def _body(self, call: Call, held_lease: HeldLease, record: Record) -> Ending:
        self._write(self.pin.begun(call.key, call.group))
        self.ran = True
        steps = partial(self.parts.steps, call, held_lease, record, self.interrupt_guard.closed)
        on_lost = self.options.on_lost
        if on_lost == "kill" and self.request.is_eager:
            on_lost = "interrupt"  # an eager call runs in the caller's own process
        before = enter_body(Lease(held_lease, record, steps, self.process))
        began = self.parts.clock.now()
        try:
            try:
                try:
                    self.interrupt_guard.open(held_lease, on_lost)
                    value = self.run_body(self.request, *self.args, **self.kwargs)
                finally:
                    self.interrupt_guard.shut()
            finally:
                self.interrupt_guard.shut()
                leave_body(before)
                if os.getpid() != self.process:
                    _end_the_forked()
        except BaseException as error:  # noqa: BLE001 - every way a body can end is told apart below
            end = BodyEnd(
                self.task,
                self.request,
                self.interrupt_guard,
                call,
                held_lease,
                self.parts.context,
            )
            return end.by(error, self.parts.clock.now() - began)
        return Returned(value, *encode(value, self.options.result_max))

    # -- what Celery gets --------------------------------------------------------------------------

    def _give(self, call: Call, answer: Answer) -> Any:
        if isinstance(answer, Return | Raise) and not self.request.is_eager:
            parts = self.parts
            parts.copies.over(self.task, self.pin, parts.marks, call.key.stored, self.options.ttl)
        match answer:
            case Return(value):
                if call.canvas:
                    _note_callbacks()
                    state_of(self.request).answered = call.key.stored, call.call_id
                return value
            case Raise(error, own, task_event):
                self._announce(call, task_event)
                if own and self._celery_knows():
                    self._drop(call, OUTCOME_KNOWN)
                raise error
            case Follow():
                return self._result_of(call, answer)
            case Drop(reason):
                raise Ignore(reason)
            case Reschedule():
                return self._reschedule(call, answer)

    def _result_of(self, call: Call, follow: Follow) -> Any:
        """The result of the task that replaced the one which completed this key: in Celery it has
        the same id.
        """
        backend, expires = self.task.backend, maybe_timedelta(self.task.app.conf.result_expires)
        lasts = expires.total_seconds() if expires else math.inf
        # The RPC backend sends each result to its caller, and no other process can read it.
        hidden = isinstance(backend, DisabledBackend | RPCBackend) or self.request.is_eager
        if hidden or follow.age > lasts:
            raise follow.missing
        try:
            found = backend.get_task_meta(celery_id_of(follow.call_id))
        except Exception as error:  # noqa: BLE001 - whatever the backend says, the result may still be there
            reason = f"the result backend does not answer: {type(error).__name__}"
            return self._reschedule(call, replace(follow.again, reason=reason))
        if found["status"] not in states.READY_STATES:
            return self._reschedule(call, follow.again)
        if found["status"] == states.SUCCESS:
            return self._give(call, Return(found["result"]))
        raise found["result"]

    def _reschedule(self, call: Call, again: Reschedule) -> NoReturn:
        """End this delivery once the broker has a copy of it; always raises."""
        delay = min(again.delay, call.longest_countdown)
        if self.request.is_eager:
            if again.unavailable and again.refusal is None:
                why = f"{printable(call.key.key)}: {again.reason}; an eager call cannot be rescheduled"
                raise StoreUnavailable(why, None if again.started else False)
            held = f"{printable(call.key.key)}: {again.reason}, and an eager call cannot be rescheduled"
            raise again.refusal or LeaseHeld(held, call.key.key, delay)
        self._pin(
            call,
            reschedules=call.reschedules + 1,
            store_failures=self.pin.store_failures + 1 if again.unavailable else 0,
            prior=(*call.prior, again.prior)[-PRIOR_KEPT:] if again.prior else self.pin.prior,
            started=self.pin.started or again.started,
            failure_fence=self._failure_fence(call, again),
            held=again.held,
        )
        retry, began = _retry_of(again), self.parts.clock.now()
        published = self._publish(call, again, delay)
        if again.retrying:
            self._still_a_retry(again)
        if not published:
            self._drop(call, "another copy of this call waits already")
        self._observe(
            CallRescheduled(
                **call.subject, delay=delay, reason=again.reason, unavailable=again.unavailable
            )
        )
        self._announce(call, again.task_event)
        if again.cause is not None and not isinstance(again.cause, Cooldown | RetryLater):
            level = (
                logging.ERROR if again.unknown else logging.WARNING
            )  # Celery logs a retry without its traceback
            logger.log(
                level,
                "%s[%s] raised, and will run again",
                call.task,
                call.call_id,
                exc_info=again.cause,
            )
        if retry is not None and not (
            self.parts.clock.now() - began > delay and self._celery_knows()
        ):
            raise retry from again.cause
        reason = f"rescheduled: {again.reason}"
        raise (
            KeyIsHeld(reason, call.key.stored, call.key.fingerprint)
            if again.held
            else Ignore(reason)
        )

    def _publish(self, call: Call, again: Reschedule, delay: float) -> bool:
        """Publish a copy, and repeat for a while; ``False`` when another copy is known to wait
        already.

        If the broker does not accept the copy, the delivery is returned to the broker, as long as
        it would be delivered again.
        """
        parts = self.parts
        before, limit = self._spent(call)
        until = self._held_until(call)
        newest = self.ran or self.unread or (call.fresh and again.unavailable)
        tries = 0
        while True:
            try:
                published = parts.copies.reschedule(
                    self.task,
                    self.pin,
                    delay,
                    parts.marks,
                    call.key.stored,
                    self.options.ttl,
                    newest=newest,
                )
            except NotPublishable as error:
                self._fail(call, again, f"its message cannot be written: {error}")
            except Exception as error:  # noqa: BLE001 - whatever the broker said, the message must survive
                why = f"{type(error).__name__}: {error}"
            else:
                requeue.taken(call.call_id)
                return published
            pause = publish_retry_pause(tries)
            if self.interrupt_guard.stopping or parts.clock.now() + pause > until:
                if may_be_returned(before, limit):
                    self._sleep(pause)
                    self._give_back(call, again, why)
                self._fail(
                    call,
                    again,
                    f"the broker accepts no copy of it after {before + 1} deliveries: {why}",
                )
            if not tries:
                logger.error(
                    "%s[%s] could not be rescheduled, retrying: %s", call.task, call.call_id, why
                )
            tries += 1
            self._sleep(pause)

    def _spent(self, call: Call) -> tuple[int, int | None]:
        """How often this message has been returned, and how often its queue allows that, if it has
        a limit.
        """
        return requeue.spent(self.request, call.call_id, self.parts.copies.routes)

    def _held_until(self, call: Call) -> float:
        """When the delivery is returned at the latest if the broker does not accept a copy
        of it.
        """
        until = self.parts.clock.now() + publish_retry_time(
            *self._spent(call), call.longest_countdown
        )
        return (
            min(until, self.taken + call.time_limit - TIME_TO_GIVE_BACK)
            if call.time_limit
            else until
        )

    def _give_back(self, call: Call, again: Reschedule, why: str) -> NoReturn:
        """Give the delivery back to the broker, which delivers it again."""
        self._observe(
            CallRescheduled(
                **call.subject,
                delay=0.0,
                reason=again.reason,
                confirmed=False,
                unavailable=again.unavailable,
            )
        )
        requeue.give_back(call.task, call.call_id, "could not be rescheduled", why)

    def _fail(self, call: Call, again: Reschedule, why: str) -> NoReturn:
        """End the call with an error, because it cannot be rescheduled; its record, if it has one,
        says the same.
        """
        message = (
            f"{printable(call.key.key)}: {again.reason}, and the call cannot be rescheduled: {why}"
        )
        error = RescheduleFailed(message, call.key.key, why)
        try:
            self._close_record(call, again, failure_of(error))
        except StoreUnavailable as unavailable:
            if may_be_returned(*self._spent(call)):
                self._sleep(self._held_until(call) - self.parts.clock.now())
                self._give_back(call, again, f"{why}; {unavailable}")
            logger.error(
                "%s[%s] cannot be rescheduled, and its record could not be closed: %s",
                call.task,
                call.call_id,
                unavailable,
            )
        self._observe(CallRefused(**call.subject, error=str(error)))
        raise error from again.cause

    def _close_record(self, call: Call, again: Reschedule, failure: Failure) -> None:
        """Write into the record of this call that it does not run again."""
        record = self._own_record(call)
        if record is None:
            return
        if record.state not in _WAITING:
            self._leave_to_its_copy(call, again)
        elif record.resumes:
            before = record.failure or failure
            self.parts.records.stop_resuming(
                record, replace(before, type=failure.type, message=failure.message)
            )

    def _own_record(self, call: Call) -> Record | None:
        """The record, if it is this call's; otherwise the call has waited for another one."""
        record = self.parts.records.read(call.key.stored)
        return record if record is not None and record.call_id == call.call_id else None

    def _leave_to_its_copy(self, call: Call, again: Reschedule) -> None:
        """Hold the delivery while a copy of the call runs: if the process of that copy dies, only
        this delivery runs the call again.

        Then the delivery is returned. A delivery that its queue would discard is dropped if the
        outcome is known; otherwise this returns.
        """
        until = self._held_until(call)
        while not self.interrupt_guard.stopping and self.parts.clock.now() < until:
            record = self._own_record(call)
            if (
                record is None
                or record.state in _WAITING
                or (record.state is not State.RUNNING and self._celery_knows())
            ):
                break
            self._sleep(LOOK_AGAIN)
        if may_be_returned(*self._spent(call)):
            self._give_back(call, again, "a copy of it is running, and no other can be published")
        if self._celery_knows():
            self._drop(call, OUTCOME_KNOWN)

    def _sleep(self, seconds: float) -> None:
        """Wait, unless the process is shutting down."""
        clock = self.parts.clock
        until = clock.now() + seconds
        while not self.interrupt_guard.stopping and (left := until - clock.now()) > 0:
            clock.sleep(min(left, 0.5))

    def _still_a_retry(self, again: Reschedule) -> None:
        """Show the state RETRY for the rest of the wait, because Celery has just set the state of
        the copy to STARTED.
        """
        request = self.request
        if self.task.track_started and not request.__dict__.get(
            "ignore_result", self.task.ignore_result
        ):
            with suppress(Exception):  # its state is STARTED then, and the broker has the copy
                self.task.backend.mark_as_retry(request.id, again.refusal, request=request)

    def _failure_fence(self, call: Call, again: Reschedule) -> int | None:
        """The failure that the copy of a fresh message waits for; the copy may run after it."""
        if again.failure_fence is not None or self.ran:
            return again.failure_fence
        if call.fresh:
            return 0 if again.unavailable else None
        return call.failure_fence

    def _announce(self, call: Call, task_event: TaskEvent | None) -> None:
        """Send a task event, shown by Flower, that says why the call does not run now."""
        if task_event is not None:
            fields = {
                "key": call.key.shown,
                "retry_after": task_event.retry_after,
                "reason": task_event.reason,
            }
            self.parts.copies.announce(self.task, task_event.type, **fields)

    def _celery_knows(self) -> bool:
        """Whether the result backend has a final state for this call."""
        if self.request.is_eager:
            return False
        try:
            return self.task.backend.get_state(self.request.id) in states.READY_STATES
        except Exception:  # noqa: BLE001 - no backend, or one that cannot be asked
            return False

    def _drop(self, call: Call, reason: str) -> NoReturn:
        self._observe(CallDropped(**call.subject, reason=reason))
        raise Ignore(reason)

    def _observe(self, event: Any) -> None:
        self.parts.context.observer.observe(event)


def _note_callbacks() -> None:
    """From now on, note in this process that callbacks were sent; a receiver of this signal costs
    each task some time.
    """
    global _callbacks_noted  # noqa: PLW0603 - once in a process
    if not _callbacks_noted:
        signals.task_success.connect(_callbacks_are_out, weak=False)
        _callbacks_noted = True


def _callbacks_are_out(sender: Any, **_: Any) -> None:
    """Celery has sent the callbacks of this call: a later copy of it is superfluous."""
    if hasattr(sender, "lease_options"):
        request = sender.request
        answered = state_of(request).answered
        if answered is not None and not request.is_eager:
            stored_key, call_id = answered
            ttl = min(sender.lease_options.retention, CALLBACKS_REMEMBERED)
            marks = app_components.parts_of(sender.app, eager=False).marks
            with suppress(
                StoreUnavailable
            ):  # a copy would send the callbacks again, as the guarantees say
                marks.swap_mark(stored_key, callbacks_mark(call_id), None, "out", ttl)


def _retry_of(again: Reschedule) -> Retry | None:
    """The exception that Celery gets for a failed call that runs again; ``None`` for a call that
    runs again for another reason.

    It is made before anything is published: an exception that cannot be copied must not fail a call
    whose copy waits.
    """
    if again.cause is None:
        return None
    when = round(again.delay, 1)
    try:
        return Retry(exc=again.cause, when=when)
    except Exception:  # noqa: BLE001 - the user's exception may do anything when it is pickled
        return Retry(exc=RuntimeError(type(again.cause).__qualname__), when=when)


def _end_the_forked() -> NoReturn:
    """End a process that the body has forked and that returns from the body: the parent does the
    rest.
    """
    error = sys.exception()
    if error is not None and not isinstance(error, SystemExit):
        traceback.print_exception(error)
    code = error.code if isinstance(error, SystemExit) else 1 if error is not None else 0
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(code if isinstance(code, int) else 1 if code else 0)
