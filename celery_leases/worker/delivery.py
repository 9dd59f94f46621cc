"""Handles one delivery: makes a call from Celery's request, runs it, and answers Celery."""

from __future__ import annotations

import math
import os
import sys
import time
import traceback
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Any, NoReturn

from celery import signals, states
from celery.backends.base import DisabledBackend
from celery.backends.rpc import RPCBackend
from celery.exceptions import Ignore, Reject, Retry
from celery.utils.time import maybe_timedelta

from celery_leases.attempt.held_lease import BodyState, HeldLease
from celery_leases.attempt.process import Process
from celery_leases.attempt.run import Execution
from celery_leases.call import Call
from celery_leases.concurrency import os_threads, wait_limit
from celery_leases.deadlines import begin_by
from celery_leases.decide.copies import callbacks_mark
from celery_leases.decide.endings import ControlFlow, Ending, Raised, Returned
from celery_leases.decide.verdicts import (
    Drop,
    Follow,
    Raise,
    Reschedule,
    Return,
    Verdict,
)
from celery_leases.decide.waiting import (
    LONGEST_PUBLISH_RETRY_TIME,
    may_be_returned,
    publish_retry_pause,
    publish_retry_time,
)
from celery_leases.errors import (
    LeasesError,
    RescheduleFailed,
    StoreUnavailable,
)
from celery_leases.events import Dropped
from celery_leases.groups.slots import Ask
from celery_leases.keys import OF_ERRBACK, is_short_form
from celery_leases.lease import Lease, enter_body, leave_body
from celery_leases.options import Group
from celery_leases.record import Ended, Record
from celery_leases.results import NOT_JSON, encode
from celery_leases.text.cleaning import printable
from celery_leases.text.notices import logger
from celery_leases.worker import body_exceptions, processes, requeue
from celery_leases.worker.body_exceptions import BODY_STATE, as_exception, body_state_of
from celery_leases.worker.errbacks import rebuilt
from celery_leases.worker.headers import (
    ARRIVED,
    CAME,
    ENDED_UNDER,
    HEADER,
    LIMITS,
    SINCE,
    WOKEN,
    Header,
    call_id_of,
    celery_id_of,
    group_of,
    key_of,
    new_token,
    order_of,
    owner_of,
    read_header,
    token_of,
)
from celery_leases.worker.interrupts import interrupt_guard_here
from celery_leases.worker.publisher import NotPublishable
from celery_leases.worker.rescheduling import NotConfirmed, Rescheduling
from celery_leases.worker.routes import Routes
from celery_leases.worker.stored_messages import has_expired

_ENDINGS_RETURNED = (Retry, Awaitable, Generator, AsyncGenerator)
"""What a body returns, and what is no result: nothing of the work has run."""

CALLBACKS_MARK_TTL = 86_400.0
"""The most seconds for which the mark lasts that the callbacks of a call were sent."""
_marks_callbacks = False


