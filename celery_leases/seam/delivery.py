"""One delivery: from Celery's request to a call the execution knows, and from its reply back to Celery."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, NoReturn
from uuid import uuid4

from celery import signals, states
from celery.exceptions import Ignore, Reject

from celery_leases.core.endings import Ending, Returned
from celery_leases.core.errors import LeaseHeld, StoreUnavailable
from celery_leases.core.events import CallDropped, CallPutBack
from celery_leases.core.options import OnLost
from celery_leases.core.records import Record
from celery_leases.core.replies import Again, Answer, News, Over, Reply, Throw
from celery_leases.core.results import encode
from celery_leases.core.verdicts import Call
from celery_leases.handle import Lease, leased
from celery_leases.interruption.by_signal import shield_here
from celery_leases.seam import apps
from celery_leases.seam.body_end import BodyEnd
from celery_leases.seam.kept import is_over
from celery_leases.seam.pin import HEADER, TOKEN, call_id_of, group_of, key_of, owner_of, pinned
from celery_leases.signals import logger
from celery_leases.tenure import Tenure

STORED_KEY = "celery_leases_stored_key"
"""Where a request remembers key and call whose callbacks are to be marked as sent."""

PAUSE_UNCONFIRMED = 1.0
PRIOR_KEPT = 8


class Delivery:
    """One delivery of one call of *task*, with the arguments Celery unpacked."""

    def __init__(
        self, task: Any, request: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run_body: Callable[..., Any]
    ) -> None:
        self.task = task
        self.run_body = run_body
        self.request = request
        self.args = args
        self.kwargs = kwargs
        self.options = task.lease_options
        self.parts = apps.parts_of(task.app, eager=request.is_eager)
        self.shield = shield_here(os.getpid(), request.__dict__.get(TOKEN))
        self.call_id = call_id_of(request.id, request.replaced_task_nesting)
        self.pin = pinned(request.headers, task.name, self.call_id)

    def take(self) -> Any:
        """Take the delivery to its end; returns what Celery shall store, or raises what Celery understands."""
        with self.shield.around():
            call = self._call()
            self._refuse_expired(call)
            self._pin(call)
            reply = self.parts.execution.run(call, self._body(call), self.pin.get("away", 0))
            if self.shield.limited:
                logger.info("%s[%s] dropped a soft time limit that fired outside the body", call.task, call.call_id)
            return self._give(call, reply)

    # -- what Celery delivered -----------------------------------------------------------------------------

    def _call(self) -> Call:
        request, pin = self.request, self.pin
        redelivered = bool((request.delivery_info or {}).get("redelivered"))
        limits = request.timelimit or (None, None)
        return Call(
            task=self.task.name,
            call_id=self.call_id,
            key=key_of(self.task, pin, self.call_id, self.args, self.kwargs),
            options=self.options,
            repeat=bool(pin) or redelivered or request.retries > 0,
            canvas=bool(request.chain or request.chord or request.group or request.callbacks),
            tries=pin.get("tries", 0),
            started=bool(pin.get("started")) or request.retries > 0,
            retries=request.retries,
            prior=tuple(pin.get("prior", ())),
            token=owner_of(request.__dict__.get(TOKEN) or uuid4().hex, os.getpid()),
            longest_hop=self.parts.settings.longest_hop,
            time_limit=limits[0] or self.task.time_limit,
            group=group_of(self.task, pin, self.args, self.kwargs),
            comes_back=not request.is_eager,
            message=self._kept_message(),
        )

    def _kept_message(self) -> str | None:
        if not self.options.store_arguments or self.request.is_eager:
            return None
        return self.parts.copies.message_of(self.task, self.pin)

    def _pin(self, call: Call, **news: Any) -> None:
        """Write the pin into this request's own copy of the headers, which retries and copies carry on."""
        lasting = ("nonce", "tries", "away", "prior", "started")
        kept: dict[str, Any] = {name: self.pin[name] for name in lasting if name in self.pin}
        identity = {"task": call.task, "id": call.call_id, "key": call.key.key, "fingerprint": call.key.fingerprint}
        self.pin = {**kept, **identity, **({"group": call.group} if call.group else {}), **news}
        self.request.headers = {**(self.request.headers or {}), HEADER: self.pin}

    def _refuse_expired(self, call: Call) -> None:
        """End a redelivered message whose time is over, unless its call has begun: then this is a mere copy."""
        if not call.repeat or self.pin.get("started") or not is_over(self.request.expires, datetime.now(UTC)):
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

    @property
    def _on_lost(self) -> OnLost:
        """What a lost lease means here; the process of an eager call is the caller's own."""
        on_lost = self.options.on_lost
        return "interrupt" if on_lost == "kill" and self.request.is_eager else on_lost

    # -- the body ------------------------------------------------------------------------------------------

    def _body(self, call: Call) -> Any:
        def body(tenure: Tenure, record: Record) -> Ending:
            self._pin(call, started=True, tries=0, away=0, prior=[])
            lease = Lease(tenure, record, self.parts.steps(call, tenure, record, self.shield.closed))
            began, pid = time.monotonic(), os.getpid()
            try:
                try:
                    with leased(lease), self.shield.opened(tenure, self._on_lost):
                        value = self.run_body(*self.args, **self.kwargs)
                finally:
                    self.shield.shut()
                    if os.getpid() != pid:
                        _end_the_forked()
            except BaseException as error:  # noqa: BLE001 - every way a body can end is told apart below
                return BodyEnd(self.task, self.request, self.shield, call, tenure).by(error, time.monotonic() - began)
            return Returned(value, *encode(value, self.options.result_max))

        return body

    # -- what Celery gets ----------------------------------------------------------------------------------

    def _give(self, call: Call, reply: Reply) -> Any:
        match reply:
            case Answer(value):
                if call.canvas:
                    self.request.__dict__[STORED_KEY] = (call.key.stored, call.call_id)
                return value
            case Throw(error, own, news):
                self._announce(call, news)
                if own and self._celery_knows():
                    self._drop(call, "its outcome is known already")
                raise error
            case Over(reason):
                raise Ignore(reason)
            case Again():
                return self._put_back(call, reply)

    def _put_back(self, call: Call, again: Again) -> NoReturn:
        """End this delivery once a copy of it is with the broker; always raises."""
        delay = min(again.delay, call.longest_hop)
        if self.request.is_eager:
            held = f"{call.key.key}: {again.reason}, and an eager call cannot come back"
            raise again.refusal or LeaseHeld(held, call.key.key, delay)
        away = self.pin.get("away", 0) + 1 if again.away else 0
        prior = [*call.prior, again.prior][-PRIOR_KEPT:] if again.prior else list(self.pin.get("prior", ()))
        news = {"tries": call.tries + 1, "away": away, "prior": prior}
        self._pin(call, **(news | ({"started": True} if again.started else {})))
        parts = self.parts
        try:
            published = parts.copies.put_back(
                self.task, self.pin, delay, parts.marks, call.key.stored, self.options.ttl
            )
        except Exception as error:  # noqa: BLE001 - whatever the broker said, the message must survive
            logger.warning(
                "%s[%s] could not be put back, given to the broker again: %s", call.task, call.call_id, error
            )
            self._observe(CallPutBack(**call.subject, delay=0.0, reason=again.reason, confirmed=False))
            parts.clock.sleep(PAUSE_UNCONFIRMED)
            raise Reject(again.reason, requeue=True) from None
        if not published:
            self._drop(call, "another copy of this call waits already")
        self._observe(CallPutBack(**call.subject, delay=delay, reason=again.reason))
        self._announce(call, again.news)
        if again.cause is not None:  # Celery is told nothing that it would log
            logger.warning("%s[%s] raised, and comes back", call.task, call.call_id, exc_info=again.cause)
        raise Ignore(f"put back: {again.reason}")

    def _announce(self, call: Call, news: News | None) -> None:
        """Tell Celery's event state, and so Flower, why the call does not run now."""
        if news is not None:
            fields = {"key": call.key.key, "retry_after": news.retry_after, "reason": news.reason}
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
