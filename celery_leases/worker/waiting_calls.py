"""Calls that wait in a worker for a held key, and are begun as soon as the key is free.

Such a call waits as every call with a countdown does: its message is with this worker,
unacknowledged, and Celery's timer begins it when its time has come. Here its time is brought
forward. There is no second message, nothing is written anywhere, and no promise depends on it:
without it, the call begins when its countdown is over.

Two kinds of calls wait here:

* Copies that a pool child has published because the key was held. Their header says so.
* Messages that have just come, whose key is known to be held. They get a countdown here, as if they
  had been published with one, so that no pool child has to find out once more that they must wait.

The lease store is asked which of these keys are still held, for all of them at once. One call of a
free key is begun, in the order in which the calls came to this worker; the next one as soon as that
call has ended. Where done work is answered from its record, the others are begun together then. A
call whose countdown ends while its key is known to be held waits on here, for as long as the broker
can be trusted with its message.

Everything here happens in the worker's main process, and begins nothing but in callbacks of its
timer.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from heapq import heapify, heappop, heappush
from itertools import count
from time import monotonic
from typing import Any, Final

from celery.worker import state
from celery.worker.request import Request

from celery_leases.concurrency import greenlets, os_threads
from celery_leases.errors import LeasesError
from celery_leases.protocol.waiting import FIRST_COUNTDOWN_UNTIL_FREE
from celery_leases.signals import logger
from celery_leases.worker import app_components
from celery_leases.worker.app_settings import settings_of
from celery_leases.worker.headers import (
    HEADER,
    Header,
    arrived,
    call_id_of,
    carried_stored_key,
    key_of,
)
from celery_leases.worker.reschedule import KeyIsHeld

TICK: Final = 0.05
"""Seconds between two looks at the lines."""
SOONEST_LOOK: Final = 0.1
LATEST_LOOK: Final = 1.0
"""Seconds between two questions to the lease store about one key: the longer it is held, the
longer.
"""
LONGEST_PAUSE: Final = 10.0
"""Seconds until a key is asked for again whose calls were rescheduled several times, although it
seemed to be free.
"""
TOGETHER: Final = 16
"""Calls of one key that are begun together where they only need to be answered."""
NEWS_LAST: Final = 5.0
"""Seconds for which an answer of the lease store is news."""
KEPT_IDLE: Final = 5.0
"""Seconds for which a line without calls is kept."""
ASKED_AT_ONCE: Final = 500
"""Keys in one question to the lease store."""
MOST: Final = 10_000
"""Scheduled requests of a worker up to which arriving messages get a countdown here."""
FINGERPRINTS_KEPT: Final = 100


class Line:
    """The calls of one key that wait in this worker, or that it has begun."""

    def __init__(self, stored_key: str, now: float, *, longest: float) -> None:
        self.stored_key = stored_key
        #: The longest countdown the broker can be trusted with, in seconds.
        self.longest = longest
        #: Some of its calls are work of their own each, so that they run one after the other.
        self.rerun = False
        #: Its calls, a heap by their places. Celery may drop some of them without telling.
        self.waiting: list[tuple[int, int, Any]] = []
        self.begun: set[Any] = set()
        #: What its calls are about, as far as calls were rescheduled.
        self.fingerprints: set[str | None] = set()
        #: No attempt holds the key, as far as this process knows.
        self.free = False
        self.width = 1
        self.since = self.used = now
        self.look_at = now + SOONEST_LOOK
        #: How often in a row a call was rescheduled that was begun here.
        self.in_vain = 0
        self._known_held = now
        self._count = count()
        self._places: dict[str, int] = {}

    def about(self, fingerprint: str | None) -> None:
        """A call with that fingerprint waits for the key."""
        if len(self.fingerprints) >= FINGERPRINTS_KEPT:
            self.fingerprints.clear()
        self.fingerprints.add(fingerprint)

    def place(self, request: Any) -> int:
        """A rescheduled call keeps its place, and is delivered again as another message."""
        if request.id not in self._places:
            self._places[request.id] = next(self._count)
        return self._places[request.id]

    def join(self, request: Any) -> None:
        """*request* waits."""
        heappush(self.waiting, (self.place(request), next(self._count), request))

    def held(self, now: float) -> None:
        """A call of the key was rescheduled, because another call holds the key."""
        pause = SOONEST_LOOK * 2.0 ** min(self.in_vain, 10)
        self.free, self.width, self.used, self._known_held = False, 1, now, now
        self.look_at = now + min(pause, LONGEST_PAUSE)

    def ended(self, request: Any, now: float, *, answered: bool) -> None:
        """A call that was begun here has ended otherwise, so the key is free; *answered*: it has a
        result.
        """
        self.begun.discard(request)
        self._places.pop(request.id, None)
        self.free, self.in_vain, self.since, self.used = True, 0, now, now
        self.width = TOGETHER if answered and not self.rerun else 1

    def still_held(self, now: float) -> None:
        """The lease store says so."""
        self._known_held = now
        self.look_at = now + min(max((now - self.since) / 100, SOONEST_LOOK), LATEST_LOOK)

    def must_wait(self, now: float) -> bool:
        """Whether a call of it is known to begin in vain now."""
        if self.free:
            return len(self.begun) >= self.width
        return now - self._known_held < NEWS_LAST

    def wants_to_know(self, now: float) -> bool:
        """Whether the lease store is to be asked about its key."""
        return bool(self.waiting) and not self.begun and not self.free and now >= self.look_at

    def next(self) -> Any:
        """A call to begin now; ``None`` if there is none."""
        while self.free and self.waiting and len(self.begun) < self.width:
            _, _, request = heappop(self.waiting)
            if _waits(request):
                self.begun.add(request)
                return request
        return None

    def forget_the_dropped(self) -> None:
        """Celery has dropped requests, as with a lost connection, or has ended them without
        telling.
        """
        self.begun = {request for request in self.begun if _is_there(request)}
        if any(not _waits(request) for _, _, request in self.waiting):
            self.waiting = [place for place in self.waiting if _waits(place[-1])]
            heapify(self.waiting)


class HeldCalls:
    """The lines of one worker."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """There are none: a worker starts."""
        #: By stored key; empty in a worker whose calls meet no held keys.
        self.lines: dict[str, Line] = {}
        self._tasks: set[str] = set()
        self._lock = threading.RLock()
        self._answers: deque[tuple[Sequence[str], set[str]]] = deque()
        self._asking = False
        self._due = 0.0
        self._turn = 0

    def wakes(self, consumer: Any) -> bool:
        """Whether calls that wait in this worker are begun early.

        Not before Celery 5.7, which is the first that keeps the timer's entry of a request. Nor
        with quorum queues: the broker itself keeps their messages until their time has come, and a
        worker cannot raise their prefetch count.
        """
        if (
            consumer is None
            or consumer.connection is None
            or not hasattr(Request, "_eta_timer_entry")
        ):
            return False
        return bool(consumer.qos_global) or consumer.connection.transport.driver_type != "amqp"

    # -- what happens to a request -----------------------------------------------------------------

    def receive(self, request: Any) -> None:
        """Note a message that has come; it may get a countdown here, which must happen before
        Celery looks for one.
        """
        fields, task = request._request_dict, request.task  # noqa: SLF001 - as Celery's own request reads it
        consumer: Any = _consumer()
        copy = request.eta is not None
        if (HEADER not in fields if copy else task.name not in self._tasks) or not self.wakes(
            consumer
        ):
            return
        if copy:
            header = _header_of(request)
            if header is None or not (stored_key := carried_stored_key(task, header)):
                return
            with self._lock:
                line = self._line(stored_key, task)
                line.about(header.fingerprint)
        else:
            found = self._line_of(request)
            if found is None:
                return
            line, shown = found
            with self._lock:
                if line.free and not line.waiting and len(line.begun) < line.width:
                    line.begun.add(request)
                    self._watch(request, line)
                    return
            if not self._may_wait(consumer):
                return
            request._eta = datetime.now(UTC) + timedelta(seconds=min(_countdown(), line.longest))  # noqa: SLF001
            logger.info(
                "%s[%s] key %s: waits here: another call holds the key",
                task.name,
                request.id,
                shown,
            )
        request.waits_until = monotonic() + line.longest * random.uniform(0.7, 1.0)
        self._watch(request, line)

    def scheduled(self, request: Any) -> None:
        """Celery has put *request*, which belongs to a line, into its timer: from now on it waits
        there.
        """
        entry = _entry_of(request)
        begin = partial(entry.fun, *entry.args)

        def when_over(of: Any) -> None:
            self._time_has_come(of, begin)

        entry.fun, entry.args = when_over, (request,)
        with self._lock:
            request.line.join(request)
        self._run(_consumer())

    def reschedule(self, request: Any, held: KeyIsHeld) -> None:
        """The delivery of *request* has ended, because another call holds its key."""
        consumer = _consumer()
        with self._lock:
            request.line = None
            line = self.lines.get(held.stored_key)
            if line is None:
                if not self.wakes(consumer):
                    return
                line = self._line(held.stored_key, request.task)
            line.about(held.fingerprint)
            if request in line.begun:
                line.in_vain += 1
                line.begun.discard(request)
            line.place(request)
            line.held(monotonic())
        self._run(consumer)

    def ended(self, request: Any, *, answered: bool = False) -> None:
        """A call of a line has ended, or was revoked while it waited."""
        with self._lock:
            line, request.line = request.line, None
            if line is None or request not in line.begun:
                return
            line.ended(request, monotonic(), answered=answered)
        consumer = _consumer()
        if line.waiting and consumer is not None and consumer.timer is not None:
            consumer.timer.call_after(0, self._begin_what_may)

    def _line(self, stored_key: str, task: Any) -> Line:
        line = self.lines.get(stored_key)
        if line is None:
            line = Line(stored_key, monotonic(), longest=settings_of(task.app).longest_countdown)
            self.lines[stored_key] = line
        self._tasks.add(task.name)
        line.rerun = line.rerun or task.lease_options.rerun
        return line

    def _line_of(self, request: Any) -> tuple[Line, str] | None:
        """The line that a message which has just come belongs to, and its key as it is shown.

        A call with other arguments is refused at once, which the record decides; it goes to a pool
        child.
        """
        options, fields = request.task.lease_options, request._request_dict  # noqa: SLF001
        if (
            options.on_held != "reschedule"
            or callable(options.key)
            or callable(options.fingerprint)
        ):
            return None  # functions of the user's are not for this process
        try:
            call_id = call_id_of(request.id, fields.get("replaced_task_nesting"))
            args, kwargs, _ = request._payload  # noqa: SLF001
            key = key_of(request.task, None, call_id, args, kwargs, fields["retries"])
        except Exception:  # noqa: BLE001 - the pool child says what is wrong with it
            return None
        line = self.lines.get(key.stored)
        return (
            (line, key.shown) if line is not None and key.fingerprint in line.fingerprints else None
        )

    def _may_wait(self, consumer: Any) -> bool:
        """Whether one more message may get a countdown; ``worker_eta_task_limit`` is a limit of
        these too.
        """
        limit = consumer.app.conf.get("worker_eta_task_limit")
        return len(state.scheduled_requests) < (MOST if limit is None else limit // 2)

    def _watch(self, request: Any, line: Line) -> None:
        """Observe the end of *request*, whose class Celery has made with an ``on_success`` of its
        own.
        """
        request.line = line
        on_success: Callable[..., Any] = request.on_success

        def then_tell(result: Any, **kwargs: Any) -> Any:
            vars(request).pop("on_success", None)
            try:
                return on_success(result, **kwargs)
            finally:
                self.ended(request, answered=not result[0])

        request.on_success = then_tell

    # -- the timer ---------------------------------------------------------------------------------

    def _time_has_come(self, request: Any, begin: Callable[[], Any]) -> None:
        """Begin *request*, once; Celery's timer calls this when the countdown is over, and a free
        line before.
        """
        entry = _entry_of(request)
        with self._lock:
            line, now = request.line, monotonic()
            if line is not None and request not in line.begun:
                rest = request.waits_until - now
                if rest > TICK and line.must_wait(now):
                    again = _consumer().timer.call_after(
                        min(_countdown(), rest), entry.fun, entry.args
                    )
                    request.scheduled_again(again)
                    return
                line.begun.add(request)
            # The entry of a call that was begun early stays in the timer until its time.
            entry.fun, entry.args = _nothing, ()
        begin()

    def _run(self, consumer: Any) -> None:
        """Have the lines looked at; where the timer was cleared, as with a lost connection, it is
        asked again.
        """
        with self._lock:
            now = monotonic()
            if now < self._due + 1.0 or consumer is None or consumer.timer is None:
                return
            self._due = now + TICK
            self._turn += 1
            turn = self._turn
        consumer.timer.call_after(TICK, self._tick, (turn,))

    def _tick(self, turn: int) -> None:
        """Look at the lines, and again in a moment as long as there are any."""
        consumer = _consumer()
        with self._lock:
            if turn != self._turn or consumer is None or consumer.timer is None:
                return
            now = monotonic()
            for stored_key, line in list(self.lines.items()):
                line.forget_the_dropped()
                if line.waiting or line.begun:
                    line.used = now
                elif now - line.used > KEPT_IDLE:
                    del self.lines[stored_key]
            if not self.lines:
                self._tasks.clear()
                self._due = 0.0
                return
            self._due = now + TICK
        consumer.timer.call_after(TICK, self._tick, (turn,))
        self._begin_what_may()
        self._ask_about(
            [line.stored_key for line in list(self.lines.values()) if line.wants_to_know(now)]
        )

    def _ask_about(self, stored_keys: Sequence[str]) -> None:
        """Call the lease store outside the worker's loop: it may not answer for seconds."""
        if not stored_keys or self._asking:
            return
        ask = partial(self._ask, app_components.worker_here().app, stored_keys)
        self._asking = True
        try:
            if os_threads.green():
                greenlets.spawn(ask)
            else:
                os_threads.start_thread(ask)
        except BaseException:
            self._asking = False
            raise

    def _ask(self, app: Any, stored_keys: Sequence[str]) -> None:
        try:
            leases = app_components.parts_of(app, eager=False).leases
            for some in _parts_of(stored_keys, ASKED_AT_ONCE):
                self._answers.append((some, leases.held(some)))
        except LeasesError as error:
            logger.debug("cannot read which keys are held: %s", error)
        except Exception:  # noqa: BLE001 - calls wait for their countdown then
            logger.exception("cannot read which keys are held")
        finally:
            self._asking = False

    def _begin_what_may(self) -> None:
        """Begin the calls whose turn has come, each in a callback of its own: in some pools, to
        begin one may block.
        """
        consumer = _consumer()
        if consumer is None or consumer.timer is None or _is_stopping():
            return
        begun = []
        with self._lock:
            now = monotonic()
            while self._answers:
                asked, held = self._answers.popleft()
                for line in (
                    self.lines[stored_key] for stored_key in asked if stored_key in self.lines
                ):
                    if line.stored_key in held:
                        line.still_held(now)
                    elif not line.begun:
                        line.free = True
            for line in self.lines.values():
                while (request := line.next()) is not None:
                    begun.append(request)
        for request in begun:
            consumer.timer.call_after(0, _begin_early, (request,))


