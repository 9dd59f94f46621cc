"""Reschedules a delivery: publishes a copy of its message, and ends the delivery."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any, NoReturn

from celery import states
from celery.exceptions import Ignore, Retry

from celery_leases.attempt.process import Process
from celery_leases.call import Call
from celery_leases.concurrency import wait_limit
from celery_leases.decide.verdicts import Reschedule, TaskEvent
from celery_leases.decide.waiting import may_be_returned, publish_retry_pause, publish_retry_time
from celery_leases.errors import (
    Cooldown,
    LeaseHeld,
    RescheduleFailed,
    RetryLater,
    StoreUnavailable,
)
from celery_leases.events import CallDropped, CallRefused, CallRescheduled, Dropped
from celery_leases.options import LeaseOptions
from celery_leases.record import Failure, Record, State
from celery_leases.results import failure_of
from celery_leases.text.cleaning import printable
from celery_leases.text.notices import logger
from celery_leases.worker import requeue
from celery_leases.worker.headers import MAX_PRIOR, Header
from celery_leases.worker.interrupts import InterruptGuard
from celery_leases.worker.publisher import GroupIsFull, KeyIsHeld, NotPublishable
from celery_leases.worker.waiting_log import (
    AGAIN,
    RESCHEDULED,
    STILL,
    cause_after,
    name_reschedules,
)

POLL_INTERVAL = 0.5
"""Seconds between two reads of the record while a copy of the call runs."""

_WAITING = (State.PENDING, State.COOLING)

PUBLISH_MARGIN = 12.0
"""No publish begins in the last seconds before the hard time limit. This is enough for two
publishes and the end of the delivery.
"""


class NotConfirmed(Exception):
    """The broker does not accept a message; the text says why."""


class Rescheduling:
    """The part of a delivery that lets its call go on in another message."""

    task: Any
    request: Any
    options: LeaseOptions
    process: Process
    interrupt_guard: InterruptGuard
    header: Header
    #: The header cannot be read, so it is unknown which copy of the call this is.
    header_unreadable: bool
    #: The hard and the soft time limit in seconds, if the call has any.
    time_limits: tuple[float | None, float | None] | None
    #: When a delivery with a time limit began, by the clock of :mod:`os_threads`.
    received_at = 0.0
    #: The body has begun here, so a copy that was published earlier cannot replace this one.
    body_began = False

    def _update_header(self, call: Call, **changes: Any) -> None:
        self.header = replace(self.header.of_key(call.key, call.group), **changes)
        self.header.write(self.request)

    def _reschedule(self, call: Call, again: Reschedule) -> NoReturn:
        """Publish a copy of the delivery, then end the delivery by an exception."""
        delay = min(again.delay, call.longest_countdown)
        if self.request.is_eager:
            if again.unavailable and again.refusal is None:
                why = f"{printable(call.key.key)}: {again.reason}; an eager call cannot be rescheduled"
                raise StoreUnavailable(why, None if again.started else False)
            held = f"{printable(call.key.key)}: {again.reason}, and an eager call cannot be rescheduled"
            raise again.refusal or LeaseHeld(held, call.key.key, delay)
        cause = cause_after(self.header.cause, again)
        still = cause.startswith(AGAIN)
        name_reschedules()
        self._update_header(
            call,
            reschedules=call.reschedules + 1,
            store_failures=self.header.store_failures + 1 if again.unavailable else 0,
            prior=(*call.prior, again.prior)[-MAX_PRIOR:] if again.prior else self.header.prior,
            started=self.header.started or again.started,
            failure_fence=self._failure_fence(call, again),
            held=again.held,
            full=again.full_since is not None,
            since=again.full_since or self.header.since,
            arrived=call.arrived,
            waited_for_newer=again.waited_for_newer,
            cause=cause,
        )
        retry, began = _retry_of(again), self.process.clock.now()
        if self.time_limits is not None and not self.body_began:
            # Three quarters of the limit: then the delivery is returned to the broker.
            wait_limit.set_seconds(1.5 * call.begin_by - 0.5 * call.received_at - began)
        published = self._publish(call, again, delay)
        if again.retrying:
            self._show_retry(again)
        if not published:
            self._drop(call, Dropped.COPY_WAITS)
        self._observe(
            CallRescheduled(
                **call.subject,
                delay=delay,
                reason=again.reason,
                unavailable=again.unavailable,
                still=still,
            )
        )
        self._announce(call, again.task_event)
        if again.cause is not None and not isinstance(again.cause, Cooldown | RetryLater):
            # Logged here, because Celery logs a retry without its traceback.
            level = logging.ERROR if again.unknown else logging.WARNING
            logger.log(
                level,
                "%s[%s] raised, and will run again",
                call.task,
                call.call_id,
                exc_info=again.cause,
                code="raised-and-resumes",
            )
        if retry is not None and not (
            self.process.clock.now() - began > delay and self._celery_has_outcome()
        ):
            raise retry from again.cause
        reason = f"{STILL if still else RESCHEDULED}{again.reason}"
        if again.full_since is not None:
            raise GroupIsFull(reason, call.group or "", again.full_since)
        raise (
            KeyIsHeld(reason, call.key.stored, call.key.fingerprint)
            if again.held
            else Ignore(reason)
        )

    def _publish(self, call: Call, again: Reschedule, delay: float) -> bool:
        """Publish a copy, and retry for a while; ``False`` if another copy waits already.

        If the broker accepts no copy, the delivery is returned to the broker; the call fails if
        the broker would discard the returned message.
        """
        process = self.process
        before, limit = self._requeue_count(call)
        newest = self.body_began or self.header_unreadable or (call.fresh and again.unavailable)
        try:
            return self._until_confirmed(
                call,
                lambda: process.publisher.reschedule(
                    self.task,
                    self.header,
                    delay,
                    process.leases,
                    call.key.stored,
                    self.options.ttl,
                    newest=newest,
                ),
            )
        except NotPublishable as error:
            self._fail(call, again, f"its message cannot be written: {error}")
        except NotConfirmed as error:
            if may_be_returned(before, limit):
                self._requeue(call, again, str(error))
            why = f"the broker accepts no copy of it after {before + 1} deliveries: {error}"
            self._fail(call, again, why)

    def _until_confirmed(self, call: Call, publish: Callable[[], bool]) -> bool:
        """Call *publish*, and retry for a while; raises :class:`NotConfirmed` if the broker does
        not accept the message.
        """
        until = self._publish_deadline(call)
        failures = 0
        while True:
            try:
                published = publish()
            except NotPublishable:
                raise
            except Exception as error:  # noqa: BLE001 - whatever the broker said, the message must survive
                why = f"{type(error).__name__}: {error}"
            else:
                requeue.clear_count(call.call_id)
                return published
            pause = publish_retry_pause(failures)
            if self.interrupt_guard.stopping or self.process.clock.now() + pause > until:
                self._sleep(pause)
                raise NotConfirmed(why)
            if not failures:
                logger.error(
                    "%s[%s] could not be rescheduled, retrying: %s",
                    call.task,
                    call.call_id,
                    why,
                    code="not-rescheduled",
                )
            failures += 1
            self._sleep(pause)

    def _requeue_count(self, call: Call) -> tuple[int, int | None]:
        """See :func:`celery_leases.worker.requeue.requeue_count`."""
        return requeue.requeue_count(self.request, call.call_id, self.process.publisher.routes)

    def _publish_deadline(self, call: Call) -> float:
        """Until when to retry the publish of a copy, before the delivery is returned."""
        until = self.process.clock.now() + publish_retry_time(
            *self._requeue_count(call), call.longest_countdown
        )
        return (
            min(until, self.received_at + call.time_limit - PUBLISH_MARGIN)
            if call.time_limit
            else until
        )

    def _requeue(self, call: Call, again: Reschedule, why: str) -> NoReturn:
        """Return the delivery to the broker, which delivers it again."""
        self._observe(
            CallRescheduled(
                **call.subject,
                delay=0.0,
                reason=again.reason,
                confirmed=False,
                unavailable=again.unavailable,
            )
        )
        requeue.requeue_delivery(call.task, call.call_id, "could not be rescheduled", why)

    def _fail(self, call: Call, again: Reschedule, why: str) -> NoReturn:
        """End the call with an error, because it cannot be rescheduled, and write the same into its
        record.
        """
        message = (
            f"{printable(call.key.key)}: {again.reason}, and the call cannot be rescheduled: {why}"
        )
        error = RescheduleFailed(message, call.key.key, why)
        try:
            self._close_record(call, again, failure_of(error))
        except StoreUnavailable as unavailable:
            if may_be_returned(*self._requeue_count(call)):
                self._sleep(self._publish_deadline(call) - self.process.clock.now())
                self._requeue(call, again, f"{why}; {unavailable}")
            logger.error(
                "%s[%s] cannot be rescheduled, and its record could not be closed: %s",
                call.task,
                call.call_id,
                unavailable,
                code="not-rescheduled",
            )
        self._observe(CallRefused(**call.subject, error=str(error)))
        raise error from again.cause

    def _close_record(self, call: Call, again: Reschedule, failure: Failure) -> None:
        """Write into the call's record that it does not run again."""
        record = self._own_record(call)
        if record is None:
            return
        if record.state not in _WAITING:
            self._wait_for_copy(call, again)
        elif record.resumes:
            before = record.failure or failure
            self.process.records.stop_resuming(
                record, replace(before, type=failure.type, message=failure.message)
            )

    def _own_record(self, call: Call) -> Record | None:
        """The record, if it belongs to this call and not to one that this call has waited for."""
        record = self.process.records.read(call.key.stored)
        return record if record is not None and record.call_id == call.call_id else None

    def _wait_for_copy(self, call: Call, again: Reschedule) -> None:
        """Wait while a copy of the call runs, then return the delivery to the broker.

        If the process of that copy dies, this delivery is the only one that can run the call. If
        the queue would discard the returned message, the delivery is dropped if Celery has the
        outcome; otherwise this function returns.
        """
        until = self._publish_deadline(call)
        while not self.interrupt_guard.stopping and self.process.clock.now() < until:
            record = self._own_record(call)
            if (
                record is None
                or record.state in _WAITING
                or (record.state is not State.RUNNING and self._celery_has_outcome())
            ):
                break
            self._sleep(POLL_INTERVAL)
        if may_be_returned(*self._requeue_count(call)):
            self._requeue(call, again, "a copy of it is running, and no other can be published")
        if self._celery_has_outcome():
            self._drop(call, Dropped.OUTCOME_KNOWN)

    def _sleep(self, seconds: float) -> None:
        """Wait, unless the process is shutting down."""
        clock = self.process.clock
        until = clock.now() + seconds
        while not self.interrupt_guard.stopping and (left := until - clock.now()) > 0:
            clock.sleep(min(left, 0.5))

    def _show_retry(self, again: Reschedule) -> None:
        """Set Celery's state to RETRY again for the rest of the wait, because Celery has set it to
        STARTED for this delivery.
        """
        request = self.request
        if self.task.track_started and not request.__dict__.get(
            "ignore_result", self.task.ignore_result
        ):
            with suppress(Exception):  # the state stays STARTED, and the broker has the copy
                self.task.backend.mark_as_retry(request.id, again.refusal, request=request)

    def _failure_fence(self, call: Call, again: Reschedule) -> int | None:
        """The ``failure_fence`` for the header of the copy, see
        :class:`~celery_leases.call.Call`.
        """
        if again.failure_fence is not None or self.body_began:
            return again.failure_fence
        if call.fresh:
            return 0 if again.unavailable else None
        return call.failure_fence

    def _announce(self, call: Call, task_event: TaskEvent | None) -> None:
        """Send the task event that says why the call does not run now; Flower shows it."""
        if task_event is not None:
            fields = {
                "key": call.key.shown,
                "retry_after": task_event.retry_after,
                "reason": task_event.reason,
            }
            self.process.publisher.announce(self.task, task_event.type, **fields)

    def _celery_has_outcome(self) -> bool:
        """Whether the result backend has a final state for this call."""
        if self.request.is_eager:
            return False
        try:
            return self.task.backend.get_state(self.request.id) in states.READY_STATES
        except Exception:  # noqa: BLE001 - there is no backend, or it does not answer
            return False

    def _drop(self, call: Call, reason: Dropped) -> NoReturn:
        self._observe(CallDropped(**call.subject, reason=reason, why=reason.words))
        raise Ignore(reason.words)

    def _observe(self, event: Any) -> None:
        self.process.observer.observe(event)


def _retry_of(again: Reschedule) -> Retry | None:
    """The exception that Celery gets for a failed call that runs again; ``None`` for a call that is
    rescheduled for another reason.

    It is made before anything is published: if the exception cannot be pickled, that must not fail
    a call whose copy waits already.
    """
    if again.cause is None:
        return None
    when = round(again.delay, 1)
    try:
        return Retry(exc=again.cause, when=when)
    except BaseException:  # noqa: BLE001 - the user's exception may do anything when it is pickled
        return Retry(exc=RuntimeError(type(again.cause).__qualname__), when=when)