class Delivery(Rescheduling):
    """One delivery of one call of *task*, with the arguments that Celery has unpacked."""

    def __init__(
        self,
        task: Any,
        request: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        run_body: Callable[..., Any],
    ) -> None:
        self.task = task
        #: The body of this request runs already, and calls itself.
        self.is_nested = type(request.__dict__.get(BODY_STATE)) is BodyState
        self.run_body = run_body
        self.request = request
        self.args = args
        self.kwargs = kwargs
        self.options = task.lease_options
        self.pid = os.getpid()
        self.token = token_of(request)
        self.time_limits = (
            request.__dict__[LIMITS] if LIMITS in request.__dict__ else None  # noqa: SIM401 - a call less
        )
        self.owner = owner_of(self.token or new_token(), self.pid)
        self.call_id = call_id_of(request.id, request.replaced_task_nesting)
        headers = request.headers
        if not (type(headers) is dict or headers is None or isinstance(headers, Mapping)):
            # A message may have a header named "headers", of any type, which has replaced them.
            request.headers = headers = None
        self.received_header = read_header(headers, task.name, self.call_id)
        self.header_unreadable = (
            self.received_header is None and headers is not None and headers.get(HEADER) is not None
        )
        self.header = self.received_header or Header(task.name, self.call_id)
        delivered = request.delivery_info
        self.redelivered = bool(delivered and delivered.get("redelivered"))

    def handle(self) -> Any:
        """Handle the delivery to its end: return the result that Celery stores, or raise an
        exception that Celery handles.
        """
        request, before = self.request, None
        if self.time_limits is not None:
            before = self._limit_waits()
        self.interrupt_guard = interrupt_guard_here(self.pid, self.token)
        try:
            with self.interrupt_guard:
                try:
                    self.process = processes.process_of(self.task.app, eager=request.is_eager)
                except Exception as error:  # whatever this process lacks
                    if request.is_eager or isinstance(error, LeasesError):
                        raise
                    self.process = self._make_process(error)
                call = self._call()
                if call.repeat:
                    self._refuse_expired(call)
                if self.header.due is not None:
                    self._wait_until_due(call, self.header.due)
                verdict = Execution(self.process, call).run(
                    partial(self._body, call), self.header.store_failures
                )
                if self.interrupt_guard.limited:
                    logger.info(
                        "%s[%s] dropped a soft time limit that fired outside the body",
                        call.task,
                        call.call_id,
                    )
                return self._answer_celery(call, verdict)
        except BaseException as error:
            with suppress(Exception):  # an exception of the user's may allow no attribute
                setattr(error, ENDED_UNDER, self.token)
            raise
        finally:
            if before is not None:
                wait_limit.until.set(before)

    def _limit_waits(self) -> float:
        """Let the library's own waits end at half of the time limit; returns the limit before,
        which is that of a body that this call runs in.
        """
        assert self.time_limits is not None
        self.received_at, before = os_threads.boot_clock(), wait_limit.until.get()
        wait_limit.set_seconds(begin_by(0.0, *self.time_limits))
        return before

    # -- what Celery delivered ---------------------------------------------------------------------

    def _make_process(self, error: Exception) -> Process:
        """Try for a while to make what this process has for the app, after *error*: it may have no
        memory or file descriptors left.
        """
        returns = requeue.requeue_count(self.request, self.call_id, Routes(self.task.app))
        until = os_threads.boot_clock() + wait_limit.bounded(
            publish_retry_time(*returns, LONGEST_PUBLISH_RETRY_TIME)
        )
        logger.error(
            "%s[%s] did not begin, retrying: %s",
            self.task.name,
            self.call_id,
            error,
            code="did-not-begin",
        )
        failures = 0
        while True:
            pause = publish_retry_pause(failures)
            failures += 1
            if self.interrupt_guard.stopping or os_threads.boot_clock() + pause > until:
                self._fail_to_begin(f"{type(error).__name__}: {error}", *returns)
            time.sleep(pause)
            try:
                return processes.process_of(self.task.app, eager=False)
            except LeasesError:
                raise
            except Exception as failed:  # noqa: BLE001 - as the first
                error = failed

    def _fail_to_begin(self, why: str, before: int, limit: int | None) -> NoReturn:
        """Return a delivery that this process cannot handle to the broker, or fail if the broker
        would discard it.
        """
        if may_be_returned(before, limit):
            requeue.requeue_delivery(self.task.name, self.call_id, "did not begin", why)
        key = key_of(
            self.task,
            self.received_header,
            self.call_id,
            self.args,
            self.kwargs,
            self.request.retries,
            self.request.headers,
        ).key
        message = (
            f"{printable(key)}: the call did not begin, and cannot be rescheduled "
            f"after {before + 1} deliveries: {why}"
        )
        raise RescheduleFailed(message, key, why)

    def _call(self) -> Call:
        request, header, limits = self.request, self.header, self.time_limits
        group = message = ask = None
        order = order_of(request.__dict__, self.call_id) if self.options.latest_runs else 0
        if self.options.latest_runs and not header.arrived:
            arrived = request.__dict__.get(ARRIVED, 0)
            if self.redelivered and order:
                arrived = order  # it has arrived before, some time after it was published
            self.header = header = replace(header, arrived=arrived)
        if self.options.group is not None:
            if self.options.group.limited:
                ask = self._ask(self.options.group)
            group = group_of(
                self.task, self.received_header, self.args, self.kwargs, request.retries
            )
        if self.options.outbox == "store" and not request.is_eager:
            stored = header if header.arrived else self.received_header
            message = self.process.publisher.message_of(self.task, stored)
        return Call(
            task=self.task.name,
            call_id=self.call_id,
            key=key_of(
                self.task,
                self.received_header,
                self.call_id,
                self.args,
                self.kwargs,
                request.retries,
                request.headers,
            ),
            options=self.options,
            repeat=self.received_header is not None or self.redelivered or request.retries > 0,
            failure_fence=None
            if header.failure_fence == 0 and self.redelivered
            else header.failure_fence,
            canvas=bool(request.chain or request.chord or request.group or request.callbacks),
            reschedules=header.reschedules,
            started=header.started or request.retries > 0,
            retries=request.retries,
            prior=header.prior,
            token=self.owner,
            host=self.process.host,
            longest_countdown=self.process.settings.longest_countdown,
            received_at=self.received_at,
            time_limit=limits[0] if limits is not None else None,
            begin_by=begin_by(self.received_at, *limits) if limits is not None else math.inf,
            group=group,
            ask=ask,
            reschedulable=not request.is_eager,
            message=message,
            starts_when_free=WOKEN in request.__dict__,
            order=order,
            arrived=header.arrived,
            waited_for_newer=header.waited_for_newer and self._waited_for_newer(),
        )

    def _waited_for_newer(self) -> float:
        now = self.process.clock.now()
        here: float = max(0.0, now - self.request.__dict__.get(CAME, now))
        return self.header.waited_for_newer + here

    def _ask(self, group: Group) -> Ask:
        since = self.header.since or self.request.__dict__.get(SINCE) or 0.0
        return Ask(group.limit or 0, group.pause * 1000, since, str(self.request.hostname or ""))

    def _refuse_expired(self, call: Call) -> None:
        """Revoke a redelivered message that has expired, unless its call has begun.

        The message of a call that has begun may be a copy of a call that runs now, so it does not
        expire.
        """
        now = datetime.fromtimestamp(self.process.wall_time(), UTC)
        if self.header.started or not has_expired(self.request.expires, now):
            return
        try:
            record = self.process.records.read(call.key.stored)
        except StoreUnavailable:
            return
        if record is not None and (
            record.call_id == call.call_id or call.call_id in record.finished_calls
        ):
            self._update_header(call, started=True)
            return
        self.task.backend.mark_as_revoked(self.request.id, "expired", request=self.request)
        signals.task_revoked.send(
            sender=self.task, request=self.request, terminated=False, signum=None, expired=True
        )
        self._drop(call, Dropped.EXPIRED)

    def _wait_until_due(self, call: Call, due: float) -> None:
        """Reschedule the call if the user's countdown is not over yet."""
        left = due - self.process.wall_time()
        if left > 0:
            reason = "its countdown is not over"
            self._reschedule(call, Reschedule(left, reason, event_type=""))
        self.header = replace(self.header, due=None)
        self.request.eta = datetime.fromtimestamp(due, UTC).isoformat()

    # -- the body ----------------------------------------------------------------------------------

    def _body(self, call: Call, held_lease: HeldLease, record: Record) -> Ending:
        self.header = self.header.begun(call.key, call.group, call.arrived)
        self.header.write(self.request)
        self.body_began = True
        state = self.request.__dict__[BODY_STATE] = held_lease.body_state
        on_lost = self.options.on_lost
        if on_lost == "kill" and self.request.is_eager:
            on_lost = "interrupt"  # an eager call runs in the caller's own process
        guard = self.interrupt_guard
        before = enter_body(
            partial(
                Lease,
                process=self.process,
                call=call,
                held_lease=held_lease,
                record=record,
                interrupts_deferred=guard.interrupts_deferred,
                pid=self.pid,
            )
        )
        if self.time_limits is not None:
            wait_limit.set_seconds(math.inf)  # for the stores that the body itself calls
        try:
            try:
                try:
                    guard.body_begins(held_lease, on_lost)
                    args: Any = self.args
                    if args and type(args[0]) is dict and OF_ERRBACK in args[0]:
                        args = rebuilt(self.task, args)
                    value = self.run_body(self.request, *args, **self.kwargs)
                finally:
                    guard.body_ended()
            finally:
                guard.body_ended()
                leave_body(before)
                if call.time_limit:
                    wait_limit.set_seconds(self._time_left(call))
                if os.getpid() != self.pid:
                    _exit_forked_process()
        except BaseException as error:  # noqa: BLE001 - each is distinguished there
            elapsed = self.process.clock.now() - self.received_at
            ending = body_exceptions.ending_of(self, call, held_lease, error, elapsed)
            if state.goes_on is None or _comes_again(ending, state.goes_on):
                return ending
            return self._goes_on(call, state, error)
        if state.goes_on is not None:
            return self._goes_on(call, state, None)
        try:
            result, missing = encode(value)
        except BaseException as error:  # noqa: BLE001 - a method of the value raised; the work is done
            # Celery must not read that value. It cannot serialize this one, and says so.
            return Returned(as_exception(error, "the result"), None, NOT_JSON)
        if missing is not None and isinstance(value, _ENDINGS_RETURNED):
            return body_exceptions.ending_of_returned(self, call, held_lease, value)
        return Returned(value, result, missing)

    def _goes_on(self, call: Call, state: BodyState, error: BaseException | None) -> Ending:
        """The ending of a body that has retried, replaced or published its call, and has then
        returned or raised *error*. Publishes the message of a retry.

        If the broker does not accept that message, the delivery is returned to the broker.
        """
        goes_on: Retry | Ignore = state.goes_on
        if error is not None and not isinstance(error, Retry | Ignore):
            logger.warning(
                "%s[%s] raised after retry() or replace(), and goes on in another message",
                call.task,
                call.call_id,
                exc_info=error,
                code="raised-after-retry",
            )
        if isinstance(goes_on, Retry) and goes_on.sig is not None:
            publisher, before = self.process.publisher, self._requeue_count(call)
            try:
                self._until_confirmed(call, lambda: publisher.publish_retry(goes_on.sig))
            except NotPublishable as failed:  # as Celery's own retry
                return body_exceptions.rejected(Reject(failed, requeue=False))
            except NotConfirmed as failed:
                if not may_be_returned(*before):
                    return body_exceptions.rejected(Reject(failed, requeue=False))
                what = "could not be retried"
                try:
                    requeue.requeue_delivery(call.task, call.call_id, what, str(failed))
                except Reject as returned:
                    return ControlFlow(returned, runs_again=True, ended=Ended.REJECTED)
        return body_exceptions.ending_after(self, call, state)

    def _time_left(self, call: Call) -> float:
        """Seconds until the hard time limit, less one for the end of the delivery."""
        assert call.time_limit is not None
        return call.received_at + call.time_limit - 1.0 - self.process.clock.now()

    # -- what Celery gets --------------------------------------------------------------------------

    def _answer_celery(self, call: Call, verdict: Verdict) -> Any:
        is_copy = self.header.copy.number > 0
        if is_copy and isinstance(verdict, Return | Raise) and not self.request.is_eager:
            process = self.process
            process.publisher.mark_ended(
                self.task, self.header, process.leases, call.key.stored, self.options.ttl
            )
        match verdict:
            case Return(value):
                if call.canvas:
                    _mark_callbacks()
                    body_state_of(self.request).callbacks_of = call.key.stored, call.call_id
                return value
            case Raise(error, own, task_event):
                self._announce(call, task_event)
                if own and self._celery_has_outcome():
                    self._drop(call, Dropped.OUTCOME_KNOWN)
                raise error
            case Follow():
                return self._result_of(call, verdict)
            case Drop():
                raise Ignore(verdict.why)
            case Reschedule():
                return self._reschedule(call, verdict)

    def _result_of(self, call: Call, follow: Follow) -> Any:
        """The result of the task that has replaced the completed one. In Celery both have the same
        id, so the result backend has that result.
        """
        backend, expires = self.task.backend, maybe_timedelta(self.task.app.conf.result_expires)
        lasts = expires.total_seconds() if expires else math.inf
        # The RPC backend sends each result to its caller, and no other process can read it.
        hidden = (
            isinstance(backend, DisabledBackend | RPCBackend)
            or self.request.is_eager
            or is_short_form(follow.call_id)  # the record has not the whole id
        )
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
            return self._answer_celery(call, Return(found["result"]))
        raise found["result"]