def _consumer() -> Any:
    return getattr(app_components.worker_here(), "consumer", None)


def _header_of(request: Any) -> Header | None:
    """The header of a copy that waits for a held key; of any other message nothing is said here."""
    fields = request._request_dict  # noqa: SLF001 - as Celery's own request reads it
    written = fields.get(HEADER)
    if not (isinstance(written, Mapping) and written.get("held") is True):
        return None
    return arrived(
        fields, request.task.name, call_id_of(request.id, fields.get("replaced_task_nesting"))
    )


def _countdown() -> float:
    """About a minute: calls that came together do not begin together."""
    return FIRST_COUNTDOWN_UNTIL_FREE * random.uniform(0.75, 1.0)


def _begin_early(request: Any) -> None:
    """Begin *request* before its countdown is over, unless Celery has begun or dropped it
    meanwhile.
    """
    if _waits(request):
        _entry_of(request)()


def _nothing() -> None:
    """What the timer does for a call that was begun early."""


def _entry_of(request: Any) -> Any:
    """The entry of *request* in Celery's timer; with greenlets the timer gives one that has the
    entry.
    """
    scheduled = request._eta_timer_entry  # noqa: SLF001 - as Celery's consumer cancels it
    return getattr(scheduled, "entry", scheduled)


def _waits(request: Any) -> bool:
    """Whether *request* is still in Celery's timer: not begun, not revoked, not dropped with its
    connection.
    """
    return request.line is not None and request in state.scheduled_requests


def _is_there(request: Any) -> bool:
    """Whether Celery still has *request*."""
    known = (state.scheduled_requests, state.reserved_requests, state.active_requests)
    return request.line is not None and any(request in requests for requests in known)


def _is_stopping() -> bool:
    return any(
        wanted is not None and wanted is not False
        for wanted in (state.should_stop, state.should_terminate)
    )


def _parts_of(keys: Sequence[str], size: int) -> Iterator[Sequence[str]]:
    return (keys[start : start + size] for start in range(0, len(keys), size))


held_calls: Final = HeldCalls()
"""Those of this process."""
