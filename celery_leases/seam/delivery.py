"""One delivery: from Celery's request to a call the execution knows, and from its reply back to Celery."""

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

from celery_leases.core.endings import Ending, Returned
from celery_leases.core.errors import Cooldown, LeaseHeld, LeasesError, PutBackFailed, RetryLater, StoreUnavailable
from celery_leases.core.events import CallDropped, CallPutBack, CallRefused
from celery_leases.core.records import Failure, Record, State
from celery_leases.core.replies import Again, Answer, Elsewhere, News, Over, Reply, Throw, callbacks_mark
from celery_leases.core.results import encode, failure_of
from celery_leases.core.texts import printable
from celery_leases.core.verdicts import Call
from celery_leases.core.waiting import HELD_LONGEST, held_for, may_be_given_back, unconfirmed_pause
from celery_leases.handle import Lease, enter_body, leave_body
from celery_leases.interruption.by_signal import shield_here
from celery_leases.seam import apps, given_back
from celery_leases.seam.apps import AppParts
from celery_leases.seam.body_end import BodyEnd
from celery_leases.seam.kept import is_over
from celery_leases.seam.pin import (
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
from celery_leases.seam.putback import KeyIsHeld, NotPublishable
from celery_leases.seam.routes import Routes
from celery_leases.signals import logger
from celery_leases.tenure import Tenure

LOOK_AGAIN = 0.5
"""Seconds between two looks at a copy that runs."""

_WAITING = (State.PENDING, State.COOLING)

TIME_TO_GIVE_BACK = 12.0
"""Seconds before the hard time limit after which nothing is published any more: two tries, and the end."""

CALLBACKS_REMEMBERED = 86_400.0
_callbacks_noted = False


class Delivery:
    """One delivery of one call of *task*, with the arguments Celery unpacked."""

    parts: AppParts
    taken: float

    def __init__(
        self, task: Any, request: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run_body: Callable[..., Any]
    ) -> None:
        self.task = task
        self.run_body = run_body
        self.request = request
        self.args = args
        self.kwargs = kwargs
        self.options = task.lease_options
        self.process = os.getpid()
        self.token = token_of(request)
        self.shield = shield_here(self.process, self.token)
        self.call_id = call_id_of(request.id, request.replaced_task_nesting)
        headers = request.headers
        if not (type(headers) is dict or headers is None or isinstance(headers, Mapping)):
            request.headers = headers = None  # a message may have a header of that name, of any type
        self.arrived = arrived(headers, task.name, self.call_id)
        #: It has a header that cannot be read, which says nothing of which copy this is.
        self.unread = self.arrived is None and headers is not None and headers.get(HEADER) is not None
        self.pin = self.arrived or Header(task.name, self.call_id)
        delivered = request.delivery_info
        self.redelivered = bool(delivered and delivered.get("redelivered"))
        #: Its body has run here, so that a copy which was published before cannot stand for it.
        self.ran = False

    def take(self) -> Any:
        """Take the delivery to its end; returns what Celery shall store, or raises what Celery understands."""
        with self.shield:
            self.parts = self._parts_of()
            self.taken = self.parts.clock.now()
            call = self._call()
            if call.repeat:
                self._refuse_expired(call)
            reply = self.parts.execution.run(call, partial(self._body, call), self.pin.away)
            if self.shield.limited:
                logger.info("%s[%s] dropped a soft time limit that fired outside the body", call.task, call.call_id)
            return self._give(call, reply)

    # -- what Celery delivered -----------------------------------------------------------------------------

    def _parts_of(self) -> AppParts:
        """The parts of the app; a process that cannot make them, as without memory or descriptors, is given time."""
        spent: tuple[int, int | None] = (0, None)
        tries, until = 0, 0.0
        while True:
            try:
                return apps.parts_of(self.task.app, eager=self.request.is_eager)
            except LeasesError:
                raise
            except Exception as error:
                if self.request.is_eager:
                    raise
                why = f"{type(error).__name__}: {error}"
            if not tries:
                spent = given_back.spent(self.request, self.call_id, Routes(self.task.app))
                until = time.monotonic() + held_for(*spent, HELD_LONGEST)
                logger.error("%s[%s] was not begun, tried again: %s", self.task.name, self.call_id, why)
            pause = unconfirmed_pause(tries)
            tries += 1
            if self.shield.hurried or time.monotonic() + pause > until:
                self._not_taken(why, *spent)
            time.sleep(pause)

    def _not_taken(self, why: str, before: int, limit: int | None) -> NoReturn:
        """End a delivery that this process can do nothing for."""
        if may_be_given_back(before, limit):
            given_back.give_back(self.task.name, self.call_id, "was not begun", why)
        key = key_of(self.task, self.arrived, self.call_id, self.args, self.kwargs, self.request.retries).key
        message = f"{printable(key)}: the call was not begun, and cannot come back after {before + 1} deliveries: {why}"
        raise PutBackFailed(message, key, why)

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
            key=key_of(self.task, self.arrived, self.call_id, self.args, self.kwargs, request.retries),
            options=self.options,
            repeat=self.arrived is not None or self.redelivered or request.retries > 0,
            met=None if pin.met == 0 and self.redelivered else pin.met,
            canvas=bool(request.chain or request.chord or request.group or request.callbacks),
            tries=pin.tries,
            started=pin.started or request.retries > 0,
            retries=request.retries,
            prior=pin.prior,
            token=owner_of(self.token or uuid4().hex, self.process),
            longest_hop=self.parts.settings.longest_hop,
            time_limit=limits[0] or self.task.time_limit,
            group=group,
            comes_back=not request.is_eager,
            message=message,
            woken=WOKEN in request.__dict__,
        )

    def _pin(self, call: Call, **news: Any) -> None:
        self._write(replace(self.pin.of_key(call.key, call.group), **news))

    def _write(self, pin: Header) -> None:
        """Write the pin into this request's own copy of the headers, which retries and copies carry on."""
        self.pin = pin
        self.request.headers = {**(self.request.headers or {}), HEADER: pin.written()}

    def _refuse_expired(self, call: Call) -> None:
        """End a redelivered message whose time is over, unless its call has begun: then this is a mere copy."""
        if self.pin.started or not is_over(self.request.expires, datetime.now(UTC)):
            return
        try:
            record = self.parts.records.read(call.key.stored)
        except StoreUnavailable:
            return
        if record is not None and (record.call_id == call.call_id or call.call_id in record.finished_calls):
            self._pin(call, started=True)
            return
        self.task.backend.mark_as_revoked(self.request.id, "expired", request=self.request)
        signals.task_revoked.send(sender=self.task, request=self.request, terminated=False, signum=None, expired=True)
        self._drop(call, "it expired before it began")

    # -- the body ------------------------------------------------------------------------------------------

    def _body(self, call: Call, tenure: Tenure, record: Record) -> Ending:
        self._write(self.pin.begun(call.key, call.group))
        self.ran = True
        steps = partial(self.parts.steps, call, tenure, record, self.shield.closed)
        on_lost = self.options.on_lost
        if on_lost == "kill" and self.request.is_eager:
            on_lost = "interrupt"  # the process of an eager call is the caller's own
        before = enter_body(Lease(tenure, record, steps, self.process))
        began = time.monotonic()
        try:
            try:
                try:
                    self.shield.open(tenure, on_lost)
                    value = self.run_body(self.request, *self.args, **self.kwargs)
                finally:
                    self.shield.shut()
            finally:
                self.shield.shut()
                leave_body(before)
                if os.getpid() != self.process:
                    _end_the_forked()
        except BaseException as error:  # noqa: BLE001 - every way a body can end is told apart below
            return BodyEnd(self.task, self.request, self.shield, call, tenure).by(error, time.monotonic() - began)
        return Returned(value, *encode(value, self.options.result_max))

    # -- what Celery gets ----------------------------------------------------------------------------------

    def _give(self, call: Call, reply: Reply) -> Any:
        if isinstance(reply, Answer | Throw) and not self.request.is_eager:
            parts = self.parts
            parts.copies.over(self.task, self.pin, parts.marks, call.key.stored, self.options.ttl)
        match reply:
            case Answer(value):
                if call.canvas:
                    _note_callbacks()
                    state_of(self.request).answered = call.key.stored, call.call_id
                return value
            case Throw(error, own, news):
                self._announce(call, news)
                if own and self._celery_knows():
                    self._drop(call, "its outcome is known already")
                raise error
            case Elsewhere():
                return self._result_of(call, reply)
            case Over(reason):
                raise Ignore(reason)
            case Again():
                return self._put_back(call, reply)

    def _result_of(self, call: Call, elsewhere: Elsewhere) -> Any:
        """The result of a task that stands for the one which has done this key: in Celery it has that one's id."""
        backend, expires = self.task.backend, maybe_timedelta(self.task.app.conf.result_expires)
        lasts = expires.total_seconds() if expires else math.inf
        # The RPC backend sends each result to its caller, and nobody else can look at it.
        hidden = isinstance(backend, DisabledBackend | RPCBackend) or self.request.is_eager
        if hidden or elsewhere.age > lasts:
            raise elsewhere.missing
        try:
            found = backend.get_task_meta(celery_id_of(elsewhere.call_id))
        except Exception as error:  # noqa: BLE001 - whatever the backend says, the result may still be there
            reason = f"the result backend does not answer: {type(error).__name__}"
            return self._put_back(call, replace(elsewhere.again, reason=reason))
        if found["status"] not in states.READY_STATES:
            return self._put_back(call, elsewhere.again)
        if found["status"] == states.SUCCESS:
            return self._give(call, Answer(found["result"]))
        raise found["result"]

    def _put_back(self, call: Call, again: Again) -> NoReturn:
        """End this delivery once a copy of it is with the broker; always raises."""
        delay = min(again.delay, call.longest_hop)
        if self.request.is_eager:
            held = f"{printable(call.key.key)}: {again.reason}, and an eager call cannot come back"
            raise again.refusal or LeaseHeld(held, call.key.key, delay)
        away = self.pin.away + 1 if again.away else 0
        prior = (*call.prior, again.prior)[-PRIOR_KEPT:] if again.prior else self.pin.prior
        news = {"tries": call.tries + 1, "away": away, "prior": prior, "met": self._met(call, again)}
        news["held"] = again.held
        self._pin(call, **(news | ({"started": True} if again.started else {})))
        retry, began = _retry_of(again), time.monotonic()
        published = self._publish(call, again, delay)
        if again.retrying:
            self._still_a_retry(again)
        if not published:
            self._drop(call, "another copy of this call waits already")
        self._observe(CallPutBack(**call.subject, delay=delay, reason=again.reason, unavailable=again.away))
        self._announce(call, again.news)
        if again.cause is not None and not isinstance(again.cause, Cooldown | RetryLater):
            level = logging.ERROR if again.unknown else logging.WARNING  # Celery logs a retry without its traceback
            logger.log(level, "%s[%s] raised, and comes back", call.task, call.call_id, exc_info=again.cause)
        if retry is not None and not (time.monotonic() - began > delay and self._celery_knows()):
            raise retry from again.cause
        reason = f"put back: {again.reason}"
        raise KeyIsHeld(reason, call.key.stored, call.key.fingerprint) if again.held else Ignore(reason)

    def _publish(self, call: Call, again: Again, delay: float) -> bool:
        """Publish a copy, again and again for a while; ``False`` when another copy is known to wait already.

        A delivery whose copy the broker does not take is given back to it, as long as it would be delivered again.
        """
        parts = self.parts
        before, limit = self._spent(call)
        until = self._held_until(call)
        newest = self.ran or self.unread or (call.fresh and again.away)
        tries = 0
        while True:
            try:
                published = parts.copies.put_back(
                    self.task, self.pin, delay, parts.marks, call.key.stored, self.options.ttl, newest=newest
                )
            except NotPublishable as error:
                self._fail(call, again, f"no message of it can be written: {error}")
            except Exception as error:  # noqa: BLE001 - whatever the broker said, the message must survive
                why = f"{type(error).__name__}: {error}"
            else:
                given_back.taken(call.call_id)
                return published
            pause = unconfirmed_pause(tries)
            if self.shield.hurried or parts.clock.now() + pause > until:
                if may_be_given_back(before, limit):
                    self._sleep(pause)
                    self._give_back(call, again, why)
                self._fail(call, again, f"the broker takes no copy of it after {before + 1} deliveries: {why}")
            if not tries:
                logger.error("%s[%s] could not be put back, tried again: %s", call.task, call.call_id, why)
            tries += 1
            self._sleep(pause)

    def _spent(self, call: Call) -> tuple[int, int | None]:
        """How often this message has been given back, and how often its queue allows that, if it has a limit."""
        return given_back.spent(self.request, call.call_id, self.parts.copies.routes)

    def _held_until(self, call: Call) -> float:
        """When the delivery is given back at the latest that the broker takes no copy of."""
        until = self.parts.clock.now() + held_for(*self._spent(call), call.longest_hop)
        return min(until, self.taken + call.time_limit - TIME_TO_GIVE_BACK) if call.time_limit else until

    def _give_back(self, call: Call, again: Again, why: str) -> NoReturn:
        """Give the delivery back to the broker, which delivers it again."""
        self._observe(
            CallPutBack(**call.subject, delay=0.0, reason=again.reason, confirmed=False, unavailable=again.away)
        )
        given_back.give_back(call.task, call.call_id, "could not be put back", why)

    def _fail(self, call: Call, again: Again, why: str) -> NoReturn:
        """End the call with an error, as it cannot come back; its record, if it has one, says the same."""
        message = f"{printable(call.key.key)}: {again.reason}, and the call cannot come back: {why}"
        error = PutBackFailed(message, call.key.key, why)
        try:
            self._close_record(call, again, failure_of(error))
        except StoreUnavailable as unavailable:
            if may_be_given_back(*self._spent(call)):
                self._sleep(self._held_until(call) - self.parts.clock.now())
                self._give_back(call, again, f"{why}; {unavailable}")
            logger.error(
                "%s[%s] cannot come back, and its record is not closed: %s", call.task, call.call_id, unavailable
            )
        self._observe(CallRefused(**call.subject, error=str(error)))
        raise error from again.cause

    def _close_record(self, call: Call, again: Again, failure: Failure) -> None:
        """Have the record of this call say that it does not come back."""
        record = self._own_record(call)
        if record is None:
            return
        if record.state not in _WAITING:
            self._leave_to_its_copy(call, again)
        elif record.resumes:
            before = record.failure or failure
            self.parts.records.stop_resuming(record, replace(before, type=failure.type, message=failure.message))

    def _own_record(self, call: Call) -> Record | None:
        """The record, if it is this call's; else the call has waited for another one."""
        record = self.parts.records.read(call.key.stored)
        return record if record is not None and record.call_id == call.call_id else None

    def _leave_to_its_copy(self, call: Call, again: Again) -> None:
        """Hold the delivery while a copy of the call runs: if that one's process dies, nothing else brings it back.

        Then it is given back. One that its queue would discard is dropped, if the outcome is known; else this returns.
        """
        until = self._held_until(call)
        while not self.shield.hurried and self.parts.clock.now() < until:
            record = self._own_record(call)
            if (
                record is None
                or record.state in _WAITING
                or (record.state is not State.RUNNING and self._celery_knows())
            ):
                break
            self._sleep(LOOK_AGAIN)
        if may_be_given_back(*self._spent(call)):
            self._give_back(call, again, "a copy of it is running, and no other can be published")
        if self._celery_knows():
            self._drop(call, "its outcome is known already")

    def _sleep(self, seconds: float) -> None:
        """Wait, unless the process is to end."""
        clock = self.parts.clock
        until = clock.now() + seconds
        while not self.shield.hurried and (left := until - clock.now()) > 0:
            clock.sleep(min(left, 0.5))

    def _still_a_retry(self, again: Again) -> None:
        """Show the retry on, for the rest of its wait, where Celery has just noted that its copy has been started."""
        request = self.request
        if self.task.track_started and not request.__dict__.get("ignore_result", self.task.ignore_result):
            with suppress(Exception):  # it is shown as STARTED then, and the copy is with the broker
                self.task.backend.mark_as_retry(request.id, again.refusal, request=request)

    def _met(self, call: Call, again: Again) -> int | None:
        """The failure that the copy of a fresh message waits for, which it may run after."""
        if again.met is not None or self.ran:
            return again.met
        if call.fresh:
            return 0 if again.away else None
        return call.met

    def _announce(self, call: Call, news: News | None) -> None:
        """Tell Celery's event state, and so Flower, why the call does not run now."""
        if news is not None:
            fields = {"key": call.key.shown, "retry_after": news.retry_after, "reason": news.reason}
            self.parts.copies.announce(self.task, news.what, **fields)

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
        self.parts.execution.entry.observer.observe(event)