def _mark_callbacks() -> None:
    """Begin to mark in this process that callbacks were sent. Not before it is needed, because a
    receiver of this signal costs each task some time.
    """
    global _marks_callbacks  # noqa: PLW0603 - once in a process
    if not _marks_callbacks:
        signals.task_success.connect(_mark_callbacks_sent, weak=False)
        _marks_callbacks = True


def _mark_callbacks_sent(sender: Any, **_: Any) -> None:
    """Mark that Celery has sent the callbacks of a call, so that a later copy of it is dropped."""
    if hasattr(sender, "lease_options"):
        request = sender.request
        answered = body_state_of(request).callbacks_of
        if answered is not None and not request.is_eager:
            stored_key, call_id = answered
            ttl = min(sender.lease_options.retention, CALLBACKS_MARK_TTL)
            marks = processes.process_of(sender.app, eager=False).leases
            # Without the mark, a copy would send the callbacks again, which the guarantees allow.
            with suppress(StoreUnavailable):
                marks.swap_mark(stored_key, callbacks_mark(call_id), None, "out", ttl)


def _comes_again(ending: Ending, goes_on: Retry | Ignore) -> bool:
    """Whether the message of this delivery comes again, so that a retry need not be published."""
    if isinstance(ending, ControlFlow):
        return isinstance(goes_on, Ignore) and ending.runs_again
    return not isinstance(ending, Raised)


def _exit_forked_process() -> NoReturn:
    """Exit a process that the body has forked and that returns from the body. Its parent settles
    the attempt.
    """
    error = sys.exception()
    if error is not None and not isinstance(error, SystemExit):
        traceback.print_exception(error)
    code = error.code if isinstance(error, SystemExit) else 1 if error is not None else 0
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(code if isinstance(code, int) else 1 if code else 0)