def _note_callbacks() -> None:
    """From now on, note in this process that callbacks are out; a receiver of this signal costs each task something."""
    global _callbacks_noted  # noqa: PLW0603 - once in a process
    if not _callbacks_noted:
        signals.task_success.connect(_callbacks_are_out, weak=False)
        _callbacks_noted = True


def _callbacks_are_out(sender: Any, **_: Any) -> None:
    """Celery has sent the callbacks of this call: a copy of it that comes now is superfluous."""
    if hasattr(sender, "lease_options"):
        request = sender.request
        answered = state_of(request).answered
        if answered is not None and not request.is_eager:
            stored_key, call_id = answered
            ttl = min(sender.lease_options.retention, CALLBACKS_REMEMBERED)
            marks = apps.parts_of(sender.app).marks
            with suppress(StoreUnavailable):  # a copy would send the callbacks again, as the guarantees say
                marks.swap_mark(stored_key, callbacks_mark(call_id), None, "out", ttl)


def _retry_of(again: Again) -> Retry | None:
    """What Celery raises for a call that has failed and comes back; ``None`` for any other one that does.

    Made before anything is published: an exception that cannot be copied must not fail a call whose copy waits.
    """
    if again.cause is None:
        return None
    when = round(again.delay, 1)
    try:
        return Retry(exc=again.cause, when=when)
    except Exception:  # noqa: BLE001 - the user's exception may do anything when it is pickled
        return Retry(exc=RuntimeError(type(again.cause).__qualname__), when=when)


def _end_the_forked() -> NoReturn:
    """End a process that the body has forked and that comes back from it: the rest is its parent's to do."""
    error = sys.exception()
    if error is not None and not isinstance(error, SystemExit):
        traceback.print_exception(error)
    code = error.code if isinstance(error, SystemExit) else 1 if error is not None else 0
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(code if isinstance(code, int) else 1 if code else 0)
